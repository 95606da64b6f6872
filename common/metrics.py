"""All figures for Prometheus, of every role. One place, so that a name means one thing; docs/metrics.md is made from it.

Guarantees: every series carries the labels `run` and `role`, whoever scrapes it; `node` is the node that a figure is about
(a generator's: whom it serves), with all evaluations as one, `evaluation`; no label takes its values from a message's text,
and those that a stranger could make many of are cut off after a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import TAGS

EVALUATION = "evaluation"
OTHERS = "others"
AUTHORS_NAMED = 64
FAST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SLOW = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

# Else every count would bring a second series that says when it began.
disable_created_metrics()  # type: ignore[no-untyped-call]

# --- every role ---

reconnects = Counter("grapevine_reconnects_total", "Times the server was away and this worker joined again.")

# --- generators ---

tokens_generated = Counter("grapevine_tokens_generated_total", "Completion tokens sampled.", ["node"])
groups_answered = Counter("grapevine_groups_answered_total", "Orders answered with a raw group.", ["node"])
orders_skipped = Counter("grapevine_orders_skipped_total", "Orders skipped, no longer open or past their deadline.")
orders_in_flight = Gauge("grapevine_orders_in_flight", "Orders being answered by this generator.")
engine_seconds = Counter(
    "grapevine_engine_seconds_total", "Seconds in which this generator's engine was sampling; its rate is the utilisation."
)
policies_loaded = Counter("grapevine_policies_loaded_total", "Policy versions taken into the engine.", ["node"])
policies_refused = Counter("grapevine_policies_refused_total", "Policies not loaded; the old one went on.", ["reason"])
policy_swap_seconds = Histogram(
    "grapevine_policy_swap_seconds", "Seconds for which sampling paused while the engine took on a policy.", buckets=FAST
)

# --- verifiers ---

groups_scored = Counter("grapevine_groups_scored_total", "Raw groups scored, by reward tag.", ["tag"])
scoring_seconds = Histogram("grapevine_scoring_seconds", "Seconds to score one group.", ["task"], buckets=FAST)
scoring_faults = Counter("grapevine_scoring_faults_total", "Completions whose scoring failed.", ["task", "fault"])

# --- all that read streams ---

messages_refused = Counter(
    "grapevine_messages_refused_total", "Messages that this worker quarantined.", ["stream", "reason"]
)

# --- learners ---

rounds = Gauge("grapevine_round", "Rounds completed by this node.", ["node"])
rounds_planned = Gauge("grapevine_rounds_planned", "Rounds until this node is complete.", ["node"])
own_reward = Gauge("grapevine_own_reward", "Mean reward over the own groups of the last round, before filters.", ["node"])
task_reward = Gauge("grapevine_task_reward", "The same by task, of the last round that had the task.", ["node", "task"])
heldout_reward = Gauge(
    "grapevine_heldout_reward", "Mean accuracy of sampled completions on held-out questions, last evaluation.", ["node"]
)
heldout_greedy = Gauge("grapevine_heldout_greedy", "The same of greedy completions.", ["node"])
informative_share = Gauge(
    "grapevine_informative_share", "Share of the last round's own groups whose rewards are not all alike.", ["node"]
)
groups_used = Counter(
    "grapevine_groups_used_total",
    f"Groups that rounds used, by reward tag and author (the node itself, too); the first {AUTHORS_NAMED} authors by name.",
    ["node", "author", "tag"],
)
swarm_missing = Counter("grapevine_swarm_missing_total", "Swarm groups that rounds wanted and did not find.", ["node"])
staleness = Gauge("grapevine_staleness_steps", "Mean policy steps between sampling and training, own groups.", ["node"])
tokens_trained = Counter("grapevine_tokens_trained_total", "Completion tokens in updates.", ["node", "origin"])
loss = Gauge("grapevine_loss", "Loss of the last update.", ["node"])
grad_norm = Gauge("grapevine_grad_norm", "Norm of the last update's gradient, before it was shortened.", ["node"])
phase_seconds = Histogram(
    "grapevine_round_seconds",
    "Seconds of a round by phase: wait (for own groups), draw (from the swarm), update, finish (checkpoint and policy).",
    ["node", "phase"],
    buckets=SLOW,
)
books = Gauge(
    "grapevine_books",
    "The ledger's books: ordered = trained + filtered + expired + open + waiting; lost is what is missing, 0 always.",
    ["node", "column"],
)
updates_skipped = Counter("grapevine_updates_skipped_total", "Optimizer steps skipped: exploding or not finite.", ["node"])
rollbacks = Counter("grapevine_rollbacks_total", "Returns to the last good checkpoint.", ["node"])
policies_served = Counter("grapevine_policies_served_total", "Policy files sent to generators over HTTP.", ["node"])

# --- control workers ---

jobs = Gauge("grapevine_jobs", "Control jobs by status.", ["status"])
job_failures = Counter("grapevine_job_failures_total", "Tries of control jobs that failed.", ["kind"])


# --- the exporter, from what lies on the server ---


@dataclass(frozen=True)
class Exported:
    """A figure that the exporter reads from the server at every scrape, so that it outlasts every worker."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    counter: bool = False

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """To be filled by one scrape."""
        if self.counter:
            return CounterMetricFamily(self.name.removesuffix("_total"), self.help, labels=self.labels)
        return GaugeMetricFamily(self.name, self.help, labels=self.labels)


server_up = Exported("grapevine_server_up", "1 when the server answered, else 0.")
workers = Exported("grapevine_workers", "Workers whose heartbeat is fresh.", ("worker_role",))
workers_started = Exported(
    "grapevine_workers_started_total", "Starts of workers, restarts included.", ("worker_role",), True
)
generators_assigned = Exported("grapevine_generators_assigned", "Generators that serve this node.", ("node",))
orders_open = Exported("grapevine_open_orders", "Orders not answered yet, waiting or in flight; what the autoscaler reads.")
backlog = Exported(
    "grapevine_backlog", "Entries of a stream that nobody took yet; of raw groups per site, in the label `node`.",
    ("stream", "node"),
)  # fmt: skip
pending = Exported("grapevine_pending", "Entries of a stream that a worker has in hand.", ("stream", "node"))
waiting_seconds = Exported(
    "grapevine_waiting_seconds_total",
    "Seconds that a learner waited for own groups, by whom it waited for: generators, verifiers, or overdue orders.",
    ("node", "on"),
    True,
)
groups_published = Exported("grapevine_groups_published_total", "Groups published to their nodes.", ("purpose",), True)
groups_shared = Exported("grapevine_groups_shared_total", "Groups published to the swarm.", (), True)
duplicates = Exported("grapevine_duplicates_total", "Answers to orders that another had answered before.", (), True)
redelivered = Exported("grapevine_redelivered_total", "Entries taken over from workers that fell silent.", (), True)
quarantined = Exported("grapevine_quarantined_total", "Messages refused by all workers ever.", ("stream", "reason"), True)
rounds_left = Exported(
    "grapevine_rounds_left",
    "Rounds that a node has yet to do, as its heartbeat said last and its books say; it outlasts the learner.",
    ("node",),
)
swarm_available = Exported("grapevine_swarm_groups", "Groups that lie in the swarm streams.", ("tag",))
swarm_authors = Exported("grapevine_swarm_authors", "Nodes that shared a group within the maximum age.", ("tag",))
stream_bytes = Exported("grapevine_stream_bytes", "Memory of the run's streams on the server.", ("stream",))
server_bytes = Exported("grapevine_server_memory_bytes", "Memory that the server uses for its data, of all runs.")
server_most_bytes = Exported("grapevine_server_memory_limit_bytes", "Memory that the server may use; 0: no limit.")


# --- who shows what ---


@dataclass(frozen=True)
class Part:
    """Figures that the same workers show; without roles, all workers do."""

    title: str
    roles: tuple[str, ...]
    figures: tuple[Counter | Gauge | Histogram | Exported, ...]


PARTS = (
    Part("Every role", (), (reconnects,)),
    Part(
        "Generators",
        ("generator",),
        (
            tokens_generated, groups_answered, orders_skipped, orders_in_flight, engine_seconds, policies_loaded,
            policies_refused, policy_swap_seconds,
        ),
    ),
    Part("Verifiers", ("verifier",), (groups_scored, scoring_seconds, scoring_faults)),
    Part("All that read streams", ("generator", "verifier", "learner"), (messages_refused,)),
    Part(
        "Learners",
        ("learner",),
        (
            rounds, rounds_planned, own_reward, task_reward, heldout_reward, heldout_greedy, informative_share, groups_used,
            swarm_missing, staleness, tokens_trained, loss, grad_norm, phase_seconds, books, updates_skipped, rollbacks,
            policies_served,
        ),
    ),
    Part("Control workers", ("control",), (jobs, job_failures)),
    Part(
        "The exporter, from what lies on the server",
        ("exporter",),
        (
            server_up, workers, workers_started, generators_assigned, orders_open, backlog, pending, waiting_seconds,
            groups_published, groups_shared, duplicates, redelivered, quarantined, rounds_left, swarm_available,
            swarm_authors, stream_bytes, server_bytes, server_most_bytes,
        ),
    ),
)  # fmt: skip

EXPORTED = tuple(figure for part in PARTS for figure in part.figures if isinstance(figure, Exported))

# There from the start, so that the first one is an increase over 0 and not a series out of nowhere.
for reason in ("missing", "checksum", "shape"):
    policies_refused.labels(reason)
for tag in TAGS:
    groups_scored.labels(tag)


def node_label(target: str) -> str:
    """A target as the label `node`: evaluations come and go, and count as one."""
    return EVALUATION if target.startswith("eval-") else target


def _hidden(role: str) -> set[str]:
    """Families that are no business of a role: they would all be 0 there."""
    others = (part for part in PARTS if part.roles and role not in part.roles)
    return {figure._name for part in others for figure in part.figures if not isinstance(figure, Exported)}


class Labelled(Collector):
    """Another registry's figures with labels added that are the same for all, and some families left out."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str], hidden: set[str]) -> None:
        self._registry = registry
        self._labels = labels
        self._hidden = hidden

    def collect(self) -> Iterator[Metric]:
        """Every sample of the other registry that is not hidden."""
        for family in self._registry.collect():
            if family.name in self._hidden:
                continue
            family.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in family.samples]
            yield family


def page(run: str, role: str) -> bytes:
    """What a scrape gets from this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Labelled(REGISTRY, {"run": run, "role": role}, _hidden(role)))
    return generate_latest(registry)

"""*Pipeline*: where is the bottleneck?"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as model

from tools.dashboards.panels import (
    COUNT,
    NEUTRAL,
    NODES,
    PER_MINUTE,
    PER_SECOND,
    RATE,
    RUN,
    SECONDS,
    SHARE,
    TAG_COLOURS,
    TOKENS,
    WAIT_COLOURS,
    Query,
    Step,
    lines,
    made,
    number,
)


def pipeline() -> model.Dashboard:
    """Who waits for whom, streams, and each role's own speed."""
    waits = f"sum by (node, on) (rate(grapevine_waiting_seconds_total{{{NODES}}}{RATE}))"
    at_work = f"rate(grapevine_engine_seconds_total{{{RUN}}}{RATE})"
    swap = f"sum by (le) (rate(grapevine_policy_swap_seconds_bucket{{{RUN}}}{RATE}))"
    rounds = f'sum(rate(grapevine_round_seconds_count{{{NODES},phase="update"}}{RATE}))'
    phases = f"sum by (phase) (rate(grapevine_round_seconds_sum{{{NODES}}}{RATE}))"
    generated = f"rate(grapevine_tokens_generated_total{{{RUN}}}{RATE})"
    backlog = "max by (stream, node) (grapevine_backlog"
    crowd: tuple[Step, ...] = (("green", None), ("yellow", 50), ("red", 100))
    bottleneck = [
        number(
            "Generators at work", "Share of the time in which the engines sample. Near 100 %: more generators help.",
            f"avg({at_work})", SHARE, decimals=0, least=0, most=1,
            steps=(("red", None), ("yellow", 0.05), ("green", 0.3)),
        ),
        number(
            "Learners that wait", "Share of the time in which a learner waits for its own groups, mean over nodes.",
            f"avg(sum by (node) ({waits}))", SHARE, decimals=0, least=0, most=1,
            steps=(("green", None), ("yellow", 0.5), ("red", 0.9)),
        ),
        number(
            "Open orders", "Orders that are not answered and scored yet; the autoscaler reads the same figure.",
            f"max(grapevine_open_orders{{{RUN}}})", COUNT, decimals=0, steps=NEUTRAL,
        ),
        number(
            "Raw groups that wait", "Answers that no verifier took yet.",
            f'sum({backlog}{{{RUN},stream="raw"}}))', COUNT, decimals=0, steps=crowd,
        ),
        number(
            "Tokens generated", "Completion tokens sampled per second, all generators together, evaluations included.",
            f"sum({generated})", TOKENS, steps=NEUTRAL,
        ),
        number(
            "Workers up", "Workers of all roles with a fresh heartbeat.",
            f"sum(max by (worker_role) (grapevine_workers{{{RUN}}}))", COUNT, decimals=0,
            steps=(("red", None), ("green", 1)),
        ),
        lines(
            "Whom learners wait for",
            "Share of the time in which a learner waits for its own groups, mean over nodes, by whom it waits for. Nothing: "
            "the learners are the bottleneck. Overdue: the orders are lost with who had them, and are asked again at their "
            "deadline.",
            Query(f"avg by (on) ({waits})", "{{on}}"), SHARE, w=12, h=9, least=0, most=1, stack="normal",
            colours=WAIT_COLOURS,
        ),
        lines(
            "Where a round's time goes",
            "Seconds of a round by phase, mean over nodes: wait for own groups, draw from the swarm, update, finish "
            "(checkpoint and policy).",
            Query(f"{phases} / on () group_left () {rounds}", "{{phase}}"),
            SECONDS, w=12, h=9, stack="normal",
        ),
    ]  # fmt: skip
    streams = [
        lines(
            "Waiting, by stream", "Entries that nobody took yet. In `own` they stay until the learner's next checkpoint.",
            Query(f"sum by (stream) ({backlog}{{{RUN}}}))", "{{stream}}"), COUNT,
        ),
        lines(
            "In hand, by stream", "Entries that a generator or a verifier has taken and not finished.",
            Query(f"sum by (stream) (max by (stream, node) (grapevine_pending{{{RUN}}}))", "{{stream}}"), COUNT,
        ),
        lines(
            "Groups published",
            "Scored groups per second, for training and for evaluations, and those of them that were shared.",
            (
                Query(f"max by (purpose) (rate(grapevine_groups_published_total{{{RUN}}}{RATE}))", "{{purpose}}"),
                Query(f"max(rate(grapevine_groups_shared_total{{{RUN}}}{RATE}))", "shared with the swarm"),
            ),
            PER_SECOND,
        ),
        lines(
            "Open orders", "Orders that are not answered and scored yet, of nodes and evaluations.",
            Query(f"max(grapevine_open_orders{{{RUN}}})", "open"), COUNT,
        ),
        lines(
            "Orders waiting, by node",
            "Orders that no generator took yet. Learners keep at most `ahead` batches of them open.",
            Query(f'max by (node) (grapevine_backlog{{{NODES},stream="orders"}})', "{{node}}"), COUNT, stack="normal",
        ),
        lines(
            "Generators, by node", "Generators that serve a node now; each goes to whichever node has most waiting.",
            Query(f"max by (node) (grapevine_generators_assigned{{{NODES}}})", "{{node}}"), COUNT, stack="normal",
            links=True,
        ),
    ]  # fmt: skip
    generators = [
        lines(
            "Generators at work",
            "Share of the time in which an engine samples: mean, the busiest and the least busy generator.",
            (
                Query(f"avg({at_work})", "mean"),
                Query(f"max({at_work})", "busiest"),
                Query(f"min({at_work})", "least busy"),
            ),
            SHARE, least=0, most=1, steps=(("red", None), ("green", 0.05)), limit=True, thick="mean",
        ),
        lines(
            "Tokens generated, by node", "Completion tokens sampled per second, by whom they were sampled for.",
            Query(f"sum by (node) (rate(grapevine_tokens_generated_total{{{NODES}}}{RATE}))", "{{node}}"),
            TOKENS, stack="normal",
        ),
        lines(
            "Groups answered, by node", "Orders answered per second.",
            Query(f"sum by (node) (rate(grapevine_groups_answered_total{{{NODES}}}{RATE}))", "{{node}}"),
            PER_SECOND, stack="normal",
        ),
        lines(
            "Orders in flight",
            "Orders in the engines, and orders per minute that were skipped since nobody waited for them.",
            (
                Query(f"sum(grapevine_orders_in_flight{{{RUN}}})", "in flight"),
                Query(f"60 * sum(rate(grapevine_orders_skipped_total{{{RUN}}}{RATE}))", "skipped per minute"),
            ),
            COUNT,
        ),
        lines(
            "Pause for a new policy", "Seconds for which sampling pauses while an engine takes on a policy.",
            (
                Query(f"histogram_quantile(0.5, {swap})", "half are shorter"),
                Query(f"histogram_quantile(0.95, {swap})", "19 of 20 are shorter"),
            ),
            SECONDS, steps=(("green", None), ("red", 1)), limit=True,
        ),
        lines(
            "Policies taken on, by node", "Policy versions per minute that were loaded into an engine.",
            Query(f"60 * sum by (node) (rate(grapevine_policies_loaded_total{{{NODES}}}{RATE}))", "{{node}}"), PER_MINUTE,
        ),
    ]  # fmt: skip
    scoring = f"sum by (le, task) (rate(grapevine_scoring_seconds_bucket{{{RUN}}}{RATE}))"
    verifiers = [
        lines(
            "Groups scored, by tag", "Groups per second that verifiers scored, by how hard they proved.",
            Query(f"sum by (tag) (rate(grapevine_groups_scored_total{{{RUN}}}{RATE}))", "{{tag}}"),
            PER_SECOND, stack="normal", colours=TAG_COLOURS,
        ),
        lines(
            "Time to score a group, by task", "19 of 20 groups of a task are scored faster than this.",
            Query(f"histogram_quantile(0.95, {scoring})", "{{task}}"), SECONDS,
            steps=(("green", None), ("red", 3)), limit=True,
        ),
        lines(
            "Raw groups that wait, by site", "Answers that no verifier of the site took yet.",
            Query(f'max by (node) (grapevine_backlog{{{RUN},stream="raw"}})', "{{node}}"), COUNT, steps=crowd, limit=True,
        ),
    ]  # fmt: skip
    workers = [
        lines(
            "Tokens trained, by node", "Completion tokens in updates per second, own and swarm.",
            Query(f"sum by (node) (rate(grapevine_tokens_trained_total{{{NODES}}}{RATE}))", "{{node}}"), TOKENS,
            stack="normal", links=True,
        ),
        lines(
            "Seconds of an update, by node", "Mean time of the update alone, without waiting, drawing and checkpoint.",
            Query(
                f'sum by (node) (rate(grapevine_round_seconds_sum{{{NODES},phase="update"}}{RATE})) / '
                f'sum by (node) (rate(grapevine_round_seconds_count{{{NODES},phase="update"}}{RATE}))',
                "{{node}}",
            ),
            SECONDS, links=True,
        ),
        lines(
            "Workers up, by role", "Workers with a fresh heartbeat.",
            Query(f"max by (worker_role) (grapevine_workers{{{RUN}}})", "{{worker_role}}"), COUNT, decimals=0,
        ),
    ]  # fmt: skip
    return made(
        "pipeline", "pipeline", "Where is the bottleneck: generators, verifiers or learners?", "many",
        [
            ("Where is the bottleneck?", bottleneck), ("Streams", streams), ("Generators", generators),
            ("Verifiers", verifiers), ("Learners and workers", workers),
        ],
    )  # fmt: skip

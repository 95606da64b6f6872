"""The alerts, each both firing and silent, as Prometheus itself judges them; and that all they name exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grapevine.monitoring.prometheus import alert_rules
from tests.promql import assert_known, labels_out

RULES = Path(__file__).parents[1] / "grapevine" / "monitoring" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")
RUNBOOKS = "https://github.com/grapevine-rl/grapevine/blob/main/docs/operations.md"
NAMES = {
    "ServerAway", "ExporterMissing", "BooksDoNotAddUp", "LearnerStalled", "NobodyConsumes", "BacklogGrows",
    "GeneratorStarved", "QuarantineSpike", "RewardCollapse", "UpdateFailures", "PoliciesRefused", "WorkerRestarts",
    "StreamMemory",
}  # fmt: skip

promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)")

Series = dict[str, str]


def rules() -> Iterator[dict[str, Any]]:
    for group in alert_rules()["groups"]:
        yield from group["rules"]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


# --- what they are made of ---


def test_every_alert_is_there_with_all_that_belongs_to_it() -> None:
    assert set(ALERTS) == {f"Grapevine{name}" for name in NAMES}
    for name, rule in ALERTS.items():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, name
        assert set(rule["labels"]) == {"severity"} and rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{name.lower()}"
        assert re.fullmatch(r"((?!\. ).)+\.", rule["annotations"]["summary"]), "one sentence"


def test_alerts_name_only_what_exists_and_are_put_together_by_run() -> None:
    recorded = {rule["record"]: labels_out(rule["expr"]) for rule in rules() if "record" in rule}
    for rule in rules():
        assert_known(rule["expr"], recorded)
        labels = labels_out(rule["expr"], recorded)
        assert "run" in labels, "a figure of one worker is another one after its restart"
        assert labels <= {"run", "node", "stream", "reason", "worker_role"}
        shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule.get("annotations", {}).values())))
        assert shown <= labels, f"{rule}: {shown - labels} would be empty"
        assert "run" in shown or "record" in rule


@promtool
def test_prometheus_reads_them() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# --- how a run looks, a sample a minute ---

LONG = 400
ROLES = ("learner", "generator", "verifier", "control", "exporter")


def flat(value: float, minutes: int = LONG) -> str:
    """The same value."""
    return f"{value}+0x{minutes - 1}"


def rise(start: float, step: float, minutes: int = LONG) -> str:
    """More by a step each minute, or less."""
    return f"{start}{step:+}x{minutes - 1}"


def gone(minutes: int = 1) -> str:
    """No sample, and Prometheus knows that none is to come."""
    return f"stale _x{minutes}"


def then(*parts: str) -> str:
    """One after the other."""
    return " ".join(parts)


def of(name: str, **labels: str) -> str:
    """A series of run demo."""
    pairs = ",".join(f'{label}="{value}"' for label, value in {"run": "demo", **labels}.items())
    return f"grapevine_{name}{{{pairs}}}"


def round_seconds(node: str, seconds: float, minutes: int = LONG) -> Series:
    """Rounds that take so long: a wait of half of it, an update of the other half."""
    pace = 60 / seconds
    series: Series = {}
    for phase in ("wait", "update"):
        series[of("round_seconds_sum", node=node, phase=phase)] = rise(0, 30, minutes)
        series[of("round_seconds_count", node=node, phase=phase)] = rise(0, pace, minutes)
    return series


def healthy(minutes: int = LONG, node: str = "node-0") -> Series:
    """A run that works: two rounds a minute, of so many that it does not end."""
    series = {
        of("server_up"): flat(1, minutes),
        of("rounds_left", node=node): rise(100_000, -2, minutes),
        of("round", node=node, instance="a"): rise(0, 2, minutes),
        of("rounds_planned", node=node, instance="a"): flat(100_000, minutes),
        of("own_reward", node=node, instance="a"): rise(0.2, 0.0001, minutes),
        of("books", node=node, column="lost", instance="a"): flat(0, minutes),
        of("books", node=node, column="open", instance="a"): flat(32, minutes),
        of("updates_skipped_total", node=node, instance="a"): flat(0, minutes),
        of("rollbacks_total", node=node, instance="a"): flat(0, minutes),
        of("engine_seconds_total", instance="b"): rise(0, 45, minutes),
        of("tokens_generated_total", node=node, instance="b"): rise(0, 9000, minutes),
        of("open_orders"): flat(32, minutes),
        of("groups_published_total", purpose="train"): rise(0, 32, minutes),
        of("groups_published_total", purpose="eval"): flat(0, minutes),
        of("server_memory_bytes"): flat(2e9, minutes),
        of("server_memory_limit_bytes"): flat(4e9, minutes),
        of("stream_bytes", stream="swarm"): flat(1e8, minutes),
        of("stream_bytes", stream="own"): flat(1e8, minutes),
        **round_seconds(node, 30, minutes),
    }
    for stream, name, waiting in (("orders", node, 20), ("raw", "local", 2), ("own", node, 8)):
        series[of("backlog", stream=stream, node=name)] = flat(waiting, minutes)
        series[of("pending", stream=stream, node=name)] = flat(4, minutes)
    for stream in ("orders", "raw", "own", "swarm"):
        series[of("quarantined_total", stream=stream, reason="malformed")] = flat(0, minutes)
    for reason in ("missing", "checksum", "shape"):
        series[of("policies_refused_total", reason=reason, instance="b")] = flat(0, minutes)
    for role in ROLES:
        series[of("workers", worker_role=role)] = flat(1, minutes)
        series[of("workers_started_total", worker_role=role)] = flat(1, minutes)
    return series


# --- firing ---


@dataclass(frozen=True)
class Fires:
    """What is different from a healthy run, and what is said of it. `at` in minutes."""

    alert: str
    why: str
    series: Series
    at: int
    labels: dict[str, str]
    summary: str


NODE = {"run": "demo", "node": "node-0"}
NODE_0 = {"node": "node-0"}

FIRES = (
    Fires(
        "ServerAway", "it does not answer", {of("server_up"): then(flat(1, 10), flat(0))}, 12, {"run": "demo"},
        "The server of run demo does not answer.",
    ),
    Fires(
        "ExporterMissing", "it is gone",
        {of("server_up"): then(flat(1, 10), gone()), of("reconnects_total", instance="a"): flat(0)}, 30, {"run": "demo"},
        "Run demo has workers and no exporter.",
    ),
    Fires(
        "BooksDoNotAddUp", "groups are missing",
        {of("books", **NODE_0, column="lost", instance="a"): then(flat(0, 10), flat(3))}, 16, NODE,
        "The books of node-0 in run demo are wrong by 3 groups.",
    ),
    Fires(
        "BooksDoNotAddUp", "groups are counted twice",
        {of("books", **NODE_0, column="lost", instance="a"): then(flat(0, 10), flat(-2))}, 16, NODE,
        "The books of node-0 in run demo are wrong by 2 groups.",
    ),
    Fires(
        "LearnerStalled", "it hangs", {of("rounds_left", **NODE_0): then(rise(1000, -2, 60), flat(880))}, 90, NODE,
        "node-0 of run demo does no more rounds, with 880 left.",
    ),
    Fires(
        "LearnerStalled", "it is gone, and with it all its figures",
        {
            of("rounds_left", **NODE_0): then(rise(1000, -2, 60), flat(880)),
            of("round", **NODE_0, instance="a"): then(rise(0, 2, 60), gone()),
            of("rounds_planned", **NODE_0, instance="a"): then(flat(1000, 60), gone()),
            **{name: then(values, gone()) for name, values in round_seconds("node-0", 30, 60).items()},
        },
        90, NODE, "node-0 of run demo does no more rounds, with 880 left.",
    ),
    Fires(
        "LearnerStalled", "a round takes half an hour, and three hours pass without one",
        {of("rounds_left", **NODE_0): then(flat(90, 30), flat(89)), **round_seconds("node-0", 1800)}, 200, NODE,
        "node-0 of run demo does no more rounds, with 89 left.",
    ),
    Fires(
        "LearnerStalled", "not even the first round ends",
        {
            of("rounds_left", **NODE_0): flat(1000),
            **{name: gone() for name in round_seconds("node-0", 30)},
        },
        130, NODE, "node-0 of run demo does no more rounds, with 1000 left.",
    ),
    Fires(
        "NobodyConsumes", "no generator is up", {of("workers", worker_role="generator"): then(flat(1, 10), flat(0))}, 21,
        {"run": "demo", "stream": "orders"},
        "24 entries of the stream orders of run demo wait, and nobody is up to take them.",
    ),
    Fires(
        "NobodyConsumes", "no verifier is up", {of("workers", worker_role="verifier"): then(flat(1, 10), flat(0))}, 21,
        {"run": "demo", "stream": "raw"}, "6 entries of the stream raw of run demo wait, and nobody is up to take them.",
    ),
    Fires(
        "NobodyConsumes", "those who died hold all of them",
        {
            of("workers", worker_role="generator"): then(flat(1, 10), flat(0)),
            of("backlog", stream="orders", **NODE_0): then(flat(20, 10), flat(0)),
        },
        21, {"run": "demo", "stream": "orders"},
        "4 entries of the stream orders of run demo wait, and nobody is up to take them.",
    ),
    Fires(
        "BacklogGrows", "verifiers are too slow", {of("backlog", stream="raw", node="local"): rise(2, 5)}, 45,
        {"run": "demo", "stream": "raw"}, "The backlog of the stream raw of run demo grows: 227 entries wait.",
    ),
    Fires(
        "BacklogGrows", "generators are too slow", {of("backlog", stream="orders", **NODE_0): rise(50, 3)}, 60,
        {"run": "demo", "stream": "orders"}, "The backlog of the stream orders of run demo grows: 230 entries wait.",
    ),
    Fires(
        "GeneratorStarved", "the engines stand still",
        {of("engine_seconds_total", instance="b"): then(rise(0, 45, 30), flat(1305))}, 55, {"run": "demo"},
        "The generators of run demo have nothing to do: they sample 0% of the time.",
    ),
    Fires(
        "QuarantineSpike", "a stranger sends nonsense",
        {of("quarantined_total", stream="swarm", reason="malformed"): then(flat(0, 10), rise(2, 2))}, 40,
        {"run": "demo", "stream": "swarm"},
        "30 messages of the stream swarm of run demo were refused within 15 minutes.",
    ),
    Fires(
        "QuarantineSpike", "all is refused and nothing published",
        {
            of("quarantined_total", stream="raw", reason="unknown_key"): then(flat(0, 10), rise(2, 2)),
            of("groups_published_total", purpose="train"): flat(7),
        },
        40, {"run": "demo", "stream": "raw"}, "30 messages of the stream raw of run demo were refused within 15 minutes.",
    ),
    Fires(
        "RewardCollapse", "it falls within an hour",
        {of("own_reward", **NODE_0, instance="a"): then(flat(0.6, 120), rise(0.6, -0.01, 50), flat(0.1))}, 220, NODE,
        "The own reward of node-0 in run demo fell to 0.10, less than half its best.",
    ),
    Fires(
        "RewardCollapse", "it falls over hours",
        {of("own_reward", **NODE_0, instance="a"): then(flat(0.6, 120), rise(0.6, -0.002, 250), flat(0.1))}, 360, NODE,
        "The own reward of node-0 in run demo fell to 0.15, less than half its best.",
    ),
    Fires(
        "UpdateFailures", "updates are skipped",
        {of("updates_skipped_total", **NODE_0, instance="a"): then(flat(40, 60), rise(40, 1, 4), flat(43))}, 66, NODE,
        "Updates of node-0 in run demo were skipped or rolled back within half an hour: 3.",
    ),
    Fires(
        "UpdateFailures", "the node goes back to a checkpoint",
        {of("rollbacks_total", **NODE_0, instance="a"): then(flat(2, 60), flat(3))}, 62, NODE,
        "Updates of node-0 in run demo were skipped or rolled back within half an hour: 1.",
    ),
    Fires(
        "PoliciesRefused", "one is missing",
        {of("policies_refused_total", reason="missing", instance="b"): then(flat(0, 10), rise(0, 60))}, 21,
        {"run": "demo", "reason": "missing"},
        "Generators of run demo refuse policies again and again, reason missing.",
    ),
    Fires(
        "WorkerRestarts", "a learner dies again and again",
        {of("workers_started_total", worker_role="learner"): then(flat(1, 30), rise(2, 1))}, 50,
        {"run": "demo", "worker_role": "learner"}, "15 restarts of the role learner in run demo within 15 minutes.",
    ),
    Fires(
        "WorkerRestarts", "generators die while they become more",
        {
            of("workers", worker_role="generator"): then(flat(2, 30), flat(6)),
            of("workers_started_total", worker_role="generator"): then(flat(2, 30), rise(6, 1, 6), flat(11)),
        },
        38, {"run": "demo", "worker_role": "generator"}, "5 restarts of the role generator in run demo within 15 minutes.",
    ),
    Fires(
        "StreamMemory", "the server nears its limit", {of("server_memory_bytes"): then(flat(2e9, 10), flat(3.5e9))}, 17,
        {"run": "demo"}, "The server of run demo fills up: 87.5% of what it may hold.",
    ),
    Fires(
        "StreamMemory", "no limit, but gigabytes of streams",
        {
            of("server_memory_limit_bytes"): flat(0),
            of("stream_bytes", stream="swarm"): then(flat(1e8, 10), flat(3 * 2**30)),
            of("stream_bytes", stream="own"): then(flat(1e8, 10), flat(2**30)),
        },
        17, {"run": "demo"}, "The server of run demo fills up: 100% of what it may hold.",
    ),
)  # fmt: skip


@promtool
@pytest.mark.parametrize("case", FIRES, ids=lambda case: f"{case.alert}: {case.why}")
def test_it_fires(tmp_path: Path, case: Fires) -> None:
    rule = ALERTS[f"Grapevine{case.alert}"]
    expected = {
        "exp_labels": {**case.labels, "severity": rule["labels"]["severity"]},
        "exp_annotations": {**rule["annotations"], "summary": case.summary},
    }
    judge(tmp_path, {**healthy(), **case.series}, {case.alert: [(case.at, [expected])]})


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    assert {case.alert for case in FIRES} == NAMES


# --- silent ---

ENDED = 60


def complete(stays: bool) -> Series:
    """Ended after an hour. The learner may stay, with what it said last, and be started for ever; entries are left over."""
    of_learner = {
        name: values for name, values in healthy(ENDED).items() if 'instance="a"' in name or "_round_seconds" in name
    }
    series = healthy() | {
        of("rounds_left", node="node-0"): then(rise(118, -2, ENDED), flat(0)),
        of("engine_seconds_total", instance="b"): then(rise(0, 45, ENDED), flat(45 * ENDED)),
        of("tokens_generated_total", node="node-0", instance="b"): then(rise(0, 9000, ENDED), flat(9000 * ENDED)),
        of("open_orders"): then(flat(32, ENDED), flat(0)),
        of("backlog", stream="orders", node="node-0"): then(flat(20, ENDED), flat(3)),
        of("pending", stream="orders", node="node-0"): then(flat(4, ENDED), flat(2)),
        of("workers", worker_role="generator"): then(flat(1, ENDED), flat(0)),
        of("workers", worker_role="verifier"): then(flat(1, ENDED), flat(0)),
        of("groups_published_total", purpose="train"): then(rise(0, 32, ENDED), flat(32 * ENDED)),
    }
    if not stays:
        left = {name: then(values, gone()) for name, values in of_learner.items()}
        return series | left | {of("workers", worker_role="learner"): then(flat(1, ENDED), flat(0))}
    return (
        series
        | {name: then(values, flat(0)) for name, values in of_learner.items() if "_round_seconds" in name}
        | {
            of("round", node="node-0", instance="a"): then(rise(2, 2, ENDED), flat(120)),
            of("rounds_planned", node="node-0", instance="a"): flat(120),
            of("own_reward", node="node-0", instance="a"): then(flat(0.6, ENDED - 2), flat(0.1)),
            of("rollbacks_total", node="node-0", instance="a"): then(flat(0, ENDED), flat(1)),
            of("updates_skipped_total", node="node-0", instance="a"): then(flat(0, ENDED), flat(9)),
            of("workers_started_total", worker_role="learner"): then(flat(1, ENDED), rise(2, 1)),
        }
    )


def begun_anew() -> Series:
    """The same name, a new run: after two hours all counts begin at 0 again, and the reward where it began."""
    return {name: then(values, healthy()[name]) for name, values in healthy(120).items()} | {
        of("own_reward", node="node-0", instance="a"): then(rise(0.2, 0.005, 120), rise(0.1, 0.0001)),
        of("updates_skipped_total", node="node-0", instance="a"): then(flat(40, 120), flat(0)),
        of("rollbacks_total", node="node-0", instance="a"): then(flat(4, 120), flat(0)),
        of("quarantined_total", stream="raw", reason="malformed"): then(flat(5000, 120), flat(0)),
        of("policies_refused_total", reason="missing", instance="b"): then(flat(500, 120), flat(0)),
        of("workers_started_total", worker_role="learner"): then(flat(90, 120), flat(1)),
        of("workers_started_total", worker_role="generator"): then(flat(90, 120), flat(1)),
    }


def fresh() -> Series:
    """The first quarter of an hour: models load, the first orders wait, no round has ended."""
    series = {
        name: values
        for name, values in healthy().items()
        if not name.startswith(("grapevine_round_seconds", "grapevine_own_reward"))
    }
    return series | {
        of("rounds_left", node="node-0"): then("_x3", flat(100_000)),
        of("round", node="node-0", instance="a"): then("_x3", flat(0)),
        of("engine_seconds_total", instance="b"): then("_x6", flat(0, 6), rise(0, 45)),
        of("open_orders"): then("_x3", flat(32)),
        of("backlog", stream="orders", node="node-0"): then("_x3", flat(32)),
        of("pending", stream="orders", node="node-0"): then("_x3", flat(0)),
        of("workers", worker_role="generator"): then(flat(0, 7), flat(4)),
        of("workers", worker_role="learner"): then(flat(0, 3), flat(4)),
        of("workers", worker_role="verifier"): then(flat(0, 2), flat(4)),
        **{of("workers_started_total", worker_role=role): then(flat(0, 2), rise(0, 1, 5), flat(4)) for role in ROLES[:3]},
    }


def evaluates(training: bool) -> Series:
    """Generators answer an evaluation of a thousand questions: beside training, which waits, or after it."""
    orders = of("backlog", stream="orders", node="evaluation")
    series = healthy() | {
        orders: then(flat(0, 60), rise(1000, -10, 90), flat(0)),
        of("pending", stream="orders", node="evaluation"): flat(16),
        of("tokens_generated_total", node="evaluation", instance="b"): then(flat(0, 60), rise(0, 9000, 90), flat(810_000)),
        of("tokens_generated_total", node="node-0", instance="b"): then(rise(0, 9000, 60), flat(540_000)),
    }
    if training:
        series |= {of("rounds_left", node="node-0"): then(rise(1000, -2, 60), flat(880, 90), rise(878, -2))}
    else:
        series |= {
            of("rounds_left", node="node-0"): flat(0),
            of("workers", worker_role="learner"): flat(0),
            of("engine_seconds_total", instance="b"): then(flat(0, 60), rise(0, 45, 90), flat(4050)),
        }
    return series


def with_other_exporter() -> Series:
    """After an hour the exporter is another process at another address, and counts what the server's totals say."""
    series, before = healthy(), healthy(60)
    for name in list(series):
        if "instance" not in name and "_round_seconds" not in name:
            series[name.replace("{", '{instance="c",')] = then(before[name], gone())
            # Gauges stand where they stood, and so do the server's totals.
            end, step, _ = re.split(r"(?<=\d)(?=[+-])|x", before[name])
            series[name.replace("{", '{instance="d",')] = then("_x61", f"{float(end) + 61 * float(step)}{step}x{LONG}")
            del series[name]
    return series


SILENT: dict[str, tuple[Series, tuple[int, ...]]] = {
    "nothing at all": ({}, (1, 60)),
    "a run that works": (healthy(), (5, 60, 390)),
    "many nodes": (healthy() | healthy(node="node-1"), (5, 60, 390)),
    "a run that has just begun": (fresh(), (3, 6, 9, 14)),
    "a run that is complete": (complete(stays=False), (59, 62, 75, 120, 300)),
    "a run that is complete, with its learner still there": (complete(stays=True), (62, 75, 100, 120, 300)),
    "a run that was begun anew under its name": (begun_anew(), (119, 122, 130, 180, 230)),
    "an evaluation beside training": (evaluates(training=True), (65, 85, 100, 140)),
    "an evaluation and nothing else": (evaluates(training=False), (65, 85, 100, 140, 200)),
    "another exporter": (with_other_exporter(), (62, 70, 85, 120)),
    "a learner that went back to a checkpoint": (
        healthy()
        | {
            of("updates_skipped_total", node="node-0", instance="a"): then(flat(40, 60), flat(38)),
            of("rollbacks_total", node="node-0", instance="a"): then(flat(3, 60), flat(2)),
            of("round", node="node-0", instance="a"): then(rise(0, 2, 60), rise(100, 2)),
            of("rounds_left", node="node-0"): then(rise(1000, -2, 60), rise(900, -2)),
        },
        (61, 70, 90),
    ),
    "a learner that came back at another address": (
        healthy()
        | {
            of("updates_skipped_total", node="node-0", instance="a"): then(flat(40, 60), gone()),
            of("updates_skipped_total", node="node-0", instance="c"): then("_x61", flat(40)),
            of("own_reward", node="node-0", instance="a"): then(flat(0.5, 60), gone()),
            of("own_reward", node="node-0", instance="c"): then("_x61", flat(0.5)),
        },
        (61, 70, 90),
    ),
    "slow rounds": (
        healthy()
        | round_seconds("node-0", 1500)
        | {of("rounds_left", node="node-0"): then(flat(9, 60), flat(8, 60), flat(7))},
        (50, 90, 150, 170),
    ),
    "one update skipped": (
        healthy() | {of("updates_skipped_total", node="node-0", instance="a"): then(flat(0, 60), flat(1))},
        (62, 80),
    ),
    "a reward that is small anyway": (
        healthy() | {of("own_reward", node="node-0", instance="a"): then(flat(0.05, 120), flat(0.01))},
        (200, 300),
    ),
    "a reward that falls a little": (
        healthy() | {of("own_reward", node="node-0", instance="a"): then(flat(0.6, 120), flat(0.4))},
        (200, 300),
    ),
    "a lucky first round": (
        healthy() | {of("own_reward", node="node-0", instance="a"): then(flat(0.9, 3), flat(0.2))},
        (40, 80, 200),
    ),
    "many more generators, then fewer": (
        healthy()
        | {
            of("workers", worker_role="generator"): then(flat(1, 30), rise(1, 4, 5), flat(17, 60), flat(1)),
            of("workers_started_total", worker_role="generator"): then(flat(1, 30), rise(1, 4, 5), flat(17)),
        },
        (32, 36, 44, 96, 110),
    ),
    "three restarts": (
        healthy() | {of("workers_started_total", worker_role="verifier"): then(flat(1, 30), rise(1, 1, 4), flat(4))},
        (35, 40),
    ),
    "a few refusals among many groups": (
        healthy() | {of("quarantined_total", stream="swarm", reason="stale"): rise(0, 1)},
        (20, 60),
    ),
    "a few refusals and nothing published": (
        healthy()
        | {
            of("quarantined_total", stream="swarm", reason="stale"): then(flat(0, 20), flat(8)),
            of("groups_published_total", purpose="train"): flat(0),
        },
        (25, 32),
    ),
    "a policy that was missing for a moment": (
        healthy() | {of("policies_refused_total", reason="missing", instance="b"): then(flat(0, 20), flat(6))},
        (22, 28),
    ),
    "orders that jump and stay": (
        healthy() | {of("backlog", stream="orders", node="node-0"): then(flat(20, 30), flat(400))},
        (32, 44, 50, 70),
    ),
    "a server without a limit": (
        healthy() | {of("server_memory_limit_bytes"): flat(0), of("server_memory_bytes"): flat(64e9)},
        (20,),
    ),
    "generators off, and no order open": (
        healthy() | {of("workers", worker_role="generator"): flat(0), of("open_orders"): flat(0)},
        (30,),
    ),
    "books that are read while they are written": (
        healthy() | {of("books", node="node-0", column="lost", instance="a"): then(flat(0, 10), flat(1, 3), flat(0))},
        (12, 20),
    ),
    "a server that restarts": (healthy() | {of("server_up"): then(flat(1, 10), "0", flat(1))}, (10, 11, 12)),
}


@promtool
@pytest.mark.parametrize("scene", SILENT)
def test_all_are_silent(tmp_path: Path, scene: str) -> None:
    series, times = SILENT[scene]
    judge(tmp_path, series, {name: [(at, []) for at in times] for name in sorted(NAMES)})


def judge(folder: Path, series: Series, expected: dict[str, list[tuple[int, list[Any]]]]) -> None:
    """Have Prometheus evaluate the rules over these samples. JSON is YAML, too."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{at}m", "alertname": f"Grapevine{name}", "exp_alerts": alerts}
            for name, times in expected.items()
            for at, alerts in times
        ],
    }
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

"""The dashboards: what is checked in is what the code makes, Grafana's types accept it, and a real run fills every panel."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from common.metrics import PARTS
from grapevine.monitoring.prometheus import alert_rules
from grapevine.monitoring.table import name_of, page
from grapevine.screen.status import Place
from learners.journal import read
from tests.promql import ALERTS, KNOWN, assert_known, selectors
from tests.test_up import GRAPEVINE, environment
from tools.dashboards.files import DASHBOARDS, MONITORING, files

ROOT = Path(__file__).parents[1]
FILES = {name: MONITORING / "dashboards" / f"{name}.json" for name in DASHBOARDS}
BOARDS: dict[str, dict[str, Any]] = {name: json.loads(path.read_text()) for name, path in FILES.items()}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]


def named(value: Any) -> str:
    return value["title"] if isinstance(value, dict) else str(value)


def plain(expr: str, run: str = "demo", node: str = ".*") -> str:
    """An expression with Grafana's variables filled in."""
    filled = expr.replace("$run", run).replace("$node", node)
    filled = filled.replace("$__rate_interval", "30s").replace("$__range", "5m")
    # What is left may only be the group of a regular expression.
    assert re.findall(r"\$(\w+)", filled) in ([], ["1"]), expr
    return filled


# --- what is checked in ---


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_what_is_checked_in_is_what_the_code_makes(path: Path) -> None:
    assert path.read_text() == files()[path], "renew it with `python -m tools.dashboards`"


def test_the_page_of_all_figures_is_up_to_date() -> None:
    """Every figure of `common.metrics` stands in one part, and every part on the page."""
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), (
        "renew it with `python -m grapevine.monitoring.table > docs/metrics.md`"
    )
    from common import metrics

    kinds = (metrics.Counter, metrics.Gauge, metrics.Histogram, metrics.Exported)
    in_parts = [figure for part in PARTS for figure in part.figures]
    assert sorted(map(id, in_parts)) == sorted(id(one) for one in vars(metrics).values() if isinstance(one, kinds))


def test_the_operator_gets_the_same_alerts() -> None:
    rule = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["metadata"] == {"name": "grapevine", "labels": {"app.kubernetes.io/part-of": "grapevine"}}
    assert rule["spec"] == alert_rules()


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_has_what_all_have(name: str) -> None:
    board = BOARDS[name]
    assert (board["uid"], board["tags"], board["refresh"]) == (f"grapevine-{name}", ["grapevine"], "10s")
    assert board["time"] == {"from": "now-1h", "to": "now"}
    assert [link["tags"] for link in board["links"]] == [["grapevine"]]
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "run", "node"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another"
        taken |= cells
    rows = {y for _, y in taken}
    assert taken == {(x, y) for x in range(24) for y in rows}, "there are gaps"
    assert rows == set(range(len(rows)))


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=named)
def test_a_panel_explains_itself_and_asks_for_what_exists(name: str, panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"] and panel["description"].endswith(".") and defaults["unit"]
    assert defaults["thresholds"]["steps"][0]["value"] is None
    for target in panel["targets"]:
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        several = len(panel["targets"]) > 1
        assert target["legendFormat"] != "__auto" or (panel["type"] == "table" and not several)
        assert 'run="$run"' in target["expr"]
        assert_known(plain(target["expr"]))
        for selector in selectors(plain(target["expr"])):
            asked = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert asked["run"] == "demo", "figures of other runs would be mixed in"
            of_a_node = "node" in KNOWN.get(selector.name, ()) and asked.get("stream") != "raw"
            if name == "node":
                assert "node" in asked
            elif not of_a_node:
                assert "node" not in asked


def test_no_figure_is_left_out() -> None:
    shown = {
        selector.name for _, panel in PANELS for target in panel["targets"] for selector in selectors(plain(target["expr"]))
    }
    series = {name for name in shown if name not in ALERTS}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series} | series
    assert {name_of(figure) for part in PARTS for figure in part.figures} <= families


# --- Grafana's own types ---

SCHEMAS = ("12.4.11", "13.2.3")
TYPESCRIPT = "5.9.3"


@pytest.fixture(scope="session", params=SCHEMAS)
def typescript(request: pytest.FixtureRequest) -> Path:
    """A folder with Grafana's types and the compiler, kept between sessions."""
    npm, cache = shutil.which("npm"), request.config.cache
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm is not installed")
    assert cache is not None
    folder = cache.mkdir(f"grafana-schema-{request.param}")
    if not (folder / "node_modules" / ".bin" / "tsc").exists():
        wanted = [f"@grafana/schema@{request.param}", f"typescript@{TYPESCRIPT}"]
        command = [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--save-exact"]
        try:
            done = subprocess.run([*command, *wanted], cwd=folder, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip("the npm registry does not answer")
        if done.returncode != 0:
            pytest.skip(f"npm cannot install Grafana's types: {' '.join(done.stderr.split())[-300:]}")
    return folder


def compiled(folder: Path, boards: dict[str, dict[str, Any]]) -> str:
    """What the compiler has to say of the dashboards."""
    text = (ROOT / "tests" / "grafana.ts").read_text()
    text += "".join(f"export const {name}: Whole = {json.dumps(board, indent=1)};\n" for name, board in boards.items())
    (folder / "dashboards.ts").write_text(text)
    options = ["--noEmit", "--strict", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
    command = [str(folder / "node_modules" / ".bin" / "tsc"), *options, "--skipLibCheck", "dashboards.ts"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout


def test_grafana_knows_every_property(typescript: Path) -> None:
    assert compiled(typescript, BOARDS) == ""


def test_grafana_would_notice_a_mistake(typescript: Path) -> None:
    """Otherwise the test above would say nothing."""
    text = json.dumps(BOARDS["swarm"])
    wrong = {"lineWidth": "lineWidht", "colorMode": "colourMode", "drawStyle": "drawstyle", "schemaVersion": "schema"}
    boards = {f"board{i}": json.loads(text.replace(f'"{a}"', f'"{b}"')) for i, (a, b) in enumerate(wrong.items())}
    said = compiled(typescript, boards)
    for name in wrong.values():
        assert f"'\"{name}\"' does not exist" in said


# --- a real run, seen by a real Prometheus ---

PATIENCE = 150.0
RUN = "seen"


@dataclass
class Seen:
    """A run that is up, its monitor, and what Prometheus says."""

    folder: Path
    up: subprocess.Popen[bytes]
    port: int
    monitor: subprocess.Popen[str] | None = None
    left: list[psutil.Process] = field(default_factory=list)

    def watch(self, port: int, path: str | None = None) -> subprocess.Popen[str]:
        """`grapevine monitor` on a port."""
        return subprocess.Popen(
            [*GRAPEVINE, "monitor", RUN, "--folder", str(self.folder / "runs"), "--listen", f"127.0.0.1:{port}"],
            env=environment(**({} if path is None else {"PATH": path})),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, path: str, **parameters: str) -> Any:
        """Prometheus's answer."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def holds(self, query: str) -> bool:
        """Whether there are samples. Not while Prometheus starts."""
        with suppress(OSError):
            return bool(self.ask("query", query=query)["result"])
        return False

    def until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait for it while both are up."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.up.poll() is None, "the run ended"
            assert self.monitor is None or self.monitor.poll() is None, "the monitor ended"
            assert time.monotonic() < deadline, f"still missing after {PATIENCE:.0f} s: {what()}"
            time.sleep(0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Seen]:
    """Two nodes that train on, evaluations, a control worker, nonsense in the streams, and Prometheus beside it."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt install prometheus)")
    folder = tmp_path_factory.mktemp("seen")
    node = {
        "model": str(tiny_model), "rounds": 100_000, "group_size": 4, "sampling": {"max_new_tokens": 16},
        "mix": {"own": 4, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy"]},
        "share": {"tags": ["failed", "hard", "mixed", "easy"]},
        "reward": {"accuracy": 1.0, "length": 1.0}, "evaluate": {"questions": 4, "completions": 2, "every": 20},
    }  # fmt: skip
    tree = {"run": RUN, "folder": str(folder / "runs"), "nodes": 2, "control": {"replicas": 1}, "node": node}
    (folder / "seen.yaml").write_text(yaml.safe_dump(tree))
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen([*GRAPEVINE, "up", str(folder / "seen.yaml")], env=environment(), stdout=log, stderr=log)
    seen = Seen(folder, up, free_port())
    journal = folder / "runs" / RUN / "nodes" / "node-1" / "rounds.jsonl"
    try:
        seen.until(lambda: len(read(journal)) > 1, (folder / "up.log").read_text)
        seen.monitor = seen.watch(seen.port)
        # Only what is refused after the first look is an increase.
        seen.until(lambda: seen.holds("grapevine_quarantined_total"), lambda: "a first sample")
        place = Place.find(RUN, None, folder / "runs")
        for stream in (place.keys.orders("node-0"), place.keys.raw(0, "local"), place.keys.own("node-0")):
            for number in range(5):
                place.client.xadd(stream, {"m": b"\xc1 nonsense %d" % number})
        yield seen
    finally:
        for process in (seen.monitor, up):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def finite(samples: list[dict[str, Any]]) -> bool:
    return any(isfinite(float(sample["value"][1])) for sample in samples)


def test_every_panel_shows_something(seen: Seen) -> None:
    missing = {
        (name, panel["title"], plain(target["expr"], RUN, "node-0" if name == "node" else ".*"))
        for name, panel in PANELS
        for target in panel["targets"]
    }

    def all_there() -> bool:
        for one in sorted(missing):
            if finite(seen.ask("query", query=one[2])["result"]):
                missing.discard(one)
        return not missing

    seen.until(all_there, lambda: "\n".join(map(str, sorted(missing))))


def test_what_was_refused_is_told_by_stream_and_reason(seen: Seen) -> None:
    panels = {panel["title"]: panel for name, panel in PANELS if name == "safety"}

    def shown(title: str) -> list[tuple[dict[str, str], float]]:
        found = seen.ask("query", query=plain(panels[title]["targets"][0]["expr"], RUN))["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    seen.until(lambda: sum(value for _, value in shown("Refused")) > 14, lambda: str(shown("Most refused")))
    most = shown("Most refused")
    assert [labels for labels, _ in most if labels["stream"] == "none"] == []
    expected = [{"reason": "malformed", "stream": stream} for stream in ("orders", "own", "raw")]
    assert sorted((labels for labels, _ in most), key=str) == expected


def test_every_variable_has_values(seen: Seen) -> None:
    for name, expected in (("run", {RUN}), ("node", {"node-0", "node-1"})):
        queries = {
            variable["query"].replace("$run", RUN)
            for board in BOARDS.values()
            for variable in board["templating"]["list"]
            if variable["name"] == name
        }
        (query,) = queries
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert found is not None and found[2] == name
        assert set(seen.ask(f"label/{name}/values", **{"match[]": found[1]})) == expected


def test_all_that_alerts_ask_for_is_there(seen: Seen) -> None:
    recorded = {rule["record"] for group in alert_rules()["groups"] for rule in group["rules"] if "record" in rule}
    missing = {
        str(selector).partition(" offset ")[0]
        for group in alert_rules()["groups"]
        for rule in group["rules"]
        for selector in selectors(rule["expr"])
        if selector.name not in recorded
    }

    def all_there() -> bool:
        missing.difference_update([one for one in missing if seen.holds(one)])
        return not missing

    seen.until(all_there, lambda: "\n".join(sorted(missing)))
    rules = [rule for group in seen.ask("rules")["groups"] for rule in group["rules"]]
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
    assert {rule["name"] for rule in rules if rule["type"] == "alerting"} == {
        rule["alert"] for group in alert_rules()["groups"] for rule in group["rules"] if "alert" in rule
    }
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == [], "nothing is wrong with this run"


def test_a_second_monitor_says_why_it_cannot_be(seen: Seen) -> None:
    for port, sentence in (
        (seen.port, f"grapevine: --listen 127.0.0.1:{seen.port}: it is in use; choose another port\n"),
        (free_port(), f"grapevine: run {RUN} has a monitor already; look at that one, or end it first\n"),
    ):
        second = seen.watch(port)
        assert second.communicate(timeout=PATIENCE) == ("", sentence)
        assert second.returncode == 2
    assert seen.holds("count(up == 1) > 4"), "the first one is not harmed"


def test_an_interrupt_ends_it_and_the_runs_end_does_not(seen: Seen) -> None:
    """The last one: it takes both away."""
    assert seen.monitor is not None
    seen.up.kill()
    seen.up.wait()
    deadline = time.monotonic() + PATIENCE
    while not seen.holds(f'grapevine_server_up{{run="{RUN}"}} == 0'):
        assert time.monotonic() < deadline and seen.monitor.poll() is None
        time.sleep(0.5)
    (prometheus,) = psutil.Process(seen.monitor.pid).children()
    seen.monitor.send_signal(signal.SIGINT)
    out, errors = seen.monitor.communicate(timeout=PATIENCE)
    assert (seen.monitor.returncode, errors) == (0, "")
    assert f"Prometheus watches run {RUN}" in out
    assert out.count("the run's server is away") == 1
    assert not prometheus.is_running()


def test_without_prometheus_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [*GRAPEVINE, "monitor", "any", "--folder", str(tmp_path)],
        env=environment(PATH=""), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"grapevine: Prometheus is not installed here .+\n", done.stderr)


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1", "127.0.0.1:0", "300.0.0.1:9090"])
def test_an_address_that_is_none(tmp_path: Path, listen: str) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "prometheus").write_text("#!/bin/sh\n")
    (tools / "prometheus").chmod(0o755)
    done = subprocess.run(
        [*GRAPEVINE, "monitor", "any", "--folder", str(tmp_path), "--listen", listen],
        env=environment(PATH=str(tools)), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"grapevine: --listen {listen}: write address:port, as in 127.0.0.1:9090\n"

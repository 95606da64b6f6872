"""Reports: a page that stands by itself, whatever a run wrote down, and figures that a hand can check."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from common.settings import SettingsError
from grapevine.cli import app
from grapevine.report import charts, series
from grapevine.report.compare import comparison_page, difference
from grapevine.report.folder import read_run
from grapevine.report.labels import spread
from grapevine.report.leaderboard import show_standings, standings, widest
from grapevine.report.page import run_page, span
from grapevine.report.settings import between, from_defaults
from grapevine.report.summary import figures, summary, with_error
from grapevine.running.continuing import resumed
from learners.journal import read
from tests.synthetic import heldout_line, write_lines, write_run

HOSTILE = "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{1234567*7}}$\\frac{$"


class Page(HTMLParser):
    """A page's elements, ids, references, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.texts.append(" ")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name.rpartition(":")[2] in ("href", "src", "srcset", "data", "action"):
                self.references.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: `swarm`, and `silo` that learns less."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "swarm", rounds=30, every=10)
    write_run(folder / "silo", rounds=30, every=10, swarm=0, lift=0.1, node={"update": {"learning_rate": 5e-4}})
    evaluation = heldout_line(Random(5), 30, 30, 0.4)
    job = {**evaluation, "round": None, "reward": 0.99, "job": "nightly", "node": "node-2", "at": 1.0}
    write_lines(folder / "swarm" / "evaluations.jsonl", [job])
    restart = {"at": 1_760_000_004.0, "event": "restart", "name": "generator-1", "code": -9}
    write_lines(folder / "swarm" / "events.jsonl", [restart])
    change(folder / "swarm" / "ledger.json", lambda ledger: ledger["counts"].update({"refused:raw:bad signature": 12}))
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> str:
    """The page of `swarm`."""
    return run_page(read_run(runs / "swarm"))


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a run that no learner has written anything for yet."""
    shutil.rmtree(write_run(tmp_path / "begun", rounds=1, complete=False) / "nodes")
    return tmp_path


def change(path: Path, edit: Any) -> None:
    tree = json.loads(path.read_text())
    edit(tree)
    path.write_text(json.dumps(tree))


# --- the page ---


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    found = Page(page)
    assert "svg" in found.tags
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "img", "base"}
    assert found.references
    assert all(reference.startswith("#") for reference in found.references)
    assert "://" not in page
    assert "@import" not in page and "@font-face" not in page


def test_every_chart_is_whole_and_apart_from_the_others(page: str) -> None:
    found = Page(page)
    assert len(found.ids) == len(set(found.ids)), "ids of two charts are alike"
    assert {reference[1:] for reference in found.references} <= set(found.ids)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 10
    for drawing in drawings:
        ElementTree.fromstring(f'<page xmlns:xlink="xlink">{drawing}</page>')


def test_the_page_says_what_the_run_came_to(runs: Path, page: str) -> None:
    facts = summary(runs / "swarm")
    text = Page(page).text
    for words in (
        "swarm complete: 30 rounds", f"{facts['own_reward_last10']:.3f}", f"± {facts['own_reward_last10_se']:.3f}",
        "job nightly", "99.0 %", "12 raw bad signature", "generator-1 restart -9", "fraction_simplification",
        "node.mix.swarm 4 8", "✓ right", "✗ wrong", "node-0 learned it from", "0 lost, 0 trained twice",
    ):  # fmt: skip
        assert words in text, words


def test_the_same_run_gives_the_same_bytes(runs: Path, page: str) -> None:
    assert run_page(read_run(runs / "swarm")) == page


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3, nodes=2, every=3)
    rollout = {
        "round": 2, "source": "swarm", "order_id": f"{HOSTILE}/7", "task": HOSTILE, "tag": HOSTILE, "question": HOSTILE,
        "completions": [{"text": HOSTILE, "reward": 1.0, "tokens": 3, "finished": False}],
    }  # fmt: skip
    write_lines(folder / "nodes" / "node-0" / "rollouts.jsonl", [rollout])
    path = folder / "nodes" / "node-0" / "rounds.jsonl"
    lines = read(path)
    lines[2].update(swarm_ids=[f"{HOSTILE}/1"], own_tasks=[HOSTILE] * 8)
    write_lines(path, lines)
    write_lines(folder / "events.jsonl", [{"at": 1.0, "event": HOSTILE, "name": HOSTILE, "code": 1}])
    change(folder / "ledger.json", lambda ledger: ledger["counts"].update({f"refused:{HOSTILE}:{HOSTILE}": 1}))
    change(folder / "settings.json", lambda tree: tree["node"].update(model=HOSTILE))
    evaluation = {**heldout_line(Random(1), 3, 3, 0.1), "job": HOSTILE, "node": HOSTILE, "at": 1.0}
    write_lines(folder / "evaluations.jsonl", [evaluation])
    run = read_run(folder)
    for page in (run_page(run), comparison_page([run, run])):
        found = Page(page)
        assert not found.tags & {"script", "img"}
        assert not found.handlers
        assert "8641969" not in page, "a template in the data was run"
    assert Page(run_page(run)).text.count("alert(1)") >= 10


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("nodes", "just begun: 0 of 3 rounds"),
        ("nodes/node-1", "0 of 3 rounds"),
        ("nodes/node-0/timing.jsonl nodes/node-0/heldout.jsonl nodes/node-0/rollouts.jsonl", "complete: 3 rounds"),
        ("ledger.json run.json", "complete: 3 rounds"),
        ("settings.json", "The run left no settings behind."),
    ],
)
def test_what_is_missing_is_left_out(tmp_path: Path, missing: str, words: str) -> None:
    folder = write_run(tmp_path / "run", rounds=3, nodes=2, every=3)
    for path in map(folder.joinpath, missing.split()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert words in Page(run_page(read_run(folder))).text


@pytest.mark.parametrize("shape", [{"nodes": 1, "swarm": 0}, {"every": 0}, {"rounds": 1, "complete": False}, {"nodes": 9}])
def test_small_and_odd_runs_have_a_page(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "run", **{"rounds": 3, "nodes": 2, "every": 3, **shape})
    text = Page(run_page(read_run(folder))).text
    assert ("Nothing has been evaluated yet." in text) == (shape.get("every") == 0)
    assert ("Nothing was taken from the swarm." in text) == (shape.get("swarm") == 0 or shape.get("rounds") == 1)
    assert ("1 of 2 rounds" in text) == (shape.get("rounds") == 1)


def test_a_line_cut_short_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=5, nodes=2, every=5)
    for name in ("rounds", "timing", "heldout", "rollouts"):
        with (folder / "nodes" / "node-0" / f"{name}.jsonl").open("a") as file:
            file.write('{"round": 6, "own_rew')
    assert "complete: 5 rounds" in Page(run_page(read_run(folder))).text


def test_a_node_that_only_contributes_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3, nodes={"giver": {"learner": "none"}, "taker": None}, every=3)
    path = folder / "nodes" / "giver" / "rounds.jsonl"
    lines = read(path)
    for line in lines:
        for key in ("tokens_own", "tokens_swarm", "loss", "grad_norm"):
            del line[key]
    write_lines(path, lines)
    assert "giver contributes only 3" in Page(run_page(read_run(folder))).text


def test_long_and_wide_runs_stay_small(tmp_path: Path) -> None:
    long, wide = (
        write_run(tmp_path / name, rounds=rounds, nodes=nodes, every=rounds // 10)
        for name, rounds, nodes in (("long", 2000, 1), ("wide", 10, 32))
    )
    long_page, wide_page = (run_page(read_run(folder)) for folder in (long, wide))
    assert len(long_page) < 700_000
    assert len(wide_page) < 1_500_000
    # 32 names at the end of lines would be a wall of text: the mean, the best and the worst are named.
    reward = wide_page[wide_page.index("Own reward by node") : wide_page.index("Own reward by task")]
    assert "mean of 32" in reward
    assert len(set(re.findall(r">(node-\d+)<", reward))) == 2


def test_a_run_that_is_not_there_is_one_sentence(runs: Path) -> None:
    with pytest.raises(SettingsError, match=r"swarn holds no run; did you mean swarm\?$"):
        read_run(runs / "swarn")
    with pytest.raises(SettingsError, match=r"zebra holds no run; .* has silo, swarm$"):
        read_run(runs / "zebra")
    with pytest.raises(SettingsError, match=r"holds no run; `grapevine up` makes one$"):
        read_run(runs / "nowhere" / "swarm")


# --- figures ---


def test_figures_are_those_of_the_files(runs: Path) -> None:
    facts = summary(runs / "swarm")
    lines = {path.name: read(path / "rounds.jsonl") for path in (runs / "swarm" / "nodes").iterdir()}
    groups = [reward for node in lines.values() for line in node[-10:] for reward in line["own_group_rewards"]]
    assert facts["own_reward_last10"] == pytest.approx(fmean(groups))
    assert facts["swarm_groups_used"] == 4 * (1 + 2 + 3 + 4 * 26)
    assert facts["swarm_groups_missing"] == 4 * (4 + 3 + 2 + 1)
    assert (facts["groups_trained_twice"], facts["groups_lost"], facts["quarantined"]) == (0, 0, 12)
    ends = [read(path / "heldout.jsonl")[-1] for path in (runs / "swarm" / "nodes").iterdir()]
    assert facts["heldout_greedy_last"] == pytest.approx(fmean(line["greedy"]["rate"] for line in ends))
    # Of the node that took longest, and without the first round, which waits for the models.
    timing = [read(path / "timing.jsonl")[1:] for path in (runs / "swarm" / "nodes").iterdir()]
    longest = max(sum(line[part] for line in lines for part in series.SECONDS) for lines in timing)
    assert facts["tokens_per_second"] == pytest.approx(4 * 29 * 700 / longest)


def test_nodes_that_answer_the_same_questions_are_no_surer_together(runs: Path) -> None:
    run = read_run(runs / "swarm")
    errors = [lines[-1]["standard_error"] for lines in run.heldout.values()]
    assert len(errors) > 1
    assert summary(runs / "swarm")["heldout_last_se"] == pytest.approx(fmean(errors))


def test_the_mean_of_unequally_long_lines_is_taken_round_by_round() -> None:
    short = series.line("short", range(1, 301), [float(round) for round in range(1, 301)], size=1)
    long = series.line("long", range(1, 601), [float(round) for round in range(1, 601)], size=1)
    mean = series.mean_line("mean", [short, long])
    assert mean.x == mean.y == list(range(1, 301))
    assert len(series.thinned(long).x) == series.POINTS


@pytest.mark.parametrize("name", ["ledger.json", "run.json"])
@pytest.mark.parametrize("text", ["", "{", '{"books": 5, "elapsed_seconds": "x"}', '{"books": {"node-0": {}}}'])
def test_what_a_run_writes_again_counts_as_absent_when_it_is_damaged(tmp_path: Path, name: str, text: str) -> None:
    folder = write_run(tmp_path / "cut", rounds=3)
    (folder / name).write_text(text)
    assert summary(folder)["rounds"] == 3
    assert "cut" in run_page(read_run(folder))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"run": "cut"}', "{" * 5000])
def test_damaged_settings_are_one_sentence(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "cut", rounds=3)
    (folder / "settings.json").write_text(text)
    for command in (["report", "cut"], ["leaderboard", "cut"], ["export", "cut", "node-0"]):
        result = CliRunner().invoke(app, [*command, "--folder", str(tmp_path)])
        assert isinstance(result.exception, SettingsError), result.output
        assert "settings.json is damaged; `grapevine up` with the run's own YAML file" in str(result.exception)
    with pytest.raises(SettingsError, match="is damaged"):
        resumed(str(folder))
    assert (folder / "settings.json").read_text() == text


def test_a_terminal_that_knows_no_such_sign_gets_another(runs: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "grapevine", "report", "swarm", "--folder", str(runs), "--out", str(runs / "ascii.html")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert " ? 0.0" in shown.stdout


def test_a_narrow_terminal_shows_the_figures_whole(runs: Path) -> None:
    console = Console(width=40, file=io.StringIO())
    show_standings(read_run(runs / "swarm"), 3, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "99.0" in text and "node-2" in text
    assert "…" not in text


def test_a_group_in_two_rounds_counts_as_trained_twice(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3, nodes=2, every=0)
    path = folder / "nodes" / "node-1" / "rounds.jsonl"
    lines = read(path)
    lines[2]["own_ids"] = [*lines[2]["own_ids"][:-1], lines[0]["own_ids"][0]]
    write_lines(path, lines)
    assert summary(folder)["groups_trained_twice"] == 1


def test_who_learned_from_whom_adds_up(runs: Path) -> None:
    run = read_run(runs / "swarm")
    authors, learners, counts = series.learned_from(run)
    assert (authors, learners) == (run.nodes, run.nodes)
    assert sum(map(sum, counts)) == summary(runs / "swarm")["swarm_groups_used"]
    assert all(row[i] == 0 for i, row in enumerate(counts)), "a node learned from itself"


def test_mix_counts_every_group_once(runs: Path) -> None:
    run = read_run(runs / "swarm")
    for side, groups in (("own", 8), ("swarm", 4)):
        stack = series.mix(run, side)
        assert [sum(layer) for layer in zip(*stack.layers.values(), strict=True)] == [pytest.approx(groups)] * 30
    assert series.mix(run, "swarm").layers["missing"][:5] == [4, 3, 2, 1, 0]
    assert series.mix(read_run(runs / "silo"), "swarm").layers == {}


def test_the_leaderboard_is_in_order_of_the_sampled_rate(runs: Path) -> None:
    run = read_run(runs / "swarm")
    rows = standings(run)
    assert len(rows) == 4 * 4 + 1
    assert (rows[0].source, rows[0].node, rows[0].sampled[0]) == ("job nightly", "node-2", 0.99)
    assert [row.sampled[0] for row in rows] == sorted((row.sampled[0] for row in rows), reverse=True)
    assert widest(rows) == 4
    file = io.StringIO()
    show_standings(run, 3, Console(width=80, file=file))
    shown = file.getvalue()
    assert "job nightly" in shown and "pass@4" in shown and "and 14 more: --top 0 shows all" in shown
    assert "…" not in shown, "a table of 80 columns has to cut nothing"


def test_only_what_differs_from_the_defaults_is_named(runs: Path) -> None:
    changed = {key: (value, default) for key, value, default in from_defaults(read_run(runs / "silo"))}
    assert changed == {
        "node.rounds": ("30", "200"), "node.mix.swarm": ("0", "8"),
        "node.update.learning_rate": ("0.0005", "1e-06"),
    }  # fmt: skip
    assert between([read_run(runs / "swarm"), read_run(runs / "silo")]) == [
        ("node.mix.swarm", ["4", "0"]), ("node.update.learning_rate", ["1e-06", "0.0005"]),
    ]  # fmt: skip


def test_a_comparison_shows_both_runs_and_their_differences(runs: Path) -> None:
    page = comparison_page([read_run(runs / "swarm"), read_run(runs / "silo")])
    found = Page(page)
    assert all(reference.startswith("#") for reference in found.references)
    one, other = summary(runs / "swarm"), summary(runs / "silo")
    found_difference = difference(one, other, "own_reward_last10", 3)
    error = (one["own_reward_last10_se"] ** 2 + other["own_reward_last10_se"] ** 2) ** 0.5
    less = one["own_reward_last10"] - other["own_reward_last10"]
    assert found_difference.text == f"\N{MINUS SIGN}{less:.3f} ± {error:.3f}"
    assert found_difference.clear
    assert f"<b>{found_difference.text}</b>" in page
    assert "node.mix.swarm 4 0" in found.text
    assert len(re.findall("<svg", page)) == 3


def test_a_run_that_stopped_early_is_compared_over_what_both_have(tmp_path: Path) -> None:
    whole = read_run(write_run(tmp_path / "whole", rounds=60, every=20))
    early = read_run(write_run(tmp_path / "early", rounds=30, every=20))
    page = Page(comparison_page([whole, early])).text
    assert "those of the first 30 rounds" in page
    cut = replace(
        whole,
        rounds={node: lines[:30] for node, lines in whole.rounds.items()},
        heldout={node: [line for line in lines if line["round"] in (0, 20)] for node, lines in whole.heldout.items()},
    )
    assert with_error(figures(cut), "own_reward_last10") in page
    assert with_error(figures(cut), "heldout_last") in page
    assert with_error(figures(whole), "heldout_last") not in page


def test_runs_without_a_round_can_be_compared(tmp_path: Path, runs: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=1, every=0, complete=False)
    shutil.rmtree(folder / "nodes")
    assert "swarm against run" in Page(comparison_page([read_run(runs / "swarm"), read_run(folder)])).text


# --- numbers and places ---


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 20))
def test_smoothing_is_the_mean_of_the_last_ones(values: list[float], size: int) -> None:
    for i, value in enumerate(series.smooth(values, size)):
        assert value == pytest.approx(fmean(values[max(0, i + 1 - size) : i + 1]), abs=1e-9)


@given(st.integers(0, 500), st.integers(2, 50))
def test_thinning_keeps_order_and_both_ends(count: int, limit: int) -> None:
    kept = series.thin(list(range(count)), limit)
    assert kept == sorted(set(kept))
    assert len(kept) == min(count, limit)
    assert kept[:1] == list(range(count))[:1] and kept[-1:] == list(range(count))[-1:]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_names_at_line_ends_never_touch(wanted: list[float]) -> None:
    gap = 0.06
    places = spread(wanted, gap)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    for (one, at), (other, there) in itertools.combinations(zip(wanted, places, strict=True), 2):
        assert abs(at - there) >= gap - 1e-9
        assert one == other or (one < other) == (at < there)


def test_lines_of_a_chart_differ_without_colour() -> None:
    looks = {
        (charts.DASHES[i % len(charts.DASHES)], charts.MARKERS[i % len(charts.MARKERS)])
        for i in range(charts.MOST_LINES + 4)
    }
    assert len(looks) == charts.MOST_LINES + 4


@pytest.mark.parametrize(
    ("seconds", "text"), [(51.4, "51 s"), (720, "12 min"), (12_000, "3 h 20 min"), (7_199, "2 h 0 min")]
)
def test_spans_read_well(seconds: float, text: str) -> None:
    assert span(seconds) == text


# --- the commands ---


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_report_writes_a_page_and_says_where(begun: Path) -> None:
    out = call("report", "begun", "--folder", str(begun))
    assert f"page: {begun / 'begun' / 'report.html'}" in out
    assert "0 rounds on 4 nodes" in out
    assert (begun / "begun" / "report.html").read_text().startswith("<!doctype html>")


def test_report_of_several_runs_compares_them(begun: Path) -> None:
    shutil.copytree(begun / "begun", begun / "other")
    call("report", "begun", "other", "--folder", str(begun))
    assert "all settings are alike" in (begun / "begun-vs-other.html").read_text()
    call("report", "begun", "other", "--folder", str(begun), "--out", str(begun / "a" / "b.html"))
    assert (begun / "a" / "b.html").exists()


def test_report_as_json_is_json_alone(runs: Path) -> None:
    assert json.loads(call("report", "swarm", "--folder", str(runs), "--json"))["run"] == "swarm"
    both = json.loads(call("report", "swarm", "silo", "--folder", str(runs), "--json"))
    assert [facts["run"] for facts in both] == ["swarm", "silo"]


def test_a_page_that_cannot_be_written_is_one_sentence(begun: Path) -> None:
    result = CliRunner().invoke(app, ["report", "begun", "--folder", str(begun), "--out", str(begun)])
    assert isinstance(result.exception, SettingsError)
    assert str(result.exception) == f"--out {begun} cannot be written: Is a directory"


def test_leaderboard_command(runs: Path) -> None:
    assert "held-out accuracy" in call("leaderboard", "swarm", "--folder", str(runs), "--top", "0")

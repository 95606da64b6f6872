"""An experiment's figures: the exact test, what hands can check, and a page that has every arm."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grapevine.experiment.cells import kept, plan
from grapevine.experiment.curves import panels
from grapevine.experiment.page import signed, write_pages
from grapevine.experiment.record import record
from grapevine.experiment.signflip import sign_flip_p
from grapevine.experiment.study import Study, Tree
from grapevine.experiment.summary import summarize
from grapevine.report.folder import read_run
from tests.study_cells import write_cell, write_study
from tests.synthetic import write_run

# Whole numbers, so that brute force needs no tolerance.
differences = st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=9)


def brute_force(values: list[float]) -> float:
    found = abs(sum(values))
    flips = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    return sum(flip >= found for flip in flips) / len(flips)


@given(differences)
def test_p_is_the_share_of_all_flips(values: list[float]) -> None:
    assert sign_flip_p(values) == brute_force(values)


@given(differences, st.floats(0.001, 1000))
def test_p_does_not_depend_on_sign_scale_or_order(values: list[float], scale: float) -> None:
    p = sign_flip_p(values)
    assert 2.0 ** (1 - len(values)) <= p <= 1.0
    assert sign_flip_p([-value for value in values]) == p
    assert sign_flip_p([scale * value for value in values]) == p
    assert sign_flip_p(sorted(values)) == p


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=16))
def test_the_smallest_p_is_that_of_differences_of_one_sign(values: list[float]) -> None:
    assert sign_flip_p(values) == 2.0 ** (1 - len(values))


def test_ties_count_in_spite_of_rounding() -> None:
    # 0.1 + 0.2 - 0.3 is not 0 in floating point, and the order of the sum must not matter.
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1.0
    assert sign_flip_p([0.1, 0.2, 0.3, 0.0]) == brute_force([1, 2, 3, 0]) == 0.25
    assert sign_flip_p([1.0] * 40) == 2.0**-39
    with pytest.raises(ValueError):
        sign_flip_p([])


def finished(folder: Path, study: Study, lifts: dict[str, float], leave_out: tuple[str, ...] = ()) -> dict[str, Tree]:
    """Cells of these arms, but for some, as files; and their figures."""
    cells = plan(study, folder)
    for cell in cells:
        if cell.arm in lifts and cell.name not in leave_out:
            write_cell(cell, folder, lifts[cell.arm])
    found = {cell.name: kept(cell, folder) for cell in cells}
    return {name: figures for name, figures in found.items() if figures is not None}


def test_the_summary_is_what_a_hand_computes(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    found = finished(tmp_path, study, {"silo": 0.2, "naive": 0.1, "successes": 0.4}, leave_out=("alike/naive-3",))
    regime = summarize(study, plan(study, tmp_path), found)["regimes"]["alike"]
    silo, better = ([found[f"alike/{arm}-{seed}"] for seed in (1, 2, 3)] for arm in ("silo", "successes"))
    sums = [cell["cumulative_own_reward"] for cell in silo]
    assert regime["arms"]["silo"]["mean"]["own_reward"] == fmean(sums)
    pair = next(pair for pair in regime["pairs"] if pair["arms"] == ["silo", "successes"])
    wanted = [b["cumulative_own_reward"] - a["cumulative_own_reward"] for a, b in zip(silo, better, strict=True)]
    assert list(pair["own_reward"]["differences"].values()) == wanted
    assert pair["own_reward"]["p"] == brute_force(wanted) == 0.25
    other = next(pair for pair in regime["pairs"] if pair["arms"] == ["silo", "naive"])
    assert (other["own_reward"]["seeds"], other["own_reward"]["p"]) == (2, 0.5)
    assert regime["missing"] == ["alike/naive-3"]
    start = {
        seed: fmean(
            reward for cell in found.values() if cell["seed"] == seed for reward in cell["rounds"]["own_reward"][:10]
        )
        for seed in (1, 2, 3)
    }
    assert regime["arms"]["silo"]["seeds"]["1"]["start"] == pytest.approx(start[1])
    gains = [fmean(fmean(cell["rounds"]["own_reward"]) - start[cell["seed"]] for cell in cells) for cells in (silo, better)]
    assert regime["arms"]["successes"]["percent_of_gain"]["silo"] == pytest.approx(100 * gains[1] / gains[0], rel=1e-3)


def test_no_share_of_a_gain_that_is_none(tmp_path: Path) -> None:
    study = write_study(tmp_path, seeds=(1,))
    found = finished(tmp_path, study, {"silo": -0.2, "naive": 0.1})
    arms = summarize(study, plan(study, tmp_path), found)["regimes"]["alike"]["arms"]
    assert arms["naive"]["percent_of_gain"] == {"silo": None}
    assert arms["successes"]["mean"] == {}


def test_a_page_has_every_arm_and_stands_by_itself(tmp_path: Path) -> None:
    study = write_study(tmp_path, question="<b>What?</b>")
    found = finished(tmp_path, study, {"silo": 0.2, "naive": 0.1})
    write_pages(study, plan(study, tmp_path), found, tmp_path)
    page = (tmp_path / "index.html").read_text()
    for arm in study.arms:
        assert f"<tr><td>{arm}" in page
    assert "naive less silo" in page and "successes less silo" in page
    assert "3 of 9 runs are not finished" in page and "successes-3" in page
    assert "no p can be smaller than 0.25" in page
    assert "node.update.correction" in page and "node.rounds: 300" in page
    assert "&lt;b&gt;What?" in page and "<script" not in page and "http" not in page
    charts = [part.partition("</svg>")[0] for part in page.split("<svg")[1:]]
    assert len(charts) == 4
    assert all(f">{arm}</text>" in chart for chart in charts for arm in ("silo", "naive"))
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] == 6
    ElementTree.parse(tmp_path / "figures" / "alike.svg")
    assert (tmp_path / "figures" / "alike.png").read_bytes()[:4] == b"\x89PNG"


def test_one_seed_has_no_p_and_nothing_finished_is_said(tmp_path: Path) -> None:
    study = write_study(tmp_path, seeds=(1,))
    cells = plan(study, tmp_path)
    write_pages(study, cells, {}, tmp_path)
    assert "No run is finished yet" in (tmp_path / "index.html").read_text()
    write_pages(study, cells, finished(tmp_path, study, {"silo": 0.2, "naive": 0.1, "successes": 0.3}), tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "so there is no p value" in page and "±" not in page.partition("<section")[2]


def test_a_regime_of_one_arm(tmp_path: Path) -> None:
    study = write_study(tmp_path, regimes={"lone": {"seeds": [1], "arms": ["silo"]}})
    write_pages(study, plan(study, tmp_path), finished(tmp_path, study, {"silo": 0.2}), tmp_path)
    assert "nothing to compare" in (tmp_path / "index.html").read_text()


def test_curves_end_where_the_seed_with_the_fewest_tokens_does(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    found = finished(tmp_path, study, {"silo": 0.2})
    cells = [found[f"alike/silo-{seed}"] for seed in (1, 2, 3)]
    drawn = {title: lines for title, lines, _, _ in panels({"silo": cells, "naive": []})}
    (tokens,) = drawn["Own reward by tokens generated"]
    assert tokens.x[-1] == pytest.approx(min(sum(cell["rounds"]["own_tokens"]) for cell in cells) / 1e3)
    (rounds,) = drawn["Own reward by round"]
    assert rounds.low is not None and rounds.high is not None
    assert all(low <= y <= high for low, y, high in zip(rounds.low, rounds.y, rounds.high, strict=True))


def test_a_cell_records_what_the_journals_say(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rounds=30, nodes={"a": {}, "b": {}, "c": {"learner": "none"}}, every=10))
    figures = record(run)
    assert figures["learning"] == ["a", "b"]
    rewards = [fmean(run.rounds[node][at]["own_reward"] for node in ("a", "b")) for at in range(30)]
    assert figures["rounds"]["own_reward"] == [round(reward, 5) for reward in rewards]
    assert figures["cumulative_own_reward"] == pytest.approx(sum(rewards), abs=1e-12)
    assert figures["rounds"]["own_tokens"] == [2100] * 30
    assert sum(figures["rounds"]["swarm_groups"]) == sum(sum(row.values()) for row in figures["learned_from"].values())
    assert [one["round"] for one in figures["heldout"]] == [0, 10, 20, 30]
    assert figures["nodes"]["a"]["heldout"] == run.heldout["a"][-1]["reward"]
    assert len(json.dumps(figures)) < 10_000


def test_signs() -> None:
    assert [signed(value, 2) for value in (0.5, -0.5, 0.0, None)] == ["+0.50", "\N{MINUS SIGN}0.50", "+0.00", "\N{EN DASH}"]


def test_descriptive_arms_are_drawn_apart(tmp_path: Path) -> None:
    regime = {"seeds": [1, 2, 3], "descriptive_arms": ["naive"], "descriptive_seeds": 2, "reference": ["silo"]}
    study = write_study(tmp_path, regimes={"alike": regime})
    found = finished(tmp_path, study, {"silo": 0.2, "naive": 0.1, "successes": 0.4})
    write_pages(study, plan(study, tmp_path), found, tmp_path)
    page = (tmp_path / "index.html").read_text()
    charts = [part.partition("</svg>")[0] for part in page.split("<svg")[1:]]
    shown = [tuple(arm for arm in study.arms if f">{arm}</text>" in chart) for chart in charts]
    assert shown == [("silo", "successes")] * 4 + [("silo", "naive")] * 4
    assert "over seeds 1, 2 only" in page
    assert {path.name for path in (tmp_path / "figures").glob("*.svg")} == {"alike.svg", "alike-descriptive.svg"}

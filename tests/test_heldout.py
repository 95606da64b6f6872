"""Evaluations while training, on a real server without a model: begun once, taken up again, given up when nothing comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.tasks import Question, build, is_held_out
from grapevine.server import EmbeddedServer
from learners import evaluation
from learners.journal import read
from learners.learner import Learner
from tests.chaos.workers import CoinScorer
from tests.site import Site
from verifiers.sandbox import GroupVerdict


class Examiner(CoinScorer):
    """A coin that knows which questions are held out."""

    def score(self, question: Question, texts: list[str], max_characters: int) -> GroupVerdict:
        verdict = super().score(question, texts, max_characters)
        text = build(question).text
        return GroupVerdict(verdict.components, verdict.faults, is_held_out(text), text, "")


def site_of(tmp_path: Path, server: EmbeddedServer, run: str, **node: Any) -> Site:
    settings = {"rounds": 2, "evaluate": {"questions": 3, "completions": 2, "every": 0}, **node}
    site = Site(tmp_path, server.url, run, nodes=("node-0",), **settings)
    site.verifier._scorer = Examiner()
    return site


def heldout(site: Site) -> list[dict[str, Any]]:
    return read(site.settings.run_folder / "nodes" / "node-0" / "heldout.jsonl")


def finish(site: Site, learner: Learner) -> None:
    more = True
    while more:
        site.generate()
        site.verify()
        more = learner.step()


def restarted(site: Site, completions: int) -> Learner:
    """Another life of the learner, with this setting."""
    wanted = site.settings.node.evaluate.model_copy(update={"completions": completions})
    node = site.settings.node.model_copy(update={"evaluate": wanted})
    site.settings = site.settings.model_copy(update={"node": node})
    learner = site._learner("node-0")
    learner.rejoin()
    return learner


def test_first_and_last_policy_are_evaluated_once(tmp_path: Path, server: EmbeddedServer) -> None:
    site = site_of(tmp_path, server, "heldout-once")
    finish(site, site.learners[0])
    assert [line["round"] for line in heldout(site)] == [0, 2]
    assert all((line["questions"], line["completions"], line["unanswered"]) == (3, 2, 0) for line in heldout(site))
    assert site.directory.targets("local") == ["node-0"], "an evaluation leaves nothing behind"


def test_what_was_answered_before_a_restart_is_taken_up(tmp_path: Path, server: EmbeddedServer) -> None:
    site = site_of(tmp_path, server, "heldout-restart")
    site.learners[0].checkpoint()
    site.generate()
    site.verify()
    scored = site.ledger.counts()["scored:eval"]
    finish(site, restarted(site, completions=2))
    assert [line["round"] for line in heldout(site)] == [0, 2]
    assert site.ledger.counts()["scored:eval"] == 2 * scored, "the first evaluation was not asked again"


def test_an_evaluation_of_another_plan_is_begun_anew(tmp_path: Path, server: EmbeddedServer) -> None:
    site = site_of(tmp_path, server, "heldout-plan")
    site.learners[0].checkpoint()
    site.generate()
    site.verify()
    finish(site, restarted(site, completions=5))
    assert [(line["round"], line["completions"]) for line in heldout(site)] == [(0, 5), (2, 5)]


def test_one_written_down_before_a_crash_is_not_repeated(tmp_path: Path, server: EmbeddedServer) -> None:
    site = site_of(tmp_path, server, "heldout-written")
    learner = site.learners[0]
    learner.checkpoint()  # names the evaluation as under way
    while not heldout(site):
        site.generate()
        site.verify()
        learner._heldout.advance()
    finish(site, restarted(site, completions=2))
    assert [line["round"] for line in heldout(site)] == [0, 2]


def test_one_that_nobody_answers_is_given_up(
    tmp_path: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "TEND_SECONDS", 0.0)
    site = site_of(tmp_path, server, "heldout-silent", order_seconds=0.3)
    site.verifier._scorer = CoinScorer()  # says of no question that it is held out, so that all are refused
    finish(site, site.learners[0])
    assert heldout(site) == []
    assert site.refused("raw") == {"held_out": site.ledger.counts()["refused:raw:held_out"]}
    assert site.ledger.books("node-0").round == 2
    assert site.directory.targets("local") == ["node-0"]

"""Whatever an answer or a question does, it costs only itself, and the caller goes on."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.tasks import PRESETS, Question, TaskRefused, build, draw, is_held_out
from verifiers.child import Limits
from verifiers.sandbox import Sandbox, SandboxUnavailable
from verifiers.scoring import Components

NINE = PRESETS["paper9"]
ROOT = Path(__file__).resolve().parents[1]
# coin_flip hands the answer to Fraction, which computes 10 ** 999999999.
HANGS = "<answer>1e999999999</answer>"
COIN = Question("coin_flip", {}, 1, 0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    sandbox.score(COIN, [], 100)
    yield sandbox
    sandbox.close()


def answered(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def right_for(question: Question) -> str:
    return answered(build(question).answer)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_pid(sandbox: Sandbox) -> int:
    assert sandbox.host_pid
    (worker,) = children(sandbox.host_pid)
    return worker


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("spec", NINE, ids=lambda spec: spec.name)
def test_hostile_answers_score_nought_and_the_others_their_due(sandbox: Sandbox, spec: Any, tmp_path: Path) -> None:
    question = next(
        q
        for q in (draw((spec,), 2**40, number, False) for number in range(50))
        if spec.name != "propositional_logic" or build(q).dataset.score_answer(build(q).answer, build(q).entry) == 1.0
    )
    touched = tmp_path / "touched"
    hostile = [
        answered("9**9**9"),
        answered(f"__import__('os').system('touch {touched}')"),
        answered("(" * 500_000 + ")" * 500_000),
        answered("(" * 2000 + ")" * 2000),
        "(" * 2**20,
        answered("\x00"),
        answered("\ud800\udfff"),
        answered("1e999999999"),
        answered("\u00ac" * 3000 + "P"),
        answered("sys.exit()"),
        "<answer>" * 100_000,
    ]
    right = right_for(question)
    for texts in ([right, *hostile, right], *([right, text, right] for text in hostile)):
        began = time.monotonic()
        verdict = sandbox.score(question, texts, 1000)
        assert time.monotonic() - began < 2.0
        assert [c.accuracy for c in verdict.components] == [1.0, *[0.0] * (len(texts) - 2), 1.0]
        assert verdict.faults == [None] * len(texts)
    assert not touched.exists()


def test_verdict_tells_the_question_and_its_side(sandbox: Sandbox) -> None:
    for held_out in (False, True):
        question = draw(NINE, 2**40, 3, held_out)
        verdict = sandbox.score(question, [], 100)
        item = build(question)
        assert (verdict.text, verdict.answer) == (item.text, item.answer)
        assert verdict.held_out == is_held_out(item.text) == held_out
        assert not verdict.components and not verdict.faults


def test_a_hang_costs_only_that_answer(sandbox: Sandbox) -> None:
    right = right_for(COIN)
    verdict = sandbox.score(COIN, [right, HANGS, right, "no answer", HANGS, right], len(right))
    assert [c.accuracy for c in verdict.components] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert verdict.faults == [None, "timeout", None, None, "timeout", None]
    # What is lost is the accuracy alone.
    assert verdict.components[1] == Components(0.0, 1.0, 1 - min(1.0, len(HANGS) / len(right)))


def test_honest_answers_count_in_a_group_of_hangs(sandbox: Sandbox) -> None:
    verdict = sandbox.score(COIN, [*[HANGS] * 20, right_for(COIN)], 100)
    assert verdict.faults == [*["timeout"] * 20, None]
    assert verdict.components[-1].accuracy == 1.0


def test_far_too_many_hangs_end_the_scoring_of_the_group() -> None:
    sandbox = Sandbox(Limits(answer=0.02, group=0.02))
    verdict = sandbox.score(COIN, [HANGS] * 40, 100)
    sandbox.close()
    assert verdict.faults == ["timeout"] * 40


@pytest.mark.parametrize(
    ("raised", "fault"),
    [
        ("SystemExit", "scorer"),
        ("KeyboardInterrupt", "scorer"),
        ("RecursionError", "scorer"),
        ("ZeroDivisionError", "scorer"),
        ("MemoryError", "memory"),
    ],
)
def test_whatever_a_scorer_raises_is_a_fault(raised: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    from verifiers import child

    def scorer(item: Any, answer: str | None) -> float:
        raise getattr(builtins, raised)

    monkeypatch.setattr(child, "accuracy", scorer)
    assert child._judge(build(COIN), "1") == child.Scored(0.0, fault)


@pytest.mark.parametrize(
    "settings",
    [{"min_n": 10**9, "max_n": 10**9}, {"min_n": 30_000, "max_n": 30_000}, {"min_n": 400, "max_n": 400}],
)
def test_hostile_settings_are_refused(sandbox: Sandbox, settings: dict[str, Any]) -> None:
    with pytest.raises(TaskRefused, match="binary_matrix"):
        sandbox.score(Question("binary_matrix", settings, 1, 0), ["<answer>1</answer>"], 100)
    assert sandbox.score(COIN, [right_for(COIN)], 100).components[0].accuracy == 1.0


def test_memory_is_bounded() -> None:
    sandbox = Sandbox(Limits(build=30.0, memory=300 * 2**20))
    with pytest.raises(TaskRefused, match="MemoryError"):
        sandbox.score(Question("binary_matrix", {"min_n": 10**5, "max_n": 10**5}, 1, 0), [], 100)
    assert sandbox.score(COIN, [right_for(COIN)], 100).components[0].accuracy == 1.0
    sandbox.close()


@pytest.mark.parametrize(
    ("question", "word"),
    [
        (Question("gdc", {}, 1, 0), "gcd"),
        (Question("word_ladder", {}, 1, 0), "word_ladder"),
        (Question("gcd", {"max_value": 10**400}, 1, 0), "64 bits"),
        (Question("gcd", {"max_numbers": 1}, 1, 0), "max_numbers"),
    ],
)
def test_refusals_cross_the_process_border(sandbox: Sandbox, question: Question, word: str) -> None:
    with pytest.raises(TaskRefused, match=word):
        sandbox.score(question, ["<answer>1</answer>"], 100)


def test_killed_processes_are_replaced(sandbox: Sandbox) -> None:
    right = right_for(COIN)
    worker = worker_pid(sandbox)
    os.kill(worker, 9)
    assert sandbox.score(COIN, [right], 100).faults == [None]
    assert worker_pid(sandbox) != worker
    host = sandbox.host_pid
    assert host
    os.kill(host, 9)
    assert sandbox.score(COIN, [right], 100).components[0].accuracy == 1.0
    assert sandbox.host_pid != host


def test_closing_ends_the_processes_and_scoring_starts_them_again() -> None:
    sandbox = Sandbox()
    sandbox.score(COIN, [], 100)
    pids = [sandbox.host_pid or 0, worker_pid(sandbox)]
    sandbox.close()
    _wait_until_gone(pids)
    assert sandbox.score(COIN, [right_for(COIN)], 100).components[0].accuracy == 1.0
    sandbox.close()


def test_processes_have_no_secrets_and_few_rights(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@server")
    fresh = Sandbox()
    fresh.score(COIN, [], 100)
    for pid in (fresh.host_pid or 0, worker_pid(fresh)):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"secret" not in environment and b"PATH" not in environment
        limits = Path(f"/proc/{pid}/limits").read_text()
        by_name = {line[:25].strip(): line[25:].split()[0] for line in limits.splitlines()}
        assert by_name["Max file size"] == "0"
        assert by_name["Max address space"] == str(2**30)
        assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == "/dev/null"
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    fresh.close()


def test_processes_end_with_their_parent() -> None:
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.test_sandbox import COIN, Sandbox, worker_pid\n"
        "sandbox = Sandbox(); sandbox.score(COIN, [], 100)\n"
        "print(sandbox.host_pid, worker_pid(sandbox), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True)
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    _wait_until_gone(pids)


def test_a_host_that_cannot_start_is_no_fault_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxUnavailable):
        Sandbox().score(COIN, [right_for(COIN)], 100)


def _wait_until_gone(pids: list[int]) -> None:
    patience = time.monotonic() + 20
    while any(map(running, pids)):
        assert time.monotonic() < patience, f"{pids} still run"
        time.sleep(0.02)

"""What people see: the picture in every size, plain lines, `grapevine status`."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from common.ledger import Books, Entry
from grapevine.cli import main
from grapevine.screen.live import LINE_SECONDS, Screen, read_events, round_line
from grapevine.screen.picture import picture
from grapevine.screen.status import svg
from grapevine.screen.view import (
    Generator,
    GeneratorFacts,
    HeldOut,
    Helper,
    LearnerFacts,
    Mix,
    Node,
    Raw,
    Target,
    View,
)
from grapevine.screen.waits import waits
from grapevine.screen.wording import duration, event_words, mean_curve, sparkline
from grapevine.server import EmbeddedServer
from tests.site import Site

RESTART = {"at": 1000.0, "event": "restart", "name": "generator-1", "code": -9}


def a_view(nodes: int, generators: int = 2, silent: tuple[int, ...] = (), heard: bool = True) -> View:
    """A run of so many nodes, each at round 86 or 87 of 150."""

    def node(i: int) -> Node:
        name = f"node-{i}"
        facts = LearnerFacts(
            round=86 + i % 2, rounds=150, waiting=5, wanted=16, own_reward=0.4 + i / 1000, curve=[0.2, 0.3, 0.4] * 8,
            heldout=HeldOut(50, 0.31, 0.27, 0.35, 0.4), mix=Mix({"hard": 3, "mixed": 5, "easy": 8}, {"hard": 2}, 6),
            staleness=1.4, tokens_per_second=1430.0, version="1.86", model="starter", site="local",
            state="waits for own groups",
        ) if heard else LearnerFacts()  # fmt: skip
        state = "silent" if i in silent else facts.state or "no learner"
        books = Books(open=10, waiting=5, ordered=100, trained=80, filtered=5, expired=0, incarnation=1, round=86)
        return Node(name, Target(name, "local", 8, 3, 5), books, facts, 20.0, i in silent, state)

    view = View(
        run="demo", at=1000.0, nodes=tuple(map(node, range(nodes))), evaluations=(),
        generators=tuple(
            Generator(f"generator-{i}", GeneratorFacts(f"node-{i}", "1.86", 9, 9), 0.0, 1.0, False, 2000.0)
            for i in range(generators)
        ),
        helpers=(Helper("verifier", "verifier-0", 1.0, False, 4810),), raw=(Raw(0, "local", 6, 4),),
        counts={"refused:raw:bad_signature": 7}, newer=0, elapsed=83.0, restarts=2, events=(RESTART,),
    )  # fmt: skip
    return replace(view, waits=tuple(waits(view)))


def drawn(view: View, width: int, height: int | None = None, away: float = 0.0) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(picture(view, width, height, away))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width,height", [(80, 23), (120, 34), (200, 60), (60, 14), (40, 8)])
@pytest.mark.parametrize("nodes", [0, 1, 4, 40])
@pytest.mark.parametrize("heard", [True, False])
def test_the_picture_fits_every_terminal(width: int, height: int, nodes: int, heard: bool) -> None:
    lines = drawn(a_view(nodes, max(2, nodes // 4), (nodes - 1,) if nodes > 4 else (), heard), width, height, 3.0)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_small_terminal_shows_what_matters() -> None:
    text = "\n".join(lines := drawn(a_view(4), 80, 23))
    for words in ("demo", "rounds 86 to 87 of 150", "2 restarts", "7 refused", "0 lost", "32 orders", "6 raw", "1 min 23 s"):
        assert words in text
    (row,) = [line for line in lines if "node-2" in line and "86/150" in line]
    for words in ("0.402", "▂▄▆", "0.31±0.04", "1.4", "1430", "waits 5/16"):
        assert words in row
    assert "node-0 and 3 more wait for generators (32 orders unanswered, 2 on them)" in text
    assert "generator-1 restarted (killed by SIGKILL)" in text


def test_a_large_terminal_shows_the_mixes() -> None:
    lines = drawn(a_view(4), 120, 34)
    (row,) = [line for line in lines if "node-2" in line and "86/150" in line]
    assert "h3 m5 e8" in row
    assert "h2 -6" in row
    assert "0.27-0.35" in row
    assert any("raw: bad_signature" in line for line in lines)


def test_forty_nodes_are_summed_up_but_not_those_in_trouble() -> None:
    lines = drawn(a_view(40, 10, silent=(33,)), 80, 23)
    assert any("node-33" in line and "silent 20 s" in line for line in lines)
    assert any("37 more" in line for line in lines)
    (everybody,) = [line for line in lines if "all 40" in line]
    assert "57200" in everybody
    assert any("node-33: heartbeat silent for 20 s" in line for line in lines)
    assert len([line for line in drawn(a_view(40), 80) if "/150" in line]) == 41, "on paper there is room for all"


def test_a_server_that_is_away_is_said_on_the_last_picture() -> None:
    text = "\n".join(drawn(a_view(4), 80, 23, away=3.2))
    assert "server away for 3 s" in text
    assert "node-0" in text


def test_the_svg_holds_the_picture() -> None:
    text = svg(a_view(4)).replace("&#160;", " ")
    assert text.startswith("<svg")
    assert "node-3" in text and "grapevine status demo" in text


FIGURES = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FIGURES, min_size=1, max_size=30), st.lists(FIGURES, min_size=1, max_size=30), FIGURES)
def test_any_figures_can_be_drawn(one: list[float], other: list[float], figure: float) -> None:
    view = a_view(2)
    facts = [
        msgspec.structs.replace(
            node.facts, curve=curve, own_reward=figure, staleness=curve[0], tokens_per_second=figure,
            heldout=HeldOut(1, figure, -figure, figure, figure),
        )
        for node, curve in zip(view.nodes, (one, other), strict=True)
    ]  # fmt: skip
    view = replace(view, nodes=tuple(replace(node, facts=fact) for node, fact in zip(view.nodes, facts, strict=True)))
    lines = drawn(view, 120, 34)
    assert len(lines) <= 34 and max(map(len, lines)) <= 120
    assert "round   86/150" in round_line(view)


@given(st.lists(st.floats(-10, 10), max_size=100), st.integers(1, 40))
def test_sparklines(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= width
    assert bool(line) == bool(values)
    if values and len(values) <= width and max(values) - min(values) > 1e-6:
        assert line[values.index(max(values))] == "█"
        assert line[values.index(min(values))] == "▁"


def test_curves_of_unequal_length_have_a_mean() -> None:
    assert mean_curve([]) == []
    assert mean_curve([[1.0, 2.0], [3.0, 3.0, 5.0, 5.0]]) == [2.0, 3.5]


def test_words() -> None:
    assert [duration(s) for s in (5, 83, 7500, 400_000)] == ["5 s", "1 min 23 s", "2 h 05 min", "4 days"]
    assert (
        event_words({**RESTART, "event": "server restart", "name": "server", "code": 1})
        == "the server restarted (exit code 1)"
    )
    assert event_words({**RESTART, "code": -99}) == "generator-1 restarted (killed by signal 99)"
    view = a_view(2)
    busy = replace(view.nodes[0], books=replace(view.nodes[0].books, ordered=105), state="updates")
    assert list(waits(replace(view, nodes=(busy,), generators=()))) == ["node-0: the books miss 5 groups"]


# --- the screen of a run that is up ---


@pytest.fixture
def site(tmp_path: Path, server: EmbeddedServer, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path, server.url, "screen-" + str(abs(hash(request.node.name))))


def beat(site: Site) -> None:
    for worker in (site.generator, site.verifier, *site.learners):
        site.directory.beat(worker.role, worker.name, worker.facts())


def screen(site: Site, live: bool, nodes: int = 2) -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=live, width=100, height=30)
    known = {"elapsed": 83.0, "restarts": 0, "events": ()}
    return Screen(site.settings.redis_url or "", site.ledger.keys, console, lambda: known, nodes, live), file


def again(one: Screen) -> None:
    """As if all pauses between two looks, pictures and lines were over."""
    one._looked = one._drawn = one._lined = float("-inf")
    one.show()


def test_plain_lines_tell_a_round_each(site: Site) -> None:
    site.learn(2)
    beat(site)
    one, file = screen(site, live=False)
    with one:
        again(one)
        again(one)
        site.learn(1)
        beat(site)
        one.show()
        again(one)
    first, second = file.getvalue().splitlines()
    assert first.startswith("round    2/1000000  own reward 0.")
    assert second.startswith("round    3/1000000  own reward 0.")
    assert "83 s" in second
    assert re.search(r"[\x00-\x09\x0b-\x1f]", file.getvalue()) is None


def test_no_line_before_all_nodes_are_there(site: Site) -> None:
    site.learn(1)
    beat(site)
    one, file = screen(site, live=False, nodes=3)
    with one:
        again(one)
    assert file.getvalue() == ""


def test_a_resumed_run_has_no_line_before_its_nodes_speak(site: Site) -> None:
    site.learn(2)
    one, file = screen(site, live=False)
    with one:
        again(one)
        assert file.getvalue() == ""
        beat(site)
        again(one)
    assert file.getvalue().startswith("round    2/1000000  own reward 0.")


def test_nothing_that_a_server_or_a_file_says_ends_the_screen(site: Site, tmp_path: Path) -> None:
    site.learn(1)
    beat(site)
    events = tmp_path / "events.jsonl"
    far, whole = (json.dumps(event).encode() for event in ({**RESTART, "at": 1e300}, RESTART))
    events.write_bytes(b"\n".join([b"{", b"\xff", b"5", far, whole, b""]))
    assert read_events(events) == [RESTART]
    one, file = screen(site, live=True)
    client, keys = site.ledger.redis, site.ledger.keys
    with one:
        again(one)
        figures = {
            "round": 10**300,
            "rounds": 1,
            "curve": [1e308, -1e308],
            "own_reward": 1e308,
            "mix": {"missing": -(10**300)},
        }
        beats = json.dumps({"role": "learner", "name": "node-0", "at": -1e308, "facts": figures})
        client.hset(keys.workers(), "learner:node-0", beats)
        client.hset(keys.books("node-1"), "ordered", "many")
        client.hset(keys.counts(0), "refused:raw:x", b"\xff")
        again(one)
        seen = one.view
        assert seen is not None and seen.nodes[1].books.ordered == 0
        client.delete(keys.own("node-0"))
        client.set(keys.own("node-0"), "no stream")
        again(one)
        assert one.view is seen, "the last picture"
    assert "node-0" in file.getvalue()


def test_plain_lines_say_what_happens_and_why_nothing_does(site: Site) -> None:
    site.order()
    beat(site)
    one, file = screen(site, live=False)
    with one:
        again(one)
        restart = {**RESTART, "at": one._told_at + 1}
        one._known = lambda: {"events": (restart,)}
        again(one)
        again(one)
        one._moved -= 1000
        again(one)
        one._seen -= 10
        one._lined = float("-inf")
        one.show()
    event, still, away = file.getvalue().splitlines()
    assert event == "generator-1 restarted (killed by SIGKILL)"
    assert still.startswith("no round ended for 10") and "wait for generators" in still
    assert away == "server away for 10 s"
    assert LINE_SECONDS >= 4.0


def test_the_terminal_is_left_as_it_was_found(site: Site) -> None:
    site.learn(1)
    beat(site)
    one, file = screen(site, live=True)
    with pytest.raises(KeyboardInterrupt), one:
        again(one)
        raise KeyboardInterrupt
    text = file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert "\x1b[?1049h" not in text, "the last picture stays where the terminal scrolls"
    last = text[text.rindex("\x1b[?25h") - 4000 :]
    assert "node-0" in last


def test_a_server_that_dies_keeps_the_last_picture(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server")
    server.start()
    site = Site(tmp_path, server.url, "dies")
    site.learn(1)
    beat(site)
    one, file = screen(site, live=True)
    with one:
        again(one)
        server.stop()
        again(one)
        assert one.view is not None
        one._seen -= 5
        one._drawn = float("-inf")
        one.show()
        assert "server away for 5 s" in file.getvalue()
        server.start()
        before = len(file.getvalue())
        again(one)
        assert "what happens" in file.getvalue()[before:]
        assert "server away" not in file.getvalue()[before:]
    server.stop()


# --- grapevine status ---


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Status = Callable[..., Said]


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Status:
    """`grapevine status ...` in this process, with no server in the environment but the one given."""

    def call(*arguments: str, url: str = "") -> Said:
        monkeypatch.setattr(sys, "argv", ["grapevine", "status", *arguments])
        monkeypatch.delenv("REDIS_URL", raising=False)
        if url:
            monkeypatch.setenv("REDIS_URL", url)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return call


def test_status_of_a_run_elsewhere(site: Site, status: Status) -> None:
    site.learn(2)
    beat(site)
    run, url = site.settings.run, site.settings.redis_url or ""
    done = status(run, "--json", url=url)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["run"], facts["round"], [node["name"] for node in facts["nodes"]]) == (run, 2, ["node-0", "node-1"])
    done = status(run, "--redis-url", url)
    assert "round 2 of 1000000" in done.stdout and "\x1b" not in done.stdout
    missing = status("nothing", url=url)
    assert missing.returncode == 1
    assert missing.stderr.startswith("grapevine: no run nothing on this server; there is ") and run in missing.stderr


def test_status_of_a_run_here(tmp_path: Path, status: Status) -> None:
    folder = tmp_path / "runs"
    none = status("--folder", str(folder))
    assert (none.returncode, none.stderr) == (1, f"grapevine: no run in {folder}; set REDIS_URL for a run elsewhere\n")
    server = EmbeddedServer(folder / "mine" / "server")
    server.start()
    site = Site(folder, server.url, "mine")
    site.learn(1)
    (folder / "mine" / "run.json").write_text('{"elapsed_seconds": 83.2, "restarts": 3}')
    site.ledger.note_refusal(0, Entry("stream", "1-1", b"x"), "swarm", "odd", "a\x1b[2Jb", "v")
    done = status("--folder", str(folder))
    assert "3 restarts" in done.stdout and "up 1 min 23 s" in done.stdout
    refused = status("--folder", str(folder), "--quarantine")
    assert "swarm: odd, refused by v: a\\x1b[2Jb" in refused.stdout
    assert "\x1b" not in refused.stdout
    server.stop()
    away = status("mine", "--folder", str(folder))
    assert away.returncode == 2
    assert away.stderr.startswith("grapevine: the server of run mine does not answer") and away.stderr.count("\n") == 1
    assert (folder / "mine" / "server" / "password").read_text() not in away.stderr
    (folder / "other" / "server").mkdir(parents=True)
    (folder / "other" / "server" / "port").write_text("1")
    several = status("--folder", str(folder))
    assert (several.returncode, several.stderr.count("mine, other")) == (2, 1)


def test_round_lines_of_a_large_swarm_are_short() -> None:
    line = round_line(a_view(40))
    assert line.startswith("round   86/150  own reward 0.4")
    assert len(line) < 200

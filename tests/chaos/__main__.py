"""Kills, stops and cuts off everything at random, and checks that the books balance.

    python -m tests.chaos --faults 300

Exit 0 when nothing was lost, nothing was trained twice, and nothing hung for more than a minute.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import redis
import structlog

from common.ledger import Books
from common.run import open_run
from common.settings import Settings
from grapevine.processes import die_with_parent
from grapevine.server import EmbeddedServer
from learners.journal import read
from tests.chaos.workers import make_worker

HANG_SECONDS = 60.0
# How often each kind strikes. The server's own faults stop everybody, so they are rarer: the others need work to disturb.
FAULTS = {"kill": 7, "stop": 6, "cut": 2, "cut one": 3, "kill server": 2, "wipe server": 1, "stop server": 1}


def settings_for(folder: Path, url: str, nodes: int, **node: object) -> Settings:
    """Small groups, short times: many rounds and many redeliveries per second."""
    defaults = {
        "rounds": 10**6, "group_size": 2, "ahead": 2, "order_seconds": 4.0, "max_staleness": 50,
        "sampling": {"max_new_tokens": 8}, "mix": {"own": 4, "swarm": 2}, "evaluate": {"questions": 0},
    }  # fmt: skip
    return Settings(
        run="chaos", folder=folder, redis_url=url, shards=2, redeliver_seconds=1.0, nodes=nodes,
        node={**defaults, **node}, generators={"batch_orders": 4},
    )  # type: ignore[arg-type]  # fmt: skip


class Fleet:
    """Worker processes forked from this one, so that a restart costs milliseconds."""

    def __init__(self, settings: Settings, learners: list[str], generators: int, verifiers: int) -> None:
        self._settings = settings
        self._roles = {name: "learner" for name in learners}
        self._roles |= {f"generator-{i}": "generator" for i in range(generators)}
        self._roles |= {f"verifier-{i}": "verifier" for i in range(verifiers)}
        self.pids: dict[str, int] = {}
        self.stopped: dict[str, float] = {}
        self.restarts = 0

    def tend(self) -> None:
        """Start what is missing, let run again what was stopped long enough."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for name, known in list(self.pids.items()):
                if known == pid:
                    del self.pids[name]
                    self.restarts += 1
        for name, until in list(self.stopped.items()):
            if time.monotonic() > until:
                del self.stopped[name]
                if name in self.pids:
                    os.kill(self.pids[name], signal.SIGCONT)
        for name in self._roles.keys() - self.pids.keys():
            self.pids[name] = self._fork(name)

    def _fork(self, name: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            die_with_parent()
            log = os.open(self._settings.run_folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            while True:
                try:
                    loop = make_worker(self._roles[name], name, self._settings)
                    break
                except redis.RedisError:
                    time.sleep(0.1)
            loop.run()
            code = 0
        except BaseException:
            structlog.get_logger().exception("worker died", worker=name)
        finally:
            os._exit(code)

    def signal(self, name: str, number: int) -> None:
        """Send a signal; a process already gone is no matter."""
        if name in self.pids:
            os.kill(self.pids[name], number)

    def end(self, seconds: float = 20.0) -> list[str]:
        """SIGTERM to all; returns who had to be killed."""
        for name in self.pids:
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGTERM)
        left, deadline = dict(self.pids), time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            for name, pid in list(left.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del left[name]
            time.sleep(0.02)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return sorted(left)


def main() -> int:
    """Run the faults, heal everything, drain, check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folder of the run")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    folder = Path(tempfile.mkdtemp(prefix="grapevine-chaos-"))
    try:
        faults = run(folder, options.faults, options.nodes, random.Random(options.seed))
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"kept {folder}")
    return 1 if faults else 0


def run(folder: Path, faults: int, nodes: int, chance: random.Random) -> list[str]:
    """The whole test; returns what is wrong."""
    server = EmbeddedServer(folder / "server")
    server.start()
    settings = settings_for(folder, server.url, nodes)
    settings.run_folder.mkdir(parents=True)
    names = settings.node_names()
    fleet = Fleet(settings, names, generators=3, verifiers=2)
    done: dict[str, int] = {}
    wrong: list[str] = []
    started = last_progress = time.monotonic()
    longest, progress, server_back = 0.0, 0, 0.0
    while sum(done.values()) < faults or server_back:
        fleet.tend()
        process = server.process
        if process is not None and process.poll() is not None and time.monotonic() > server_back:
            server.start()
        if server_back and time.monotonic() > server_back and process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            server_back = 0.0
        seen = rounds(settings)
        now = time.monotonic()
        longest = max(longest, now - last_progress)
        if seen != progress:
            progress, last_progress = seen, now
        if now - last_progress > HANG_SECONDS:
            wrong.append(f"nothing was trained for {HANG_SECONDS:.0f} s")
            break
        if sum(done.values()) < faults and not server_back:
            kind = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
            done[kind] = done.get(kind, 0) + 1
            server_back = strike(kind, chance, fleet, server)
            if sum(done.values()) % 25 == 0:
                print(
                    f"{sum(done.values()):4d} faults  {progress:6d} rounds  {fleet.restarts:4d} restarts  "
                    f"{now - started:4.0f} s",
                    flush=True,
                )
        time.sleep(chance.uniform(0.05, 0.8))
    fleet.stopped = dict.fromkeys(fleet.stopped, 0.0)
    fleet.tend()
    calm(settings, fleet)
    killed = fleet.end()
    wrong += [f"{name} did not drain" for name in killed]
    wrong += check(settings, names)
    server.stop()
    print(f"faults {done}; longest pause between rounds {longest:.1f} s")
    for line in wrong:
        print("WRONG:", line)
    print("chaos:", "FAILED" if wrong else "everything balances")
    return wrong


def strike(kind: str, chance: random.Random, fleet: Fleet, server: EmbeddedServer) -> float:
    """One fault. Returns until when the server is to stay away (monotonic), 0 when it is not touched."""
    victim = chance.choice(sorted(fleet.pids))
    process = server.process
    if kind == "kill":
        fleet.signal(victim, signal.SIGKILL)
    elif kind == "stop":
        fleet.signal(victim, signal.SIGSTOP)
        fleet.stopped[victim] = time.monotonic() + chance.choice([0.2, 1.0, 3.0])
    elif kind in ("cut", "cut one"):
        client = redis.Redis.from_url(server.url, socket_timeout=5)
        people = [c["id"] for c in client.client_list(_type="normal")]
        for id in people if kind == "cut" else [chance.choice(people)]:
            try:
                client.client_kill_filter(_id=id, skipme=True)
            except redis.ResponseError:
                continue  # already gone
        client.close()
    elif process is not None:
        process.send_signal(signal.SIGSTOP if kind == "stop server" else signal.SIGKILL)
        if kind == "wipe server":
            process.wait()
            shutil.rmtree(server.folder / "appendonlydir", ignore_errors=True)
        return time.monotonic() + chance.choice([0.1, 0.5, 1.0, 4.0])
    return 0.0


def rounds(settings: Settings) -> int:
    """Bytes of all journals: grows with every round."""
    return sum(path.stat().st_size for path in settings.run_folder.glob("nodes/*/rounds.jsonl")) // 400


def calm(settings: Settings, fleet: Fleet) -> None:
    """Let the fleet run unharmed until every node has made five more rounds."""
    ledger, _ = open_run(settings)
    goals = {name: ledger.books(name).round + 5 for name in settings.node_names()}
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline and any(ledger.books(name).round < goal for name, goal in goals.items()):
        fleet.tend()
        time.sleep(0.1)


def check(settings: Settings, names: list[str]) -> list[str]:
    """What is wrong with the books and the journals."""
    ledger, _ = open_run(settings)
    wrong = []
    total = Books(0, 0, 0, 0, 0, 0, 0, 0)
    twice_total = 0
    for name in names:
        books = ledger.books(name)
        lines = read(settings.run_folder / "nodes" / name / "rounds.jsonl")
        trained = [id for line in lines for id in line["own_ids"]]
        filtered = [id for line in lines for id in line["stale_ids"]]
        twice = len(trained) + len(filtered) - len({*trained, *filtered})
        twice_total += twice
        if books.lost:
            wrong.append(f"{name}: {books.lost} groups lost: {books}")
        if twice:
            wrong.append(f"{name}: {twice} groups trained twice")
        if len(trained) != books.trained:
            wrong.append(f"{name}: the journal trained {len(trained)} groups, the books say {books.trained}")
        if [line["round"] for line in lines] != list(range(1, len(lines) + 1)):
            wrong.append(f"{name}: the journal's rounds are not 1, 2, 3, ...")
        if books.round < 5:
            wrong.append(f"{name}: only {books.round} rounds")
        total = Books(*(a + b for a, b in zip(_row(total), _row(books), strict=True)))
    counts = ledger.counts()
    print(
        f"ordered {total.ordered} = trained {total.trained} + filtered {total.filtered} + expired {total.expired} "
        f"+ open {total.open} + waiting {total.waiting} + groups_lost {total.lost}"
    )
    print(f"rounds {total.round}; groups_trained_twice {twice_total}; {counts}")
    return wrong


def _row(books: Books) -> list[int]:
    return [
        books.open,
        books.waiting,
        books.ordered,
        books.trained,
        books.filtered,
        books.expired,
        books.incarnation,
        books.round,
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Scoring in a child that can be killed: nothing a completion or a question's settings do reaches the caller.

Three processes. The caller talks to a *host*, started by exec with an empty environment and our `sys.path`; the host
has ReasoningGYM and the tasks of one's own loaded and forks a *worker*, which builds and scores and is forked anew (a
few milliseconds) once it hangs or dies. Guaranteed here:

- an answer that hangs, fills the memory, kills its process or raises costs only itself: accuracy 0 and a named fault;
- limits are in CPU seconds, so that a busy machine fails no honest answer, with a wall-clock limit ten times as long;
- what comes back is data (msgpack, strictly typed): a worker gone bad could falsify its scores, but not run code here;
- host and worker end with the caller. Neither writes to a file, a terminal or a log.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from common.own_tasks import Definition
from common.settings import SettingsError
from common.tasks import Components, Question, TaskRefused, check
from verifiers.child import WALL_FACTOR, Group, Limits, Refusal, Request, receive, send
from verifiers.scoring import read

START_SECONDS = 60.0
PATIENCE_SECONDS = 120.0

# The host gets its parent's sys.path, so that it runs the same code, and nothing else of its parent.
_MAIN = "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a[0]; import verifiers.child as c; c.host(*a[1:])"


class GroupVerdict(msgspec.Struct, frozen=True):
    """One group scored. `components` and `faults` go by completion; a fault is None or why accuracy is 0:
    "timeout", "memory", "crash" (the process died) or "scorer" (it raised)."""

    components: list[Components]
    faults: list[str | None]
    held_out: bool
    text: str
    answer: str


class SandboxUnavailable(RuntimeError):
    """The host does not start or does not answer: a fault of this installation, never of a completion."""


class Sandbox:
    """Scores groups in a child. Any thread may call; calls take turns."""

    def __init__(self, limits: Limits | None = None, own_tasks: Sequence[Definition] = ()) -> None:
        self.limits = limits or Limits()
        self._own_tasks = msgspec.to_builtins(list(own_tasks))
        self._turn = threading.Lock()
        self._host: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def host_pid(self) -> int | None:
        """Process id of the host, None before the first call and after `close`."""
        return self._host.pid if self._host else None

    def score(self, question: Question, texts: list[str], max_characters: int) -> GroupVerdict:
        """Rebuild a question and score completions of it; without texts, just rebuild it.

        `length` is the share of the budget of `max_characters` left unused.

        Raises:
            TaskRefused: the question cannot be used, or not be built within the limits.
            SandboxUnavailable: the host failed twice in a row.
            SettingsError: a task of one's own cannot be used in the host.
        """
        check(question)
        readings = [read(text, max_characters) for text in texts]
        answers = [None if answer is None else _valid(answer) for answer, _, _ in readings]
        request = msgspec.msgpack.encode(Request(question, answers, 0, self.limits.answer))
        with self._turn:
            reply = self._ask(request, len(texts))
        if isinstance(reply, Refusal):
            raise TaskRefused(reply.reason)
        if len(reply.scores) != len(texts):
            raise SandboxUnavailable("the scoring host gave an answer of the wrong kind")
        return GroupVerdict(
            [Components(s.accuracy, form, length) for s, (_, form, length) in zip(reply.scores, readings, strict=True)],
            [s.fault for s in reply.scores],
            reply.built.held_out,
            reply.built.text,
            reply.built.answer,
        )

    def close(self) -> None:
        """End the host and its worker. A later `score` starts them anew."""
        with self._turn:
            self._stop()

    def _ask(self, request: bytes, answers: int) -> Group | Refusal:
        for _ in range(2):
            connection = self._socket or self._start()
            # Only for a host that was stopped or starved: it keeps every limit itself.
            connection.settimeout(PATIENCE_SECONDS + WALL_FACTOR * self.limits.answer * answers)
            try:
                send(connection, request)
                reply: Group | Refusal = msgspec.msgpack.decode(receive(connection), type=Group | Refusal)
                return reply
            except (OSError, EOFError, msgspec.DecodeError):
                self._stop()
        raise SandboxUnavailable("the scoring host failed twice over one group")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        limits = self.limits
        paths = [os.path.abspath(path) for path in sys.path]
        arguments = json.dumps(
            [paths, theirs.fileno(), limits.build, limits.answer, limits.group, limits.memory, self._own_tasks]
        )
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-I", "-c", _MAIN, arguments],
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._socket = ours
        ours.settimeout(START_SECONDS)
        try:
            word = receive(ours)
        except (OSError, EOFError) as error:
            self._stop()
            raise SandboxUnavailable("the scoring host does not start; is reasoning-gym installed?") from error
        if word != b"ready":
            self._stop()
            raise SettingsError(word.decode())
        return ours

    def _stop(self) -> None:
        if self._socket:
            self._socket.close()
        if self._host:
            # The worker follows: it asked the kernel to end with the host.
            self._host.kill()
            self._host.wait()
        self._socket = self._host = None


def _valid(text: str) -> str:
    """Text without lone surrogates, which no encoding of a message carries."""
    return text.encode("utf-8", "replace").decode()

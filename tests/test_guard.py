"""The start-up guard lets our packages pass and refuses a namesake, wherever that one sits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import guard

GUARD = Path(guard.__file__)


def start(*path: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter whose sys.path starts with `path` and that knows no installed packages."""
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n"
    code += "from common.guard import check_imports\ncheck_imports()\n"
    code += "print(sorted(set(sys.modules) & {'verifiers', 'grapevine'}))"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)


def package(home: Path, name: str) -> Path:
    (home / name).mkdir(parents=True)
    (home / name / "__init__.py").write_text("raise RuntimeError('the guard must not import what it looks at')\n")
    return home / name


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A copy of the layout with nothing in it but the guard."""
    home = tmp_path / "ours"
    for name in guard.PACKAGES:
        package(home, name)
    (home / "common" / "__init__.py").write_text("")
    shutil.copy(GUARD, home / "common")
    return home


def test_this_checkout_passes() -> None:
    guard.check_imports()


def test_own_packages_pass_and_are_not_imported(ours: Path) -> None:
    run = start(ours)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "[]", "")


@pytest.mark.parametrize("name", ["verifiers", "grapevine"])
def test_namesake_earlier_on_the_path_is_refused(ours: Path, tmp_path: Path, name: str) -> None:
    other = package(tmp_path / "site-packages", name)
    run = start(other.parent, ours)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert f"`{name}`" in run.stderr and str(other.resolve()) in run.stderr and "pip uninstall" in run.stderr


def test_module_file_of_our_name_is_refused(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "learners.py").write_text("")
    assert start(tmp_path, ours).returncode == 2


def test_distribution_unpacked_over_ours_is_refused(ours: Path) -> None:
    info = ours / "verifiers-0.1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.1.5\n")
    run = start(ours)
    assert run.returncode == 2
    assert "overwritten" in run.stderr


def test_missing_package_is_not_the_guards_business(ours: Path) -> None:
    shutil.rmtree(ours / "learners")
    assert start(ours).returncode == 0

"""The start-up guard: the five packages are ours, all of one copy.

Their names are plain words, and PyPI has a `verifiers` and a `grapevine` of its own. Guarantees: when one of the names
would be imported from anywhere but beside this package, or a distribution of that name was installed over ours, the
program ends with one sentence and exit code 2 before any of it is imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("common", "generators", "verifiers", "learners", "grapevine")

# The folder that holds our packages: the checkout, or the site-packages we were installed into.
HOME = Path(__file__).resolve().parents[1]


def check_imports() -> None:
    """Ends the program if a name of ours means another package. A name that is not there is left to its importer."""
    for name in PACKAGES:
        spec = find_spec(name)  # finds a top-level name without running it
        folder = _folder(spec) if spec else None
        if folder is not None and folder != HOME / name:
            _refuse(f"the package `{name}` would come from {folder}, not from {HOME / name}", name)
        if _installed_over_ours(name):
            _refuse(f"another distribution called `{name}` in {HOME} has overwritten files of ours", name)


def _folder(spec: ModuleSpec) -> Path:
    if spec.origin and spec.origin != "namespace":
        origin = Path(spec.origin).resolve()
        return origin.parent if origin.name == "__init__.py" else origin
    return Path(next(iter(spec.submodule_search_locations or [""]))).resolve()


def _installed_over_ours(name: str) -> bool:
    """Two wheels that both unpack `name/` share the folder, so its place alone tells nothing."""
    try:
        return Path(str(distribution(name).locate_file(""))).resolve() == HOME
    except PackageNotFoundError:
        return False


def _refuse(what: str, name: str) -> None:
    print(
        f"grapevine: {what}; run it in an environment of its own (make setup) or remove the other with "
        f"`pip uninstall {name}`.",
        file=sys.stderr,
    )
    raise SystemExit(2)

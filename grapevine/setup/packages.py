"""Which roles this environment has the packages for, by what the distribution itself says it needs.

Guarantees: nothing is imported to find out; the lists are those of pyproject.toml, not a copy of them.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION = "grapevine-rl"
ROLES = ("learner", "generator", "verifier", "server", "control", "report")
_REQUIREMENT = re.compile(r"""^([A-Za-z0-9._-]+).*extra == ["'](\w+)["']""")


def missing_by_role() -> dict[str, list[str]] | None:
    """Packages that each role lacks; None when the distribution itself is not installed."""
    try:
        needed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    missing: dict[str, list[str]] = {role: [] for role in ROLES}
    for requirement in needed:
        found = _REQUIREMENT.match(requirement)
        if found and found[2] in missing and not _installed(found[1]):
            missing[found[2]].append(found[1])
    return missing


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True

"""Stands in for pycosat, a C extension without wheels that reasoning-gym imports on start.

reasoning-gym solves with it in one task only (zebra_puzzles), so a machine without a compiler can do without.
Guarantees: the import succeeds, and any use fails with the way out instead of a wrong puzzle.
"""

from typing import Any, NoReturn


def itersolve(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "zebra_puzzles needs pycosat, which could not be built here: install a C compiler and Python's headers "
        "(Debian: apt install gcc python3-dev), then run make clean setup"
    )


solve = itersolve

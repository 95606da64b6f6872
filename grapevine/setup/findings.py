"""What a check of `grapevine doctor` comes to. Guarantee: whatever is not in order says what to do."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["ok", "warning", "failure"]


class Finding(NamedTuple):
    """One check: its state, what was looked at, what was found, and what to do unless all is well."""

    state: State
    name: str
    found: str
    fix: str = ""

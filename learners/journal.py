"""What a node writes down for people and reports: one JSON object per line.

`rounds.jsonl` holds what one seed reproduces, `timing.jsonl` the wall-clock figures, `heldout.jsonl` the evaluations.
Guarantees: a resumed learner's `rounds.jsonl` holds each round of the surviving lineage once.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec


class Journal:
    """Appends to one node's files; `keep_until` is the checkpoint's round, later lines are dropped."""

    def __init__(self, folder: Path, keep_until: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for name in ("rounds.jsonl", "timing.jsonl", "heldout.jsonl"):
            lines = read(folder / name)
            kept = [line for line in lines if line["round"] <= keep_until]
            if len(kept) != len(lines) or (folder / name).exists():
                aside = folder / f"{name}.new"
                aside.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
                os.replace(aside, folder / name)
        self.evaluated: set[int] = {line["round"] for line in read(folder / "heldout.jsonl")}

    def round(self, record: dict[str, Any]) -> None:
        """One round's figures."""
        self._append("rounds.jsonl", record)

    def timing(self, record: dict[str, Any]) -> None:
        """One round's seconds."""
        self._append("timing.jsonl", record)

    def heldout(self, record: dict[str, Any]) -> None:
        """One evaluation's result; `evaluated` holds the rounds that have one."""
        self.evaluated.add(record["round"])
        self._append("heldout.jsonl", record)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a journal file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line) for line in lines[:-1]]


def question_mark(text: str) -> str:
    """Ten hex digits that tell distinct questions apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]

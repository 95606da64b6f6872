"""Where models that were made on this machine are kept. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

# Says what a folder was made with; it is there when the rest is.
MARKER = "starter.json"


def cache_folder() -> Path:
    """The user's cache: GRAPEVINE_CACHE, else ~/.cache/grapevine."""
    cache = Path(os.environ.get("GRAPEVINE_CACHE") or Path.home() / ".cache" / "grapevine")
    cache.mkdir(parents=True, exist_ok=True)
    return cache

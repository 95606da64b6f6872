"""Writes the files: `python -m tools.dashboards`."""

from __future__ import annotations

from tools.dashboards.files import main

main()

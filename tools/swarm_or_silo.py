"""Draws README's plot, docs/images/swarm-or-silo.png, from the kept cells of the study in docs/experiments/sharing."""

from __future__ import annotations

import json
from pathlib import Path

from grapevine.experiment.curves import panels
from grapevine.report.charts import lines_figure

DOCS = Path(__file__).parent.parent / "docs"
ARMS = {
    "swarm, auto": "auto",
    "swarm": "successes",
    "naive swarm": "naive",
    "silo": "silo",
}
SHOWN = ("Own reward by round", "Held-out, sampled answers")


def main() -> None:
    """One line per arm with its band over the seeds."""
    cells = DOCS / "experiments" / "sharing" / "cells" / "specialists"
    arms = {
        name: [json.loads(path.read_text()) for path in sorted(cells.glob(f"{arm}-[0-9]*.json"))]
        for name, arm in ARMS.items()
    }
    drawn = [panel for panel in panels(arms) if panel[0] in SHOWN]
    (DOCS / "images" / "swarm-or-silo.png").write_bytes(lines_figure(drawn, "png"))


if __name__ == "__main__":
    main()

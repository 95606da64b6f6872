"""The reference of all figures as Markdown, made from `common.metrics` itself.

Guarantees: every figure is listed once, under the role that shows it; the page is a pure function of the code, so a test can
tell when `docs/metrics.md` is out of date.

Run as `python -m grapevine.monitoring.table > docs/metrics.md`.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from common.metrics import PARTS, Exported

INTRODUCTION = """\
# Figures for Prometheus

*Made from `common/metrics.py` by `python -m grapevine.monitoring.table > docs/metrics.md`; edit the descriptions there.*

Every worker shows its figures at `/metrics` of its health port, the exporter those that only the server knows. `grapevine
monitor` runs Prometheus beside a run on this machine. Its alerts and the dashboards are made of nothing else.

Besides the labels below, every series carries `run` and `role`, the role of the worker that shows it. `node` is the node
that a figure is about, for a generator the one it serves; all evaluations together are `node="evaluation"`. Of a worker that
is started again the series are new ones: put them together by `run` and `node`. A histogram has the series `_bucket`, `_sum`
and `_count`.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for part in PARTS:
        rows = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
        rows += ["| " + " | ".join(_row(figure)) + " |" for figure in part.figures]
        parts.append(f"## {part.title}\n\n" + "\n".join(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def name_of(figure: Counter | Gauge | Histogram | Exported) -> str:
    """The name in queries; a histogram's without its ending."""
    if isinstance(figure, Exported):
        return figure.name
    return f"{figure._name}_total" if isinstance(figure, Counter) else figure._name


def type_of(figure: Counter | Gauge | Histogram | Exported) -> str:
    """Counter, gauge or histogram."""
    if isinstance(figure, Exported):
        return "counter" if figure.counter else "gauge"
    return figure._type


def labels_of(figure: Counter | Gauge | Histogram | Exported) -> tuple[str, ...]:
    """Its own labels, without those that every series has."""
    return figure.labels if isinstance(figure, Exported) else figure._labelnames


def _row(figure: Counter | Gauge | Histogram | Exported) -> list[str]:
    meaning = figure.help if isinstance(figure, Exported) else figure._documentation
    labels = ", ".join(f"`{label}`" for label in labels_of(figure))
    return [f"`{name_of(figure)}`", type_of(figure), labels, meaning.replace("|", "\\|")]


if __name__ == "__main__":
    print(page(), end="")

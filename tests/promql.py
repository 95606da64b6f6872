"""Expressions of alerts and dashboards, taken apart: which figures they ask for, and which labels come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import Histogram

from common.metrics import PARTS
from grapevine.monitoring.table import labels_of, name_of

# Whoever imports this is skipped without it, as in the environment of vLLM.
promql = pytest.importorskip("promql_parser", reason="needs promql-parser (extra `dev`)")

# On every series, whoever scrapes it.
ALWAYS = frozenset({"run", "role"})


def series() -> dict[str, frozenset[str]]:
    """Every series there can be, with its labels."""
    known: dict[str, frozenset[str]] = {}
    for figure in (figure for part in PARTS for figure in part.figures):
        labels = ALWAYS | set(labels_of(figure))
        if isinstance(figure, Histogram):
            known |= {f"{name_of(figure)}_{ending}": labels for ending in ("sum", "count")}
            known[f"{name_of(figure)}_bucket"] = labels | {"le"}
        else:
            known[name_of(figure)] = labels
    return known


KNOWN = series()
# Made by Prometheus itself of the alerts; with the labels that these have.
ALERTS = {"ALERTS": frozenset({"alertname", "alertstate", "run", "node"})}


def selectors(expr: str) -> list[Any]:
    """All that an expression asks for."""
    found: list[Any] = []

    def visit(part: Any) -> bool:
        if isinstance(part, promql.VectorSelector):
            found.append(part)
        elif isinstance(part, promql.MatrixSelector):
            found.append(part.vector_selector)
        return True

    promql.walk(promql.parse(expr), visit)
    return list({str(one): one for one in found}.values())


def assert_known(expr: str, recorded: Mapping[str, frozenset[str]] | None = None) -> None:
    """Every series exists and has the labels that the expression names."""
    known = {**KNOWN, **ALERTS, **(recorded or {})}
    for selector in selectors(expr):
        assert selector.name in known, f"{selector.name} in {expr}"
        unknown = {matcher.name for matcher in selector.matchers.matchers} - known[selector.name]
        assert not unknown, f"{selector.name} has no label {unknown}: {expr}"
    for part in _parts(promql.parse(expr)):
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            unknown = set(part.modifier.labels) - _out(part.expr, known)
            assert not unknown, f"{part.prettify()} groups by {unknown}, which it does not have"


def labels_out(expr: str, recorded: Mapping[str, frozenset[str]] | None = None) -> frozenset[str]:
    """Labels that a result can have."""
    return _out(promql.parse(expr), {**KNOWN, **ALERTS, **(recorded or {})})


def _children(part: Any) -> list[Any]:
    if isinstance(part, promql.BinaryExpr):
        return [part.lhs, part.rhs]
    if isinstance(part, promql.Call):
        return [arg for arg in part.args if isinstance(arg, promql.Expr)]
    inner = getattr(part, "expr", None)
    return [inner] if inner is not None else []


def _parts(part: Any) -> Iterator[Any]:
    yield part
    for child in _children(part):
        yield from _parts(child)


def _out(part: Any, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    if isinstance(part, promql.VectorSelector):
        return known[part.name]
    if isinstance(part, promql.MatrixSelector):
        return known[part.vector_selector.name]
    if isinstance(part, promql.AggregateExpr):
        # topk and bottomk keep what is there.
        if str(part.op) in ("topk", "bottomk"):
            return _out(part.expr, known)
        return frozenset(part.modifier.labels) if part.modifier is not None else frozenset()
    if isinstance(part, promql.Call):
        inner = frozenset[str]().union(*(_out(child, known) for child in _children(part)))
        if part.func.name == "label_replace":
            return inner | {part.args[1].val}
        return inner - {"le"} if part.func.name == "histogram_quantile" else inner
    if isinstance(part, promql.BinaryExpr):
        sides = [_out(part.lhs, known), _out(part.rhs, known)]
        operation = str(part.op)
        if operation == "or":
            return sides[0] | sides[1]
        return sides[0] or (sides[1] if operation not in ("and", "unless") else frozenset())
    return frozenset[str]().union(*(_out(child, known) for child in _children(part)))

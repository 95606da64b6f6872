"""The files of k8s/components/monitoring that are made from code: dashboards, and the alerts as a PrometheusRule.

They are checked in, and a test tells when they are out of date. Needs the package grafana-foundation-sdk of the extra `dev`.

Guarantees: the same code gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grapevine.monitoring.prometheus import alert_rules
from tools.dashboards.node import node
from tools.dashboards.pipeline import pipeline
from tools.dashboards.safety import safety
from tools.dashboards.swarm import swarm

MONITORING = Path(__file__).parents[2] / "k8s" / "components" / "monitoring"
DASHBOARDS = {"swarm": swarm, "pipeline": pipeline, "node": node, "safety": safety}


def rules() -> str:
    """The alerts as Kubernetes wants them, for the Prometheus operator."""
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "grapevine", "labels": {"app.kubernetes.io/part-of": "grapevine"}},
        "spec": alert_rules(),
    }
    head = "# Made from grapevine/monitoring/alerts.yaml by `python -m tools.dashboards`.\n"
    return head + yaml.dump(resource, Dumper=Blocks, sort_keys=False, width=120)


class Blocks(yaml.SafeDumper):
    """Texts of several lines as they are."""


Blocks.add_representer(
    str, lambda to, text: to.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def files() -> dict[Path, str]:
    """Every file that is made here, and its content."""
    made = {
        MONITORING / "dashboards" / f"{name}.json": json.dumps(make(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, make in DASHBOARDS.items()
    }
    return {**made, MONITORING / "rules.yaml": rules()}


def main() -> None:
    """Write what is out of date."""
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"written: {path.relative_to(MONITORING.parents[2])}", file=sys.stderr)

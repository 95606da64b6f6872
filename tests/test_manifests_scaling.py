"""The autoscaler: objects that KEDA takes, which read the keys of this very run and alone own the number of pods."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.keys import Keys
from tests.manifests import Object, every_overlay, full_name, rendered, settings_of

# What KEDA 2.12 and later take; anything else it would leave unread.
POLICY = {"type": str, "value": int, "periodSeconds": int}
RULES = {"stabilizationWindowSeconds": int, "selectPolicy": str, "policies": [POLICY]}
SCALED_OBJECT: dict[str, Any] = {
    "scaleTargetRef": {"apiVersion": str, "kind": str, "name": str, "envSourceContainerName": str},
    "minReplicaCount": int,
    "maxReplicaCount": int,
    "idleReplicaCount": int,
    "pollingInterval": int,
    "cooldownPeriod": int,
    "initialCooldownPeriod": int,
    "fallback": {"failureThreshold": int, "replicas": int, "behavior": str},
    "advanced": {
        "restoreToOriginalReplicaCount": bool,
        "horizontalPodAutoscalerConfig": {"name": str, "behavior": {"scaleUp": RULES, "scaleDown": RULES}},
        "scalingModifiers": {"formula": str, "target": str, "activationTarget": str, "metricType": str},
    },
    "triggers": [
        {
            "type": str,
            "name": str,
            "metricType": str,
            "useCachedMetrics": bool,
            "metadata": {},
            "authenticationRef": {"name": str, "kind": str},
        }
    ],
}
AUTHENTICATION = {"secretTargetRef": [{"parameter": str, "name": str, "key": str}]}
CONNECTION = {"address", "username", "databaseIndex", "enableTLS", "unsafeSsl"}
# Of each type of trigger: what it has to say, and what else it may. A stream's length alone is asked for: with a consumer
# group it would be something else that is counted.
METADATA = {
    "redis": ({"address", "username", "listName", "listLength"}, CONNECTION | {"activationListLength"}),
    "redis-streams": ({"address", "username", "stream", "streamLength"}, CONNECTION),
}


def faults(value: Any, shape: Any, where: str) -> Iterator[str]:
    """What a value has that its shape has not. An empty dict stands for texts under any names."""
    if isinstance(shape, list):
        for number, one in enumerate(value):
            yield from faults(one, shape[0], f"{where}[{number}]")
    elif isinstance(shape, dict) and shape:
        for key, one in value.items():
            if key in shape:
                yield from faults(one, shape[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is unknown"
    elif shape == {}:
        yield from (f"{where}.{key} is no text" for key, one in value.items() if not isinstance(one, str))
    elif type(value) is not shape:
        yield f"{where} is {value!r}, not {shape.__name__}"


def test_the_table_finds_faults() -> None:
    given = {"minReplicaCount": "0", "triggers": [{"metadata": {"listLength": 5}, "names": "x"}], "advanced": {"x": 1}}
    assert list(faults(given, SCALED_OBJECT, "spec")) == [
        "spec.minReplicaCount is '0', not int",
        "spec.triggers[0].metadata.listLength is no text",
        "spec.triggers[0].names is unknown",
        "spec.advanced.x is unknown",
    ]


@every_overlay
def test_kedas_objects_are_such_as_it_takes(overlay: str) -> None:
    for kind, shape in (("ScaledObject", SCALED_OBJECT), ("TriggerAuthentication", AUTHENTICATION)):
        for one in rendered(overlay).all(kind):
            assert not list(faults(one["spec"], shape, full_name(one)))
    for one in rendered(overlay).all("ScaledObject"):
        for trigger in one["spec"]["triggers"]:
            needed, more = METADATA[trigger["type"]]
            assert needed <= set(trigger["metadata"]) <= needed | more, f"{full_name(one)}: {trigger['metadata']}"
        behavior = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        for rules in behavior.values():
            assert 0 <= rules["stabilizationWindowSeconds"] <= 3600, full_name(one)
            for policy in rules.get("policies", ()):
                assert policy["type"] in ("Pods", "Percent") and 0 < policy["periodSeconds"] <= 1800, full_name(one)


@every_overlay
def test_who_owns_the_number_of_pods_says_it(overlay: str) -> None:
    """An apply would otherwise set back what the autoscaler chose."""
    cluster = rendered(overlay)
    owned = {one["spec"]["scaleTargetRef"]["name"]: one for one in cluster.all("ScaledObject")}
    assert sorted(owned) == (["control", "generators", "verifiers"] if overlay == "gpu" else [])
    for workload in cluster.workloads:
        assert (workload.replicas is None) == (workload.name in owned), workload
    for name, one in owned.items():
        assert set(one["spec"]["scaleTargetRef"]) == {"name"}, "a Deployment, unless it says otherwise"
        cluster.get("Deployment", one["metadata"]["namespace"], name, full_name(one))
        least, most = one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]
        # Without orders nothing is to be generated; who waits for raw groups and for jobs must be there to see them.
        assert least == (0 if name == "generators" else 1) and most > least, full_name(one)


@every_overlay
def test_the_autoscaler_reads_the_keys_of_this_run(overlay: str, tmp_path: Path) -> None:
    cluster = rendered(overlay)
    for one in cluster.all("ScaledObject"):
        namespace = one["metadata"]["namespace"]
        settings = settings_of(cluster, namespace, tmp_path)
        keys, shards = Keys(settings.run, settings.shards), range(settings.shards)
        wanted = {
            "generators": [("redis", keys.open(shard)) for shard in shards],
            "verifiers": [("redis-streams", keys.raw(shard, settings.site)) for shard in shards],
            "control": [("redis", f"rq:queue:gv-{settings.run}")],
        }
        triggers = one["spec"]["triggers"]
        found = [(trigger["type"], _key(trigger)) for trigger in triggers]
        assert found == wanted[one["spec"]["scaleTargetRef"]["name"]], full_name(one)
        service = cluster.get("Service", namespace, "redis", full_name(one))
        for trigger in triggers:
            address = f"redis.{namespace}.svc:{service['spec']['ports'][0]['port']}"
            assert trigger["metadata"]["address"] == address, full_name(one)
            assert trigger["metadata"].get("databaseIndex", "0") == "0", "as REDIS_URL says"


def _key(trigger: Object) -> str:
    return str(trigger["metadata"].get("listName") or trigger["metadata"].get("stream"))


@every_overlay
def test_the_autoscaler_may_read_its_keys(overlay: str) -> None:
    cluster = rendered(overlay)
    for one in cluster.all("ScaledObject"):
        namespace = one["metadata"]["namespace"]
        (line,) = [
            line
            for line in cluster.generated("Secret", namespace, "redis-users")["users.acl"].splitlines()
            if line.startswith("user keda ")
        ]
        patterns = [re.sub(r"^(~|%R~)", "", word) for word in line.split() if word.startswith(("~", "%R~"))]
        for trigger in one["spec"]["triggers"]:
            assert [pattern for pattern in patterns if fnmatch.fnmatchcase(_key(trigger), pattern)], _key(trigger)
            assert trigger["metadata"]["username"] == "keda", full_name(one)
            asks = cluster.get("TriggerAuthentication", namespace, trigger["authenticationRef"]["name"], full_name(one))
            (reference,) = asks["spec"]["secretTargetRef"]
            assert (reference["parameter"], reference["key"]) == ("password", "keda"), full_name(asks)


@every_overlay
def test_shards_are_added_up(overlay: str, tmp_path: Path) -> None:
    """Of several triggers an autoscaler would take the greatest alone."""
    cluster = rendered(overlay)
    for one in cluster.all("ScaledObject"):
        batch = settings_of(cluster, one["metadata"]["namespace"], tmp_path).generators.batch_orders
        triggers, name = one["spec"]["triggers"], full_name(one)
        (length,) = {trigger["metadata"].get("listLength") or trigger["metadata"]["streamLength"] for trigger in triggers}
        assert 1 <= int(length) <= (1 if one["spec"]["scaleTargetRef"]["name"] == "control" else batch), name
        modifiers = one["spec"]["advanced"].get("scalingModifiers")
        assert (modifiers is not None) == (len(triggers) > 1), name
        if modifiers is None:
            continue
        names = [trigger["name"] for trigger in triggers]
        assert all(re.fullmatch(r"[a-z]\w*", part) for part in names), "a formula knows no names with a hyphen"
        assert modifiers["formula"] == " + ".join(names), name
        assert (modifiers["target"], modifiers["metricType"]) == (length, "AverageValue"), name
        assert modifiers.get("activationTarget", "0") == "0", name

"""What each setting alone cannot show: values that contradict one another, and variables that name no setting.

Guarantees: whatever is refused here would otherwise run and come to nothing (wait for ever, throw groups away, change
nothing); each sentence names every key that takes part and how to resolve it. What is merely unusual passes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.sections import NodeSettings
    from common.settings import Settings

PREFIX = "GRAPEVINE_"

# A token's clip is hundreds of times wider than a sequence's (arXiv 2507.18071, section 5.1).
GSPO_CLIP = 0.05

# Variables of ours that are no settings: what they decide is needed before settings are read, or wherever code runs.
OTHER_VARIABLES = {
    "GRAPEVINE_CACHE": "where the starter model is kept; default ~/.cache/grapevine",
    "GRAPEVINE_LOG": "`json`: log lines as JSON",
    "GRAPEVINE_LOG_LEVEL": "`debug`, `info`, `warning` or `error`",
    "GRAPEVINE_PUBLISHED_PASSWORDS": "`allowed`: use a server whose password is published with the manifests",
    "GRAPEVINE_SETTINGS": "the file of settings that `docker compose` gives to its containers",
}

# Kubernetes describes every service to every pod: a service called grapevine-anything makes variables like these.
_OF_A_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def unknown_variable(variables: Iterable[str], settings: Iterable[str]) -> str | None:
    """What is wrong with the first variable that starts like ours and names no top-level setting; None: nothing."""
    known = {name.upper() for name in settings}
    for variable in sorted(variables):
        name = variable.upper()
        first, deeper, rest = name.removeprefix(PREFIX).partition("__")
        if not name.startswith(PREFIX) or first in known or name in OTHER_VARIABLES or _OF_A_SERVICE.fullmatch(name):
            continue
        near = difflib.get_close_matches(first, [*known, *(other.removeprefix(PREFIX) for other in OTHER_VARIABLES)], n=1)
        hint = f"did you mean {PREFIX}{near[0]}{deeper}{rest}?" if near else "unset it, or see `grapevine settings`"
        return f"the environment variable {variable} names no setting; {hint}"
    return None


def contradiction(settings: Settings) -> str | None:
    """The first pair of settings that cannot both be meant, as a sentence; None: there is none."""
    names = settings.node_names()
    if "auto" in names:
        return "setting nodes: no node can be called auto, which generators.target uses for any node; choose another name"
    if settings.serves_policies and settings.policies_token is None:
        return (
            "setting policies_url: learners that serve policies over HTTP need policies_token, a secret of 16 or more "
            "characters that all workers share (GRAPEVINE_POLICIES_TOKEN in the environment)"
        )
    target = settings.generators.target
    # `eval-` targets come and go with evaluation jobs.
    if target not in ("auto", *names) and not target.startswith("eval-"):
        near = difflib.get_close_matches(target, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"nodes are {some(names)}; or set generators.target=auto"
        return f"setting generators.target: {target} is none of the nodes; {hint}"
    for name in names[:1] if isinstance(settings.nodes, int) else names:  # those given by their number are alike
        node = settings.for_node(name)
        own = {} if isinstance(settings.nodes, int) else settings.nodes.get(name) or {}
        for keys, why in _within(node):
            # Where a node overrides one of the keys, the sentence must point there.
            places = [f"nodes.{name}.{key}" if _has(own, key) else f"node.{key}" for key in keys]
            return why.format(*places)
    return None


def _within(node: NodeSettings) -> Iterable[tuple[tuple[str, ...], str]]:
    """Contradictions of one node: the keys, and a sentence with a place for each."""
    if node.mix.swarm and not node.mix.tags:
        yield (
            ("mix.swarm", "mix.tags"),
            f"setting {{1}} names no tag to draw, but {{0}} is {node.mix.swarm}; "
            "set {0}=0, or give tags such as [hard, mixed, easy]",
        )
    if node.learner == "none" and (node.share.fraction == 0 or not node.share.tags):
        key, value = ("share.fraction", "0") if node.share.fraction == 0 else ("share.tags", "empty")
        yield (
            ("learner", key),
            f"setting {{0}} is none and {{1}} is {value}, so the node would neither learn nor share; "
            "set {0}=train, or share something",
        )
    reward = node.reward
    if node.learner == "train" and reward.accuracy == reward.format == reward.length == 0:
        yield (
            ("reward.accuracy", "reward.format", "reward.length"),
            "settings {0}, {1} and {2} are all 0, so no answer is better than another; set one of them, usually {0}=1",
        )
    yield from _within_learning(node)
    if node.max_staleness < node.ahead - 1:
        yield (
            ("max_staleness", "ahead"),
            f"setting {{1}}={node.ahead} orders groups that are up to {node.ahead - 1} steps old when their turn comes, "
            f"and {{0}}={node.max_staleness} would throw them away; set {{0}} to at least {node.ahead - 1}, "
            f"or {{1}} to at most {node.max_staleness + 1}",
        )


def _within_learning(node: NodeSettings) -> Iterable[tuple[tuple[str, ...], str]]:
    """Contradictions of the mix and the update."""
    mix, update = node.mix, node.update
    if idle := [tag for tag in mix.weights if tag not in mix.tags]:
        yield (
            ("mix.weights", "mix.tags"),
            f"setting {{0}} weighs {idle[0]}, which {{1}} does not draw; add it there, or take the weight out",
        )
    if mix.own_filter == "refill" and mix.refill_most < 2:
        yield (
            ("mix.own_filter", "mix.refill_most"),
            "setting {0} is refill and {1}=1 leaves no room for it; set {1} to at least 2, or {0}=drop",
        )
    if node.learner == "none" and mix.own_filter == "refill":
        yield (
            ("learner", "mix.own_filter"),
            "setting {0} is none and {1} is refill, which generates more for training that never comes; set {1}=none",
        )
    if update.warmup_rounds >= node.rounds:
        yield (
            ("update.warmup_rounds", "rounds"),
            f"setting {{0}}={update.warmup_rounds} is no shorter than {{1}}={node.rounds}, so the learning rate never "
            "reaches its height; lower {0}",
        )
    if update.skip_grad_norm <= update.max_grad_norm:
        yield (
            ("update.skip_grad_norm", "update.max_grad_norm"),
            f"setting {{0}}={update.skip_grad_norm:g} skips gradients that {{1}}={update.max_grad_norm:g} would shorten; "
            "set {0} well above {1}",
        )
    if update.objective == "gspo" and update.clip_high > GSPO_CLIP and update.epochs * update.minibatches > 1:
        yield (
            ("update.objective", "update.clip_low", "update.clip_high"),
            f"setting {{0}} is gspo, whose ratio of whole sequences never moves as far as {{2}}={update.clip_high:g}; "
            "set {1}=3e-4 and {2}=4e-4",
        )
    if update.lora.rank and not update.lora.targets:
        yield (
            ("update.lora.rank", "update.lora.targets"),
            f"setting {{0}}={update.lora.rank} asks for adapters and {{1}} names no module; name some, or set {{0}}=0",
        )


def _has(tree: Mapping[str, object], key: str) -> bool:
    """Whether a dotted key is set in a tree."""
    part, _, rest = key.partition(".")
    below = tree.get(part)
    return part in tree and (not rest or (isinstance(below, Mapping) and _has(below, rest)))


def some(names: list[str]) -> str:
    """Names for a sentence: the first eight."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

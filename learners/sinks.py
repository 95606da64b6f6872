"""Where else a learner's figures go: TensorBoard event files, Weights & Biases.

Guarantees: a package is imported only when its sink is asked for, and a missing one is one sentence; a learner that comes
back from a checkpoint writes rounds again without harm. The journal stays the record: reports never read a sink.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from common.files import write_whole
from common.settings import Settings, SettingsError

Kind = Literal["round", "heldout"]


class Sink(Protocol):
    """Takes the journal's records."""

    def write(self, kind: Kind, record: dict[str, Any], step: int) -> None:
        """A line of rounds.jsonl or heldout.jsonl; `step` is its round."""

    def close(self) -> None:
        """Write out what is still in memory."""


def open_sinks(settings: Settings, node: str, folder: Path, resumed_at: int = 0) -> list[Sink]:
    """The sinks that the settings ask for; `folder` is the run's, `resumed_at` the round of the checkpoint.

    Raises SettingsError when a package is not installed or its service refuses.
    """
    sinks: list[Sink] = []
    if settings.sinks.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard" / node, resumed_at))
    if settings.sinks.wandb:
        config = {"node": node, **settings.for_node(node).model_dump(mode="json")}
        sinks.append(WandbSink(settings.sinks.wandb, settings.run, node, config, folder / "wandb"))
    return sinks


class TensorBoardSink:
    """Event files in a folder per node; `tensorboard --logdir runs/RUN/tensorboard` shows all nodes."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        """What an earlier life wrote of rounds after `resumed_at` is hidden: they are trained anew."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SettingsError(_install("sinks.tensorboard", "tensorboard")) from None
        self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def write(self, kind: Kind, record: dict[str, Any], step: int) -> None:
        for name, value in scalars(kind, record).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One Weights & Biases run per node, grouped by the grapevine run."""

    def __init__(self, project: str, run: str, node: str, config: dict[str, Any], folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise SettingsError(_install("sinks.wandb", "wandb")) from None
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project, group=run, name=node, id=_kept_id(folder / f"{node}.id"), resume="allow",
                config=config, dir=folder, reinit="create_new",
            )  # fmt: skip
        except wandb.errors.Error as error:
            said = " ".join(str(error).split())
            raise SettingsError(f"sinks.wandb: {said}; `wandb login` first, or set WANDB_MODE=offline") from None
        # A step of wandb's own may not go back, as it does after a crash; so the round is a figure like the others.
        self._run.define_metric("round", hidden=True)
        for group in _GROUPS:
            self._run.define_metric(f"{group}/*", step_metric="round")

    def write(self, kind: Kind, record: dict[str, Any], step: int) -> None:
        self._run.log({"round": step, **scalars(kind, record)})

    def close(self) -> None:
        self._run.finish()


_GROUPS = ("reward", "mix", "tags", "update", "heldout")
# Figures of a round by the group they are shown in; what a record lacks (a node that never trains) is left out.
_FIGURES = {
    "own_reward": "reward/own",
    "staleness": "mix/staleness",
    "swarm_missing": "mix/swarm_missing",
    "own_tokens": "mix/own_tokens",
    "tokens_own": "update/tokens_own",
    "tokens_swarm": "update/tokens_swarm",
    "informative_share": "update/informative_share",
    "loss": "update/loss",
    "grad_norm": "update/grad_norm",
    "sampler_gap": "update/sampler_gap",
    "skipped": "update/skipped",
    "rolled_back": "update/rolled_back",
    "steps": "update/steps",
    "learning_rate": "update/learning_rate",
    "kl": "update/kl",
}


def scalars(kind: Kind, record: dict[str, Any]) -> dict[str, float]:
    """A record's figures as single numbers, named `group/figure`.

    Rewards, rates and shares lie between 0 and 1 (rewards as far as the node's weights do), the rest are counts, policy
    steps, or what the update reports.
    """
    if kind == "heldout":
        found = {"heldout/sampled": record["reward"]}
        found |= {f"heldout/{end}": record[end] for end in ("low", "high") if end in record}
        if "greedy" in record:
            found["heldout/greedy"] = record["greedy"]["rate"]
        found |= {f"heldout/pass@{k}": figure["rate"] for k, figure in record.get("pass_at", {}).items()}
        found |= {
            f"heldout/task/{task}": figure["reward"]
            for task, figure in record.get("by_task", {}).items()
            if isinstance(figure, dict)
        }
        return {name: float(value) for name, value in found.items()}
    found = {name: record[key] for key, name in _FIGURES.items() if record.get(key) is not None}
    found["mix/own_groups"] = len(record["own_ids"])
    found["mix/swarm_groups"] = len(record["swarm_ids"])
    if "auto" in record:
        found |= {f"mix/auto_{key}": record["auto"][key] for key in ("swarm", "informative", "strength", "falling")}
    if record.get("swarm_rewards"):
        found["reward/swarm"] = fmean(record["swarm_rewards"])
    for side in ("own", "swarm"):
        tags = record.get(f"{side}_tags", [])
        found |= {f"tags/{side}_{tag}": tags.count(tag) for tag in set(tags)}
    by_task: dict[str, list[float]] = {}
    for task, reward in zip(record.get("own_tasks", []), record["own_group_rewards"], strict=False):
        by_task.setdefault(task, []).append(reward)
    found |= {f"reward/task/{task}": fmean(rewards) for task, rewards in by_task.items()}
    return {name: float(value) for name, value in sorted(found.items())}


def _kept_id(path: Path) -> str:
    """An id that a restarted learner finds again and a run begun anew under the same name does not."""
    if not path.exists():
        write_whole(path, secrets.token_hex(8))
    return path.read_text()


def _install(key: str, package: str) -> str:
    return f"{key} needs the package {package}, which is not installed: pip install 'grapevine-rl[sinks]'"

"""`grapevine init`: a settings file to start from.

Guarantees: the file loads as it is; every commented-out `# key: value` line in it is a valid setting once the `# ` is taken
away; nothing is overwritten unasked, and nothing is written when the arguments make no valid settings.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml

from common.sections import STARTER_MODELS
from common.settings import SettingsError, load

TEMPLATE = """\
# Settings of a grapevine run. Lines that are commented out show the defaults (or an example); take away the "# " to change
# one. `grapevine settings` explains every setting, `grapevine doctor {file}` checks whether this can run here.

# The run's name; its files are kept in runs/{run}. The same name continues an interrupted run.
run: {run}
# folder: runs
# seed: 0

# How many nodes train together. Names in place of a number let each differ, for example
#   nodes: {{small: {{}}, picky: {{mix: {{own: 12, swarm: 4}}}}, helper: {{learner: none}}}}
nodes: {nodes}

# What holds for every node.
node:
  # What is trained: a Hugging Face hub id, a folder, or the tiny starter model that is made on first use.
  model: {model}
  # What is asked: a preset (starter, paper9) or a list of ReasoningGYM datasets with settings of one's own or without, as
  # in [gcd, {{name: bf, settings: {{difficulty: 1}}}}].
  tasks: {tasks}
  # Updates until the node is complete, and completions per question.
  rounds: {rounds}
  group_size: 8
  # Batches ordered ahead of time: more keep the generators busy, fewer keep the answers fresh.
  # ahead: 2
  # max_staleness: 8
  # checkpoint_every: 1

  # How completions are drawn.
  sampling:
    max_new_tokens: {max_new_tokens}
    # temperature: 1.0
    # top_p: 1.0

  # What one round trains on, in groups: its own, and up to so many of other nodes.
  # `swarm: 0` trains alone, `swarm: auto` decides by what helps.
  mix:
    own: {own}
    swarm: {swarm}
    # tags: [hard, mixed, easy]

  # What the others may see. Less sharing: fewer tags, or a fraction below 1.
  # share: {{tags: [failed, hard, mixed, easy, solved], fraction: 1.0}}

  # What counts, as weights: right answers, the form asked for, short completions.
  # reward: {{accuracy: 1.0, format: 0.0, length: 0.0}}

  # The update. `successes` takes from others only what beat its group's mean, `none` takes all, as the paper does;
  # docs/learning.md has the others. lora: {{rank: 16}} trains adapters, dtype: bfloat16 halves memory and time on a GPU.
  update:
    correction: successes
    learning_rate: {learning_rate}
    # weight_decay: 0.0
    # max_grad_norm: 1.0

  # Held-out questions, answered every so many rounds, before the first and after the last.
  evaluate:
    every: {every}
    questions: 64
    # completions: 4

# The workers that answer and score. More generators answer faster, as long as there are cores or GPUs for them.
generators:
  replicas: {generators}
  batch_orders: {batch_orders}
  # device: auto
  # dtype: float32
verifiers:
  replicas: 1

# How long a shared group may be drawn, in seconds.
swarm:
  max_age: {max_age}
  # quota: 32

# Without a server's address one is started beside the run. To spread a run over machines name a server here, or better in
# the environment, where no password is written to a file: REDIS_URL=redis://:password@host:6379/0
# redis_url: redis://127.0.0.1:6379/0
# policies_url: s3://bucket/policies
# site: local
"""


def write(file: Path, nodes: int, model: str, tasks: str, force: bool) -> None:
    """Write the file. Raises SettingsError when it exists and `force` is false, or when the arguments are no settings."""
    if file.exists() and not force:
        raise SettingsError(f"{file} exists already; choose another name, or overwrite it with --force")
    if not file.parent.is_dir():
        raise SettingsError(f"the folder {file.parent} does not exist; make it, or choose another place for {file.name}")
    aside = file.with_name(f".{file.name}.new")
    try:
        aside.write_text(text(file, nodes, model, tasks))
        load(aside)
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def text(file: Path, nodes: int, model: str, tasks: str) -> str:
    """The file's content. The starter model takes the values of the demo, any other those of a careful first run."""
    starter = model in STARTER_MODELS
    chosen = (
        {"rounds": 150, "max_new_tokens": 16, "own": 16, "swarm": 8, "learning_rate": "5.0e-4", "every": 50}
        if starter
        else {"rounds": 200, "max_new_tokens": 256, "own": 8, "swarm": 8, "learning_rate": "1.0e-6", "every": 100}
    )
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    return TEMPLATE.format(
        file=file,
        run=_run_name(file),
        nodes=nodes,
        model=_yaml(model),
        tasks=_yaml(names[0])
        if len(names) == 1 and names[0] in ("starter", "paper9")
        else f"[{', '.join(map(_yaml, names))}]",
        generators=2 if starter else 1,
        batch_orders=32 if starter else 16,
        max_age=60 if starter else 600,
        **chosen,
    )


def _run_name(file: Path) -> str:
    """A run's name after the file's."""
    name = re.sub(r"[^a-z0-9.-]+", "-", file.stem.lower())[:40].strip("-.")
    return name or "swarm"


def _yaml(text: str) -> str:
    """A text as YAML, quoted only where it must be."""
    return text if re.fullmatch(r"[\w./-]+", text) and yaml.safe_load(text) == text else json.dumps(text)

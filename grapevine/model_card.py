"""The model card of an exported policy: what it is made of, what it was trained on, how good it is.

Guarantees: every figure comes from the run's own records, and one that is missing is said to be missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from common.chat import SYSTEM_PROMPT
from common.directory import Policy
from common.sections import UpdateSettings
from common.settings import Settings
from learners.journal import read


def model_card(settings: Settings, node: str, policy: Policy) -> str:
    """README.md with its YAML front matter."""
    own = settings.for_node(node)
    update, sampling = own.update, own.sampling
    base, licence = _base(policy.model)
    most = own.mix.most if own.mix.swarm == "auto" else own.mix.swarm
    mix = f"up to {most} groups of other nodes" if most else "its own questions only"
    tasks = own.tasks if isinstance(own.tasks, str) else ", ".join(_task_name(task) for task in own.tasks)
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grapevine", "reinforcement-learning", "grpo", "sapo", "reasoning-gym"],
        **licence,
    }
    if base is not None:
        front["base_model"] = base
    name = f"{settings.run}-{node}"
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {name}

Policy {policy.version} of node `{node}` in the run `{settings.run}`: {base or Path(policy.model).name} after
{policy.version.step} rounds of reinforcement learning with [Swarm sAmpling Policy Optimization](https://arxiv.org/abs/2509.08721),
by grapevine.

| | |
|---|---|
| Base model | {base or f"a local folder, `{Path(policy.model).name}`"} |
| Rounds trained | {policy.version.step} |
| Tasks | {tasks} |
| Each round | {own.mix.own} groups of {own.group_size} completions of its own, {mix} (tags: {", ".join(own.mix.tags)}) |
| Objective | {update.objective}, clip {update.clip_low:g} / {update.clip_high:g}, swarm correction {update.correction} |
| Learning rate | {update.learning_rate:g} |
| Trained | {_trained(update)} |
| Sampling | temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, up to {sampling.max_new_tokens} tokens |
| Seed | {settings.seed} |
| SHA-256 of the policy file | `{policy.checksum}` |

## Held-out questions

{_heldout(settings, node, policy)}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
question = [
    {{"role": "system", "content": "{SYSTEM_PROMPT}"}},
    {{"role": "user", "content": "..."}},
]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens={sampling.max_new_tokens})[0]))
```

This is the prompt of its training, where the tokenizer has a chat template. Weights are float32.

## Licence

{_licence_sentence(licence)}
"""


def _heldout(settings: Settings, node: str, policy: Policy) -> str:
    """A table of the evaluation of this very version, or a sentence that there is none."""
    folder = settings.run_folder
    trained = read(folder / "nodes" / node / "heldout.jsonl")
    jobs = [line for line in read(folder / "evaluations.jsonl") if line.get("node") == node]
    lines = [*trained, *jobs]
    # The node's own file holds its surviving line alone: there a step means the same weights after every restart.
    fitting = [line for line in trained if line["version"].partition(".")[2] == str(policy.version.step)]
    fitting += [line for line in jobs if line["version"] == str(policy.version)]
    if not fitting:
        rounds = [line["round"] for line in lines if line.get("round") is not None]
        last = f" The node's last evaluation was of round {max(rounds)}." if rounds else ""
        return f"This version was not evaluated.{last}"
    line = max(fitting, key=lambda line: line["questions"])
    rows = [
        f"| {name} | {part['questions']} | {_rate(part['greedy'])} | {_rate({**part, 'rate': part['reward']})} |"
        for name, part in [*line["by_task"].items(), ("all", line)]
    ]
    head = "| Task | Questions | Greedy | Sampled |\n|---|---|---|---|\n"
    note = f"Share of right answers, with 95 % intervals; {line['completions']} sampled completions per question."
    return head + "\n".join(rows) + f"\n\n{note}"


def _trained(update: UpdateSettings) -> str:
    lora = update.lora
    if not lora.rank:
        return "all weights"
    return (
        f"low-rank adapters, merged into the weights: rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"
    )


def _rate(part: dict[str, Any]) -> str:
    return f"{part['rate']:.3f} ({part['low']:.3f}-{part['high']:.3f})"


def _base(model: str) -> tuple[str | None, dict[str, str]]:
    """The hub id, None for a local folder; and what is known of the licence, as front matter."""
    folder = Path(model)
    if not folder.is_dir():
        return model, {
            "license": "other",
            "license_name": "that-of-the-base-model",
            "license_link": f"https://huggingface.co/{model}",
        }
    card = folder / "README.md"
    front = re.match(r"---\n(.*?)\n---", card.read_text(errors="replace"), re.DOTALL) if card.exists() else None
    known = yaml.safe_load(front[1]) if front else None
    if isinstance(known, dict) and isinstance(known.get("license"), str):
        kept = ("license", "license_name", "license_link")
        return None, {key: known[key] for key in kept if isinstance(known.get(key), str)}
    return None, {"license": "other", "license_name": "that-of-the-base-model"}


def _licence_sentence(licence: dict[str, str]) -> str:
    if licence.get("license_name") == "that-of-the-base-model":
        return "That of the base model, which was not looked up: check it before passing this model on."
    return f"That of the base model, whose card says: {licence['license']}."


def _task_name(task: Any) -> str:
    if isinstance(task, dict):
        return str(task.get("task") or task.get("name") or next(iter(task), task))
    return str(task)

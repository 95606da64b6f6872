"""The sections of the settings: what a node, the pool, the verifiers and the swarm can be told.

Guarantees: every field has a default, limits and a description, from which the reference in docs/configuration.md is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from common.messages import TAGS, Tag
from common.own_tasks import Definition
from common.settings_tree import without_empty

# Tiny models that are made on first use (grapevine.starter) rather than fetched.
STARTER_MODELS = ("starter", "starter-wide")

NamePattern = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?$")]


class Section(BaseModel):
    """Strict and frozen; an empty section is one of defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, tree: Any) -> Any:
        return without_empty(tree, cls)


class SamplingSettings(Section):
    """How completions are drawn."""

    max_new_tokens: int = Field(256, ge=1, le=131072, description="longest completion, in tokens")
    temperature: float = Field(1.0, gt=0.0, le=10.0, description="above 1 completions vary more, below 1 less")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="share of the probability that tokens are drawn from; 1: all")


def _groups(value: Any) -> int | str:
    """`mix.swarm`: one sentence for both of the types it can have."""
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.isdecimal():  # from the environment
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number of groups, 0 or more, or auto")
    return value


class MixSettings(Section):
    """What one round trains on, in groups. `swarm: 0` is a silo."""

    own: int = Field(8, ge=1, description="own groups per round")
    swarm: Annotated[int | Literal["auto"], PlainValidator(_groups)] = Field(
        8, description="groups of other nodes per round, at most; 0: none; `auto`: by what helps"
    )
    most: int = Field(16, ge=1, description="most swarm groups per round that `auto` may draw")
    tags: tuple[Tag, ...] = Field(("hard", "mixed", "easy"), description="which groups of others to draw, by score")
    weights: dict[Tag, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        {}, description="how often a tag is drawn beside an author's others; 1 where it is not named"
    )
    fill: bool = Field(False, description="replace missing swarm groups by further own ones that have arrived")
    own_filter: Literal["none", "drop", "refill"] = Field(
        "none",
        description="own groups whose rewards are all alike: `none` counts them, `drop` leaves them out of the update, "
        "`refill` orders others in their place",
    )
    refill_most: int = Field(4, ge=1, description="most own groups per round with `refill`, in multiples of `own`")


class ShareSettings(Section):
    """What the swarm may see of a node's groups."""

    tags: tuple[Tag, ...] = Field(TAGS, description="which of its groups are shared, by score")
    fraction: float = Field(1.0, ge=0.0, le=1.0, description="share of its groups that the node offers; 0: none")


class RewardSettings(Section):
    """The node's own reward: weights on the verifier's components, each of which lies between 0 and 1."""

    accuracy: float = Field(1.0, description="weight of a right answer")
    format: float = Field(0.0, description="weight of an answer in the form that was asked for")
    length: float = Field(0.0, description="weight of a short completion")


class LoraSettings(Section):
    """Low-rank adapters in place of all weights. Rank 0: all weights are trained."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: none")
    alpha: float = Field(32.0, gt=0.0, description="the adapters' output is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="modules that get an adapter, by the last part of their names",
    )


class UpdateSettings(Section):
    """The policy update."""

    objective: Literal["grpo", "dr_grpo", "gspo", "cispo"] = Field("grpo", description="the loss")
    correction: Literal["none", "successes", "hacpo", "luffy"] = Field(
        "successes",
        description="of groups of others: `none` trains on all, `successes` on completions above their group's mean, "
        "`hacpo` weighs by capability and likelihood, `luffy` by the probability of each token",
    )
    likelihood_weight: float = Field(
        0.0, ge=0.0, description="weigh foreign completions by their likelihood per token to this power; 0: not"
    )
    learning_rate: float = Field(1e-6, ge=0.0, description="step size of AdamW; 0: train nothing, measure only")
    warmup_rounds: int = Field(0, ge=0, description="rounds over which the learning rate rises to its height")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate falls until the last round; the last two end at a tenth"
    )
    weight_decay: float = Field(0.0, ge=0.0, description="decay of the weights, per step and unit of learning rate")
    max_grad_norm: float = Field(1.0, gt=0.0, description="longer gradients are shortened to this norm")
    skip_grad_norm: float = Field(1e4, gt=0.0, description="an update with a longer gradient, or none finite, is skipped")
    rollback_after: int = Field(
        5, ge=0, description="rounds skipped in a row until the last good checkpoint returns; 0: never"
    )
    clip_low: float = Field(0.2, ge=0.0, lt=1.0, description="how far a probability ratio may fall below 1")
    clip_high: float = Field(0.28, ge=0.0, description="how far a probability ratio may rise above 1")
    kl: float = Field(0.0, ge=0.0, description="weight of the divergence from the model that training began with; 0: none")
    importance_cap: float = Field(2.0, ge=1.0, description="truncation of the token-level importance weights")
    epochs: int = Field(1, ge=1, description="passes over a round's samples")
    minibatches: int = Field(1, ge=1, description="optimizer steps per pass")
    microbatch_tokens: int = Field(65536, ge=1, description="most tokens, padding included, in one forward pass")
    logit_tokens: int = Field(1024, ge=1, description="tokens whose logits are held at once, where a vocabulary is large")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="number format of the forward pass; optimizer and trained weights stay float32"
    )
    gradient_checkpointing: bool = Field(False, description="compute activations twice and keep few of them")
    lora: LoraSettings = LoraSettings()


class EvaluateSettings(Section):
    """Evaluation on held-out questions: one greedy completion of each, and some sampled ones."""

    every: int = Field(100, ge=0, description="rounds between evaluations; 0: only before the first and after the last")
    questions: int = Field(64, ge=0, description="distinct held-out questions, fewer where the tasks have fewer; 0: never")
    completions: int = Field(4, ge=1, le=1024, description="sampled completions per question, for pass@k up to this k")
    temperature: float = Field(1.0, gt=0.0, le=10.0, description="of the sampled completions")


# Rounds between checkpoints, at most, where a rollback may need one: it then costs about twice as many at worst.
ROLLBACK_REACH = 50


class NodeSettings(Section):
    """One node. The section `node` holds for all, `nodes.<name>` overrides it for one."""

    model: str = Field("starter", description="a hub id, a local folder, `starter` or `starter-wide`")
    learner: Literal["train", "none"] = Field("train", description="`none`: contributes rollouts and never trains")
    tasks: str | list[Any] = Field(
        "starter", description="a preset (`starter`, `paper9`) or a list of dataset names, each with settings or without"
    )
    rounds: int = Field(200, ge=1, description="updates until the node is complete")
    group_size: int = Field(8, ge=2, le=1024, description="completions per question")
    ahead: int = Field(2, ge=1, description="batches of orders kept open")
    max_staleness: int = Field(8, ge=0, description="oldest own group, in policy steps, that still trains")
    order_seconds: float = Field(120.0, gt=0, description="seconds until an unanswered order is placed anew")
    checkpoint_every: int = Field(
        1, ge=1, description="rounds between checkpoints, at most 50 unless `update.rollback_after` is 0"
    )
    policies_kept: int = Field(8, ge=2, description="policy files kept, besides those that evaluations need")
    sampling: SamplingSettings = SamplingSettings()
    mix: MixSettings = MixSettings()
    share: ShareSettings = ShareSettings()
    reward: RewardSettings = RewardSettings()
    update: UpdateSettings = UpdateSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    @property
    def durable_every(self) -> int:
        """Rounds between checkpoints: no more than a rollback may cost (about twice over) where there can be one."""
        return min(self.checkpoint_every, ROLLBACK_REACH) if self.update.rollback_after else self.checkpoint_every


class GeneratorSettings(Section):
    """The pool."""

    replicas: int = Field(2, ge=0, description="generators that `up` starts")
    target: str = Field("auto", description="a node's name, or `auto`")
    engine: Literal["auto", "vllm", "transformers", "paced"] = Field(
        "auto",
        description="what runs the model; `auto`: vLLM where it is installed; `paced` makes answers up, at a fixed pace",
    )
    engine_options: dict[str, Any] = Field(
        {}, description="passed on to vLLM (`max_model_len`, `gpu_memory_utilization`, ...) or `paced` (`tokens_per_second`)"
    )
    batch_orders: int = Field(16, ge=1, description="questions in one generator's hands at a time")
    models: tuple[str, ...] = Field((), description="serve only nodes with these models; none named: any model")
    models_kept: int = Field(1, ge=1, description="models kept in memory by `transformers`: more when nodes differ in model")
    drain_seconds: float = Field(
        20.0, ge=0, description="a generator told to end answers what it has begun for so long, and hands back the rest"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of the weights")
    device: str = Field("auto", description="`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one")


class VerifierSettings(Section):
    """Scoring."""

    replicas: int = Field(1, ge=0, description="verifiers that `up` starts")
    answer_seconds: float = Field(0.2, gt=0, description="CPU seconds to score one answer")
    memory_megabytes: int = Field(1024, ge=256, description="memory to score one answer, in MB")
    max_characters: int = Field(65536, ge=1, description="longer completions score 0")


class SwarmSettings(Section):
    """The shared streams. `max_age` in seconds, in lockstep in rounds."""

    quota: int = Field(32, ge=1, description="groups kept per author and tag")
    max_age: int = Field(600, ge=1, description="how long a shared group can be drawn: seconds, in lockstep rounds")


class OwnTaskSettings(Section):
    """A task of one's own: a JSONL file of questions, or a Python function that makes them."""

    file: Path | None = Field(None, description="JSONL: question, answer and optionally scorer on each line")
    function: str | None = Field(None, description="`module:function` or `file.py:function`: seed to question")
    scorer: Literal["exact", "numeric", "math", "choice"] = Field("exact", description="how answers are compared")
    score: str | None = Field(None, description="`module:function` or `file.py:function` in place of a scorer")
    settings: dict[str, Any] = Field({}, description="keyword arguments of the function")
    folder: Path | None = Field(None, description="where paths and modules start; default: the settings file's folder")
    checksum: str | None = Field(None, description="of the definition; filled in when a run starts")

    def definition(self, name: str) -> Definition:
        """The same as tasks understand it."""
        return Definition(name, **{**self.model_dump(mode="json"), "folder": str(self.folder or "")})


class SinkSettings(Section):
    """Where else a learner writes its figures."""

    tensorboard: bool = Field(False, description="event files under the run's folder")
    wandb: str | None = Field(None, description="project at Weights & Biases")


class ControlSettings(Section):
    """Control jobs: evaluations, exports, reports, pruning."""

    replicas: int = Field(0, ge=0, description="control workers that `up` starts")
    evaluate_rounds: int = Field(0, ge=0, description="evaluate every node each time so many rounds passed; 0: never")
    evaluate_minutes: float = Field(0, ge=0, description="evaluate every node so often; 0: never")
    retries: int = Field(3, ge=0, description="how often a failed job is tried again")

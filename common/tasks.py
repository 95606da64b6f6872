"""All tasks behind one small interface: a question is (task, settings, seed, index) and rebuilt from that alone.

A task is a ReasoningGYM dataset, or one of one's own that was registered as such (`common.own_tasks`).

Guaranteed here: the same question gives the same item in every process, whatever PYTHONHASHSEED is and whatever was
built before; what cannot be rebuilt, or cannot be scored without executing the answer, is refused with one sentence;
nodes draw from seed ranges of their own; a held-out question is never drawn for training.

`build` runs ReasoningGYM with the settings it is given and puts no bound on time or memory: settings of one's own go
straight to it, settings from a message go through the sandbox of the verifiers, which calls it in a killable child.
"""

import decimal
import hashlib
import random
import unicodedata
from typing import Annotated, Any

import msgspec

from common.own_tasks import CHECKSUM, Definition, check_definition, register, source_of
from common.task_settings import REFUSED, TEXT_CHARACTERS, UNREPRODUCIBLE, TaskRefused, check_task, datasets, nearest

__all__ = [
    "PRESETS",
    "REFUSED",
    "TEXT_CHARACTERS",
    "UNREPRODUCIBLE",
    "Components",
    "Item",
    "Question",
    "TaskRefused",
    "TaskSpec",
    "build",
    "check",
    "define",
    "draw",
    "is_held_out",
    "resolve_tasks",
    "seed_base_of",
]

SEEDS = 2**62
INDICES = 2**20
HELD_OUT_ONE_IN = 16

# A node owns a block of seeds. Order `number` tries the seeds at seed_base + number * stride onwards. A training draw
# fails on 1 question in 16, so 64 attempts never run out by chance; a held-out draw succeeds on 1 in 16, so that even
# 4096 attempts only run out (chance 1e-115) where a task has no held-out question at all.
BLOCK = 2**30
TRAIN_ATTEMPTS = 64
HELD_OUT_ATTEMPTS = 4096


# A number out of range, or none at all, in one group would spoil a learner's whole update.
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class TaskSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dataset with the settings (JSON values) that differ from its defaults."""

    name: str
    settings: dict[str, Any] = {}


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that identifies a question on the wire."""

    task: str
    settings: dict[str, Any]
    seed: int
    index: int


class Item(msgspec.Struct, frozen=True):
    """A rebuilt question. `answer` is one right answer, or "" where ReasoningGYM gives none."""

    question: Question
    text: str
    answer: str
    entry: dict[str, Any]
    dataset: Any
    """The dataset that made the entry: some scorers need what it holds. Never sent anywhere."""


class Components(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a completion earned, each from 0 to 1; a learner weighs them by its own reward."""

    accuracy: Share
    format: Share
    length: Share


PRESETS: dict[str, tuple[TaskSpec, ...]] = {
    "paper9": (
        TaskSpec("arc_1d", {"min_size": 10, "max_size": 30, "num_train": 3}),
        TaskSpec("basic_arithmetic", {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 4}),
        TaskSpec("base_conversion", {"min_base": 2, "max_base": 16, "min_value": 0, "max_value": 1000}),
        TaskSpec("bf", {"difficulty": 1}),
        TaskSpec("binary_matrix", {"min_n": 3, "max_n": 10, "p_zero": 0.25}),
        TaskSpec("calendar_arithmetic", {"year": 2023}),
        TaskSpec(
            "decimal_arithmetic",
            {"min_num_decimal_places": 1, "max_num_decimal_places": 3, "min_terms": 2, "max_terms": 6},
        ),
        TaskSpec("fraction_simplification", {"min_value": 1, "max_value": 100, "min_factor": 2, "max_factor": 100}),
        TaskSpec(
            "propositional_logic",
            {
                "min_vars": 2,
                "max_vars": 4,
                "min_statements": 2,
                "max_statements": 4,
                "min_complexity": 1,
                "max_complexity": 3,
            },
        ),
    ),
    "starter": (
        TaskSpec("binary_matrix", {"min_n": 3, "max_n": 3}),
        TaskSpec("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20}),
        TaskSpec("count_bits", {"min_n": 1, "max_n": 63}),
        TaskSpec("fraction_simplification", {"min_value": 1, "max_value": 9, "min_factor": 2, "max_factor": 5}),
    ),
}


def define(definition: Definition) -> str:
    """Make a task of one's own known to this process, in place of any other of its name; returns its checksum.

    Raises:
        TaskRefused: one sentence on what is wrong with it.
    """
    if definition.name in PRESETS:
        raise TaskRefused(f"own_tasks.{definition.name}: there is a preset of this name; choose another")
    return register(definition)


def check(question: Question) -> None:
    """Refuse what can be refused without running ReasoningGYM: cheap and bounded for any question.

    Raises:
        TaskRefused: unknown or refused task, seed or index out of range, a setting of an unknown name or wrong type, a
            task of one's own that is defined otherwise here.
    """
    check_task(question.task, question.settings)
    check_definition(question.task, question.settings)
    for field, value, end in (("seed", question.seed, SEEDS), ("index", question.index, INDICES)):
        if type(value) is not int or not 0 <= value < end:
            raise TaskRefused(f"{field} must be a whole number from 0 to below {end}")


def build(question: Question) -> Item:
    """Rebuild a question, its answer and what its scorer needs.

    Raises:
        TaskRefused: whatever `check` refuses, and whatever ReasoningGYM raises on these settings.
    """
    check(question)
    dataset_class, config_class = datasets()[question.task]
    # Decoding afresh keeps the question's own settings out of reach of datasets that change their lists in place.
    settings = msgspec.json.decode(msgspec.json.encode(question.settings))
    try:
        # decimal tasks set the precision of the thread's context, others compute with whatever they find there.
        with decimal.localcontext(decimal.Context(prec=28)):
            dataset = dataset_class(config_class(**settings, seed=question.seed, size=question.index + 1))
            entry = dataset[question.index]
    except Exception as error:
        cause = str(error)[:200] or type(error).__name__
        if source_of(question.task) is not None:
            raise TaskRefused(f"task '{question.task}' makes no question at seed {question.seed}: {cause}") from error
        raise TaskRefused(f"task '{question.task}' does not accept these settings, correct them: {cause}") from error
    text = entry["question"]
    answer = entry["answer"]
    if answer is None:
        answer = entry["metadata"].get("example_answer") or ""
    if isinstance(answer, str) and not answer.strip() and entry["answer"] is not None:
        # base_conversion writes the number 0 so.
        raise TaskRefused(f"task '{question.task}' has an empty answer at this seed; take another seed")
    if not isinstance(text, str) or not isinstance(answer, str) or len(text) + len(answer) > TEXT_CHARACTERS:
        raise TaskRefused(
            f"settings of task '{question.task}' make a question of over {TEXT_CHARACTERS} characters; make it smaller"
        )
    return Item(question, text, answer, entry, dataset)


def is_held_out(text: str) -> bool:
    """Whether a question text is reserved for evaluation: 1 text in 16, by hash, blind to case, width and spacing."""
    normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    digest = hashlib.sha256(normal.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def resolve_tasks(value: str | list[Any]) -> tuple[TaskSpec, ...]:
    """The tasks a configuration means: a preset's name, or a list of dataset names and {name, settings} mappings.

    Builds one item of each, so that a wrong setting shows at start-up. The settings must be one's own (see `build`).

    Raises:
        TaskRefused: on the first task that cannot be used.
    """
    if isinstance(value, str):
        if value not in PRESETS:
            raise TaskRefused(f"tasks: preset {value!r} is unknown{nearest(value, PRESETS)}; or give a list of tasks")
        specs = PRESETS[value]
    else:
        if not value:
            raise TaskRefused("tasks must name at least one task")
        specs = tuple(_spec(entry) for entry in value)
    for spec in specs:
        draw((spec,), 0, 0, held_out=False)
    return specs


def seed_base_of(run_seed: int, node: str, held_out: bool) -> int:
    """First seed of the block of 2**30 that a node draws from; the held-out block is one per run, alike for all nodes.

    Blocks are aligned and chosen by hash, so that two nodes share all of a block or none of it: the chance that any two
    of 1,000 nodes meet is 1 in 4,000. Training blocks fill the lower half of the seeds, held-out blocks the upper one.
    """
    half = SEEDS // BLOCK // 2
    key = f"held-out:{run_seed}" if held_out else f"train:{run_seed}:{node}"
    slot = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest(), "big") % half
    return (slot + half if held_out else slot) * BLOCK


def draw(tasks: tuple[TaskSpec, ...], seed_base: int, number: int, held_out: bool) -> Question:
    """The question of order `number`: a pure function, so that a restarted learner orders the same questions again.

    The task is uniform over `tasks`; a seed whose question belongs to the other side, or that ReasoningGYM cannot make
    (a division by zero, say), is passed over. A block holds 2**24 training orders or 2**18 held-out ones.

    Raises:
        TaskRefused: no seed served, or the block is used up.
    """
    attempts = HELD_OUT_ATTEMPTS if held_out else TRAIN_ATTEMPTS
    if not 0 <= number < BLOCK // attempts:
        raise TaskRefused(f"number must be from 0 to below {BLOCK // attempts}; start a run with another seed")
    spec = random.Random(f"{seed_base}:{number}").choice(tasks)
    failure: TaskRefused | None = None
    built = 0
    for attempt in range(attempts):
        question = Question(spec.name, spec.settings, seed_base + number * attempts + attempt, 0)
        try:
            item = build(question)
        except TaskRefused as error:
            failure = error
            # A wrong setting fails on every seed; a seed without a question is rare.
            if attempt - built >= TRAIN_ATTEMPTS - 1:
                break
            continue
        built += 1
        if is_held_out(item.text) == held_out:
            return question
    if failure is not None and not built:
        raise failure
    side = "held-out" if held_out else "training"
    raise TaskRefused(f"task '{spec.name}' has no {side} question in {attempts} attempts; {_remedy(spec.name)}")


def _remedy(task: str) -> str:
    source = source_of(task)
    if source is None or not source.entries:
        return "widen its settings"
    held_out = sum(is_held_out(entry.text) for entry in source.entries)
    return (
        f"{held_out} of the {len(source.entries)} lines of {source.definition.file} are held out (1 text in 16, by its "
        f"hash): add lines, or do without evaluations (evaluate.questions: 0)"
    )


def _spec(entry: Any) -> TaskSpec:
    try:
        spec = TaskSpec(entry) if isinstance(entry, str) else msgspec.convert(entry, TaskSpec)
    except msgspec.ValidationError as error:
        raise TaskRefused(f"tasks: each is a dataset name or a mapping of name and settings: {error}") from error
    source = source_of(spec.name)
    return TaskSpec(spec.name, {**spec.settings, CHECKSUM: source.checksum}) if source is not None else spec

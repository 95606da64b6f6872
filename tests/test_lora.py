"""Adapters: the learner trains them alone, the file says what they are, the engine samples from them, exports merge them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.adapters import METADATA_KEY, adapter_of
from common.messages import Completion, Sampling, Version
from common.policies import PolicyStore
from common.sections import NodeSettings, UpdateSettings
from common.settings import Settings, SettingsError
from generators.engines.base import Engine, PolicyUnusable, Request, answer_all
from generators.engines.transformers import TransformersEngine
from grapevine.evaluate import evaluate_model
from grapevine.export import export_model
from grapevine.models import ModelFacts, bytes_to_train
from learners.checkpoint import WEIGHTS_FILE, Checkpoints, LearnerState
from learners.journal import read
from learners.mix import Sample
from learners.update import OPTIMIZER_FILE, PolicyTrainer
from tests.conftest import make_tiny_model
from tests.engines import KINDS, opener

QUESTIONS = ("How many 1 bits are there in 9?", "Simplify the fraction 8/12 to its lowest terms.", "2")
REQUESTS = [Request(str(seed), text, 4, Sampling(max_new_tokens=12), seed) for seed, text in enumerate(QUESTIONS)]
LORA = {"rank": 4, "alpha": 16.0, "targets": ["q_proj", "v_proj", "down_proj"]}


def node(model: Path, **update: Any) -> dict[str, Any]:
    return {
        "model": str(model), "tasks": "starter", "sampling": {"max_new_tokens": 12},
        "update": {"learning_rate": 0.01, "lora": LORA, **update},
    }  # fmt: skip


def trainer_for(model: Path, **update: Any) -> PolicyTrainer:
    return PolicyTrainer(str(model), NodeSettings.model_validate(node(model, **update)))


def engine_for(model: Path, dtype: str = "float32") -> Engine:
    engine = TransformersEngine("cpu", dtype)
    engine.open_model(str(model))
    return engine


def rollouts(engine: Engine) -> list[tuple[str, Completion]]:
    groups = answer_all(engine, REQUESTS)
    return [(request.question, c) for request, group in zip(REQUESTS, groups, strict=True) for c in group]


def samples(found: list[tuple[str, Completion]]) -> list[Sample]:
    return [Sample(q, c.text, True, (-1.0) ** i, c.token_ids, c.logprobs) for i, (q, c) in enumerate(found)]


def gap(trainer: PolicyTrainer, engine: Engine) -> float:
    """Between what the engine says of its tokens and what the learner says of them."""
    encoded = [trainer.encode(sample) for sample in samples(rollouts(engine))]
    with torch.no_grad():
        logprobs, mask = trainer.logprobs(encoded)
    gaps = [
        np.abs(row[present.bool()].numpy() - np.array(sample.sampled))
        for row, present, sample in zip(logprobs, mask, encoded, strict=True)
    ]
    return float(np.concatenate(gaps).max())


def trained(model: Path, folder: Path, rounds: int = 3, **update: Any) -> PolicyTrainer:
    """A trainer after some rounds on what the engine wrote, saved in `folder`."""
    trainer, engine = trainer_for(model, **update), engine_for(model)
    batch = samples(rollouts(engine))
    for _ in range(rounds):
        assert trainer.update(batch, [])["grad_norm"] > 0
    folder.mkdir(parents=True, exist_ok=True)
    trainer.save(folder)
    return trainer


def test_adapters_alone_are_trained_and_saved(tiny_model: Path, tmp_path: Path) -> None:
    fresh, trainer = trainer_for(tiny_model), trained(tiny_model, tmp_path)
    moved = {
        name
        for name, p in trainer.model.named_parameters()
        if not torch.equal(p, dict(fresh.model.named_parameters())[name])
    }
    assert moved and all(".lora_" in name for name in moved)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    assert len(tensors) == 2 * 3 * 2, "two matrices, three targets, two layers"
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors, "named as in PEFT's files"
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert (tmp_path / OPTIMIZER_FILE).stat().st_size < 3 * (tmp_path / WEIGHTS_FILE).stat().st_size
    adapter = adapter_of(tmp_path / WEIGHTS_FILE)
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.targets, adapter.base) == (4, 16.0, tuple(LORA["targets"]), str(tiny_model))  # type: ignore[arg-type]
    assert adapter_of(tiny_model / "model.safetensors") is None


def test_the_first_policy_is_the_base_and_one_file(tiny_model: Path, tmp_path: Path) -> None:
    files = []
    for number in range(2):
        torch.manual_seed(number)
        state = torch.random.get_rng_state()
        trainer = trainer_for(tiny_model)
        assert torch.equal(torch.random.get_rng_state(), state), "nobody else's random numbers are touched"
        (tmp_path / str(number)).mkdir()
        trainer.save(tmp_path / str(number))
        files.append((tmp_path / str(number) / WEIGHTS_FILE).read_bytes())
    assert files[0] == files[1]
    assert gap(trainer, engine_for(tiny_model)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 0.3)])
def test_the_engine_samples_from_the_adapters(kind: str, tmp_path: Path, tied: bool, dtype: str, near: float) -> None:
    model = make_tiny_model(tmp_path / "model", tied)
    trainer = trained(model, tmp_path / "policy", dtype=dtype)
    with opener(kind, dtype) as open_engine:
        follower = open_engine(model)
        before = gap(trainer, follower)
        follower.load_policy(tmp_path / "policy" / WEIGHTS_FILE, Version(1, 1))
        assert gap(trainer, follower) < near < before
        assert rollouts(follower)[0][1].spans[0].version == Version(1, 1)


def test_an_engine_in_float32_follows_a_learner_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    """What was published is what was trained: computed in float32, both sides say the same."""
    trained(tiny_model, tmp_path, dtype="bfloat16")
    exact = trainer_for(tiny_model)
    exact.load(tmp_path)
    engine = engine_for(tiny_model)
    engine.load_policy(tmp_path / WEIGHTS_FILE, Version(1, 1))
    assert gap(exact, engine) < 1e-4


def test_bfloat16_holds_the_base_in_16_bits_and_the_adapters_in_32(tiny_model: Path) -> None:
    trainer = trainer_for(tiny_model, dtype="bfloat16")
    formats = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert all(dtype == (torch.float32 if ".lora_" in name else torch.bfloat16) for name, dtype in formats.items())
    full = trainer_for(tiny_model, dtype="bfloat16", lora={})
    assert {p.dtype for p in full.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_goes_from_adapters_to_all_weights_and_back(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    low = trained(tiny_model, tmp_path / "low")
    full = trained(tiny_model, tmp_path / "full", lora={}, learning_rate=0.003)
    assert adapter_of(tmp_path / "full" / WEIGHTS_FILE) is None
    other = make_tiny_model(tmp_path / "other", tied=False)
    with opener(kind) as open_engine:
        engine = open_engine(tiny_model)
        for step, (trainer, folder) in enumerate([(low, "low"), (full, "full"), (low, "low"), (full, "full"), (low, "low")]):
            engine.load_policy(tmp_path / folder / WEIGHTS_FILE, Version(1, step))
            assert gap(trainer, engine) < 1e-5
        engine.open_model(str(other))
        assert gap(trainer_for(other, lora={}), engine) < 1e-5, "nothing of the adapters stays"


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_change_under_what_is_in_flight(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """From the base model to adapters, to other adapters of a higher rank, to all weights."""
    policies: dict[Version, PolicyTrainer] = {Version(0, 0): trainer_for(tiny_model, lora={})}
    plans: list[dict[str, Any]] = [{}, {"lora": {**LORA, "rank": 12}}, {"lora": {}, "learning_rate": 0.003}]
    for step, plan in enumerate(plans, 1):
        policies[Version(1, step)] = trained(tiny_model, tmp_path / str(step), **plan)
    long = [replace(one, sampling=Sampling(max_new_tokens=40)) for one in REQUESTS]
    with opener(kind) as open_engine:
        engine = open_engine(tiny_model)
        for request in long:
            engine.submit(request)
        answered: dict[str, list[Completion]] = {}
        for version in list(policies)[1:]:
            answered |= dict(engine.step())
            engine.load_policy(tmp_path / str(version.step) / WEIGHTS_FILE, version)
        while engine.in_flight:
            answered |= dict(engine.step())
    assert sorted(answered) == sorted(request.id for request in long)
    for request in long:
        for completion in answered[request.id]:
            recorded = np.frombuffer(completion.logprobs, "<f4")
            for span in completion.spans:
                trainer = policies[span.version]
                (encoded,) = (trainer.encode(sample) for sample in samples([(request.question, completion)]))
                with torch.no_grad():
                    logprobs, mask = trainer.logprobs([encoded])
                said = logprobs[0][mask[0].bool()].numpy()
                assert np.abs(said - recorded)[span.start : span.end].max() < 1e-4


def rewrite(source: Path, target: Path, change: Any, **metadata: Any) -> None:
    tensors = load_file(source)
    with safe_open(source, framework="pt") as file:
        said = json.loads(file.metadata()[METADATA_KEY])
    save_file(change(tensors) or tensors, target, metadata={METADATA_KEY: json.dumps({**said, **metadata})})


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_do_not_fit_leave_the_old_policy(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    trainer = trained(tiny_model, tmp_path)
    good, bad = tmp_path / WEIGHTS_FILE, tmp_path / "bad.safetensors"
    with opener(kind) as open_engine:
        engine = open_engine(tiny_model)
        refuses(engine, trainer, good, bad)


def refuses(engine: Engine, trainer: PolicyTrainer, good: Path, bad: Path) -> None:
    engine.load_policy(good, Version(1, 1))
    name = next(iter(load_file(good)))
    spoilt = [
        (lambda t: {key: value for key, value in t.items() if key != name}, {}, "is missing"),
        (lambda t: t.update({name: torch.zeros(4, 3)}), {}, r"is \(4, 3\), not"),
        (lambda t: None, {"rank": 8}, "not"),
        (lambda t: None, {"targets": ["o_proj"]}, "no layer to be adapted"),
        (lambda t: t.update({"base_model.model.nowhere.q_proj.lora_A.weight": torch.zeros(4, 64)}), {}, "nowhere"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64)}), {}, "no layer to be adapted"),
        (lambda t: {"x": torch.zeros(1)}, {}, "no layer to be adapted"),
        (lambda t: None, {"rank": 0}, "damaged"),
        (lambda t: None, {"alpha": "much"}, "damaged"),
    ]
    for change, metadata, said in spoilt:
        rewrite(good, bad, change, **metadata)
        with pytest.raises(PolicyUnusable, match=said):
            engine.load_policy(bad, Version(9, 9))
        assert gap(trainer, engine) < 1e-5
    assert rollouts(engine)[0][1].spans[0].version == Version(1, 1)


def test_a_resumed_run_goes_on_bit_by_bit(tiny_model: Path, tmp_path: Path) -> None:
    batch = samples(rollouts(engine_for(tiny_model)))
    through = trained(tiny_model, tmp_path, epochs=2, minibatches=3, warmup_rounds=6, kl=0.1)
    resumed = trainer_for(tiny_model, epochs=2, minibatches=3, warmup_rounds=6, kl=0.1)
    resumed.load(tmp_path)
    figures = [trainer.update(batch, []) for trainer in (through, resumed)]
    assert figures[0] == figures[1]
    for trainer, folder in ((through, "a"), (resumed, "b")):
        (tmp_path / folder).mkdir()
        trainer.save(tmp_path / folder)
    for name in (WEIGHTS_FILE, OPTIMIZER_FILE):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("lora", [LORA, {}])
def test_the_divergence_is_to_the_base_also_after_a_resume(tiny_model: Path, tmp_path: Path, lora: Any) -> None:
    batch = samples(rollouts(engine_for(tiny_model)))
    trainer = trainer_for(tiny_model, kl=0.01, lora=lora, learning_rate=0.003)
    figures = [trainer.update(batch, []) for _ in range(3)]
    assert figures[0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert figures[2]["kl"] > 1e-4
    trainer.save(tmp_path)
    resumed = trainer_for(tiny_model, kl=0.01, lora=lora, learning_rate=0.003)
    resumed.load(tmp_path)
    encoded = [resumed.encode(sample) for sample in batch]
    plain = trainer_for(tiny_model, lora={})
    for sample, ours in resumed._measure_reference(encoded).items():
        with torch.no_grad():
            np.testing.assert_allclose(ours, plain.logprobs([sample])[0][0], atol=1e-5)
    assert resumed.update(batch, [])["kl"] > 1e-4


def test_gradient_checkpointing_changes_nothing(tiny_model: Path) -> None:
    batch = samples(rollouts(engine_for(tiny_model)))
    for lora in (LORA, {}):
        plain, again = (trainer_for(tiny_model, lora=lora, gradient_checkpointing=twice) for twice in (False, True))
        calls: list[int] = []
        layer = again.model.model.layers[0].mlp
        layer.register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        figures = [trainer.update(batch, []) for trainer in (plain, again)]
        assert len(calls) >= 2 * len(again.logprobs.micro_batches([again.encode(s) for s in batch], 10**6))
        assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-6)
        for ours, theirs in zip(plain._parameters.values(), again._parameters.values(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            np.testing.assert_allclose(ours.grad, theirs.grad, atol=1e-5 * max(1.0, ours.grad.abs().max().item()))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["query"], "query names no linear layer of .*; it has down_proj, gate_proj"),
        (["lm_head"], "lm_head of .* shares its weights"),
    ],
)
def test_targets_that_name_nothing(tiny_model: Path, targets: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=rf"node\.update\.lora\.targets: {said}"):
        trainer_for(tiny_model, lora={"rank": 4, "targets": targets})


def test_a_checkpoint_of_another_kind_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    trained(tiny_model, tmp_path)
    for lora in ({}, {**LORA, "rank": 8}, {**LORA, "targets": ["q_proj"]}):
        with pytest.raises(SettingsError, match=r"does not fit node\.model and node\.update\.lora"):
            trainer_for(tiny_model, lora=lora).load(tmp_path)


def elsewhere(settings: Settings) -> Settings:
    """With adapters for layers that no model here has."""
    return Settings(
        run="other", folder=settings.folder, nodes=1, node={"update": {"lora": {"rank": 2, "targets": ["query"]}}}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_holds_the_merged_weights(tmp_path: Path, tied: bool) -> None:
    model = make_tiny_model(tmp_path / "model", tied)
    settings = Settings(run="low", folder=tmp_path / "runs", nodes=1, node=node(model))  # type: ignore[arg-type]
    settings.run_folder.mkdir(parents=True)
    trainer = trained(model, tmp_path / "policy")
    checkpoints = Checkpoints(settings.run_folder / "nodes" / "node-0" / "checkpoints")
    saved = checkpoints.save(LearnerState(round=3, version=Version(1, 3)), trainer)
    PolicyStore(str(settings.run_folder / "policies"), "node-0", 4).publish(saved / WEIGHTS_FILE, Version(1, 3), str(model))
    export_model(settings, "node-0", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, trainer.model(ids).logits, rtol=0, atol=1e-4)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
        assert (exported(ids).logits - base).abs().max() > 1e-2
    assert "low-rank adapters, merged into the weights: rank 4, alpha 16" in (tmp_path / "out" / "README.md").read_text()
    assert not list((tmp_path / "out").glob("adapter*"))
    if tied:
        asked: dict[str, Any] = {"questions": 6, "completions": 2, "max_new_tokens": 6}
        found = [evaluate_model(settings, name, "starter", **asked) for name in ("low/node-0", str(tmp_path / "out"))]
        assert found[0]["version"] == "1.3"
        assert found[0]["reward"] == found[1]["reward"]
        assert found[0]["greedy"] == found[1]["greedy"]
        evaluate_model(elsewhere(settings), str(model), "starter", **asked)


def test_the_memory_that_is_told_is_that_of_the_base() -> None:
    facts = ModelFacts("Qwen2ForCausalLM", 1000, True)
    told = {
        16: {}, 20: {"kl": 0.1}, 4: {"lora": {"rank": 4}}, 2: {"lora": {"rank": 4}, "dtype": "bfloat16", "kl": 0.1},
    }  # fmt: skip
    for bytes_each, update in told.items():
        assert bytes_to_train(facts, UpdateSettings.model_validate(update)) == 1000 * bytes_each


def test_peft_itself_reads_the_file(tiny_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    trainer = trained(tiny_model, tmp_path)
    adapter = adapter_of(tmp_path / WEIGHTS_FILE)
    assert adapter is not None
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = LoraConfig(r=adapter.rank, lora_alpha=int(adapter.alpha), target_modules=list(adapter.targets))
    peer = get_peft_model(base, config).eval()
    found = set_peft_model_state_dict(peer, load_file(tmp_path / WEIGHTS_FILE))
    assert not found.unexpected_keys
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        torch.testing.assert_close(peer(ids).logits, trainer.model(ids).logits, rtol=0, atol=1e-5)


def test_a_swarm_of_adapters_in_bfloat16_trains_and_is_followed(learnt: Path, tmp_path: Path) -> None:
    """The whole pipeline in processes of its own: adapters are published, and generators sample from each new version."""
    tree = {
        "run": "adapters", "folder": str(tmp_path), "nodes": 2,
        "node": {
            "model": str(learnt), "rounds": 6, "group_size": 8, "ahead": 1, "sampling": {"max_new_tokens": 16},
            "mix": {"own": 4, "swarm": 2, "tags": ["failed", "hard", "mixed", "easy", "solved"]},
            "reward": {"accuracy": 1.0, "length": 1.0}, "evaluate": {"questions": 0},
            "update": {"learning_rate": 5e-3, "dtype": "bfloat16", "lora": {"rank": 8, "alpha": 16.0}},
        },
        "generators": {"replicas": 1, "dtype": "bfloat16"},
    }  # fmt: skip
    (tmp_path / "adapters.yaml").write_text(yaml.safe_dump(tree))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRAPEVINE_") and key != "REDIS_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "grapevine", "up", str(tmp_path / "adapters.yaml")],
        env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("node-0", "node-1"):
        lines = read(tmp_path / "adapters" / "nodes" / name / "rounds.jsonl")
        assert [line["round"] for line in lines] == list(range(1, 7))
        assert all(line["grad_norm"] > 0 and line["skipped"] == 0 for line in lines)
        # What is left is rounding: a generator without the newest adapters would say something else of its tokens.
        assert all(line["staleness"] == 0 and line["sampler_gap"] < 0.05 for line in lines)
        newest = max((tmp_path / "adapters" / "policies" / name).iterdir())
        adapter = adapter_of(newest)
        assert adapter is not None and adapter.rank == 8
        assert newest.stat().st_size < (learnt / "model.safetensors").stat().st_size
        assert any(tensor.abs().max() > 0 for key, tensor in load_file(newest).items() if "lora_B" in key), "it has learnt"

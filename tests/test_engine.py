"""Every engine samples what a plain forward pass says, to 1e-4 per token, whatever policy it took on and when."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from common.chat import load_tokenizer, prompt_ids
from common.messages import Completion, Sampling, Version
from common.sections import NodeSettings
from common.settings import Settings, SettingsError
from generators.engines.base import Engine, PolicyUnusable, Request, RequestUnfit, answer_all
from grapevine.engines import make_engine
from learners.batches import Encoded
from learners.mix import Sample
from learners.update import PolicyTrainer
from tests.conftest import make_tiny_model
from tests.engines import KINDS, Opener, needs_vllm, opener

QUESTIONS = [
    "How many 1 bits are there in 9?",
    "Simplify the fraction 8/12 to its lowest terms.",
    "2",
    "Find the GCD of 4, 16." * 4,
]
FIRST, SECOND, THIRD = Version(0, 0), Version(1, 1), Version(1, 2)


def request(number: int, completions: int = 4, tokens: int = 12, temperature: float = 1.0, top_p: float = 1.0) -> Request:
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature, top_p=top_p)
    return Request(f"r/{number}", QUESTIONS[number % len(QUESTIONS)], completions, sampling, seed=number)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_engine(kind: str) -> Iterator[Opener]:
    with opener(kind) as found:
        yield found


@pytest.fixture
def engine(open_engine: Opener, tiny_model: Path) -> Engine:
    return open_engine(tiny_model)


def trainer_for(model: Path, temperature: float = 1.0, **update: float) -> PolicyTrainer:
    settings = NodeSettings.model_validate({"sampling": {"temperature": temperature}, "update": update})
    return PolicyTrainer(str(model), settings)


def encoded(trainer: PolicyTrainer, request: Request, completion: Completion, advantage: float = 1.0) -> Encoded:
    return trainer.encode(
        Sample(request.question, completion.text, True, advantage, completion.token_ids, completion.logprobs)
    )


class Policies:
    """A model's first policy and others shifted at random, as files, and what a plain forward pass of each says."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model", tied)
        self._tokenizer = load_tokenizer(str(self.model))
        self._models: dict[Version, Any] = {FIRST: AutoModelForCausalLM.from_pretrained(self.model)}

    def shifted(self, version: Version) -> Path:
        """The file of a new policy."""
        model = AutoModelForCausalLM.from_pretrained(self.model)
        torch.manual_seed(version.step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        self._models[version] = model
        save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, self.folder / f"{version}.st")
        return self.folder / f"{version}.st"

    @torch.inference_mode()
    def gap(self, request: Request, completion: Completion) -> float:
        """The largest difference between what was recorded and what the version that a token is marked with says."""
        prompt = prompt_ids(self._tokenizer, request.question)
        ids = np.frombuffer(completion.token_ids, "<i4").tolist()
        recorded = np.frombuffer(completion.logprobs, "<f4")
        assert [span.start for span in completion.spans] == [0, *(span.end for span in completion.spans[:-1])]
        assert completion.spans[-1].end == len(ids)
        gaps = []
        for span in completion.spans:
            logits = self._models[span.version](torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            heat = request.sampling.temperature
            said = torch.log_softmax(logits / heat, -1)[range(len(ids)), ids].numpy()
            gaps.append(np.abs(said - recorded)[span.start : span.end].max())
        return float(max(gaps))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_learner_and_generator_agree_whatever_is_in_either_batch(
    open_engine: Opener, tmp_path: Path, temperature: float, tied: bool
) -> None:
    model = make_tiny_model(tmp_path / "model", tied)
    requests = [request(i, tokens=5 + 7 * i, temperature=temperature) for i in range(4)]
    groups = answer_all(open_engine(model), requests)
    trainer = trainer_for(model, temperature)
    samples = [encoded(trainer, r, c) for r, group in zip(requests, groups, strict=True) for c in group]
    # Alone, all together, and in a shuffled half: the same numbers.
    for batch in ([samples[5]], samples, samples[::-2]):
        logprobs, mask = trainer.logprobs(batch)
        for row, sample in enumerate(batch):
            ours = logprobs[row][mask[row].bool()].detach().numpy()
            assert sample.sampled is not None
            np.testing.assert_allclose(ours, sample.sampled, atol=1e-4, rtol=0)


def test_completions_do_not_depend_on_the_batch(engine: Engine) -> None:
    alone = answer_all(engine, [request(1)])[0]
    together = answer_all(engine, [request(0), request(1, tokens=12), request(3, tokens=30)])[1]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    np.testing.assert_allclose([c.logprob for c in alone], [c.logprob for c in together], atol=1e-4)


def test_seeds_decide(engine: Engine) -> None:
    first = answer_all(engine, [request(0), request(4)])
    assert [c.text for c in first[0]] != [c.text for c in first[1]], "same question, other seed"
    assert len({c.token_ids for c in first[0]}) > 1, "completions of one group differ"
    assert [c.token_ids for c in answer_all(engine, [request(0)])[0]] == [c.token_ids for c in first[0]]


def test_the_end_token_is_recorded_and_lengths_are_capped(engine: Engine, tiny_model: Path) -> None:
    groups = answer_all(engine, [request(i, completions=32, tokens=40) for i in range(4)])
    completions = [c for group in groups for c in group]
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}, "the tiny model both stops and runs on"
    end = load_tokenizer(str(tiny_model)).eos_token_id
    for c in completions:
        ids = np.frombuffer(c.token_ids, "<i4")
        assert len(ids) == c.tokens <= 40
        assert (ids[-1] == end) == (c.finish_reason == "stop")
        assert end not in ids[:-1]
        assert c.spans[0].end == c.tokens
        assert c.logprob == pytest.approx(float(np.frombuffer(c.logprobs, "<f4").sum()), abs=1e-4)


def test_greedy_takes_the_likeliest(engine: Engine) -> None:
    (group,) = answer_all(engine, [request(2, completions=3, temperature=0.0)])
    assert len({c.token_ids for c in group}) == 1
    (sampled,) = answer_all(engine, [request(2, completions=64, tokens=1)])
    best = max(np.frombuffer(c.logprobs, "<f4")[0] for c in sampled)
    assert np.frombuffer(group[0].logprobs, "<f4")[0] >= best - 1e-5


def test_top_p_cuts_the_tail_and_says_so(engine: Engine) -> None:
    """What is recorded is the distribution that was sampled from: of what was left after the cut."""
    (wide,) = answer_all(engine, [request(2, completions=256, tokens=1)])
    (narrow,) = answer_all(engine, [request(2, completions=256, tokens=1, top_p=0.3)])
    everything = {c.token_ids: float(np.exp(c.logprob or 0.0)) for c in wide}
    left = {c.token_ids: float(np.exp(c.logprob or 0.0)) for c in narrow}
    assert len(left) < len(everything)
    assert sum(left.values()) == pytest.approx(1.0, abs=1e-4), "all that was left has been drawn"
    cut = sum(everything[token] for token in left)
    assert 0.3 <= cut < 1
    for token, probability in left.items():
        assert probability == pytest.approx(everything[token] / cut, abs=1e-4)


def test_sampling_follows_the_recorded_probabilities(engine: Engine) -> None:
    (group,) = answer_all(engine, [request(2, completions=1024, tokens=1)])
    share: dict[bytes, int] = {}
    for c in group:
        share[c.token_ids] = share.get(c.token_ids, 0) + 1
    token, count = max(share.items(), key=lambda pair: pair[1])
    probability = float(np.exp(next(c.logprob or 0.0 for c in group if c.token_ids == token)))
    spread = (probability * (1 - probability) / 1024) ** 0.5
    assert abs(count / 1024 - probability) < 4 * spread


def test_a_bad_policy_leaves_the_old_one(open_engine: Opener, tmp_path: Path, tiny_model: Path) -> None:
    engine = open_engine(tiny_model)
    before = [c.logprobs for c in answer_all(engine, [request(0)])[0]]
    trainer = trainer_for(tiny_model)
    trainer.save(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    name = next(iter(good))
    missing = {key: value for key, value in good.items() if key != name}
    reshaped = {**good, name: torch.zeros(3)}
    for number, bad in enumerate((missing, reshaped)):
        save_file(bad, tmp_path / "bad.safetensors")
        with pytest.raises(PolicyUnusable):
            engine.load_policy(tmp_path / "bad.safetensors", Version(9, number))
    whole = (tmp_path / "model.safetensors").read_bytes()
    for cut in (whole[: len(whole) // 2], whole[:-1], b"half a file", b""):
        (tmp_path / "bad.safetensors").write_bytes(cut)
        with pytest.raises(PolicyUnusable):
            engine.load_policy(tmp_path / "bad.safetensors", Version(9, 3))
    with pytest.raises(PolicyUnusable):
        engine.load_policy(tmp_path / "nowhere.safetensors", Version(9, 3))
    after = answer_all(engine, [request(0)])[0]
    assert [c.logprobs for c in after] == before
    assert after[0].spans[0].version == FIRST


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_policy_is_sampled_from(open_engine: Opener, tmp_path: Path, tied: bool) -> None:
    """Also for prompts served before, nothing of which may be left from the old one."""
    policies = Policies(tmp_path, tied)
    engine = open_engine(policies.model)
    requests = [request(0), request(1), request(3)]
    first = answer_all(engine, requests)
    for version in (SECOND, THIRD, SECOND):
        engine.load_policy(policies.shifted(version), version)
        renewed = answer_all(engine, requests)
        for one, group in zip(requests, renewed, strict=True):
            for completion in group:
                assert [span.version for span in completion.spans] == [version]
                assert policies.gap(one, completion) < 1e-4
        assert [c.logprobs for c in renewed[0]] != [c.logprobs for c in first[0]]


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_that_comes_under_way_is_sampled_from_at_once(open_engine: Opener, tmp_path: Path, tied: bool) -> None:
    policies = Policies(tmp_path, tied)
    engine = open_engine(policies.model)
    requests = [request(number, tokens=40) for number in (0, 1, 3)]
    answer_all(engine, requests)  # so that their prompts were served before
    for one in requests:
        engine.submit(one)
    answered = dict(engine.step())
    for version in (SECOND, THIRD):
        engine.load_policy(policies.shifted(version), version)
        answered |= dict(engine.step())
    while engine.in_flight:
        answered |= dict(engine.step())
    assert sorted(answered) == sorted(one.id for one in requests)
    for one in requests:
        for completion in answered[one.id]:
            assert policies.gap(one, completion) < 1e-4


def test_models_kept_are_taken_up_again_as_they_were(tiny_model: Path, tmp_path: Path) -> None:
    """Two nodes with models of their own take turns: what one's policy made of its model is there when its turn comes."""
    other = make_tiny_model(tmp_path / "other", tied=False)
    with opener("transformers", models_kept=2) as open_engine:
        engine = open_engine(tiny_model)
        for folder, shift in ((tiny_model, 0.1), (other, 0.2)):
            engine.open_model(str(folder))
            model = AutoModelForCausalLM.from_pretrained(folder)
            weights = {name: p.detach() + shift * torch.randn(p.shape) for name, p in model.named_parameters()}
            save_file(weights, tmp_path / "policy.safetensors")
            engine.load_policy(tmp_path / "policy.safetensors", SECOND)
        answers = {}
        for folder in (other, tiny_model, other, tiny_model):
            engine.open_model(str(folder))
            (group,) = answer_all(engine, [request(3)])
            assert answers.setdefault(folder, [c.token_ids for c in group]) == [c.token_ids for c in group]
            assert group[0].spans[0].version == SECOND
        third = make_tiny_model(tmp_path / "third", tied=False)
        engine.open_model(str(third))
        assert answer_all(engine, [request(3)])[0][0].spans[0].version == FIRST


def test_nodes_with_models_of_their_own_take_turns(open_engine: Opener, tmp_path: Path) -> None:
    tied, untied = Policies(tmp_path / "a", tied=True), Policies(tmp_path / "b", tied=False)
    engine = open_engine(tied.model)
    engine.load_policy(tied.shifted(SECOND), SECOND)
    for policies in (tied, untied, tied):
        engine.open_model(str(policies.model))
        (group,) = answer_all(engine, [request(3)])
        assert all(policies.gap(request(3), completion) < 1e-4 for completion in group)


def test_a_model_that_cannot_be_opened(open_engine: Opener, tiny_model: Path, tmp_path: Path) -> None:
    engine = open_engine(tiny_model)
    with pytest.raises(PolicyUnusable, match="cannot be loaded here"):
        engine.open_model(str(tmp_path / "nothing"))
    engine.open_model(str(tiny_model))
    assert len(answer_all(engine, [request(0)])[0]) == 4


def test_cancelled_requests_are_forgotten(engine: Engine) -> None:
    for number in (0, 1, 3):
        engine.submit(request(number, tokens=30))
    engine.cancel(["r/1", "r/unknown"])
    assert engine.in_flight == 2
    answered: list[str] = []
    while engine.in_flight:
        answered += [id for id, _ in engine.step()]
    assert sorted(answered) == ["r/0", "r/3"]


def test_options_of_other_engines() -> None:
    for generators, said in (
        ({"engine": "transformers", "engine_options": {"max_model_len": 9}}, "the transformers engine has no options"),
        ({"engine": "paced", "engine_options": {"pace": 9}}, "engine_options: .*unexpected keyword argument 'pace'"),
    ):
        with pytest.raises(SettingsError, match=said):
            make_engine(Settings.model_validate({"generators": generators}))
    paced = make_engine(Settings.model_validate({"generators": {"engine": "paced", "engine_options": {"tokens": 3}}}))
    assert [completion.tokens for completion in answer_all(paced, [request(0)])[0]] == [3, 3, 3, 3]


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=needs_vllm)], scope="module")
class TestContinuousBatching:
    """What only an engine can do whose requests join and leave at any token."""

    def test_a_short_answer_does_not_wait_for_a_long_one(self, engine: Engine) -> None:
        engine.submit(request(0, tokens=200))
        engine.step()
        engine.submit(request(1, tokens=2))
        answered: list[str] = []
        while engine.in_flight:
            answered += [id for id, _ in engine.step()]
        assert answered == ["r/1", "r/0"]

    def test_a_policy_changes_in_the_middle_of_a_completion(self, open_engine: Opener, tmp_path: Path) -> None:
        policies = Policies(tmp_path, tied=True)
        engine = open_engine(policies.model)
        one = request(0, completions=8, tokens=60)
        engine.submit(one)
        for _ in range(5):
            engine.step()
        engine.load_policy(policies.shifted(SECOND), SECOND)
        answered: dict[str, list[Completion]] = {}
        while engine.in_flight:
            answered |= dict(engine.step())
        spans = [completion.spans for completion in answered[one.id]]
        assert max(len(found) for found in spans) == 2
        assert all(found[0].end == 5 for found in spans if len(found) == 2)
        assert all(policies.gap(one, completion) < 1e-4 for completion in answered[one.id])

    def test_a_model_that_vllm_cannot_compute_is_refused_when_it_is_opened(
        self, open_engine: Opener, tiny_model: Path, tmp_path: Path
    ) -> None:
        config = Qwen2Config(
            vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(tmp_path / "narrow")
        load_tokenizer(str(tiny_model)).save_pretrained(tmp_path / "narrow")
        engine = open_engine(tiny_model)
        with pytest.raises(PolicyUnusable, match=r"vLLM cannot serve the model .*narrow: .*head_dim=8"):
            engine.open_model(str(tmp_path / "narrow"))
        engine.open_model(str(tiny_model))
        assert len(answer_all(engine, [request(0)])[0]) == 4

    def test_what_is_longer_than_the_context_is_refused(self, engine: Engine) -> None:
        with pytest.raises(RequestUnfit, match="exceed the 512"):
            engine.submit(request(0, tokens=600))
        assert engine.in_flight == 0


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_modle_len": 4096}, "vLLM's EngineArgs have no max_modle_len"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is decided by grapevine; leave it out"),
    ],
)
def test_options_that_vllm_has_not_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    from generators.engines.vllm.engine import VllmEngine

    with pytest.raises(SettingsError, match=said):
        VllmEngine("cpu", options=options)
    with pytest.raises(SettingsError, match="this build of vLLM does not run on cuda"):
        VllmEngine("cuda:1")

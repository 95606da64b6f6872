"""Log-probabilities: whatever the batch, the way and the chunk, those of the plain forward pass; so are the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from learners import logprobs as module
from learners.batches import Encoded, cuts
from learners.logprobs import CompletionLogprobs

VOCABULARY = 131


def qwen2(tied: bool, **more: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.2, **more,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gemma2() -> Any:
    """Sliding layers and capped logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, sliding_window=8,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def cohere() -> Any:
    """Scaled logits: its own forward pass does more than apply the head."""
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, logit_scale=0.3, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return CohereForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2-tied": lambda: qwen2(True),
    "qwen2-untied": lambda: qwen2(False),
    "qwen3": qwen3,
    "llama": llama,
    "gemma2": gemma2,
    "cohere": cohere,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def samples(shared: bool) -> list[Encoded]:
    """Prompts of three lengths, three or four completions each, of 1 to 14 tokens; each its own prompt unless `shared`."""
    chance = np.random.default_rng(1)
    prompts = [chance.integers(0, VOCABULARY, length).tolist() for length in (17, 9, 12)]
    found = []
    for row, length in enumerate((3, 14, 1, 5, 5, 8, 2, 1, 11, 4)):
        own = prompts[row % 3] if shared else [row, *prompts[row % 3]]
        found.append(Encoded(own, chance.integers(0, VOCABULARY, length).tolist(), None, 1.0))
    return found


def by_hand(model: Any, sample: Encoded, temperature: float) -> Tensor:
    """Alone, all logits, the model's own forward pass."""
    ids = torch.tensor([sample.prompt + sample.completion])
    spread = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, dim=-1)
    start = len(sample.prompt) - 1
    steps = torch.arange(len(sample.completion))
    return spread[start + steps, torch.tensor(sample.completion)]


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [None, 3, 1000])  # None: all logits at once
@pytest.mark.parametrize("shared", [True, False])
def test_values_and_gradients_are_those_of_the_plain_forward_pass(
    model: Any, shared: bool, chunk: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_LOGITS", 2**24 if chunk is None else 0)
    batch = samples(shared)
    ours = CompletionLogprobs(model, temperature, chunk or 1)
    found, mask = ours(batch)
    weights = torch.tensor(np.random.default_rng(2).normal(size=found.shape), dtype=torch.float32)
    (found * weights).sum().backward()
    mine = gradients(model)
    total = torch.zeros(())
    for row, sample in enumerate(batch):
        length = len(sample.completion)
        expected = by_hand(model, sample, temperature)
        np.testing.assert_allclose(found[row, :length].detach(), expected.detach(), atol=1e-5)
        assert mask[row].tolist() == [1.0] * length + [0.0] * (mask.shape[1] - length)
        assert not found[row, length:].any()
        total = total + (expected * weights[row, :length]).sum()
    total.backward()
    theirs = gradients(model)
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        largest = max(1.0, theirs[name].abs().max().item())
        np.testing.assert_allclose(gradient, theirs[name], atol=1e-5 * largest, err_msg=name)


def test_each_model_goes_the_way_that_was_meant(model: Any) -> None:
    ours = CompletionLogprobs(model, 1.0, 8)
    ours(samples(True))
    kind = type(model).__name__
    assert ours._uses_backbone == (kind != "CohereForCausalLM")
    assert ours._shares == (kind not in ("CohereForCausalLM", "Gemma2ForCausalLM"))


def test_the_trial_finds_what_the_configuration_does_not_tell() -> None:
    """A model that doubles its logits without a word of it in its configuration."""
    torch.manual_seed(0)
    model = qwen2(False).eval()
    plain = type(model).forward

    def doubled(*args: Any, **options: Any) -> Any:
        output = plain(model, *args, **options)
        output.logits = 2 * output.logits
        return output

    model.forward = doubled
    ours = CompletionLogprobs(model, 1.0, 8)
    batch = samples(True)
    found, _ = ours(batch)
    assert not ours._uses_backbone
    for row, sample in enumerate(batch):
        expected = by_hand(model, sample, 1.0).detach()
        np.testing.assert_allclose(found[row, : len(sample.completion)].detach(), expected, atol=1e-5)


def test_padding_and_company_change_nothing(model: Any) -> None:
    ours = CompletionLogprobs(model, 1.0, 8)
    batch = [*samples(True), *samples(False)]
    with torch.no_grad():
        together = ours(batch)[0]
        for part in (
            [batch[1]],
            batch[::-1],
            batch[3:9],
            batch[:10],
            batch[:10:3],
        ):  # the last: one prompt, no padding before it
            found = ours(part)[0]
            for row, sample in zip(found, part, strict=True):
                length = len(sample.completion)
                np.testing.assert_allclose(row[:length], together[batch.index(sample), :length], atol=1e-5)


class Largest(TorchDispatchMode):
    """The most numbers in any tensor made within."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("tokens", [64, 512])
def test_memory_does_not_grow_with_tokens_times_vocabulary(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, chunk, width = 5_000, 16, 8
    monkeypatch.setattr(module, "FEW_LOGITS", 32 * vocabulary)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    ours = CompletionLogprobs(Qwen2ForCausalLM(config).eval(), 1.0, chunk)
    batch = [Encoded([1, 2, 3], list(range(tokens // 8)), None, 1.0) for _ in range(8)]
    ours(batch[:1])  # the trial of the short cuts is over
    with Largest() as largest:
        ours(batch)[0].sum().backward()
    assert largest.numbers == chunk * vocabulary
    monkeypatch.setattr(module, "FEW_LOGITS", 2**24)
    with Largest() as largest:
        ours(batch)[0].sum().backward()
    assert largest.numbers == tokens * vocabulary, "the measure sees what it should"


def test_similar_lengths_go_together_where_that_saves_tokens() -> None:
    assert cuts([], 10) == []
    assert cuts([5, 5, 5], 10) == [3]
    assert cuts([1] * 50 + [100] * 3, 10) == [50, 53]
    assert cuts([1] * 50 + [100] * 3, 10**6) == [53]
    # Against all ways to cut.
    widths, overhead = [1, 2, 2, 4, 7, 7, 12], 6

    def cost(ends: list[int]) -> int:
        starts = [0, *ends[:-1]]
        return sum(overhead + (end - start) * widths[end - 1] for start, end in zip(starts, ends, strict=True))

    ways = [[i for i in range(1, 7) if mask >> (i - 1) & 1] + [7] for mask in range(64)]
    assert cost(cuts(widths, overhead)) == min(map(cost, ways))


@pytest.mark.parametrize("most", [1, 40, 120, 10**6])
def test_micro_batches_hold_all_samples_within_the_budget(most: int) -> None:
    torch.manual_seed(0)
    ours = CompletionLogprobs(qwen2(True).eval(), 1.0, 8)
    for batch in (samples(True), samples(False)):
        empty = Encoded([1, 2], [], None, 1.0)
        parts = ours.micro_batches([empty, *batch], most)
        assert sorted(map(id, batch)) == sorted(id(sample) for part in parts for sample in part)
        assert all(len(part) == 1 or len(part) * max(map(len, part)) <= most for part in parts)


def test_short_numbers_stay_near() -> None:
    """bfloat16 products, chunked and not: the same to their rounding, with a gradient for the float32 weights."""
    torch.manual_seed(0)
    model = qwen2(True).eval()
    batch = samples(True)
    with torch.no_grad():
        exact, _ = CompletionLogprobs(model, 1.0, 4)(batch)
    half = CompletionLogprobs(model, 1.0, 4, autocast=torch.bfloat16)
    found, _ = half(batch)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert 0 < (found - exact).abs().max() < 0.3

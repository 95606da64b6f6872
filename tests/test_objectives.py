"""The losses against loops over numbers, written from the papers' formulas; their gradients against differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from learners.objectives import (
    OBJECTIVES,
    hacpo,
    kl_penalty,
    likelihood_weights,
    luffy,
    token_weights,
    truncated_importance,
)

Floats = NDArray[np.float64]
LOW, HIGH = 0.2, 0.28
EXPONENT = 2.0


# --- the formulas, token by token; `held` is what carries no gradient: the log-probabilities where it is taken ---


def length_of(mask: Floats, row: int) -> int:
    return sum(1 for present in mask[row] if present)


def mean_over(values: Floats, mask: Floats, row: int) -> float:
    present = [float(value) for value, real in zip(values[row], mask[row], strict=True) if real]
    return sum(present) / length_of(mask, row)


def smaller(ratio: float, advantage: float) -> float:
    return float(min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage))


def grpo_by_hand(new: Floats, held: Floats, old: Floats, advantages: Floats, row: int, at: int, mask: Floats) -> float:
    return -smaller(math.exp(new[row, at] - old[row, at]), advantages[row])


def gspo_by_hand(new: Floats, held: Floats, old: Floats, advantages: Floats, row: int, at: int, mask: Floats) -> float:
    return -smaller(math.exp(mean_over(new, mask, row) - mean_over(old, mask, row)), advantages[row])


def cispo_by_hand(new: Floats, held: Floats, old: Floats, advantages: Floats, row: int, at: int, mask: Floats) -> float:
    return float(-min(math.exp(held[row, at] - old[row, at]), 1 + HIGH) * advantages[row] * new[row, at])


def luffy_by_hand(new: Floats, held: Floats, old: Floats, advantages: Floats, row: int, at: int, mask: Floats) -> float:
    probability = math.exp(new[row, at])
    return float(-probability / (probability + 0.1) * advantages[row])


def hacpo_by_hand(new: Floats, held: Floats, old: Floats, advantages: Floats, row: int, at: int, mask: Floats) -> float:
    """`old` stands in for the sender: its sum over row 0, 2, 3, ... is told, that of row 1 is not."""
    if row == 1:
        return luffy_by_hand(new, held, old, advantages, row, at, mask)

    def clipped(own: Floats) -> float:
        return min(max(math.exp(mean_over(own, mask, row) - mean_over(old, mask, row)), 1 - LOW), 1.0)

    return float(-clipped(new) * clipped(held) ** EXPONENT * advantages[row])


def hacpo_called(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    sender = torch.where(mask.bool(), old, 0.0).sum(1)
    sender[1] = math.nan
    return hacpo(new, torch.full_like(old, math.nan), advantages, mask, sender, low, EXPONENT)


def luffy_called(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    return luffy(new, advantages, mask)


BY_HAND = {
    "grpo": grpo_by_hand,
    "dr_grpo": grpo_by_hand,
    "gspo": gspo_by_hand,
    "cispo": cispo_by_hand,
    "hacpo": hacpo_by_hand,
    "luffy": luffy_by_hand,
}
LOSSES = {**OBJECTIVES, "hacpo": hacpo_called, "luffy": luffy_called}


def by_hand(name: str, new: Floats, held: Floats, old: Floats, advantages: Floats, mask: Floats) -> Floats:
    losses = np.zeros_like(new)
    for row, at in np.ndindex(new.shape):
        if mask[row, at]:
            losses[row, at] = BY_HAND[name](new, held, old, advantages, row, at, mask)
    return losses


def slopes(total: Callable[[Floats], float], point: Floats) -> Floats:
    """Central differences."""
    gradient = np.zeros_like(point)
    for place in np.ndindex(point.shape):
        step = np.zeros_like(point)
        step[place] = 1e-6
        gradient[place] = (total(point + step) - total(point - step)) / 2e-6
    return gradient


def some_batch(seed: int, spread: float) -> tuple[Floats, Floats, Floats, Floats]:
    """New and old log-probabilities, advantages of both signs and zero, and a mask of ragged lengths."""
    chance = np.random.default_rng(seed)
    old = -chance.exponential(size=(5, 6)) - 0.01
    # A shift of the whole row moves the sequences' ratios past their clips, too.
    new = np.minimum(old + spread * (chance.normal(size=old.shape) + chance.normal(size=(5, 1))), -0.001)
    advantages = chance.normal(size=5)
    advantages[3] = 0.0
    mask = (np.arange(6) < np.array([6, 4, 1, 3, 5])[:, None]).astype(float)
    return new, old, advantages, mask


def called(
    name: str, new: Floats, old: Floats, advantages: Floats, mask: Floats, weights: Floats | None = None
) -> tuple[Floats, Floats]:
    """The losses and the gradient of their weighted sum."""
    logprobs = torch.tensor(new, requires_grad=True)
    losses = LOSSES[name](logprobs, torch.tensor(old), torch.tensor(advantages), torch.tensor(mask), LOW, HIGH)
    (losses * torch.tensor(np.ones_like(new) if weights is None else weights)).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return losses.detach().numpy(), logprobs.grad.numpy()


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_losses_and_gradients_agree_with_the_formulas(name: str, spread: float, seed: int) -> None:
    new, old, advantages, mask = some_batch(seed, spread)
    if spread == 0.0:
        # Off the corner at ratio 1, where hacpo's slope differs to the left and to the right.
        new = new - 1e-3
    weights = np.random.default_rng(seed).uniform(0.1, 2.0, size=new.shape)
    losses, gradient = called(name, new, old, advantages, mask, weights)
    np.testing.assert_allclose(losses, by_hand(name, new, new, old, advantages, mask), atol=1e-10)
    expected = slopes(lambda at: float((by_hand(name, at, new, old, advantages, mask) * weights).sum()), new)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_padding_never_matters(name: str, rubbish: float) -> None:
    new, old, advantages, mask = some_batch(7, 0.3)
    losses, gradient = called(name, new, old, advantages, mask)
    dirty_new, dirty_old = (np.where(mask == 1, values, rubbish) for values in (new, old))
    with_rubbish = called(name, dirty_new, dirty_old, advantages, mask)
    np.testing.assert_array_equal(with_rubbish[0], losses)
    np.testing.assert_array_equal(with_rubbish[1], gradient)
    assert not losses[mask == 0].any()
    assert not gradient[mask == 0].any()


@pytest.mark.parametrize("name", LOSSES)
def test_the_last_token_carries_gradient(name: str) -> None:
    """The end of sequence is a completion's last token: it has to be learnt like the others."""
    new, old, advantages, mask = some_batch(8, 0.0)
    _, gradient = called(name, new - 1e-3, old, advantages, mask)
    for row, length in enumerate(mask.sum(1).astype(int)):
        assert (gradient[row, length - 1] != 0) == (advantages[row] != 0)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_written_is_no_loss(name: str) -> None:
    new, old, advantages, mask = some_batch(9, 0.3)
    losses, gradient = called(name, new, old, advantages, 0 * mask)
    assert not losses.any()
    assert not gradient.any()


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "value", "moves"),
    [
        ("grpo", 1.0, 1.0, 1.0, True),
        ("grpo", 1.27, 1.0, 1.27, True),
        ("grpo", 1.5, 1.0, 1.28, False),  # far enough up: no further reward
        ("grpo", 0.5, 1.0, 0.5, True),  # below what it was: still pulled up
        ("grpo", 0.81, -1.0, -0.81, True),
        ("grpo", 0.5, -1.0, -0.8, False),  # far enough down
        ("grpo", 1.5, -1.0, -1.5, True),  # above what it was: still pushed down
        ("gspo", 1.5, 1.0, 1.28, False),
        ("gspo", 1.5, -1.0, -1.5, True),
        ("cispo", 1.5, 1.0, 1.28 * math.log(1.5), True),  # capped, and moved all the same
        ("cispo", 0.1, -1.0, -0.1 * math.log(0.1), True),
        ("hacpo", 1.0, 1.0, 1.0, True),  # alike
        ("hacpo", 0.9, 1.0, 0.9**3, True),
        ("hacpo", 0.9, -1.0, -(0.9**3), True),
        ("hacpo", 1.1, 1.0, 1.0, False),  # likelier for us than for its sender: nothing to learn, nor ...
        ("hacpo", 1.1, -1.0, -1.0, False),  # ... to unlearn: the clip is a plain one
        ("hacpo", 0.5, 1.0, 0.8**3, False),
        ("hacpo", 0.5, -1.0, -(0.8**3), False),
    ],
)
def test_clipping(name: str, ratio: float, advantage: float, value: float, moves: bool) -> None:
    new = np.full((1, 2), math.log(ratio))
    ones = np.ones((1, 2))
    if name == "hacpo":
        logprobs = torch.tensor(new, requires_grad=True)
        losses = hacpo(
            logprobs, torch.zeros(1, 2), torch.tensor([advantage]), torch.tensor(ones), torch.zeros(1), LOW, EXPONENT
        )
        losses.sum().backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        found, gradient = losses.detach().numpy(), logprobs.grad.numpy()
    else:
        found, gradient = called(name, new, 0 * ones, np.array([advantage]), ones)
    np.testing.assert_allclose(found, -value, atol=1e-6)
    assert gradient.astype(bool).all() == moves
    assert gradient.astype(bool).any() == moves


@pytest.mark.parametrize("claim", [-1e30, -1e5, 1e5, 1e30, math.inf, -math.inf, math.nan])
def test_a_senders_claim_cannot_break_the_update(claim: float) -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.25], [0.5, 0.25]])).requires_grad_()
    sender = torch.tensor([claim, -2.0])
    hacpo(logprobs, logprobs.detach(), torch.ones(2), torch.ones(2, 2), sender, exponent=3.0).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad.abs().sum() < 10


def test_the_power_of_zero_leaves_the_ratio_alone() -> None:
    logprobs, sender = torch.full((1, 4), -0.3), torch.tensor([-0.8])
    (loss,) = hacpo(logprobs, logprobs, torch.ones(1), torch.ones(1, 4), sender, exponent=0.0)
    np.testing.assert_allclose(loss, -math.exp((-1.2 + 0.8) / 4), rtol=1e-6)


# --- weights ---


def test_token_weights_by_hand() -> None:
    """Two micro-batches of a minibatch whose third completion has no signal, so is counted and not computed."""
    lengths = [torch.tensor([3, 5]), torch.tensor([4])]
    total, samples, longest = 3 + 5 + 4 + 2, 4, 10
    expected = {
        "grpo": ([1 / 14, 1 / 14], [1 / 14]),
        "cispo": ([1 / 14, 1 / 14], [1 / 14]),
        "dr_grpo": ([1 / 40, 1 / 40], [1 / 40]),
        "gspo": ([1 / 12, 1 / 20], [1 / 16]),
    }
    assert expected.keys() == OBJECTIVES.keys()
    for objective, weights in expected.items():
        for own, wanted in zip(lengths, weights, strict=True):
            np.testing.assert_allclose(token_weights(objective, own, total, samples, longest), wanted, rtol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_token_weights_of_nothing_are_finite(objective: str) -> None:
    assert torch.isfinite(token_weights(objective, torch.tensor([0]), 0, 0, 8)).all()


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="ppo"):
        token_weights("ppo", torch.tensor([1]), 1, 1, 1)


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=8),
)
def test_kl_is_never_negative_and_zero_where_alike(values: list[tuple[float, float]]) -> None:
    new, reference = torch.tensor(values, dtype=torch.float64).unbind(1)
    new.requires_grad_()
    penalty = kl_penalty(new, reference)
    penalty.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    for found, slope, (own, other) in zip(penalty.tolist(), new.grad.tolist(), values, strict=True):
        assert found == pytest.approx(math.exp(other - own) - (other - own) - 1, rel=1e-9, abs=1e-12)
        assert found >= 0
        assert slope == pytest.approx(1 - math.exp(other - own), rel=1e-9, abs=1e-12)
    assert kl_penalty(reference, reference).tolist() == [0.0] * len(values)


def test_kl_is_right_on_average() -> None:
    own, other = (torch.softmax(torch.tensor(logits), 0) for logits in ([1.0, 0.0, -1.0], [0.0, 0.5, 0.0]))
    expected = (own * (own / other).log()).sum().item()
    assert (own * kl_penalty(own.log(), other.log())).sum().item() == pytest.approx(expected, abs=1e-6)


def test_kls_gradient_with_the_ratio_is_the_divergences() -> None:
    """Summed over all tokens at the policy's own probabilities, by the logits of three tokens."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    other = torch.log_softmax(torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64), 0)

    def slope(divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[float]:
        logprobs = torch.log_softmax(logits, 0)
        (gradient,) = torch.autograd.grad(divergence(logprobs, logprobs.detach()), logits)
        return [float(value) for value in gradient]

    exact = slope(lambda own, _: (own.exp() * (own - other)).sum())
    plain = slope(lambda own, held: (held.exp() * kl_penalty(own, other)).sum())
    corrected = slope(lambda own, held: (held.exp() * kl_penalty(own, other, held)).sum())
    assert corrected == pytest.approx(exact, abs=1e-12)
    assert plain != pytest.approx(exact, abs=1e-2)


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.log(torch.tensor([[0.5, 0.5, 0.9]])).requires_grad_()
    sampled = torch.log(torch.tensor([[0.5, 0.8, 0.1]]))
    weights = truncated_importance(old, sampled, cap=2.0)
    np.testing.assert_allclose(weights.numpy(), [[1.0, 0.625, 2.0]], atol=1e-6)
    assert not weights.requires_grad


def test_likelihood_weights_by_hand() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.125, 0.9], [0.9, 0.9, 0.9], [0.1, 0.2, 0.3]])).requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    weights = likelihood_weights(logprobs, mask, 2.0)
    np.testing.assert_allclose(weights.numpy(), [0.25**2, 0.9**2, 1.0], rtol=1e-5)
    assert not weights.requires_grad
    assert likelihood_weights(logprobs, mask, 0.0).tolist() == [1.0, 1.0, 1.0]

"""Policy-gradient losses: pure functions of log-probabilities.

Shapes are [samples, tokens], log-probabilities in nats, advantages [samples]; `mask` is 1 for completion tokens and 0 for
padding. Every loss comes per token and unreduced, 0 where the mask is 0, and what stands there in the other arguments never
matters. A minibatch's loss is the sum of the losses times `token_weights`, so that it can be accumulated over
micro-batches of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]


def grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The clipped surrogate of every token.

    GRPO (arXiv 2402.03300, equation 3) without the KL term, with the asymmetric clip of DAPO (arXiv 2503.14476,
    equation 8), as SAPO uses it (arXiv 2509.08721, section 5).

    Args:
        logprobs: of the policy being updated, with gradient.
        old_logprobs: of the policy at the start of the round, without gradient.
        advantages: [samples], one per completion.
        mask: 1 for completion tokens, 0 for padding.
        clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high].
    """
    ratio = torch.exp(_where(mask, logprobs - old_logprobs))
    return _where(mask, -_clipped_surrogate(ratio, advantages.unsqueeze(1), clip_low, clip_high))


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The clipped surrogate of every sequence, repeated over its tokens.

    GSPO (arXiv 2507.18071, equations 5 to 7): the ratio is the sequence's to the power 1 / length, the gradient flows
    through it. Its clip ranges are far narrower than a token's (the paper's: 3e-4 below, 4e-4 above). Arguments as in
    `grpo`.
    """
    log_ratio = _where(mask, logprobs - old_logprobs).sum(1, keepdim=True) / _lengths(mask).unsqueeze(1)
    surrogate = _clipped_surrogate(torch.exp(log_ratio), advantages.unsqueeze(1), clip_low, clip_high)
    return _where(mask, -surrogate)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The log-probability of every token, weighed by its advantage and its capped ratio; no token loses its gradient.

    CISPO (arXiv 2506.13585, equations 4 and 5): the ratio carries no gradient and is capped above only, at 1 + clip_high
    (some implementations, TRL's among them, are given that sum). `clip_low` is not used. Arguments as in `grpo`.
    """
    ratio = torch.exp(_where(mask, logprobs - old_logprobs)).clamp(max=1 + clip_high).detach()
    return _where(mask, -ratio * advantages.unsqueeze(1) * logprobs)


# Dr. GRPO (arXiv 2503.20783) shares GRPO's token loss: it differs in `token_weights` and in its advantages.
OBJECTIVES: dict[str, Objective] = {"grpo": grpo, "dr_grpo": grpo, "gspo": gspo, "cispo": cispo}


def token_weights(objective: str, lengths: Tensor, total_tokens: int, samples: int, max_new_tokens: int) -> Tensor:
    """What one token's loss counts in the loss of its minibatch: [samples of this micro-batch], one weight per row.

    `grpo` and `cispo` take the mean over all tokens (DAPO, arXiv 2503.14476, equation 8), `dr_grpo` divides by what could
    have been written, so that long answers count no less per token (arXiv 2503.20783, section 3.2), and `gspo` takes the
    mean over sequences of their means (arXiv 2507.18071, equation 5).

    Args:
        lengths: tokens of every completion of this micro-batch.
        total_tokens, samples: of the whole minibatch, completions without signal included.
        max_new_tokens: the longest completion allowed.

    Raises:
        ValueError: no such objective.
    """
    if objective in ("grpo", "cispo"):
        return torch.full(lengths.shape, 1 / max(total_tokens, 1), device=lengths.device)
    if objective == "dr_grpo":
        return torch.full(lengths.shape, 1 / max(samples * max_new_tokens, 1), device=lengths.device)
    if objective == "gspo":
        return 1 / (max(samples, 1) * lengths.clamp(min=1).float())
    raise ValueError(f"no objective is called {objective!r}")


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """The divergence from a reference policy, per token: never negative, right on average over sampled tokens.

    Schulman's estimator k3 (joschu.net/blog/kl-approx.html), as in GRPO (arXiv 2402.03300, equation 4). Its gradient is not
    that of the divergence, though: given `old_logprobs`, it is multiplied by the ratio to the policy that sampled, which
    makes it so (DeepSeek-V3.2, arXiv 2512.02556; TRL's default). Not masked: 0 where all log-probabilities are alike.
    """
    difference = reference_logprobs - logprobs
    penalty = torch.exp(difference) - difference - 1
    return penalty if old_logprobs is None else penalty * torch.exp(logprobs - old_logprobs)


def truncated_importance(old_logprobs: Tensor, sampled_logprobs: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance weights: min(p_learner / p_generator, cap), without gradient.

    Corrects for what the generator's policy or arithmetic differed in when it sampled (IMPALA's truncation,
    arXiv 1802.01561, section 4, applied per token).
    """
    return torch.exp(old_logprobs - sampled_logprobs).clamp(max=cap).detach()


def hacpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sender_logprobs: Tensor,
    clip_low: float = 0.2,
    exponent: float = 1.0,
) -> Tensor:
    """The surrogate of another policy's sequences, repeated over their tokens; `luffy` where the sender tells no likelihood.

    HACPO (arXiv 2603.02604, equations 56 to 59): the ratio s = (own probability / sender's)^(1 / length) is clipped to
    [1 - clip_low, 1] and weighed by its own power, which carries no gradient. The clip is a plain one, not the smaller of
    two surrogates as in PPO: outside of the interval a sequence has no gradient whatever the sign of its advantage. So a
    text that we write more readily than its sender did (s > 1) teaches nothing, and neither does one too unlike
    our own. The power is that of the clipped ratio, as in the authors' code; where there is gradient the two are the same.

    Sender and receiver may count different tokens in one text. Both sums are the probability of that text, so their
    difference is divided once, by our own length; with one tokenizer this is the paper's ratio of means.

    Args:
        logprobs: of the policy being updated, with gradient.
        old_logprobs: not used, as the ratio is to the sender; here so that all losses begin alike.
        advantages: [samples], already multiplied by the capability factor peer / own.
        sender_logprobs: [samples], of the whole sequence as its sender saw it; nan where unknown.
        clip_low: the ratio stays within [1 - clip_low, 1]: foreign text is never up-weighted.
        exponent: how strongly unlikely text is weighed down, the paper's alpha: 1 to 3.
    """
    known = ~torch.isnan(sender_logprobs)
    log_ratio = (_where(mask, logprobs).sum(1) - sender_logprobs.nan_to_num(nan=0.0)) / _lengths(mask)
    # Clipped before the exponential: a sender that claims an absurd likelihood must not make the gradient infinite.
    ratio = torch.exp(log_ratio.clamp(math.log(1 - clip_low) if clip_low < 1 else -math.inf, 0.0))
    weighed = -ratio * ratio.detach() ** exponent * advantages
    return torch.where(known.unsqueeze(1), _where(mask, weighed.unsqueeze(1)), luffy(logprobs, advantages, mask))


def luffy(logprobs: Tensor, advantages: Tensor, mask: Tensor, gamma: float = 0.1) -> Tensor:
    """Another policy's tokens, weighed by p / (p + gamma) in place of a ratio, without a clip.

    LUFFY's policy shaping (arXiv 2504.14945, section 3.2). It asks nothing of the sender, and pulls tokens of small
    probability up to 1 / gamma times as hard as p itself would: that is where foreign text has something to teach.
    """
    # p / (p + gamma) written as a function of log p, which cannot overflow.
    return _where(mask, -torch.sigmoid(_where(mask, logprobs) - math.log(gamma)) * advantages.unsqueeze(1))


def likelihood_weights(old_logprobs: Tensor, mask: Tensor, power: float) -> Tensor:
    """How readily we would have written each completion: (geometric mean of its token probabilities)^power, no gradient.

    [samples], at most 1; combines with any loss of foreign completions by multiplication.
    """
    mean = _where(mask, old_logprobs).sum(1) / _lengths(mask)
    return torch.exp(power * mean).detach()


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The smaller of the plain and the clipped gain: no gradient once the ratio has moved far enough (PPO)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def _where(mask: Tensor, values: Tensor) -> Tensor:
    """`values` at the mask's shape, 0 where it is 0: unlike a product, also where they are not finite."""
    return torch.where(mask.bool(), values, 0.0)


def _lengths(mask: Tensor) -> Tensor:
    """[samples]: completion tokens, 1 where there are none, as they are divided by."""
    return mask.sum(1).clamp(min=1)

"""Policy-gradient losses: pure functions of log-probabilities. Shapes: [samples, tokens]; log-probabilities in nats."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The clipped policy-gradient objective as a sum over tokens; divide by the round's token count for the token mean.

    GRPO (arXiv 2402.03300, equation 3) without the KL term, with the asymmetric clip and the token mean of DAPO
    (arXiv 2503.14476, equation 8), as SAPO uses it (arXiv 2509.08721, section 5).

    Args:
        logprobs: of the policy being updated, with gradient.
        old_logprobs: of the policy at the start of the round, without gradient.
        advantages: [samples], one per completion.
        mask: 1 for completion tokens, 0 for prompt and padding.
        weights: what each token counts, without gradient (see `truncated_importance`); 1 for none.
        clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high].
    """
    ratio = torch.exp(logprobs - old_logprobs)
    advantage = advantages.unsqueeze(1)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    return -(surrogate * weights * mask).sum()


def truncated_importance(old_logprobs: Tensor, sampled_logprobs: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance weights: min(p_learner / p_generator, cap), without gradient.

    Corrects for what the generator's policy or arithmetic differed in when it sampled (IMPALA's truncation,
    arXiv 1802.01561, section 4, applied per token).
    """
    return torch.exp(old_logprobs - sampled_logprobs).clamp(max=cap).detach()

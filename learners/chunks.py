"""The head of a large vocabulary, some tokens at a time: log-probabilities without all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class ChunkedLogprobs(torch.autograd.Function):
    """Head, temperature and log-softmax at the targets, `chunk` tokens at a time; logits are made again for the gradient.

    Holds one chunk of logits, [chunk, vocabulary] in float32, and no more, forward and backward. The idea of
    Liger-Kernel's fused linear losses (arXiv 2410.10989, section 3.2), for any loss of the log-probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        temperature: float, softcap: float | None, chunk: int, product: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """[tokens] in float32, of `hidden` [tokens, width] and `weight` [vocabulary, width], multiplied as `product`."""
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(product)
            logprobs, heights = [], []
            for start in range(0, len(hidden), chunk):
                logits = _logits(hidden[start : start + chunk], cast, bias, softcap).div_(temperature)
                chosen = logits.gather(1, targets[start : start + chunk].unsqueeze(1)).squeeze(1)
                most = logits.amax(1)
                height = logits.sub_(most.unsqueeze(1)).exp_().sum(1).log_().add_(most)
                logprobs.append(chosen - height)
                heights.append(height)
                del logits  # or the next chunk would be made beside it
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(heights))
        ctx.options = temperature, softcap, chunk, product
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logit = (1 at the target) - probability, over the temperature."""
        hidden, weight, bias, targets, heights = ctx.saved_tensors
        temperature, softcap, chunk, product = ctx.options
        (gradient,) = gradients
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(product)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                logits = _logits(hidden[part], cast, bias, softcap)
                slope = None if softcap is None else 1 - (logits / softcap) ** 2
                logits.div_(temperature).sub_(heights[part].unsqueeze(1)).exp_()
                share = gradient[part].unsqueeze(1) / temperature
                logits.mul_(-share).scatter_add_(1, targets[part].unsqueeze(1), share)
                if slope is not None:
                    logits.mul_(slope)
                if of_bias is not None:
                    of_bias += logits.sum(0)
                logits = logits.to(product)
                if of_hidden is not None:
                    of_hidden[part] = logits @ cast
                if of_weight is not None and product == of_weight.dtype:
                    of_weight.addmm_(logits.t(), hidden[part].to(product))
                elif of_weight is not None:
                    of_weight += logits.t() @ hidden[part].to(product)
                del logits, slope
        return of_hidden, of_weight, of_bias, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """[tokens, vocabulary] in float32, before the temperature; a tensor of its own, to be changed in place."""
    logits = functional.linear(hidden.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).float()
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

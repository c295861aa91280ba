"""Sampling: choose the next token from the logits, and continue a text token by token."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from errors import UserError, check_numbers


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Forbid all but the k likeliest tokens. (B, V) -> (B, V)."""
    kth = logits.topk(min(k, logits.size(-1))).values[:, -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to p (Holtzman et al. 2020). (B, V) -> (B, V)."""
    probabilities, order = logits.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities  # the probability of all likelier tokens; 0 for the likeliest
    return logits.masked_fill((before >= p).scatter(-1, order, before >= p), -math.inf)


@dataclass(frozen=True)
class Sampler:
    """Choice of the next token. Raises UserError if an option is out of range."""

    temperature: float = 1.0
    """Divides the logits: below 1 the text is more predictable, above 1 less; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens only; 0 is no limit."""
    top_p: float | None = None
    """Choose among the fewest likeliest tokens whose probabilities sum to this."""

    def __post_init__(self) -> None:
        check_numbers(self, top_p=(1e-9, 1))

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Choose one token per row: (B, V) -> (B, 1)."""
        if self.temperature > 1e-6:  # else logits divided by it might be infinite
            logits = logits.float() / self.temperature
            if self.top_k:
                logits = keep_top_k(logits, self.top_k)
            if self.top_p is not None:
                logits = keep_top_p(logits, self.top_p)
            # The largest p / Exp(1) is a draw from p, as by torch.multinomial, which makes the host wait for the GPU.
            logits = logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=generator)
        return logits.max(-1, keepdim=True).indices  # on a CPU argmax takes longer


@torch.inference_mode()
def stream(model: nn.Module, idx: Tensor, num_tokens: int, sampler: Sampler, seed: int | None) -> Iterator[Tensor]:
    """Continue each row of idx, (B, T) with T >= 1: yield num_tokens tensors (B, 1), the next token of each row.

    The model is a `GPT`, which sees the last `context_length` tokens at most. A full context drops its older half: the
    cache is refilled once in half a context. `seed` is that of `GPT.generate`. Raises UserError if idx is empty.
    """
    if idx.size(1) == 0:
        raise UserError("the prompt is empty: give at least one token to continue")
    from model.recorded import reader  # on CUDA a graph, which is faster, and nothing else

    generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
    context_length = model.config.context_length
    context = idx[:, -context_length:]
    modes = [(part, part.training) for part in model.modules()]
    with reader(model, context, min(context_length, context.size(1) + num_tokens)) as (caches, read):
        model.eval()
        try:
            for _ in range(num_tokens):
                if context.size(1) > context_length:
                    context = context[:, -(context_length - context_length // 2) :]
                    for cache in caches:
                        cache.length = 0  # forgets all positions and keeps the storage
                token = sampler.choose(read(context[:, caches[0].length :]), generator)
                context = torch.cat((context, token), dim=1)
                yield token
        finally:
            for part, was_training in modes:
                part.training = was_training

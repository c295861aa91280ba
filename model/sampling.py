"""From logits to text: which token comes next, and the loop that asks again and again."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.config import ModelError

if TYPE_CHECKING:
    from model.gpt import GPT

MINUS_INFINITY = float("-inf")


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Forbid all but the k likeliest tokens. (B, V) -> (B, V)."""
    kth = logits.topk(min(k, logits.size(-1))).values[:, -1:]
    return logits.masked_fill(logits < kth, MINUS_INFINITY)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2020): keep the fewest likeliest tokens whose probabilities reach p."""
    probabilities, order = logits.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities  # the mass of everything likelier; 0 for the first
    return logits.masked_fill((before >= p).scatter(-1, order, before >= p), MINUS_INFINITY)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Forbid tokens less than p times as likely as the likeliest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), MINUS_INFINITY)


def next_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose one token per row: (B, V) -> (B, 1). Temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return torch.multinomial(logits.softmax(-1), num_samples=1, generator=generator)


def stream(
    model: "GPT",
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    use_cache: bool = True,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Yield max_new_tokens times a (B, 1) tensor: the next token of each row of idx (B, T), T >= 1.

    The model sees at most `context_length` tokens. Beyond that a window slides: a longer prompt is cut to its last
    `context_length` tokens, and when the window is full it drops its older half, so that the cache is refilled once
    in half a context and not at every token. With and without cache the window, and so the text, is the same.
    Raises ModelError for an empty idx or an option out of its range.
    """
    if idx.size(1) == 0:
        raise ModelError("the prompt is empty: give at least one token to continue")
    if not 0 <= temperature < math.inf:
        raise ModelError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ModelError(f"top_k must be at least 1, got {top_k}")
    for name, p in (("top_p", top_p), ("min_p", min_p)):
        if p is not None and not 0 < p <= 1:
            raise ModelError(f"{name} must be above 0 and at most 1, got {p}")
    generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
    choose = partial(next_token, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, generator=generator)
    return generate_tokens(model, idx, max_new_tokens, choose, use_cache)


@torch.inference_mode()
def generate_tokens(
    model: "GPT", idx: Tensor, max_new_tokens: int, choose: Callable[[Tensor], Tensor], use_cache: bool
) -> Iterator[Tensor]:
    """The loop behind `stream`; choose takes logits (B, V) to tokens (B, 1)."""
    context_length = model.config.context_length
    window = idx[:, -context_length:]
    caches = model.new_cache(len(idx), min(context_length, window.size(1) + max_new_tokens)) if use_cache else None
    unread = window  # what the cache has not stored yet
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if window.size(1) > context_length:
                window = unread = window[:, -(context_length - context_length // 2) :]
                for cache in caches or ():
                    cache.clear()
            hidden = model.hidden(unread, caches) if caches else model.hidden(window)
            unread = choose(model.logits(hidden[:, -1]))
            window = torch.cat((window, unread), dim=1)
            yield unread
    finally:
        model.train(was_training)

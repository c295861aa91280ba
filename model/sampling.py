"""Sampling: choose the next token from the logits, and continue a text token by token."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from model.config import ModelError


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Forbid all but the k likeliest tokens. (B, V) -> (B, V)."""
    kth = logits.topk(min(k, logits.size(-1))).values[:, -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to p or more (nucleus sampling, Holtzman et al. 2020).

    (B, V) -> (B, V).
    """
    probabilities, order = logits.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities  # the probability of all likelier tokens; 0 for the likeliest
    return logits.masked_fill((before >= p).scatter(-1, order, before >= p), -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Forbid tokens less than p times as likely as the likeliest (Nguyen et al. 2024). (B, V) -> (B, V)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -math.inf)


def next_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    generator: torch.Generator | None = None,
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
    # torch.multinomial draws the same token from the same noise, but first waits for the GPU to check its input.
    probabilities = logits.softmax(-1)
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise).argmax(-1, keepdim=True)


def stream(
    model: nn.Module,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    use_cache: bool = True,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Continue each row of idx, (B, T) with T >= 1: yield max_new_tokens tensors (B, 1), the next token of each row.

    The model is a `GPT`, which sees at most `context_length` tokens at a time. Beyond that a window slides: of a longer
    prompt it sees the last `context_length` tokens, and when the window is full it drops its older half. So the cache
    is refilled once in half a context and not at every token. The window, and so the text, is the same without a cache,
    except where rounding decides between two tokens.

    The other arguments are those of `GPT.generate`. Raises ModelError if idx is empty or an option out of its range.
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
    model: nn.Module, idx: Tensor, max_new_tokens: int, choose: Callable[[Tensor], Tensor], use_cache: bool
) -> Iterator[Tensor]:
    """Run the loop of `stream`. `choose` takes logits (B, V) to tokens (B, 1)."""
    context_length = model.config.context_length
    window = idx[:, -context_length:]
    caches = model.new_cache(len(idx), min(context_length, window.size(1) + max_new_tokens)) if use_cache else []
    unread = window  # the tokens that the model has yet to read
    was_training, cudnn = model.training, torch.backends.cuda.cudnn_sdp_enabled()
    model.eval()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would make a new plan for every number of keys
    try:
        for _ in range(max_new_tokens):
            if window.size(1) > context_length:
                window = window[:, -(context_length - context_length // 2) :]
                unread = window
                for cache in caches:
                    cache.clear()
            hidden = model.hidden(unread if use_cache else window, caches)
            unread = choose(model.logits(hidden[:, -1]))
            window = torch.cat((window, unread), dim=1)
            yield unread
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        model.train(was_training)

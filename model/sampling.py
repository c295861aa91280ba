"""From logits to text: which token comes next, and the loop that asks again and again."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.cache import LayerCache, StaticCache
from model.config import ModelError

if TYPE_CHECKING:
    from model.gpt import GPT

MINUS_INFINITY = float("-inf")
BUCKET = 256  # positions: a compiled step is made for a cache of one size, so let there be few


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
    noise: Tensor | None,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Choose one token per row: (B, V) -> (B, 1). Temperature 0 takes the likeliest.

    noise, (B, V), is drawn from the exponential distribution: of waiting times with the probabilities as their rates,
    each is the shortest with its probability. So does torch.multinomial, but not inside a compiled step.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return (logits.softmax(-1) / noise).argmax(-1, keepdim=True)


def stream(
    model: "GPT",
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    use_cache: bool = True,
    seed: int | None = None,
    compile: bool = False,
) -> Iterator[Tensor]:
    """Yield max_new_tokens times a (B, 1) tensor: the next token of each prompt, a row of (B, T) or one of B (T,).

    The likeliest tokens of a prompt are those it has alone, whatever else is in the batch. What a seed draws depends
    on all of it: the same seed gives the same tokens to the same prompts in the same order.

    The model sees at most `context_length` tokens. Beyond that a window slides: a longer prompt is cut to its last
    `context_length` tokens, and when the window is full it drops its older half, so that the cache is refilled once
    in half a context and not at every token. With and without cache the window, and so the text, is the same, unless
    rounding in bfloat16 decides between two tokens.

    compile: let torch.compile make one program of a step, on CUDA one graph that is launched at once. That takes a
    while before the first token. Raises ModelError for an empty prompt or an option out of its range.
    """
    if not len(prompts) or any(len(prompt) == 0 for prompt in prompts):
        raise ModelError("the prompt is empty: give at least one token to continue")
    if not 0 <= temperature < math.inf:
        raise ModelError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ModelError(f"top_k must be at least 1, got {top_k}")
    for name, p in (("top_p", top_p), ("min_p", min_p)):
        if p is not None and not 0 < p <= 1:
            raise ModelError(f"{name} must be above 0 and at most 1, got {p}")
    if compile and not use_cache:
        raise ModelError("only a step with a cache can be compiled")
    device = model.lm_head.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    noise = None if temperature == 0 else torch.empty(len(prompts), model.config.vocab_size, device=device)
    choose = partial(next_token, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    def draw() -> Tensor | None:
        return noise if noise is None else noise.exponential_(generator=generator)

    windows = Windows(list(prompts), model.config.context_length)
    return generate_tokens(model, windows, max_new_tokens, choose, draw, use_cache, compile)


class Windows:
    """What the model sees of each text: all of it as long as that fits, then its newer part."""

    def __init__(self, prompts: list[Tensor], context_length: int):
        self.prompts, self.context_length = prompts, context_length
        self.sizes = [min(len(prompt), context_length) for prompt in prompts]
        self.new: list[Tensor] = []

    def append(self, tokens: Tensor) -> list[int]:
        """Add a token to each text, (B, 1); return the rows whose window was full, and dropped its older half."""
        full = [row for row, size in enumerate(self.sizes) if size == self.context_length]
        self.sizes = [size + 1 for size in self.sizes]
        for row in full:
            self.sizes[row] = self.context_length - self.context_length // 2
        self.new.append(tokens)
        return full

    def stacks(self, rows: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        """The windows of these rows, those of one length together: their rows, (len(rows), T)."""
        for size in {self.sizes[row]: None for row in rows}:
            alike = [row for row in rows if self.sizes[row] == size]
            texts = [torch.cat((self.prompts[row], *(tokens[row] for tokens in self.new[-size:]))) for row in alike]
            yield alike, torch.stack([text[-size:] for text in texts])


def step(
    model: "GPT",
    tokens: Tensor,
    caches: list[LayerCache] | list[StaticCache],
    choose: Callable[[Tensor, Tensor | None], Tensor],
    noise: Tensor | None,
) -> Tensor:
    """Read the last token of each text, (B, 1), behind what the caches hold, and choose the next: (B, 1)."""
    return choose(model.logits(model.hidden(tokens, caches)[:, -1]), noise)


@torch.inference_mode()
def generate_tokens(
    model: "GPT",
    windows: Windows,
    max_new_tokens: int,
    choose: Callable[[Tensor, Tensor | None], Tensor],
    draw: Callable[[], Tensor | None],
    use_cache: bool,
    compile: bool,
) -> Iterator[Tensor]:
    """The loop behind `stream`; choose takes logits (B, V) and the noise that was drawn to tokens (B, 1)."""
    T, rows = model.config.context_length, list(range(len(windows.sizes)))
    capacity = max(windows.sizes) + max_new_tokens
    capacity = min(T, math.ceil(capacity / BUCKET) * BUCKET if compile else capacity)
    caches = model.new_cache(len(rows), capacity) if use_cache else []
    position = None
    if compile or len(set(windows.sizes)) > 1:
        position = torch.zeros(len(rows), 1, 1, dtype=torch.long, device=model.lm_head.weight.device)
        caches = [StaticCache(cache, position) for cache in caches]
    next_tokens = compiled_step(caches) if compile else step
    tokens, unread = torch.stack([prompt[-1:] for prompt in windows.prompts]), rows
    was_training, cudnn = model.training, torch.backends.cuda.cudnn_sdp_enabled()
    model.eval()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every number of keys
    try:
        for _ in range(max_new_tokens):
            if use_cache:
                for some, idx in windows.stacks(unread):
                    refill(model, caches, some, idx[:, :-1])
                tokens = next_tokens(model, tokens, caches, choose, draw()).clone()  # a graph writes over its output
                if position is not None:
                    position += 1
            else:
                hidden = {}
                for some, idx in windows.stacks(rows):
                    hidden |= zip(some, model.hidden(idx)[:, -1], strict=True)
                tokens = choose(model.logits(torch.stack([hidden[row] for row in rows])), draw())
            unread = windows.append(tokens)
            yield tokens
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        model.train(was_training)


def refill(model: "GPT", caches: list[LayerCache] | list[StaticCache], rows: list[int], idx: Tensor) -> None:
    """Let these rows of the caches hold idx, (len(rows), T), and nothing else."""
    read = model.new_cache(*idx.shape)
    if idx.size(1) > 0:
        model.hidden(idx, read)
    for cache, part in zip(caches, read, strict=True):
        cache.fill(rows, part)


def compiled_step(caches: list[StaticCache]) -> Callable[..., Tensor]:
    """`step` as one program; on CUDA a graph, which reads and writes the caches where they are."""
    for tensor in (caches[0].position, *(storage for cache in caches for storage in (cache.keys, cache.values))):
        torch._dynamo.mark_static_address(tensor, guard=False)
    mode = "reduce-overhead" if caches[0].position.is_cuda else "default"
    return torch.compile(step, mode=mode, dynamic=False, fullgraph=True)

"""Tiny decoders that attend in any way that is asked for, and keep the weights that met the values."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, V, H, MOST = 2, 11, 23, 3, 37  # MOST positions
drawn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
# q, (B, H, T, D), k and v, (B, KV, T, D) -> output, (B, H, T, D), and weights, (B, H, T, T); then the output and values
# of the product, if these are others. One text may have no axis B.
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class Layer(nn.Module):
    """(B, T, C) -> (B, T, C), C = H * D. memory: returns what the keys are made of in place of the text."""

    def __init__(
        self, attend: Attend, heads: int = H, kv: int = 0, memory: Callable[[Tensor], Tensor] | None = None, D: int = 13
    ):
        super().__init__()
        self.attend, self.memory, self.sizes, self.D = attend, memory, [heads, kv or heads, kv or heads], D
        self.qkv, self.out_proj = nn.Linear(H * D, sum(self.sizes) * D), nn.Linear(heads * D, H * D)
        self.past: tuple[Tensor, Tensor] | None = None  # keys and values, if a cache is wanted

    def forward(self, x: Tensor) -> Tensor:
        of_q, of_k = (self.qkv(y) for y in (x, self.memory(x) if self.memory else x))
        q, *_ = of_q.unflatten(-1, (-1, self.D)).transpose(-3, -2).split(self.sizes, -3)
        _, k, v = of_k.unflatten(-1, (-1, self.D)).transpose(-3, -2).split(self.sizes, -3)
        if self.past is not None:
            k, v = self.past = torch.cat((self.past[0], k), 2), torch.cat((self.past[1], v), 2)
        output, weights, *met = self.attend(q, k, v)
        self.kept = None if self.memory else (weights, *(met or (output, v)))
        return x + self.out_proj(output.transpose(-3, -2).flatten(-2))


class Decoder(nn.Module):
    """A model of such layers: ids, (B, T) or (T,), from position `start` on -> logits.

    first: what else there is before them. reentrant: layers are computed again for gradients.
    """

    def __init__(self, *layers: nn.Module, C: int = 39, first: Callable = torch.zeros_like, reentrant: bool = False):
        super().__init__()
        self.layers, self.head, self.first, self.reentrant = nn.ModuleList(layers), nn.Linear(C, V), first, reentrant
        for parameter in filter(lambda x: x.dim() > 1, self.parameters()):
            nn.init.normal_(parameter, std=C**-0.5)  # for attention that is not even
        self.tokens, self.places = nn.Embedding(V, C), nn.Embedding(MOST, C)
        self.eval()

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = self.tokens(ids) + self.places.weight[start : start + ids.size(-1)]
        x = x + self.first(x)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return self.head(x)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q.size(-1) ** -0.5 * q @ k.repeat_interleave(q.size(-3) // k.size(-3), -3).mT


def masked(x: Tensor, mask: Tensor | None = None, hidden: float = -torch.inf) -> Tensor:
    T_query, T_key = x.shape[-2:]  # the queries belong to the last keys
    mask = torch.ones(T_key, T_key, dtype=torch.bool).tril() if mask is None else mask
    return x.masked_fill(~mask[T_key - T_query : T_key, :T_key], hidden)


def score(q: Tensor, k: Tensor, hidden: float = -torch.inf) -> Tensor:
    return masked(scores(q, k), hidden=hidden)


def weigh(q: Tensor, k: Tensor) -> Tensor:
    return score(q, k).softmax(-1)


def attend(product: Callable = torch.matmul, weights: Callable = weigh, change: Callable = lambda x, q: x) -> Attend:
    return lambda q, k, v: (change(o := product(w := weights(q, k), v), q), w, o, v)


def seen_as(call: Callable[[Tensor, Tensor, Tensor], Tensor], weights: Callable = weigh) -> Attend:
    return lambda q, k, v: (call(q, k, v), weights(q, k))


def flat(call: Callable) -> Callable:  # of texts and heads in one axis
    return lambda *given: call(*(x.flatten(0, 1) for x in given)).unflatten(0, given[0].shape[:2])


causal = partial(F.scaled_dot_product_attention, is_causal=True)

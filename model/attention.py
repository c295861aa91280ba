"""Causal self-attention, the layer this project is built around.

    weights = softmax(Q K^T / sqrt(D), over the keys a query may see)    how much each token looks at each earlier one
    output  = weights V                                                  the values it gathers there

(Vaswani et al. 2017, "Attention Is All You Need", equation 1.) `attention_weights` is that formula, written out. The
layer computes the same output with PyTorch's fused kernel, which never stores the weights, or with the formula where
that is faster. tests/model/test_attention.py holds the two together.

Shapes, in every file:
    B batch   T time (tokens)   C channels (n_embd)   H heads   D head_dim   V vocabulary   L layers
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMULA_KEYS = 512  # most keys for which the formula trains faster on a CPU (benchmarks/results/step_cpu_2026-11-23.md)


def make_causal_mask(context_length: int) -> Tensor:
    """Return (T, T) bool, True where the query (row) may attend to the key (column): to itself and all before it."""
    return torch.ones(context_length, context_length, dtype=torch.bool).tril_()


def is_triangle(mask: Tensor) -> bool:
    """Return whether a mask, (T, T), is that of `make_causal_mask`, decided once. Without values, as on meta, it is."""
    if mask.is_meta or hasattr(mask, "fake_mode"):
        return True
    if not hasattr(mask, "is_triangle"):
        mask.is_triangle = mask.equal(torch.ones_like(mask).tril_())
    return mask.is_triangle


def attention_scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return how well each query matches each key, and -inf where the mask is False: (B, H, T_query, T_key)."""
    q = q / math.sqrt(q.size(-1))
    scores = q @ repeat_kv(k, q).transpose(-2, -1)
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype)  # adding is faster than filling, also backward
    return scores + mask


def attention_weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return how much each query looks at each key, before dropout; every row sums to one.

    q is (B, H, T_query, D), k is (B, n_kv_head, T_key, D), and the queries belong to the last T_query positions of k.
    mask is (T_query, T_key), True = may attend, or numbers to add. The result is (B, H, T_query, T_key), row = query.
    A change of this function needs the same change in the fused call in `Attend`, or, if no kernel can do it, a
    `formula_is_faster` that is always True.
    """
    # Without a dtype, autocast would return float32. The kernel sums in float32 either way.
    return attention_scores(q, k, mask).softmax(dim=-1, dtype=q.dtype)


def repeat_kv(k: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for the query heads that share them: (B, n_kv_head, T, D) -> (B, H, T, D)."""
    return k if q.size(1) == k.size(1) else k.repeat_interleave(q.size(1) // k.size(1), dim=1)


class Attend(nn.Module):
    """Weighted sums of the values, by the formula or a kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
        """Return the weighted sums of the values: (B, H, T_query, D). k and v are (B, n_kv_head, T_key, D).

        mask: that of `attention_weights`, or one for each sequence, (B, 1, T_query, T_key). None: a text sees itself by
        the triangle, and a single query sees all keys. The kernel does this faster without a mask.
        """
        if mask is not None and formula_is_faster(q, k):
            return F.dropout(attention_weights(q, k, mask), dropout) @ repeat_kv(v, q)
        B, H, T, D = q.shape
        causal = bool(mask is None and T > 1)  # of a torch.export, T is a symbol
        if T == 1:  # heads that share keys ask as queries of one head, so that no key is repeated
            q = q.reshape(B, k.size(1), -1, D)
        if q.device.type == "mps":  # whose kernel was wrong for transposed views (PyTorch issue 181133)
            q, k, v = (x.contiguous() for x in (q, k, v))
        if q.device.type == "cuda":  # of its kernels few take grouped heads, and on older GPUs none
            k, v = repeat_kv(k, q), repeat_kv(v, q)
        grouped = q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=grouped)
        return y.reshape(B, H, T, -1)


def formula_is_faster(q: Tensor, k: Tensor) -> bool:
    """Return whether the formula trains faster than the kernel, whose gradient is slow on a CPU in bfloat16."""
    return q.device.type == "cpu" and q.requires_grad and q.dtype == torch.bfloat16 and k.size(2) <= FORMULA_KEYS


class Cache(Protocol):
    """The interface of a key-value cache (model/cache.py)."""

    positions: Callable[[int], slice | Tensor]  # of the next T tokens; a tensor, (1,), if no shape may depend on it
    store: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys and values of one call -> those of all so far


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each token sees itself and the tokens before it.

    Args:
        n_embd: C, the width of the input and the output.
        n_head: H, the number of query heads.
        n_kv_head: the number of key and value heads; H / n_kv_head query heads share each (Ainslie et al. 2023).
        head_dim: D, the width of one head.
        mask: (context_length, context_length) bool, True = may attend; the layers of a model share one tensor. Another
            may be assigned to `causal_mask` later; what is written into this one is not seen.
        bias: whether the four projections have biases.
        q_norm, k_norm: modules that normalise queries and keys, (B, heads, T, D) -> the same shape; both or none.
        rotary: a module that rotates queries and keys by their positions: (x, T positions) -> x's shape.
        weight_dropout: probability of dropping an attention weight.
    """

    causal_mask: Tensor
    triangle: Tensor | None

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        n_kv_head: int,
        head_dim: int,
        mask: Tensor,
        bias: bool = True,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        rotary: nn.Module | None = None,
        weight_dropout: float = 0.0,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(n_embd, n_head * head_dim, bias=bias)
        self.k_proj = nn.Linear(n_embd, n_kv_head * head_dim, bias=bias)
        self.v_proj = nn.Linear(n_embd, n_kv_head * head_dim, bias=bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rotary = rotary
        self.attend = Attend()
        self.weight_dropout = weight_dropout
        self.o_proj = nn.Linear(n_head * head_dim, n_embd, bias=bias)  # mixes the outputs of the heads
        self.register_buffer("causal_mask", mask, persistent=False)  # never in a checkpoint
        self.register_buffer("triangle", mask if is_triangle(mask) else None, persistent=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Attend: (B, T, C) -> (B, T, C). With a cache, x continues the positions stored there."""
        q = self.split_heads(self.q_proj(x))
        k = self.split_heads(self.k_proj(x))
        v = self.split_heads(self.v_proj(x))
        dtype = v.dtype
        if self.q_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        positions = slice(x.size(1)) if cache is None else cache.positions(x.size(1))
        if self.rotary is not None:
            q = self.rotary(q, positions)
            k = self.rotary(k, positions)
        if cache is not None:
            k, v = cache.store(k, v)
            q = q.to(k.dtype)  # the cache may be more precise
        mask = self.mask_of(q, k, positions)
        y = self.attend(q, k, v, mask, self.weight_dropout if self.training else 0.0)
        y = y.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H * D)
        return self.o_proj(y.to(dtype))

    def mask_of(self, q: Tensor, k: Tensor, positions: slice | Tensor) -> Tensor | None:
        """Return the rows of the mask that belong to q, (T_query, T_key), or None where the kernel needs none."""
        is_whole = isinstance(positions, slice) and q.size(2) in (1, k.size(2))
        if is_whole and self.causal_mask is self.triangle and not formula_is_faster(q, k):
            return None
        return self.causal_mask[positions, : k.size(2)]

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the heads: (B, T, heads * D) -> (B, heads, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

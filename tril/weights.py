"""The weights of one call of attention: computed from queries and keys and proved, or read where they met the values.

    weights = softmax(Q K^T * scale + mask)    (Vaswani et al. 2017, equation 1)

Shapes: B batch, H heads, T time (tokens), D width of a head. Weights are (B, H, T_query, T_key): row = query, column =
key. The queries belong to the last T_query positions of the keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The largest error of a row of weights that rounding explains, for each precision of what they are computed from.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_SCORE_ROUNDING = 1e-2  # the most allowed in addition for rounded scores, which matters if they are in the thousands
BLOCK_SIZE = 1 << 21  # weights computed at a time; bounds memory and changes results by rounding only
HIDES = -1e4  # a mask of numbers hides a key by this or less; a bias is larger


class NotTheKernels(ArithmeticError):
    """The weights are not those that the kernel used."""

    exit_code = 1


class Proved(NamedTuple):
    """What is known of weights that were computed: they are those of the kernel."""

    error: float
    """The largest error of a row."""

    def __str__(self) -> str:
        return f"match the fused kernel: max row error {self.error:.1e}"


class RowSums(NamedTuple):
    """What is known of weights that the model wrote out."""

    least: float
    """The least sum of a row."""
    most: float
    """The largest sum of a row."""
    later: float
    """The largest share of a row that later tokens have."""

    def __str__(self) -> str:
        why = "" if self.least > 0.99 else " (a mask after the softmax, a sink or dropout)"
        sums = f"rows sum to {self.least:.2f} to {self.most:.2f}{why}"
        return f"read where they met the values: {sums}, later tokens get {self.later:.1g}"


Proof = Proved | RowSums


def summarise(proofs: Sequence[Proof]) -> str:
    """Say what is known of the weights: the worst of all layers that were proved, and of all that were read."""
    errors = [proof.error for proof in proofs if isinstance(proof, Proved)]
    found = [Proved(max(errors))] if errors else []
    if seen := [proof for proof in proofs if isinstance(proof, RowSums)]:
        least, most, later = zip(*seen, strict=True)
        found.append(RowSums(min(least), max(most), max(later)))
    return "; ".join(f"weights {proof}" for proof in found)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the precision of their factors: without a GPU's TF32, and without autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the weights by the formula. mask: numbers to add to the scores."""
    scores = q * scale @ repeat_heads(k, q.size(1)).mT
    return (scores + mask).softmax(-1)


def repeat_heads(k: Tensor, H: int) -> Tensor:
    """Repeat keys or values for the heads that share them: (B, n_kv_head, T, D) -> (B, H, T, D)."""
    return k if k.size(1) == H else k.repeat_interleave(H // k.size(1), dim=1)


@dataclass(frozen=True, eq=False)
class Call:
    """The attention of a layer."""

    values: Tensor  # (B, n_kv_head, T_key, width of a value)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights shown: float32, or float64 of a float64 model."""
        return torch.promote_types(self.values.dtype, torch.float32)

    @property
    def common(self) -> tuple:
        """What calls of one layer have in common."""
        return type(self), self.shape, vars(self).get("scale"), id(vars(self).get("mask"))

    def of_head(self, head: int) -> "Call":
        """Return this call with one head alone, and the keys, values and mask that it may share with others.

        Raises IndexError if there is no such head.
        """
        H = self.shape[1]
        own = {name: x[:, head * x.size(1) // H, None] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **own)

    def weights(self) -> Tensor:
        """Return the attention weights of all heads, (B, H, T_query, T_key), of `dtype`."""
        return torch.cat([F.pad(weights, (0, self.shape[3] - weights.size(3))) for weights, _ in self.blocks()], dim=2)


@dataclass(frozen=True, eq=False)
class Computed(Call):
    """A call of the kernel, whose weights are computed from queries and keys."""

    q: Tensor  # (B, H, T_query, D)
    k: Tensor  # (B, n_kv_head, T_key, D)
    mask: Tensor  # (1 or B, 1 or H, T_query, T_key), numbers to add to the scores
    is_causal: bool  # whether the kernel is given no mask but draws the triangle itself
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """B, H, T_query and T_key."""
        return (*self.q.shape[:3], self.k.size(2))

    @property
    def is_padded(self) -> bool:
        """Whether there are keys that no query may see."""
        return not (self.mask > HIDES).any(2).all()

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the weights of all heads before dropout, and the keys they may see, for one block of queries at a time.

        Weights are (B, H, queries, keys up to the last of these queries), of `dtype`. A query that may see nothing
        has weights of zero. What may be seen is bool, (1 or B, 1 or H, queries, keys).
        """
        B, H, T, num_keys = self.shape
        height = max(1, BLOCK_SIZE // (B * H * num_keys))
        for start in range(0, T, height):
            queries = slice(start, start + height)
            keys = slice(num_keys - T + start + height)
            mask = self.mask[:, :, queries, keys].to(self.dtype)
            visible = mask > HIDES
            with exact_products(mask.device):
                q, k = self.q[:, :, queries].to(self.dtype), self.k[:, :, keys].to(self.dtype)
                weights = attention_weights(q, k, mask, self.scale)
            yield weights.masked_fill(~visible.any(-1, keepdim=True), 0.0), visible

    def output(self, values: Tensor | None = None) -> Tensor:
        """Return the output of the kernel, (B, H, T_query, D), for its values or others, (B, n_kv_head, T_key, D)."""
        return F.scaled_dot_product_attention(
            self.q,
            self.k,
            self.values if values is None else values,
            None if self.is_causal else self.mask,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.q.size(1) != self.k.size(1),
        )

    def prove(self, layer: int) -> Proved:
        """Return the largest error of a row of the weights. Raises NotTheKernels if it is more than rounding.

        The kernel runs again on the same queries, keys and mask, with random values of 1 and -1. If a row of our
        weights is wrong by a vector e, the mean square difference of the two outputs over the width of a head is |e|^2
        on average, whatever the direction of e (Freivalds 1977). layer: the number of this layer.
        """
        q = self.q
        generator = torch.Generator().manual_seed(0)
        signs = torch.randn(self.k.shape, generator=generator).sign().to(q)
        sizes = self.k.to(self.dtype).norm(dim=-1, keepdim=True)
        beside = repeat_heads(torch.cat((signs.to(self.dtype), sizes), dim=-1), q.size(1))
        with exact_products(q.device), torch.no_grad():  # as in evaluation: a kernel may differ under autograd
            ours = torch.cat([weights @ beside[:, :, : weights.size(3)] for weights, _ in self.blocks()], dim=2)
            difference = ours[..., :-1] - self.output(signs)
        # What a query that sees nothing gets is the kernel's affair.
        difference = difference.masked_fill((self.mask <= HIDES).all(-1, keepdim=True), 0.0)
        # Scores are rounded in proportion to |q| |k| times their scale. Only keys with weight can move the output.
        rounding = 2 * torch.finfo(self.dtype).eps * self.scale * q.to(self.dtype).norm(dim=-1) * ours[..., -1]
        errors = difference.square().mean(-1).sqrt()
        largest = errors.max().item()
        if not (errors - rounding.clamp(max=MAX_SCORE_ROUNDING)).max() <= TOLERANCE[q.dtype]:  # also raises for nan
            raise NotTheKernels(
                f"layer {layer}: the weights shown are not those of the kernel, a row is off by "
                f"{largest:.2g} ({q.dtype}, at most {TOLERANCE[q.dtype]:.0e} is rounding)"
            )
        return Proved(largest)


@dataclass(frozen=True, eq=False)
class WrittenOut(Call):
    """Weights that met the values: a model wrote them out, or was asked for them."""

    source: Tensor  # the weights, (B, H, T_query, T_key), in the model's precision

    @property
    def shape(self) -> tuple[int, ...]:
        """B, H, T_query and T_key."""
        return tuple(self.source.shape)

    @property
    def is_padded(self) -> bool:
        """Whether keys have no weight in some texts alone. In all of them a head may just rest on another key."""
        seen = self.source.sum((1, 2)) > 0
        return bool((seen != seen[0]).any())

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all weights, as `Computed` does in blocks, and the keys to which any head of the layer gives some."""
        yield self.source.to(self.dtype), (self.source > 0).any(1, keepdim=True)

    @property
    def sums_to_one(self) -> bool:
        """Whether all rows do, but for rounding."""
        least, most, _ = self.prove(0)
        return max(1 - least, most - 1) <= TOLERANCE[self.source.dtype]

    def output(self) -> Tensor:
        """Return the weighted sums of the values, (B, H, T_query, D)."""
        return self.source @ repeat_heads(self.values, self.shape[1])

    def prove(self, layer: int) -> RowSums:
        """Return what rows sum to, and the largest share of one that later tokens have."""
        weights = self.weights()
        sums = weights.sum(-1)
        later = weights.triu(weights.size(3) - weights.size(2) + 1).sum(-1)
        shares = (later / sums).nan_to_num(0.0)  # a row may be all zeros
        return RowSums(sums.min().item(), sums.max().item(), shares.max().item())


def join(calls: Sequence[Call], are_texts: bool = False) -> Call:
    """Return one call with the heads of all, or with all of each as heads of a text; they have one mask and scale."""
    if len(calls) == 1:
        return calls[0]
    names = vars(calls[0]).keys() & {"values", "q", "k", "source"}
    joined = {name: torch.cat([vars(call)[name] for call in calls], dim=1 - are_texts) for name in names}
    if are_texts:
        joined = {name: x.reshape(len(calls), -1, *x.shape[2:]) for name, x in joined.items()}
    return replace(calls[0], **joined)

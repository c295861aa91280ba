"""Find attention that is written out: the product in which its weights meet the values.

Of two factors of any layout, one may be weights and the other values if one axis, the keys, is summed, one axis of the
weights alone is as long as the text, the queries, and one axis is the width of the values. All other axes of the
weights are batch and heads. Shapes are named as in model/attention.py.
"""

import math
from collections.abc import Iterator, Sequence
from string import ascii_letters
from typing import NamedTuple

import torch
from torch import Tensor

PRODUCTS = ("matmul", "__matmul__", "bmm", "mm", "baddbmm", "einsum")  # the names of their functions


class Layout(NamedTuple):
    """The axes of a layer's output, each a letter, and their way to (B, H, T, D)."""

    output: str
    order: str  # the same letters: batch and heads, the queries, the width
    shape: tuple[int, ...]  # B, H, T, D

    def heads(self, output: Tensor) -> Tensor:
        """Return an output as (B, H, T, D)."""
        return torch.einsum(f"{self.output}->{self.order}", output).reshape(self.shape)

    def back(self, heads: Tensor, output: Tensor) -> Tensor:
        """Return (B, H, T, D) in the shape of an output."""
        sizes = [output.size(self.output.index(axis)) for axis in self.order]
        return torch.einsum(f"{self.order}->{self.output}", heads.reshape(sizes))


class Meeting(NamedTuple):
    """Two factors of a product, as weights and values."""

    weights: Tensor  # (B, H, T_query, T_key)
    values: Tensor  # (B, H, T_key, D)
    layout: Layout  # of the output


def factors_of(name: str, operands: Sequence) -> tuple[list[Tensor], list[str]] | None:
    """Return the two factors of a product, and the axes of both and of its output as letters; None if there are more.

    name: one of PRODUCTS; operands: its arguments.
    """
    equation = "...ij,...jk->...ik"
    if name == "einsum":
        equation, *operands = operands
        equation = equation.replace(" ", "")
        operands = operands[0] if len(operands) == 1 else operands  # a list
    factors = [x for x in operands if isinstance(x, Tensor)][-2:]  # before them `baddbmm` has what is added
    inputs, arrow, output = equation.partition("->")
    if not arrow:
        output = "..." * ("..." in inputs) + "".join(x for x in sorted(inputs) if x.isalpha() and inputs.count(x) == 1)
    axes = [*inputs.split(","), output]
    unnamed = [x.dim() - sum(map(str.isalpha, named)) for x, named in zip(factors, axes, strict=False)]
    if len(axes) != 3 or len(unnamed) != 2 or min(unnamed) < 0:
        return None
    dots = "".join(x for x in ascii_letters if x not in equation)[: max(unnamed)]
    counts = (*unnamed, len(dots))
    return factors, [named.replace("...", dots[len(dots) - n :]) for named, n in zip(axes, counts, strict=True)]


def find_meetings(name: str, operands: Sequence, output: Tensor, text: tuple[int, int] | None) -> Iterator[Meeting]:
    """Yield how one factor of a product may be weights, and the other values.

    text: B and T of the token ids, if known. Without them the first axis of the weights is the batch. Where heads and
    batch are one axis, the batch comes first.
    """
    factors, (*both, of_output) = factors_of(name, operands) or ((), ("", "", ""))
    sizes_out = dict(zip(of_output, output.shape, strict=False))
    for weights, ours, values, theirs in zip(factors, both, factors[::-1], both[::-1], strict=False):
        sizes = dict(zip(ours, weights.shape, strict=True))
        key = "".join(axis for axis in ours if axis in theirs and axis not in of_output)
        own = [axis for axis in ours if axis not in theirs and (text is None or sizes[axis] == text[1])]
        width = "".join(axis for axis in theirs if axis not in ours)
        heads = "".join(axis for axis in ours if axis not in (key, *own[-1:]))
        if len(key) != 1 or len(width) != 1 or not own or any(sizes[axis] != sizes_out.get(axis) for axis in heads):
            continue
        num = math.prod(sizes[axis] for axis in heads)
        B = text[0] if text else sizes[heads[0]] if heads else 1
        if num % B or (heads and not {*heads} & {*theirs}):  # the same matrix for all texts is no attention
            continue
        batch = next((axis for axis in heads if sizes[axis] == B), "")
        heads = batch + heads.replace(batch, "")
        query = own[-1]
        shape = (B, num // B, sizes[query])
        every = values.new_ones([sizes[axis] for axis in heads])
        yield Meeting(
            torch.einsum(f"{ours}->{heads}{query}{key}", weights).reshape(*shape, sizes[key]),
            torch.einsum(f"{theirs},{heads}->{heads}{key}{width}", values, every).reshape(*shape[:2], sizes[key], -1),
            Layout(of_output, heads + query + width, (*shape, sizes_out[width])),
        )

"""Find attention that is written out: the product in which its weights meet the values.

One factor of a product may be weights and the other values if one axis of both, the keys, is summed; one axis of the
weights alone, the queries, is as long as the text; and one axis of the values alone is their width. All other axes of
the weights are batch and heads. Shapes are named as in model/attention.py.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PRODUCTS = ("matmul", "__matmul__", "bmm", "mm", "baddbmm", "einsum")  # the names of their functions
UNNAMED = "ZYXWVUTSRQPONMLKJIHGFEDCBA"  # letters for the axes of "..."


def find_attention(
    name: str, operands: Sequence, output: Tensor, text: tuple[int, int] | None
) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yield how the factors of a product may be weights (B, H, T_query, T_key) and values (B, H, T_key, D).

    The third is the equation that orders the axes of the output as batch and heads, queries, width.

    name: one of PRODUCTS; operands: its arguments; text: B and T of the token ids, if known. Without them the first
    axis of the weights is the batch. Of batch and heads in one axis the batch comes first.
    """
    equation = "...ij,...jk->...ik"
    if name == "einsum":
        equation, *operands = operands
        operands = operands[0] if len(operands) == 1 else operands  # a list
    inputs, _, result = equation.replace(" ", "").partition("->")
    if not result:
        once = "".join(axis for axis in sorted(inputs) if inputs.count(axis) == 1 and axis != ",")
        result = "..." * ("..." in inputs) + once
    tensors = [*[x for x in operands if isinstance(x, Tensor)][-2:], output]  # `baddbmm` has a term before the factors
    named = [*inputs.split(","), result]
    # The last axes that "..." stands for are the same in all.
    axes = [x.replace("...", UNNAMED[len(x) - 3 - y.dim() + 26 :]) for x, y in zip(named, tensors, strict=False)]
    if len(named) != 3 or [*map(len, axes)] != [x.dim() for x in tensors]:
        return
    sizes = {
        axis: n for x, letters in zip(tensors, axes, strict=True) for axis, n in zip(letters, x.shape, strict=True)
    }
    for ours, theirs, weights, values in ((*axes[:2], *tensors[:2]), (*axes[1::-1], *tensors[1::-1])):
        key = "".join(axis for axis in ours if axis in theirs and axis not in axes[2])
        own = "".join(axis for axis in ours if axis not in theirs and (text is None or sizes[axis] == text[1]))
        width = "".join(axis for axis in theirs if axis not in ours)
        query = own[-1:]
        heads = "".join(axis for axis in ours if axis not in key + query)
        # Each text has weights of its own: one matrix for all of them is no attention.
        is_own = [*weights.shape] == [sizes[axis] for axis in ours] and (not heads or {*heads} & {*theirs})
        if not is_own or not len(key) == len(query) == len(width) == 1 or not {*heads, width} <= {*axes[2]}:
            continue
        num = math.prod(sizes[axis] for axis in heads)
        B = text[0] if text else sizes.get(heads[:1], 1)
        if num % B:
            continue
        batch = next((axis for axis in heads if sizes[axis] == B), "")
        heads = batch + heads.replace(batch, "")
        shape = (B, num // B, sizes[query])
        every = values.new_ones([sizes[axis] for axis in heads])
        weights = torch.einsum(f"{ours}->{heads}{query}{key}", weights).reshape(*shape, sizes[key])
        values = torch.einsum(f"{theirs},{heads}->{heads}{key}{width}", values, every)
        yield weights, values.reshape(*shape[:2], sizes[key], sizes[width]), f"{axes[2]}->{heads}{query}{width}"

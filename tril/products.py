"""Find attention that is written out: the product in which its weights meet the values.

One factor of a product may be weights and the other values if one axis of both, the keys, is summed; one axis of the
weights alone, the queries, is as long as the text; and one axis of the values alone is their width. All other axes of
the weights are batch and heads. Shapes are named as in tril/weights.py.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from string import ascii_letters
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PRODUCTS = ("matmul", "__matmul__", "linalg_matmul", "bmm", "mm", "baddbmm", "einsum")  # the names of their functions


class Factor(NamedTuple):
    """A tensor of a product, and a letter for each of its axes. Axes with the same letter are multiplied."""

    tensor: Tensor
    axes: str


class Candidate(NamedTuple):
    """A way to read a product as attention."""

    weights: Tensor  # (B, H, T_query, T_key)
    values: Tensor  # (B, H, T_key, D)
    order: str  # an equation that orders the axes of the output: batch and heads, queries, width
    has_batch: bool  # whether the batch has an axis of its own, beside that of the heads


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor has numbers to look at: not one that is nested or sparse, or inside `torch.vmap`."""
    return x.layout == torch.strided and not x.is_nested and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def factors_of(name: str, arguments: Sequence, output: Tensor) -> list[Factor]:
    """Return the two factors of a product and its output, with their axes; nothing if it has no two plain factors.

    name: one of PRODUCTS; arguments: those it is called with.
    """
    given = tree_leaves(arguments)  # operands of `einsum` may be a list
    equation = given[0] if name == "einsum" else "...ij,...jk->...ik"
    inputs, _, result = equation.replace(" ", "").partition("->")
    if not result:
        once = "".join(axis for axis in sorted(inputs) if inputs.count(axis) == 1 and axis != ",")
        result = "..." * ("..." in inputs) + once
    tensors = [x.detach() for x in (*given, output) if isinstance(x, Tensor)][-3:]  # `baddbmm` has a term before them
    named = [*inputs.split(","), result]
    if len(named) != 3 or not all(is_plain(x) and x.is_floating_point() and x.numel() for x in tensors):
        return []
    unnamed = "".join(x for x in ascii_letters if x not in equation)  # the last axes of "..." are the same in all
    axes = [
        x.replace("...", unnamed[len(unnamed) + len(x) - 3 - y.dim() :]) for x, y in zip(named, tensors, strict=False)
    ]
    return [*map(Factor, tensors, axes)] if [*map(len, axes)] == [x.dim() for x in tensors] else []


def find_attention(factors: Sequence[Factor], text: tuple[int, int] | None) -> Iterator[Candidate]:
    """Yield how the factors of a product may be weights and values, the likeliest way first.

    text: B and T of the token ids, if known. Without them the first axis of the weights is the batch. Of batch and
    heads in one axis the batch comes first.
    """
    *pair, (_, of_output) = factors
    # The sizes of the output count last: an axis of a factor may be one that is repeated.
    sizes = {axis: n for tensor, axes in factors for axis, n in zip(axes, tensor.shape, strict=True)}
    for weights, values in permutations(pair):
        repeated = [axis for axis, n in zip(values.axes, values.tensor.shape, strict=True) if n < sizes[axis]]
        of_values = "".join(axis for axis in values.axes if axis not in repeated)
        key = "".join(axis for axis in weights.axes if axis in of_values and axis not in of_output)
        width = "".join(axis for axis in of_values if axis not in weights.axes)
        # Each text has weights of its own: one matrix for all of them is no attention.
        is_shared = [*weights.tensor.shape] != [sizes[axis] for axis in weights.axes]
        if is_shared or len(key) != 1 or len(width) != 1 or not {*weights.axes, width} - {key} <= {*of_output}:
            continue
        queries = [a for a in weights.axes if a not in of_values and (text is None or sizes[a] == text[1])]
        for query in reversed(queries):
            heads = "".join(axis for axis in weights.axes if axis not in key + query)
            B = text[0] if text else sizes.get(heads[:1], 1)
            if (heads and not {*heads} & {*of_values}) or math.prod(sizes[axis] for axis in heads) % B:
                continue
            batch = next((axis for axis in heads if sizes[axis] == B), "")
            heads = batch + heads.replace(batch, "")
            ones = values.tensor.new_ones([sizes[axis] for axis in heads])  # repeat values that heads share
            v = values.tensor.squeeze([values.axes.index(axis) for axis in repeated])
            yield Candidate(
                torch.einsum(f"{weights.axes}->{heads}{query}{key}", weights.tensor).reshape(
                    B, -1, sizes[query], sizes[key]
                ),
                torch.einsum(f"{of_values},{heads}->{heads}{key}{width}", v, ones).reshape(
                    B, -1, sizes[key], sizes[width]
                ),
                f"{of_output}->{heads}{query}{width}",
                len(heads) > 1 or B == 1,
            )

"""Find attention that is written out: the product in which its weights meet the values.

One factor of a product may be weights and the other values if one axis of both, the keys, is summed; one axis of the
weights alone, the queries, is as long as the text; and one axis of the values alone is their width. All other axes of
the weights are batch and heads. Shapes are named as in model/attention.py.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from string import ascii_letters

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PRODUCTS = ("matmul", "__matmul__", "linalg_matmul", "bmm", "mm", "baddbmm", "einsum")  # the names of their functions


def find_attention(
    name: str, arguments: Sequence, output: Tensor, text: tuple[int, int] | None
) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yield how the factors of a product may be weights (B, H, T_query, T_key) and values (B, H, T_key, D).

    The third is the equation that orders the axes of the output as batch and heads, queries, width.

    name: one of PRODUCTS; arguments: those it is called with; text: B and T of the token ids, if known. Without them
    the first axis of the weights is the batch. Of batch and heads in one axis the batch comes first.
    """
    given = tree_leaves(arguments)  # operands of `einsum` may be a list
    equation = given[0] if name == "einsum" else "...ij,...jk->...ik"
    inputs, _, result = equation.replace(" ", "").partition("->")
    if not result:
        once = "".join(axis for axis in sorted(inputs) if inputs.count(axis) == 1 and axis != ",")
        result = "..." * ("..." in inputs) + once
    tensors = [x.detach() for x in (*given, output) if isinstance(x, Tensor)][-3:]  # `baddbmm` has a term before them
    named = [*inputs.split(","), result]
    unnamed = "".join(x for x in ascii_letters if x not in equation)  # the last axes of "..." are the same in all
    axes = [
        x.replace("...", unnamed[len(unnamed) + len(x) - 3 - y.dim() :]) for x, y in zip(named, tensors, strict=False)
    ]
    is_odd = any(x.layout != torch.strided or not x.is_floating_point() or not x.numel() for x in tensors)
    if is_odd or len(named) != 3 or [*map(len, axes)] != [x.dim() for x in tensors]:
        return
    pairs = [*zip(tensors, axes, strict=True)]
    *factors, (_, of_output) = pairs
    # The sizes of the output count last: an axis of a factor may be one that is repeated.
    sizes = {axis: n for x, named in pairs for axis, n in zip(named, x.shape, strict=True)}
    for (weights, of_weights), (values, of_values) in permutations(factors):
        key = "".join(axis for axis in of_weights if axis in of_values and axis not in of_output)
        own = [axis for axis in of_weights if axis not in of_values and (text is None or sizes[axis] == text[1])]
        query = "".join(own[-1:])
        width = "".join(axis for axis in of_values if axis not in of_weights)
        heads = "".join(axis for axis in of_weights if axis not in key + query)
        if not len(key) == len(query) == len(width) == 1 or not {*heads, width} <= {*of_output}:
            continue
        B = text[0] if text else sizes.get(heads[:1], 1)
        rest = math.prod(sizes[axis] for axis in heads) % B
        # Each text has weights of its own: one matrix for all of them is no attention.
        is_shared = [*weights.shape] != [sizes[axis] for axis in of_weights] or (heads and not {*heads} & {*of_values})
        if rest or is_shared:
            continue
        batch = next((axis for axis in heads if sizes[axis] == B), "")
        heads = batch + heads.replace(batch, "")
        ones = values.new_ones([sizes[axis] for axis in heads])  # repeat values that heads share
        weights = torch.einsum(f"{of_weights}->{heads}{query}{key}", weights)
        values = torch.einsum(f"{of_values},{heads}->{heads}{key}{width}", values, ones)
        weights, values = (x.reshape(B, -1, *x.shape[-2:]) for x in (weights, values))
        yield weights, values, f"{of_output}->{heads}{query}{width}"

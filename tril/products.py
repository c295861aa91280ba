"""Find attention that is written out: the product in which its weights meet the values.

One factor of a product may be weights and the other values if one axis of both, the keys, is summed; one axis of the
weights alone, the queries, is as long as the text; and one axis of the values alone is their width. All other axes of
the weights are batch and heads. Shapes are named as in tril/weights.py.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations
from string import ascii_letters

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PRODUCTS = ("matmul", "__matmul__", "linalg_matmul", "bmm", "mm", "baddbmm", "einsum")  # the names of their functions


def tensors(given: object) -> list[Tensor]:
    """Return the tensors in what a function is given, or in what it returns."""
    return [x for x in tree_leaves(given) if isinstance(x, Tensor)]


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor has numbers to look at: not one that is nested or sparse, or inside `torch.vmap`."""
    return x.layout == torch.strided and not x.is_nested and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def num_texts(B: int, num: int) -> int:
    """Return of how many texts an axis is that holds so many heads of texts: of all B, or of one."""
    return B if num % B == 0 else 1


def axes_of(name: str, arguments: Sequence, output: Tensor) -> list[tuple[Tensor, str]]:
    """Return the two factors of a product and its output, and a letter for each axis; nothing if there are not two.

    name: one of PRODUCTS; arguments: those it is called with.
    """
    equation = tree_leaves(arguments)[0] if name == "einsum" else "...ij,...jk->...ik"
    inputs, _, result = equation.replace(" ", "").partition("->")
    if not result:
        once = "".join(axis for axis in sorted(inputs) if inputs.count(axis) == 1 and axis != ",")
        result = "..." * ("..." in inputs) + once
    factors = [x.detach() for x in tensors((arguments, output))][-3:]  # `baddbmm` has a term before them
    named = [*inputs.split(","), result]
    if len(named) != 3 or not all(x.is_floating_point() and x.numel() for x in factors):
        return []
    unnamed = "".join(x for x in ascii_letters if x not in equation)  # the last axes of "..." are the same in all
    axes = [
        x.replace("...", unnamed[len(unnamed) + len(x) - 3 - y.dim() :]) for x, y in zip(named, factors, strict=False)
    ]
    return [*zip(factors, axes, strict=True)] if [*map(len, axes)] == [x.dim() for x in factors] else []


def find_attention(
    name: str, arguments: Sequence, output: Tensor, text: tuple[int, int] | None, at_once: int
) -> Iterator[tuple]:
    """Yield how the factors of a product may be weights and values, the likeliest way first.

    Each way is the weights (B, H, T_query, T_key), the values (B, H, T_key, D), an equation that orders the axes of the
    output as batch and heads, queries, width, and whether batch and heads are one axis.

    name, arguments: as for `axes_of`; text: B and T of the token ids, if known. Without them the first axis of the
    weights is the batch. Of batch and heads in one axis the batch comes first. at_once: B where these are one axis.
    """
    pairs = axes_of(name, arguments, output)
    # The sizes of the output count last: an axis of a factor may be one that is repeated.
    sizes = {axis: n for x, axes in pairs for axis, n in zip(axes, x.shape, strict=True)}
    for (weights, of_weights), (values, of_values) in permutations(pairs[:2], 2):
        _, of_output = pairs[2]
        repeated = [i for i, axis in enumerate(of_values) if values.size(i) < sizes[axis]]
        of_values = "".join(axis for i, axis in enumerate(of_values) if i not in repeated)
        key = "".join(axis for axis in of_weights if axis in of_values and axis not in of_output)
        width = "".join(axis for axis in of_values if axis not in of_weights)
        # Each text has weights of its own: one matrix for all of them is no attention.
        is_shared = [*weights.shape] != [sizes[axis] for axis in of_weights]
        if is_shared or len(key) != 1 or len(width) != 1 or not {*of_weights, width} - {key} <= {*of_output}:
            continue
        for query in reversed(of_weights):
            heads = "".join(axis for axis in of_weights if axis not in key + query)
            num = math.prod(sizes[axis] for axis in heads)
            B = num_texts(at_once if len(heads) == 1 else text[0], num) if text else sizes.get(heads[:1], 1)
            is_whole = text is None or sizes[query] == text[1]
            if query in of_values or not is_whole or (heads and not {*heads} & {*of_values}):
                continue
            batch = next((axis for axis in heads if sizes[axis] == B), "")
            heads = batch + heads.replace(batch, "")
            ones = values.new_ones([sizes[axis] for axis in heads])  # repeat values that heads share
            w = torch.einsum(f"{of_weights}->{heads}{query}{key}", weights)
            v = torch.einsum(f"{of_values},{heads}->{heads}{key}{width}", values.squeeze(repeated), ones)
            w, v = (x.reshape(B, -1, *x.shape[-2:]) for x in (w, v))
            yield w, v, f"{of_output}->{heads}{query}{width}", len(heads) == 1

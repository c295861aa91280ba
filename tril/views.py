"""What a head moves, and what it adds to the logits, besides where it looks.

Shapes are named as in tril/weights.py; C is the width of the residual stream.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tril.experiments import affordable_rows
from tril.look import Captured
from tril.metrics import Head, Heads
from tril.weights import TOLERANCE, exact_products

NUM_LIKELIEST = 5  # tokens, of the likeliest and of the unlikeliest
# The n likeliest and the n unlikeliest tokens, and what is added to their logits, each (T, 2n); nan: not computed.
LogitAttribution = tuple[Tensor, Tensor]


@torch.no_grad()
def projected_values(att: Captured, head: Head) -> Tensor:
    """Return what a head moves from each key to the queries that attend to it: (T_key, C), in the precision of weights.

    That is f(x) = (x W^V + b^V) W^O of Kobayashi et al. (2020): the value through the head's part of the output
    projection. The head's output is the mean of these by its weights.

    att: what `capture(model)` saw of one text.
    """
    layer, number = head
    call = att.calls[layer]
    weight = att.projections[layer].chunk(call.shape[1], dim=1)[number]
    values = call.of_head(number).values[0, 0]
    with exact_products(values.device):
        return values.to(call.dtype) @ weight.T.to(call.dtype)


class Unembedding(NamedTuple):
    """How the residual stream of a text becomes logits: by the final norm, with the scale it has there, and the head.

    Both are linear then, so each part of the stream has its share of the logits (Elhage et al. 2021).
    """

    gain: Tensor  # (C,)
    is_centred: bool  # the norm subtracts the mean first, as a LayerNorm does
    scale: Tensor  # (T, 1)
    weight: Tensor  # of the head, (V, C)

    def logits(self, part: Tensor) -> Tensor:
        """Return the logits that a part of the stream adds, (n, C) -> (n, V), but for the scale of its position."""
        with exact_products(part.device):
            return self.gain * (part - self.is_centred * part.mean(-1, keepdim=True)) @ self.weight.to(part).T


@torch.no_grad()
def unembedding(att: Captured) -> Unembedding | None:
    """Return how what heads write in a text, (1, T), reaches the logits; None if that is not known.

    It is if the outputs of all output projections are added to a stream as they are, a norm reads the stream, and a
    linear layer the norm. Any class of norms will do: what it makes of zeros, ones and signs tells its bias, whether it
    subtracts the mean, and its gain. With these its own output has to follow from its own input.

    att: what `look` saw, which asks for the logits of the first position.
    """
    if not att.last or not att.last[2]:
        return None
    given, weight, (norm, x, y) = att.last
    written = {id(each) for each in att.projections.values()}
    is_read = given.equal(y[:, : given.size(1)])
    if not is_read or len(att.projections) < len(att.calls) or not written <= att.terms.get(x, set()):
        return None
    wide = att.calls[0].dtype
    ones = torch.ones_like(x, dtype=next(norm.parameters(), x).dtype)
    signs = ones.clone()
    signs[..., ::3] = -1
    rounding = 10 * TOLERANCE[y.dtype]
    bias, constant, of_signs = (norm(probe).to(wide) for probe in (0 * ones, ones, signs))
    of_signs, y = of_signs - bias, y.to(wide) - bias
    is_centred = (constant - bias).abs().max() < 0.1 * of_signs.abs().max()
    x, signs = (each.to(wide) - is_centred * each.to(wide).mean(-1, keepdim=True) for each in (x, signs))
    gain = of_signs / signs
    scale = (y * gain * x).sum(-1, keepdim=True) / (gain * x).square().sum(-1, keepdim=True)
    is_norm = (scale * gain * x - y).abs().max() <= rounding * y.abs().max()
    return Unembedding(gain[0, 0], is_centred, scale.view(-1, 1), weight) if is_norm else None


@torch.no_grad()
def attribute_logits(
    att: Captured, out: Unembedding, heads: Heads, effort: float = 1.0
) -> dict[Head, LogitAttribution]:
    """Return the tokens that each head makes likeliest and unlikeliest at each position: direct logit attribution.

    On a CPU only as many positions as `affordable_rows` are computed. A cap on logits is left out.

    att, out: what was seen of one text, and its `unembedding`.
    """
    n = min(NUM_LIKELIEST, len(out.weight) // 2)
    flops_per_row = 2 * out.weight.numel() * len(heads)
    rows = affordable_rows(len(out.scale), flops_per_row, out.scale.device, effort).to(out.scale.device)
    found = {}
    for head in heads:
        logits = out.scale.new_full((len(out.scale), 2 * n), torch.nan)
        tokens = torch.zeros_like(logits, dtype=torch.long)
        with exact_products(logits.device):
            output = att.pattern(*head)[0, rows] @ projected_values(att, head)
        shares = out.scale[rows] * out.logits(output)
        ends = shares.topk(n), shares.topk(n, largest=False)
        logits[rows], tokens[rows] = (torch.cat(each, dim=1) for each in zip(*ends, strict=True))
        found[head] = tokens.cpu(), logits.cpu()
    return found

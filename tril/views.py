"""What a head moves and what it says, besides where it looks: views of one text that a model has read.

Shapes are named as in tril/weights.py.
"""

import torch
from torch import Tensor, nn

from tril.experiments import affordable_rows
from tril.look import Captured
from tril.metrics import Head, Heads
from tril.weights import exact_products

MOST_SAID = 5  # tokens, of the likeliest and of the unlikeliest
Said = tuple[Tensor, Tensor]  # n likeliest and n unlikeliest tokens, and their logits; each (T, 2n), nan: not computed


@torch.no_grad()
def moved(att: Captured, head: Head) -> Tensor:
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


@torch.no_grad()
def say(model: nn.Module, att: Captured, heads: Heads, effort: float = 1.0) -> dict[Head, Said]:
    """Return the tokens that the output of each head makes likeliest and unlikeliest, at each position of a text.

    The residual stream, (1, T, C), is a sum to which each head adds its output. Its share of the logits is what the
    final norm, with the scale that it has for the whole sum, and the head of the model make of its output (Elhage et
    al. 2021). A cap on logits is left out. On a CPU only as many positions as `affordable_rows` are computed.

    model: one that `adds_to_stream`, as a GPT of ours.
    """
    norm = model.final_norm
    wide = att.calls[0].dtype  # also of `moved`
    residual = att.residual[0].to(wide)
    unembedding = model.lm_head.weight.to(wide)
    n = min(MOST_SAID, len(unembedding) // 2)
    flops_per_row = 2 * unembedding.numel() * len(heads)
    rows = affordable_rows(len(residual), flops_per_row, residual.device, effort).to(residual.device)

    def centred(x: Tensor) -> Tensor:
        """Subtract the mean, as a LayerNorm does."""
        return x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x

    scale = (centred(residual[rows]).square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    found = {}
    for head in heads:
        logits = residual.new_full((len(residual), 2 * n), torch.nan)
        tokens = torch.zeros_like(logits, dtype=torch.long)
        with exact_products(residual.device):
            direct = scale * centred(att.pattern(*head)[0, rows] @ moved(att, head))
            shares = direct @ unembedding.T
        ends = shares.topk(n), shares.topk(n, largest=False)
        logits[rows], tokens[rows] = (torch.cat(each, dim=1) for each in zip(*ends, strict=True))
        found[head] = tokens.cpu(), logits.cpu()
    return found

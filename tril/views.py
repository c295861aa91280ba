"""What a head moves, and what it adds to the logits, besides where it looks.

Shapes are named as in tril/weights.py; C is the width of the residual stream.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from tril.errors import UserError, errors_as_user_error
from tril.experiments import affordable_rows
from tril.look import Captured
from tril.metrics import Head, Heads
from tril.weights import TOLERANCE, exact_products
from tril.why import NOT_LINEAR, Writers

UNKNOWN = "what heads add to the logits is not known"
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


class Stream(Writers):
    """The residual stream of a pass of one text, (1, T): linear layers are writers too, so no way leads through one."""

    not_linear = NOT_LINEAR | {"linear"}

    def begin(self) -> None:
        """Forget the forward pass before."""
        super().begin()
        self.added = {}  # layer -> the place of what its output projection writes
        self.last = None  # the input, the weight and the output of the last linear layer

    def see_linear(self, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Remember the layer, and that its output is written next if it is an output projection."""
        super().see_linear(output, input, weight, bias)
        self.last = input, weight, output
        if self.layer in self.projections:  # since this linear layer, or one before
            self.added.setdefault(self.layer, len(self.written))

    @torch.inference_mode(False)
    def unembedding(self, known: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Return a function of a layer, a part of what it adds, (T, C) or (C,), and n rows: the logits of that, (n, V).

        The unembedding is the last linear layer, but for rows behind those of the known logits, (1, T, V), which are
        padding. If other tokens are likeliest by it, it is another layer, as one that predicts further ahead. What it
        reads is linear in what was written, with the scales that norms have in this text (Elhage et al. 2021). So a
        part of it is a derivative, and all that was written sums to it.

        Raises UserError if it is no such sum, or if the output of a layer is no part of it.
        """

        def part_of(products: Iterable[Tensor]) -> Tensor:
            """Return the Jacobian times something, given products of that and the transpose."""
            return torch.autograd.grad(sum(product.sum() for product in products), zeros, retain_graph=True)[0]

        with errors_as_user_error(UNKNOWN):
            V = known.size(-1)
            hidden, weight, output = self.last
            weight = weight[:V]
            is_other = output[..., :V].argmax(-1) != known.argmax(-1)
            zeros = torch.zeros_like(hidden, requires_grad=True)
            pull = partial(torch.autograd.grad, hidden, grad_outputs=zeros, create_graph=True)
            backs = pull([self.written[self.added[layer]][1]() for layer in range(len(self.calls))])
            written = [x for _, x in self.alive]
            pairs = zip(pull(written, allow_unused=True), written, strict=True)
            error = part_of(back * x for back, x in pairs if back is not None) - hidden
            rounding = max(TOLERANCE[x.dtype] for x in [hidden, *written])  # under autocast that of linear layers
            if len(weight) < V or is_other.float().mean() > 0.5 or not error.norm() <= 10 * rounding * hidden.norm():
                raise UserError(UNKNOWN)

        @torch.inference_mode(False)
        def logits(layer: int, part: Tensor, rows: Tensor) -> Tensor:
            with exact_products(part.device):
                part = part.clone()  # one from inference mode has no derivatives
                share = part_of([backs[layer].flatten(0, -2) * part]).flatten(0, -2)[rows]
                return share.to(part) @ weight.T.to(part)

        return logits


@torch.no_grad()
def attribute_logits(
    att: Captured, stream: Stream, known: Tensor, heads: Heads, effort: float = 1.0
) -> dict[Head, LogitAttribution]:
    """Return the tokens that each head makes likeliest and unlikeliest at each position: direct logit attribution.

    On a CPU only as many positions as `affordable_rows` are computed. A cap on logits, or a factor, is left out.

    att, stream: of one text; known: all logits of the stream, (1, T, V). Raises UserError as
    `Stream.unembedding` does.
    """
    logits_of = stream.unembedding(known)
    V, C = known.size(-1), stream.last[1].size(1)
    T = att.shape[-1]
    n = min(NUM_LIKELIEST, V // 2)
    device = stream.last[1].device
    rows = affordable_rows(T, 2 * V * C * len(heads), device, effort).to(device)
    found = {}
    for head in heads:
        moved = projected_values(att, head)
        output = moved.new_zeros(T, C)
        with exact_products(device):
            output[rows] = att.pattern(*head)[0, rows] @ moved
        shares = logits_of(head[0], output, rows)
        logits = output.new_full((T, 2 * n), torch.nan)
        tokens = torch.zeros_like(logits, dtype=torch.long)
        ends = shares.topk(n), shares.topk(n, largest=False)
        logits[rows], tokens[rows] = (torch.cat(each, dim=1) for each in zip(*ends, strict=True))
        found[head] = tokens.cpu(), logits.cpu()
    return found

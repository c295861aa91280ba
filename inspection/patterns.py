"""Capture the queries and keys of a running model, compute attention weights from them, and prove the weights right.

    with capture(model) as att:
        model(idx)                    # (B, T)
    att.pattern(layer=5, head=1)      # (B, T, T), computed on demand: T x D numbers are stored, not T x T
    att.verify()                      # raises NotTheKernels if the weights are not the fused kernel's
    att.scores()["entropy"]           # (L, H), defined in inspection/metrics.py

Shapes are named as in model/attention.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError
from inspection.metrics import Metrics, measure
from model import GPT
from model.attention import Attend, attention_weights, repeat_kv
from model.causality import exact_products, hooked

# The largest error of a row of weights that rounding explains, for each precision of queries and keys.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_SCORE_ROUNDING = 1e-2  # the most allowed in addition for rounded scores, which matters if they are in the thousands
BLOCK_SIZE = 1 << 21  # weights computed at a time; bounds memory and changes results by rounding only


class NotTheKernels(ArithmeticError):
    """The recomputed weights are not those that the kernel used."""

    exit_code = 1


class Captured:
    """Queries and keys of a model's last call. Layers and heads are numbered from zero; -1 is the last."""

    def __init__(self, kernels: list[Attend]):
        self.kernels = kernels
        self.inputs = {}  # Attend -> q, k and mask of its last call

    def hook(self, kernel: Attend, inputs: tuple, output: Tensor) -> None:
        """Store the queries, keys and mask of a kernel's call, in place of those of the call before."""
        q, k, _, mask, _ = inputs
        keys = k.detach().to(q.dtype, copy=True)  # a cache overwrites its own later
        self.inputs[kernel] = (q.detach(), keys, mask)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, T_query, D), k (B, n_kv_head, T_key, D) and mask (T_query, T_key) of one layer.

        Raises IndexError if the model has no such layer, UserError if its Attend was not called.
        """
        kernel = self.kernels[layer]
        if kernel not in self.inputs:
            meant = "a change of the layer belongs inside Attend.forward, and a compiled model is not seen"
            raise UserError(f"no call of Attend in layer {layer} was captured: {meant}")
        return self.inputs[kernel]

    def blocks(self, layer: int, head: int | None = None) -> Iterator[Tensor]:
        """Yield the attention weights of a layer, or of one of its heads, for one block of queries at a time.

        A block is (B, H, queries, keys up to the last of these queries), in float32 (float64 for a float64 model).
        """
        q, k, mask = self[layer]
        k = repeat_kv(k, q)
        if head is not None:
            q = q[:, head, None]
            k = k[:, head, None]
        wide = torch.promote_types(q.dtype, torch.float32)
        seen = k.size(2) - q.size(2)  # keys before the first query: the queries are the last positions of their keys
        weights_per_query = q.size(0) * q.size(1) * k.size(2)
        height = max(1, BLOCK_SIZE // weights_per_query)
        for queries, rows in zip(q.split(height, dim=2), mask.split(height), strict=True):
            seen += queries.size(2)
            with exact_products(q.device):
                weights = attention_weights(queries.to(wide), k[:, :, :seen].to(wide), rows[:, :seen])
            yield weights

    def patterns(self, layer: int, head: int | None = None) -> Tensor:
        """Return the attention weights before dropout of all heads of a layer, or of one: (B, H or 1, T_query, T_key).

        They are float32 (float64 for a float64 model).
        """
        _, k, _ = self[layer]
        blocks = [F.pad(weights, (0, k.size(2) - weights.size(3))) for weights in self.blocks(layer, head)]
        return torch.cat(blocks, dim=2)

    def pattern(self, layer: int, head: int) -> Tensor:
        """Return the weights of one head, (B, T_query, T_key): row = query, column = key. Raises as indexing does."""
        return self.patterns(layer, head)[:, 0]

    def scores(self, repeat: int | None = None) -> Metrics:
        """Return the metrics of all heads, means over the sequences: metric -> (L, H).

        repeat: the length L of the repeated part if the text is a `repeat_probe`.
        """
        return {name: scores.mean(0) for name, scores in self.sequence_scores(repeat).items()}

    def sequence_scores(self, repeat: int | None = None) -> Metrics:
        """Return the metrics of all heads in each sequence: metric -> (B, L, H), and "received" -> (B, L, H, T_key).

        The metrics are those of `measure` in inspection/metrics.py. No T x T matrix is stored. repeat: as in `scores`.
        """
        layers = [measure(self.blocks(layer), repeat) for layer in range(len(self.kernels))]
        return {name: torch.stack([scores[name] for scores in layers], dim=1) for name in layers[0]}

    def verify(self) -> dict[int, float]:
        """Prove the weights of each layer against its kernel: return layer -> the largest error of a row.

        Raises NotTheKernels if an error is larger than rounding explains.
        """
        largest = {}
        for layer in range(len(self.kernels)):
            dtype = self[layer][0].dtype
            errors, rounding = self.row_errors(layer)
            largest[layer] = errors.max().item()
            if not (errors - rounding).max().item() <= TOLERANCE[dtype]:  # also raises for nan
                raise NotTheKernels(
                    f"layer {layer}: the weights shown are not those of the kernel, a row is off by "
                    f"{largest[layer]:.2g} ({dtype}, at most {TOLERANCE[dtype]:.0e} is rounding)"
                )
        return largest

    def row_errors(self, layer: int) -> tuple[Tensor, Tensor]:
        """Estimate the error of each row of a layer's weights, and the error that the rounding of scores explains.

        Both are (B, H, T_query). The kernel runs again on the same queries, keys and mask, with random values of 1 and
        -1. If a row of our weights is wrong by a vector e, the mean square difference of the two outputs over the D
        columns is |e|^2 on average, whatever the direction of e (Freivalds 1977).
        """
        q, k, mask = self[layer]
        wide = torch.promote_types(q.dtype, torch.float32)
        generator = torch.Generator().manual_seed(0)
        v = (torch.randint(2, k.shape, generator=generator, dtype=torch.int8) * 2 - 1).to(k)
        values = repeat_kv(v, q).to(wide)
        key_norms = repeat_kv(k.to(wide).norm(dim=-1, keepdim=True), q)
        ours = []
        mean_key_norms = []  # weighted by attention: only keys with weight can move the output
        with exact_products(q.device), torch.no_grad():  # as in evaluation: a kernel may differ under autograd
            for weights in self.blocks(layer):
                keys = slice(weights.size(3))
                ours.append(weights @ values[:, :, keys])
                mean_key_norms.append(weights @ key_norms[:, :, keys])
            difference = torch.cat(ours, dim=2) - self.kernels[layer].forward(q, k, v, mask)
        # Scores are rounded in proportion to |q| |k| / sqrt(D).
        score_sizes = q.to(wide).norm(dim=-1) * torch.cat(mean_key_norms, dim=2).squeeze(-1) / q.size(-1) ** 0.5
        rounding = 2 * torch.finfo(wide).eps * score_sizes
        return difference.square().mean(-1).sqrt(), rounding.clamp(max=MAX_SCORE_ROUNDING)


@contextmanager
def capture(model: GPT) -> Iterator[Captured]:
    """Capture queries and keys of all layers while the model runs inside the `with` block.

    A call replaces the one before. Outputs and gradients are the same as without capture, to the last bit.
    """
    captured = Captured([block.attention.attend for block in model.blocks])
    with hooked(captured.kernels, captured.hook):
        yield captured

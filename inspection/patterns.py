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
from inspection.metrics import measure
from model import GPT
from model.attention import Attend, attention_weights
from model.precision import exact_products

# The largest error of a row of weights that rounding explains, for each precision of queries and keys.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_SCORE_ROUNDING = 1e-2  # allowed in addition where scores are in the thousands, and are themselves rounded
BLOCK_SIZE = 1 << 21  # weights computed at a time; bounds memory and changes results by rounding only


class NotTheKernels(ArithmeticError):
    """The recomputed weights are not those that the kernel used."""

    exit_code = 1


class Captured:
    """Queries and keys of a model's last call. Layers and heads are numbered from zero; -1 is the last."""

    def __init__(self, kernels: list[Attend]):
        self.kernels = kernels
        self.inputs: dict[Attend, tuple[Tensor, Tensor, Tensor]] = {}

    def hook(self, kernel: Attend, inputs: tuple, output: Tensor) -> None:
        """Store the queries, keys and mask of a kernel's call, in place of those of the call before."""
        q, k, _, mask, _ = inputs
        self.inputs[kernel] = q.detach(), k.detach().to(q.dtype, copy=True), mask  # a cache is overwritten later

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T_query, D), k (B, n_kv_head, T_key, D) and mask (T_query, T_key) of one layer.

        Raises IndexError if the model has no such layer, UserError if its Attend was not called.
        """
        kernel = self.kernels[layer]
        if kernel not in self.inputs:
            meant = "a change of the layer belongs inside Attend.forward, and a compiled model is not seen"
            raise UserError(f"no call of Attend in layer {layer} was captured: {meant}")
        return self.inputs[kernel]

    def blocks(self, layer: int, head: int | None = None) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        """Yield the arguments of `attention_weights` for blocks of queries, in float32 (float64 for a float64 model).

        Each block comes with the number of its first row, and with the keys up to its last query. head: None for all.
        """
        q, k, mask = self[layer]
        heads = range(q.size(1)) if head is None else [range(q.size(1))[head]]
        group = q.size(1) // k.size(1)  # query heads that share a key head
        q, k = q[:, heads], k[:, [number // group for number in heads]]
        past = k.size(2) - q.size(2)  # queries are always the last positions of their keys
        wide = torch.promote_types(q.dtype, torch.float32)
        weights_per_row = q.size(0) * q.size(1) * k.size(2)
        height = max(1, BLOCK_SIZE // weights_per_row)
        for start in range(0, q.size(2), height):
            end = min(start + height, q.size(2))
            yield start, (q[:, :, start:end].to(wide), k[:, :, : past + end].to(wide), mask[start:end, : past + end])

    def patterns(self, layer: int, head: int | None = None) -> Tensor:
        """Attention weights before dropout of all heads of a layer, or of one: (B, H, T_query, T_key), H may be 1.

        They are float32 (float64 for a float64 model).
        """
        q, k, _ = self[layer]
        with exact_products(q.device):
            blocks = [attention_weights(*block) for _, block in self.blocks(layer, head)]
        return torch.cat([F.pad(weights, (0, k.size(2) - weights.size(3))) for weights in blocks], dim=2)

    def pattern(self, layer: int, head: int) -> Tensor:
        """Attention weights of one head, (B, T_query, T_key): row = query, column = key. Raises as indexing does."""
        return self.patterns(layer, head)[:, 0]

    def scores(self, repeat: int | None = None) -> dict[str, Tensor]:
        """Metric -> (L, H), the mean over the sequences."""
        return {name: values.mean(0) for name, values in self.measured(repeat).items()}

    def measured(self, repeat: int | None = None) -> dict[str, Tensor]:
        """Metric -> (B, L, H) as `measure` in inspection/metrics.py has it, without ever storing a T x T matrix.

        repeat: the length L of the repeated part if the text is a `repeat_probe`.
        """
        measured = []
        for layer in range(len(self.kernels)):
            blocks = ((k.size(2) - q.size(2), attention_weights(q, k, mask)) for _, (q, k, mask) in self.blocks(layer))
            with exact_products(self[layer][0].device), torch.no_grad():
                measured.append(measure(blocks, repeat))
        return {name: torch.stack([layer[name] for layer in measured], dim=1) for name in measured[0]}

    def verify(self) -> dict[int, float]:
        """Prove the weights of each layer against its kernel; return the largest error of a row per layer.

        The kernel runs again on the same queries, keys and mask, with random values of 1 and -1. If a row of our
        weights is wrong by a vector e, the mean square difference of the two outputs over the D columns is |e|^2 on
        average, whatever the direction of e (Freivalds 1977). Raises NotTheKernels if an error exceeds rounding.
        """
        errors = {}
        for number, kernel in enumerate(self.kernels):
            q, k, mask = self[number]
            signs = torch.randint(2, k.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8) * 2 - 1
            v, wide, group = signs.to(k), torch.promote_types(q.dtype, torch.float32), q.size(1) // k.size(1)
            values = v.to(wide).repeat_interleave(group, dim=1)
            key_norms = k.to(wide).norm(dim=-1, keepdim=True).repeat_interleave(group, dim=1)
            worst, beyond_rounding = [], []
            with exact_products(q.device), torch.no_grad():
                expected = kernel.forward(q, k, v, mask)
                for start, block in self.blocks(number):
                    weights, queries = attention_weights(*block), block[0]
                    rows, keys = slice(start, start + weights.size(2)), slice(weights.size(3))
                    difference = weights @ values[:, :, keys] - expected[:, :, rows].to(wide)
                    error = difference.square().mean(-1).sqrt()
                    # Scores are rounded in proportion to |q| |k| / sqrt(D). Only keys with weight can move the output.
                    mean_key_norms = (weights @ key_norms[:, :, keys]).squeeze(-1)
                    score_sizes = queries.norm(dim=-1) * mean_key_norms / q.size(-1) ** 0.5
                    rounding = (2 * torch.finfo(wide).eps * score_sizes).clamp(max=MAX_SCORE_ROUNDING)
                    worst.append(error.max())
                    beyond_rounding.append((error - rounding).max())
            errors[number] = torch.stack(worst).max().item()
            if not torch.stack(beyond_rounding).max().item() <= TOLERANCE[q.dtype]:  # also raises for nan
                raise NotTheKernels(
                    f"layer {number}: the weights shown are not those of the kernel, a row is off by "
                    f"{errors[number]:.2g} ({q.dtype}, at most {TOLERANCE[q.dtype]:.0e} is rounding)"
                )
        return errors


@contextmanager
def capture(model: GPT) -> Iterator[Captured]:
    """Capture queries and keys of all layers while the model runs inside the `with` block.

    A call replaces the one before. Outputs and gradients are the same as without capture, to the last bit.
    """
    captured = Captured([block.attention.attend for block in model.blocks])
    hooks = [kernel.register_forward_hook(captured.hook) for kernel in captured.kernels]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()

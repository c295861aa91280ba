"""Capture the queries and keys of a running model, compute attention weights from them, and prove the weights right.

    with capture(model) as att:
        model(idx)                          # or model.generate(...): the cached steps are joined into one triangle
    att.pattern(layer=5, head=1)            # (B, T, T), computed on demand: T x D numbers are stored, not T x T
    att.verify()                            # raises NotTheKernels if the weights are not the fused kernel's
    att.scores()["entropy"]                 # (L, H), defined in inspection/metrics.py

Shapes are named as in model/attention.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from inspection.metrics import measure
from model import GPT
from model.attention import Attend, attention_scores, attention_weights

# The largest error of a row of weights that rounding explains, for each precision of queries and keys.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_SCORE_ROUNDING = 1e-2  # allowed in addition where scores are in the thousands, and are themselves rounded
BLOCK_SIZE = 1 << 21  # weights computed at a time; bounds memory and changes results by rounding only


class NotTheKernels(ArithmeticError):
    """The recomputed weights are not those that the kernel used."""

    exit_code = 1


class LayerCalls:
    """The inputs of one layer's kernel, call by call: queries, new keys, and the mask."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def hook(self, module: Attend, inputs: tuple, output: Tensor) -> None:
        """Store one call. Where a cache grows, it continues the earlier calls; if not, a new text begins."""
        q, k, _, mask, _ = inputs
        q, k = q.detach(), k.detach().to(q.dtype)
        stored = [keys for _, keys, _ in self.calls]
        if not stored or not torch.equal(torch.cat(stored, dim=2), k[:, :, : -q.size(2)]):
            self.calls, stored = [], []
        num_stored = sum(keys.size(2) for keys in stored)
        self.calls.append((q, k[:, :, num_stored:].clone(), mask))  # a copy: the cache is overwritten later


class Captured:
    """Queries and keys of a model's layers. Layers and heads are numbered from zero; -1 is the last."""

    def __init__(self, layers: Sequence[LayerCalls]):
        self.layers = layers

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T_query, D), k (B, n_kv_head, T_key, D) and mask (T_query, T_key) of one layer, all calls joined.

        Raises IndexError if the model has no such layer, RuntimeError if it has not run.
        """
        calls = self.layers[layer].calls
        if not calls:
            raise RuntimeError(f"layer {layer} did not run inside `capture`; a compiled model does not notice it")
        queries, keys, masks = zip(*calls, strict=True)
        q, k = torch.cat(queries, dim=2), torch.cat(keys, dim=2)
        return q, k, torch.cat([F.pad(mask, (0, k.size(2) - mask.size(1))) for mask in masks])

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

        def weights_and_scores(layer: int) -> Iterator[tuple[int, Tensor, Tensor]]:
            for _, block in self.blocks(layer):
                first_position = block[1].size(2) - block[0].size(2)
                yield first_position, attention_weights(*block), attention_scores(*block)

        measured = []
        for layer in range(len(self.layers)):
            with exact_products(self[layer][0].device), torch.no_grad():
                measured.append(measure(weights_and_scores(layer), repeat))
        return {name: torch.stack([layer[name] for layer in measured], dim=1) for name in measured[0]}

    def verify(self) -> dict[int, float]:
        """Prove the weights of each layer against its kernel; return the largest error of a row per layer.

        The kernel runs again on the same queries, keys and mask, with random values of 1 and -1. If a row of our
        weights is wrong by a vector e, the mean square difference of the two outputs over the D columns is |e|^2 on
        average, whatever the direction of e (Freivalds 1977). Raises NotTheKernels if an error exceeds rounding.
        """
        errors = {}
        for number, layer in enumerate(self.layers):
            q, k, _ = self[number]
            signs = torch.randint(2, k.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8) * 2 - 1
            v, wide, group = signs.to(k), torch.promote_types(q.dtype, torch.float32), q.size(1) // k.size(1)
            values = v.to(wide).repeat_interleave(group, dim=1)
            key_norms = k.to(wide).norm(dim=-1, keepdim=True).repeat_interleave(group, dim=1)
            worst, beyond_rounding = [], []
            with exact_products(q.device), torch.no_grad():
                kernel_outputs = []
                for queries, _, mask in layer.calls:
                    T_key = mask.size(1)
                    kernel_outputs.append(layer.attend.forward(queries, k[:, :, :T_key], v[:, :, :T_key], mask))
                expected = torch.cat(kernel_outputs, dim=2)
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

    A new sequence replaces the one before. Outputs and gradients are the same as without capture, to the last bit.
    """
    layers = [LayerCalls(block.attention.attend) for block in model.blocks]
    hooks = [layer.attend.register_forward_hook(layer.hook) for layer in layers]
    try:
        yield Captured(layers)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the precision of their factors: without a GPU's TF32, and without autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)

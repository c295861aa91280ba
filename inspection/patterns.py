"""Attention weights of a model as it runs: the queries and keys that its kernel saw, and the proof that they tell all.

    with capture(model) as att:
        model(idx)                          # or model.generate(...), whose cached steps become one triangle
    att.pattern(layer=5, head=1)            # (B, T, T), computed now: only queries and keys were kept, not T x T
    att.verify()                            # the kernel's own weights, or an error

Shapes are named as in model/attention.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from model import GPT
from model.attention import Attend, attention_weights

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CHUNK = 256  # rows of a pattern that are computed at a time


class NotTheKernels(ArithmeticError):
    """The recomputed weights are not those that the kernel used."""

    exit_code = 1


class Layer:
    """What the kernel of one layer was given: queries row by row, and the keys they looked at."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []  # q, the keys that are new, mask

    def hook(self, module: Attend, inputs: tuple, output: Tensor) -> None:
        q, k, _, mask, _ = inputs
        if k.size(2) != self.num_keys + q.size(2):  # it does not continue a cache: another sequence begins
            self.calls = []
        self.calls.append((q.detach(), k[:, :, self.num_keys :].detach().clone(), mask))  # a cache would be overwritten

    @property
    def num_keys(self) -> int:
        return sum(k.size(2) for _, k, _ in self.calls)


class Captured:
    """Queries and keys of a model's layers. A head is written layer.head, both from zero."""

    def __init__(self, layers: dict[int, Layer]):
        self.layers = layers

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T_query, D), k (B, n_kv_head, T_key, D) and the mask (T_query, T_key) of a layer.

        Raises KeyError if the layer was not captured, RuntimeError if it has not run.
        """
        calls = self.layers[layer].calls
        if not calls:
            raise RuntimeError(f"layer {layer} did not run inside `capture`; a compiled model does not notice it")
        q, k = (torch.cat(parts, dim=2) for parts in zip(*[call[:2] for call in calls], strict=True))
        mask = torch.cat([torch.nn.functional.pad(mask, (0, k.size(2) - mask.size(1))) for _, _, mask in calls])
        return q, k, mask

    def pattern(self, layer: int, head: int, rows: slice = slice(None)) -> Tensor:
        """The weights of one head, (B, rows, T) in float32 (float64 for a float64 model), before dropout."""
        q, k, mask = self[layer]
        key_head = head // (q.size(1) // k.size(1))
        q, k = q[:, head : head + 1, rows], k[:, key_head : key_head + 1]
        wide = torch.promote_types(q.dtype, torch.float32)
        with exact_products():
            parts = zip(q.to(wide).split(CHUNK, dim=2), mask[rows].split(CHUNK), strict=True)
            return torch.cat([attention_weights(part, k.to(wide), seen)[:, 0] for part, seen in parts], dim=1)

    def verify(self, seed: int = 0) -> dict[int, float]:
        """The largest error of a row of weights in each layer, measured against the kernel itself.

        The kernel runs again on the same queries, keys and mask, with values that are 1 or -1 at random. If a row of
        our weights is off by e, the two outputs differ by |e| in the mean square over the D columns, wherever the
        error hides (Freivalds 1977). Raises NotTheKernels beyond what rounding explains.
        """
        errors = {}
        for number, layer in self.layers.items():
            q, k, _ = self[number]
            signs = torch.randint(2, k.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
            v = signs.to(k)
            wide = torch.promote_types(q.dtype, torch.float32)
            values = v.to(wide).repeat_interleave(q.size(1) // k.size(1), dim=1)
            ours = [self.pattern(number, head) @ values[:, head] for head in range(q.size(1))]
            row, theirs = 0, []
            for part, _, mask in layer.calls:
                end = mask.size(1)
                theirs.append(layer.attend.forward(part, k[:, :, :end], v[:, :, :end], mask))
                row += part.size(2)
            difference = torch.stack(ours, dim=1) - torch.cat(theirs, dim=2).to(wide)
            errors[number] = difference.square().mean(-1).sqrt().max().item()
            if not errors[number] <= TOLERANCE[q.dtype]:
                raise NotTheKernels(
                    f"layer {number}: the weights shown are not those of the kernel, a row is off by "
                    f"{errors[number]:.2g} ({q.dtype}, at most {TOLERANCE[q.dtype]:.0e} is rounding)"
                )
        return errors


@contextmanager
def capture(model: GPT, layers: Sequence[int] | None = None) -> Iterator[Captured]:
    """Keep queries and keys of these layers (None: of all) while the model runs inside.

    Another sequence replaces the one before. Outputs and gradients are what they are without it, to the last bit.
    """
    numbers = range(len(model.blocks)) if layers is None else [range(len(model.blocks))[layer] for layer in layers]
    captured = {number: Layer(model.blocks[number].attention.attend) for number in numbers}
    hooks = [layer.attend.register_forward_hook(layer.hook) for layer in captured.values()]
    try:
        yield Captured(captured)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products in float32, without the shorter TF32 of a GPU, which would be most of the error."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

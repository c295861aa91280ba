"""Attention weights of a model as it runs: the queries and keys that its kernel saw, and the proof that they tell all.

    with capture(model) as att:
        model(idx)                          # or model.generate(...), whose cached steps become one triangle
    att.pattern(layer=5, head=1)            # (B, T, T), computed now: only queries and keys were kept, not T x T
    att.verify()                            # the kernel's own weights, or an error
    att.scores()["entropy"]                 # (L, H), see inspection/metrics.py

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

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MOST_ROUNDING = 1e-2  # that is allowed besides, for scores of thousands
BLOCK = 1 << 21  # weights that are computed at a time: time and memory depend on it, results but for rounding not


class NotTheKernels(ArithmeticError):
    """The recomputed weights are not those that the kernel used."""

    exit_code = 1


class Layer:
    """What the kernel of one layer was given, call by call: queries, the keys so far, and the mask."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def hook(self, module: Attend, inputs: tuple, output: Tensor) -> None:
        q, k, _, mask, _ = inputs
        q, k = q.detach(), k.detach().to(q.dtype)
        if not self.continues(k[:, :, : -q.size(2)]):
            self.calls = []
        self.calls.append((q, k[:, :, self.num_keys :].clone(), mask))  # a clone: a cache is written over

    def continues(self, earlier: Tensor) -> bool:
        """Whether these keys are those of the calls before: then a cache goes on, else another text has begun."""
        return bool(self.calls) and torch.equal(earlier, torch.cat([k for _, k, _ in self.calls], dim=2))

    @property
    def num_keys(self) -> int:
        return sum(k.size(2) for _, k, _ in self.calls)


class Captured:
    """Queries and keys of a model's layers. A head is written layer.head, both from zero; -1 is the last."""

    def __init__(self, layers: dict[int, Layer], n_layer: int):
        self.layers, self.n_layer = layers, n_layer

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T_query, D), k (B, n_kv_head, T_key, D) and the mask (T_query, T_key) of a layer.

        Raises IndexError if the model has no such layer, RuntimeError if it was not captured or has not run.
        """
        layer = range(self.n_layer)[layer]
        if layer not in self.layers or not self.layers[layer].calls:
            raise RuntimeError(f"layer {layer} did not run inside `capture`; a compiled model does not notice it")
        calls = self.layers[layer].calls
        if len(calls) == 1:
            return calls[0]
        q, k = (torch.cat(parts, dim=2) for parts in zip(*[call[:2] for call in calls], strict=True))
        return q, k, torch.cat([F.pad(mask, (0, k.size(2) - mask.size(1))) for _, _, mask in calls])

    def blocks(
        self, layer: int, rows: range | None = None, head: int | None = None
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        """The arguments of `attention_weights`, a block of queries after the other, in float32 or float64.

        Each comes with the row it begins at, and with the keys until its last query. rows: which are wanted at least,
        head: which one alone; None: all.
        """
        q, k, mask = self[layer]
        heads = range(q.size(1)) if head is None else [range(q.size(1))[head]]
        q, k = q[:, heads], k[:, [number // (q.size(1) // k.size(1)) for number in heads]]
        past = k.size(2) - q.size(2)  # queries are always the last positions of their keys
        wide, height = torch.promote_types(q.dtype, torch.float32), max(1, BLOCK // (q[..., 0, 0].numel() * k.size(2)))
        rows = range(q.size(2)) if rows is None else rows
        for start in range(min(rows, default=0), max(rows, default=-1) + 1, height):
            end = min(start + height, max(rows) + 1)
            yield start, (q[:, :, start:end].to(wide), k[:, :, : past + end].to(wide), mask[start:end, : past + end])

    def patterns(self, layer: int, rows: slice = slice(None), head: int | None = None) -> Tensor:
        """The weights of all heads of a layer, or of one, before dropout: (B, H, rows, T) or (B, 1, rows, T).

        They are in float32 (float64 for a float64 model).
        """
        q, k, _ = self[layer]
        wanted = range(q.size(2))[rows]
        wide, H = torch.promote_types(q.dtype, torch.float32), q.size(1) if head is None else 1
        shown = torch.zeros(q.size(0), H, len(wanted), k.size(2), device=q.device, dtype=wide)
        with exact_products(q.device):
            for start, block in self.blocks(layer, wanted, head):
                weights = attention_weights(*block)
                places = [place for place, row in enumerate(wanted) if start <= row < start + weights.size(2)]
                shown[:, :, places, : weights.size(3)] = weights[:, :, [wanted[place] - start for place in places]]
        return shown

    def pattern(self, layer: int, head: int, rows: slice = slice(None)) -> Tensor:
        """The weights of one head, (B, rows, T): row = query, column = key. Raises as indexing does."""
        return self.patterns(layer, rows, head)[:, 0]

    def scores(self, repeat: int | None = None) -> dict[str, Tensor]:
        """{metric: (L, H)}, a mean over the sequences; nan for layers that were not captured."""
        return {name: values.mean(0) for name, values in self.measured(repeat).items()}

    def measured(self, repeat: int | None = None, picture: bool = True) -> dict[str, Tensor]:
        """{metric: (B, L, H)}, as inspection/metrics.py defines them; no T x T is ever in memory.

        repeat: the text is a `repeat_probe` of this many tokens, twice; picture: whether to measure PICTURE too.
        """
        if not self.layers:
            raise RuntimeError("no layer was captured")

        def looked_at(layer: int) -> Iterator[tuple[int, Tensor, Tensor]]:
            for _, block in self.blocks(layer):
                yield block[1].size(2) - block[0].size(2), attention_weights(*block), attention_scores(*block)

        layers = {}
        for number in self.layers:
            with exact_products(self[number][0].device), torch.no_grad():
                layers[number] = measure(looked_at(number), repeat, picture)
        none = {name: torch.full_like(values, torch.nan) for name, values in next(iter(layers.values())).items()}
        every = [layers.get(number, none) for number in range(self.n_layer)]
        return {name: torch.stack([layer[name] for layer in every], dim=1) for name in none}

    def verify(self, seed: int = 0) -> dict[int, float]:
        """The largest error of a row of weights in each layer, measured against the kernel itself.

        The kernel runs again on the same queries, keys and mask, with values that are 1 or -1 at random. If a row of
        our weights is off by e, the two outputs differ by |e| in the mean square over the D columns, wherever the
        error hides (Freivalds 1977). Raises NotTheKernels beyond what rounding explains.
        """
        if not self.layers:
            raise RuntimeError("no layer was captured")
        errors = {}
        for number, layer in self.layers.items():
            q, k, _ = self[number]
            signs = torch.randint(2, k.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8) * 2 - 1
            v, wide, group = signs.to(k), torch.promote_types(q.dtype, torch.float32), q.size(1) // k.size(1)
            values, lengths = (
                x.repeat_interleave(group, dim=1) for x in (v.to(wide), k.to(wide).norm(dim=-1, keepdim=True))
            )
            worst, beyond = [], []
            with exact_products(q.device), torch.no_grad():
                theirs = [
                    layer.attend.forward(part, k[:, :, : mask.size(1)], v[:, :, : mask.size(1)], mask)
                    for part, _, mask in layer.calls
                ]
                theirs = torch.cat(theirs, dim=2)
                for start, block in self.blocks(number):
                    weights, queries = attention_weights(*block), block[0]
                    rows, keys = slice(start, start + weights.size(2)), slice(weights.size(3))
                    difference = weights @ values[:, :, keys] - theirs[:, :, rows].to(wide)
                    error = difference.square().mean(-1).sqrt()
                    # The scores themselves are rounded, by more the larger they are; this counts where a row looks.
                    sizes = queries.norm(dim=-1) * (weights @ lengths[:, :, keys]).squeeze(-1) / q.size(-1) ** 0.5
                    worst.append(error.max())
                    beyond.append((error - (2 * torch.finfo(wide).eps * sizes).clamp(max=MOST_ROUNDING)).max())
            errors[number] = torch.stack(worst).max().item()
            if not torch.stack(beyond).max().item() <= TOLERANCE[q.dtype]:
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
        yield Captured(captured, len(model.blocks))
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Products in the precision of their factors: without a GPU's TF32, and without autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)

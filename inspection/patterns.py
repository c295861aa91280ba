"""Capture the calls of PyTorch's attention kernel in a running model, compute the weights, and prove them right.

    with capture(model) as att:
        model(idx)                    # (B, T)
    att.pattern(layer=5, head=1)      # (B, T, T), computed on demand: T x D numbers are stored, not T x T
    att.verify()                      # raises NotTheKernels if the weights are not the fused kernel's
    att.scores()["entropy"]           # (L, H), defined in inspection/metrics.py

The model is any module that calls torch.nn.functional.scaled_dot_product_attention, ours or another. Shapes are named
as in model/attention.py.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from errors import UserError
from inspection.metrics import Metrics, measure
from model.attention import Attend, attention_weights, repeat_kv
from model.causality import exact_products

# The largest error of a row of weights that rounding explains, for each precision of queries and keys.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_SCORE_ROUNDING = 1e-2  # the most allowed in addition for rounded scores, which matters if they are in the thousands
BLOCK_SIZE = 1 << 21  # weights computed at a time; bounds memory and changes results by rounding only
HIDES = -1e4  # a mask of numbers hides a key by this or less; a bias is larger
UNSEEN = (
    "no call of torch.nn.functional.scaled_dot_product_attention with a causal mask was seen; attention that is "
    "written out, or computed by another kernel, cannot be shown (transformers: attn_implementation='sdpa')"
)

Replace = Callable[[int, Tensor], Tensor]  # layer, output of its kernel (B, H, T_query, D) -> the output to go on with


class NotTheKernels(ArithmeticError):
    """The recomputed weights are not those that the kernel used."""

    exit_code = 1


@dataclass(frozen=True)
class Call:
    """One call of the kernel."""

    q: Tensor  # (B, H, T_query, D)
    k: Tensor  # (B, n_kv_head, T_key, D)
    value_shape: tuple[int, ...]  # (B, n_kv_head, T_key, width of a value)
    mask: Tensor | None  # broadcasts to (B, H, T_query, T_key): bool, or numbers to add to the scores; None: triangle
    scale: float | None  # None: 1 / sqrt(D)
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> output (B, H, T_query, width of a value)
    values: Tensor | None  # (B, n_kv_head, T_key, width of a value), if they were asked for

    def rows(self, start: int, end: int, num_keys: int) -> Tensor:
        """Return the mask of the queries from `start` to `end` and the first keys: (..., queries, num_keys)."""
        if self.mask is not None:
            return self.mask[..., start:end, :num_keys]
        return torch.ones(end - start, num_keys, dtype=torch.bool, device=self.q.device).tril(start)

    def blocks(self, head: int | None = None) -> Iterator[Tensor]:
        """Yield the attention weights of all heads or of one; see `Captured.blocks`."""
        q = self.q
        k = repeat_kv(self.k, q)
        if head is not None:
            q = q[:, head, None]
            k = k[:, head, None]
        wide = torch.promote_types(q.dtype, torch.float32)
        weights_per_query = q.size(0) * q.size(1) * k.size(2)
        height = max(1, BLOCK_SIZE // weights_per_query)
        before = k.size(2) - q.size(2)  # keys before the first query: the queries are the last positions of their keys
        for start in range(0, q.size(2), height):
            queries = q[:, :, start : start + height]
            end = start + queries.size(2)
            rows = self.rows(start, end, before + end)
            if head is not None and rows.dim() > 2 and rows.size(-3) > 1:
                rows = rows[..., head, None, :, :]
            if rows.dtype != torch.bool:
                rows = rows.to(wide)
            with exact_products(q.device):
                weights = attention_weights(queries.to(wide), k[:, :, : before + end].to(wide), rows, self.scale)
            if self.mask is not None and (blind := ~visible(rows).any(-1, keepdim=True)).any():
                weights = weights.masked_fill(blind, 0.0)
            yield weights

    def even(self) -> "Call":
        """Return this call with heads that attend evenly to all keys they may see: one for each mask of its own."""
        mask = self.mask if self.mask is None else visible(self.mask)[(None,) * (4 - self.mask.dim())]
        shape = (1, 1) if mask is None else mask.shape[:2]
        q = self.q.new_zeros(*shape, self.q.size(2), 1)
        return replace(self, q=q, k=q.new_zeros(*shape, self.k.size(2), 1), mask=mask, scale=None)


def visible(mask: Tensor) -> Tensor:
    """Return where a mask lets a query see a key, as bool."""
    return mask if mask.dtype == torch.bool else mask > HIDES


def meant_mask(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, dtype: torch.dtype) -> Tensor | None:
    """Return the mask that a call means: (..., T_query, T_key), bool or of `dtype`; None for the triangle alone."""
    if attn_mask is None and is_causal:
        return None
    mask = torch.ones((), dtype=torch.bool, device=q.device) if attn_mask is None else attn_mask.detach()
    is_bool = mask.dtype == torch.bool
    mask = mask.expand(*mask.shape[:-2], q.size(-2), k.size(-2))
    mask = mask if is_bool else mask.to(dtype)
    if is_causal:
        later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        mask = mask.masked_fill(later, False if is_bool else float("-inf"))
    return mask


class Captured(TorchFunctionMode):
    """The calls of the kernel in a model's last forward pass.

    Layers are these calls in their order. Layers and heads are numbered from zero; -1 is the last.
    """

    def __init__(self, replace: Replace | None = None, with_values: bool = False):
        super().__init__()
        self.replace = replace
        self.with_values = with_values
        self.output: Tensor | None = None  # of the last call
        self.projections: dict[int, Tensor | None] = {}  # layer -> weight (C, H * width of a value); None: several
        self.calls: list[Call] = []
        self.left_out: list[str] = []  # the calls that are not attention of a text to itself and its past, in words

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call a function of PyTorch; store the call, and replace its output if that was asked for, if it attends."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # Python that calls the kernel: run its body inside this mode
            names = func.__globals__ | {"has_torch_function": lambda _: False}
            with self:
                return FunctionType(func.__code__, names, argdefs=func.__defaults__)(*args, **kwargs)
        if func is F.linear and self.output is not None:
            self.see_projection(*args, **kwargs)
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.see(output, func, *args, **kwargs)
        if isinstance(getattr(func, "__self__", None), Attend):  # our layer, which may use the formula
            return self.see(output, lambda q, k, v, attn_mask, **_: func(q, k, v, attn_mask), *args[:4])
        return output

    def see(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Store a call of the kernel. Return its output, or what replaces it."""
        dtype = output.dtype  # of the inputs, or that to which autocast casts them
        T = query.size(-2)
        mask = meant_mask(query, key, attn_mask, is_causal, dtype)
        num_keys = T
        if mask is not None:
            last_seen = visible(mask).flatten(0, -2).any(0).nonzero()[-1:]  # behind it a buffer may be empty
            num_keys = max(T, int(last_seen.sum()) + 1)
            mask = mask[..., :num_keys]
        no_heads = query.dim() != 4 or query.size(1) % key.size(1) > 0 or num_keys > key.size(2)
        # The queries belong to the last keys.
        if no_heads or (mask is not None and T > 1 and not (~visible(mask).triu(num_keys - T + 1)).all()):
            self.left_out.append(f"queries {tuple(query.shape)} of keys {tuple(key.shape)}")
            return output
        mask = mask if mask is None else self.shared(mask)
        q = query.detach().to(dtype, copy=True)  # a model may overwrite its own later, as a cache does
        k = key.detach()[:, :, :num_keys].to(dtype, copy=True)
        shape = (*value.shape[:2], num_keys, value.size(3))
        options = {"attn_mask": mask, "is_causal": mask is None, "scale": scale, "enable_gqa": enable_gqa}
        values = value.detach()[:, :, :num_keys].to(dtype, copy=True) if self.with_values else None
        self.calls.append(Call(q, k, shape, mask, scale, partial(function, **options), values))
        if self.replace is not None:
            output = self.replace(len(self.calls) - 1, output)
        self.output = output if self.with_values else None
        return output

    def see_projection(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Store the weight of the one linear layer that reads the output of the last call, its heads joined."""
        output = self.output
        joined = output.transpose(1, 2).flatten(2)
        if input.device != output.device or input.size(-1) != joined.size(-1) or input.numel() != joined.numel():
            return
        if input.reshape(joined.shape).equal(joined):
            layer = len(self.calls) - 1
            self.projections[layer] = None if layer in self.projections else weight.detach()  # beside a gate: which?

    def shared(self, mask: Tensor) -> Tensor:
        """Return a copy of a mask, which a model may change later: one copy for the layers that share one."""
        for call in self.calls:
            if call.mask is not None and call.mask.dtype == mask.dtype and call.mask.equal(mask):
                return call.mask
        return mask.clone()

    def call(self, layer: int) -> Call:
        """Return the call of a layer. Raises IndexError if the model has no such layer, UserError if it has none."""
        if not self.calls:
            others = f"; others were: {self.left_out[0]}" if self.left_out else ""
            raise UserError(f"{UNSEEN}{others}")
        return self.calls[layer]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """L, B, H and T. Raises UserError if there is no layer, or if they differ in sequences, heads or tokens."""
        self.call(0)
        shapes = [(*call.q.shape[:3], call.k.size(2)) for call in self.calls]
        if len(set(shapes)) > 1:
            raise UserError(f"heads can be compared if all layers have as many, of the same tokens, not {shapes}")
        return len(shapes), *shapes[0][:3]

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, T_query, D), k (B, n_kv_head, T_key, D) and mask (..., T_query, T_key) of a layer.

        Raises as `call` does.
        """
        call = self.call(layer)
        return call.q, call.k, call.rows(0, call.q.size(2), call.k.size(2))

    def blocks(self, layer: int, head: int | None = None) -> Iterator[Tensor]:
        """Yield the attention weights of a layer, or of one of its heads, for one block of queries at a time.

        A block is (B, H, queries, keys up to the last of these queries), in float32 (float64 for a float64 model). A
        query that its mask lets see nothing has weights of zero.
        """
        return self.call(layer).blocks(head)

    def patterns(self, layer: int, head: int | None = None) -> Tensor:
        """Return the attention weights before dropout of all heads of a layer, or of one: (B, H or 1, T_query, T_key).

        They are float32 (float64 for a float64 model).
        """
        num_keys = self.call(layer).k.size(2)
        blocks = [F.pad(weights, (0, num_keys - weights.size(3))) for weights in self.blocks(layer, head)]
        return torch.cat(blocks, dim=2)

    def pattern(self, layer: int, head: int) -> Tensor:
        """Return the weights of one head, (B, T_query, T_key): row = query, column = key. Raises as indexing does."""
        return self.patterns(layer, head)[:, 0]

    def moved(self, layer: int, head: int) -> Tensor | None:
        """Return what a head moves from each key to the queries that attend to it: (B, T_key, C).

        That is f(x) = (x W^V + b^V) W^O of Kobayashi et al. (2020): the value through the head's part of the output
        projection. The head's output is the mean of these by its weights. The dtype is that of weights; see `blocks`.

        Returns None if it is not known: inside `capture(model, with_values=True)` exactly one
        torch.nn.functional.linear has to read the output.
        """
        projection = self.projections.get(layer)
        if projection is None:
            return None
        call = self.call(layer)
        wide = torch.promote_types(call.q.dtype, torch.float32)
        weight = projection.to(wide).unflatten(1, (call.q.size(1), -1))[:, head]
        with exact_products(call.q.device):
            return repeat_kv(call.values.to(wide), call.q)[:, head] @ weight.T

    def scores(self, repeat: int | None = None) -> Metrics:
        """Return the metrics of all heads, means over the sequences: metric -> (L, H).

        repeat: the length L of the repeated part if the text is a `repeat_probe`.
        """
        return {name: scores.mean(0) for name, scores in self.sequence_scores(repeat).items()}

    def sequence_scores(self, repeat: int | None = None) -> Metrics:
        """Return the metrics of all heads in each sequence: metric -> (B, L, H), and "received" -> (B, L, H, T_key).

        The metrics are those of `measure` in inspection/metrics.py. No T x T matrix is stored. repeat: as in `scores`.
        Raises UserError as `shape` does.
        """
        L, *_ = self.shape
        layers = [measure(self.blocks(layer), repeat) for layer in range(L)]
        return {name: torch.stack([scores[name] for scores in layers], dim=1) for name in layers[0]}

    def even_scores(self, repeat: int | None = None) -> Metrics:
        """Return the metrics of heads that attend evenly to all keys they may see, in the form of `sequence_scores`."""
        L, B, H, _ = self.shape
        found = {}  # by mask, which layers share
        for call in self.calls:
            if id(call.mask) not in found:
                found[id(call.mask)] = measure(call.even().blocks(), repeat)
        layers = [found[id(call.mask)] for call in self.calls]
        return {
            name: torch.stack([scores[name].expand(B, H, *scores[name].shape[2:]) for scores in layers], dim=1)
            for name in layers[0]
        }

    def verify(self) -> dict[int, float]:
        """Prove the weights of each layer against its kernel: return layer -> the largest error of a row.

        Raises NotTheKernels if an error is larger than rounding explains.
        """
        self.call(0)
        largest = {}
        for layer, call in enumerate(self.calls):
            dtype = call.q.dtype
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
        -1. If a row of our weights is wrong by a vector e, the mean square difference of the two outputs over the
        width of a value is |e|^2 on average, whatever the direction of e (Freivalds 1977).
        """
        call = self.call(layer)
        q = call.q
        wide = torch.promote_types(q.dtype, torch.float32)
        generator = torch.Generator().manual_seed(0)
        v = (torch.randint(2, call.value_shape, generator=generator, dtype=torch.int8) * 2 - 1).to(q)
        values = repeat_kv(v, q).to(wide)
        key_norms = repeat_kv(call.k.to(wide).norm(dim=-1, keepdim=True), q)
        ours = []
        mean_key_norms = []  # weighted by attention: only keys with weight can move the output
        with exact_products(q.device), torch.no_grad():  # as in evaluation: a kernel may differ under autograd
            for weights in self.blocks(layer):
                keys = slice(weights.size(3))
                ours.append(weights @ values[:, :, keys])
                mean_key_norms.append(weights @ key_norms[:, :, keys])
            difference = torch.cat(ours, dim=2) - call.kernel(q, call.k, v)
        if call.mask is not None:  # what a query that sees nothing gets is the kernel's affair
            difference = difference.masked_fill(~visible(call.mask).any(-1, keepdim=True), 0.0)
        # Scores are rounded in proportion to |q| |k| times their scale.
        scale = q.size(-1) ** -0.5 if call.scale is None else call.scale
        score_sizes = q.to(wide).norm(dim=-1) * torch.cat(mean_key_norms, dim=2).squeeze(-1) * scale
        rounding = 2 * torch.finfo(wide).eps * score_sizes
        return difference.square().mean(-1).sqrt(), rounding.clamp(max=MAX_SCORE_ROUNDING)


@contextmanager
def capture(model: nn.Module, replace: Replace | None = None, with_values: bool = False) -> Iterator[Captured]:
    """Capture the calls of the kernel while a model runs inside the `with` block.

    A forward pass replaces the one before. Outputs and gradients are the same as without capture, to the last bit. A
    compiled model runs eagerly inside the block.

    replace: a function of a layer and the output of its kernel, before the output projection, that returns the output
        to go on with.
    with_values: also store the values and find the output projections, for `Captured.moved`.
    """
    captured = Captured(replace, with_values)
    running = []  # the model itself, not one of its parts

    def begin(module: nn.Module, inputs: tuple) -> None:
        """Forget the forward pass before. A part may be run by itself, from tokens on, as `GPT.generate` does."""
        if module is model or not running:
            captured.calls.clear()
            captured.projections.clear()
            captured.left_out.clear()
        if module is model:
            running.append(module)

    with ExitStack() as stack:
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        for module in (model, *embeddings[:1]):
            stack.enter_context(module.register_forward_pre_hook(begin))
        stack.enter_context(model.register_forward_hook(lambda *_: running.clear(), always_call=True))
        if "torch._dynamo" in sys.modules:  # which takes a second to import, and is there if anything is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack.enter_context(captured)

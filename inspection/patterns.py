"""Capture the calls of PyTorch's attention kernel in a running model, compute the weights, and prove them right.

    with capture(model) as att:
        model(idx)                    # (B, T)
    att.pattern(layer=5, head=1)      # (B, T, T), computed on demand: T x D numbers are stored, not T x T
    att.verify()                      # raises NotTheKernels if the weights are not the fused kernel's
    att.scores()["entropy"]           # (B, L, H), defined in inspection/metrics.py

The model is any module that calls torch.nn.functional.scaled_dot_product_attention, ours or another. It knows nothing
of that: its calls are seen from outside. Shapes are named as in model/attention.py.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from errors import UserError
from inspection.metrics import Metrics, measure
from model import GPT, attention
from model.attention import attention_weights, repeat_kv
from model.device import exact_products

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
    """One call of the kernel, in which the queries belong to the last T_query positions of the keys."""

    q: Tensor  # (B, H, T_query, D)
    k: Tensor  # (B, n_kv_head, T_key, D)
    mask: Tensor | None  # (1 or B, 1 or H, T_query, T_key), numbers to add to the scores; None: the triangle
    scale: float | None  # None: 1 / sqrt(D)
    values: Tensor | None  # (B, n_kv_head, T_key, width of a value); None if they were not asked for
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> output (B, H, T_query, width of v)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights: float32, or float64 for a float64 model."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def of_head(self, head: int) -> "Call":
        """Return this call with one head alone. Raises IndexError if there is no such head."""
        mask = self.mask if self.mask is None else self.mask[:, head % self.mask.size(1), None]
        return replace(self, q=self.q[:, head, None], k=repeat_kv(self.k, self.q)[:, head, None], mask=mask)

    def even(self) -> "Call":
        """Return this call with heads that attend evenly to all keys they may see: one for each mask of its own."""
        mask = self.mask if self.mask is None else self.mask.masked_fill(self.mask > HIDES, 0.0)
        B, H = (1, 1) if mask is None else mask.shape[:2]
        return replace(self, q=self.q[:B, :H], k=self.k[:B, :1], mask=mask, scale=0.0)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the attention weights of all heads before dropout, for one block of queries at a time.

        A block is (B, H, queries, keys up to the last of these queries), of `dtype`. A query that its mask lets see
        nothing has weights of zero.
        """
        B, H, T, _ = self.q.shape
        num_keys = self.k.size(2)
        height = max(1, BLOCK_SIZE // (B * H * num_keys))
        for start in range(0, T, height):
            q = self.q[:, :, start : start + height].to(self.dtype)
            k = self.k[:, :, : num_keys - T + start + height].to(self.dtype)
            rows = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril(start)
            if self.mask is not None:
                rows = self.mask[:, :, start : start + height, : k.size(2)].to(self.dtype)
            with exact_products(q.device):
                weights = attention_weights(q, k, rows, self.scale)
            if self.mask is not None and (hidden := rows <= HIDES).all(-1).any():
                weights = weights.masked_fill(hidden, 0.0)
            yield weights

    def weights(self) -> Tensor:
        """Return the attention weights of all heads before dropout, (B, H, T_query, T_key), of `dtype`."""
        return torch.cat([F.pad(block, (0, self.k.size(2) - block.size(3))) for block in self.blocks()], dim=2)

    def row_errors(self) -> tuple[Tensor, Tensor]:
        """Estimate the error of each row of the weights, and the error that the rounding of scores explains.

        Both are (B, H, T_query). The kernel runs again on the same queries, keys and mask, with random values of 1 and
        -1. If a row of our weights is wrong by a vector e, the mean square difference of the two outputs over the
        width of a head is |e|^2 on average, whatever the direction of e (Freivalds 1977).
        """
        q = self.q
        generator = torch.Generator().manual_seed(0)
        signs = (torch.randint(2, self.k.shape, generator=generator, dtype=torch.int8) * 2 - 1).to(q)
        sizes = self.k.to(self.dtype).norm(dim=-1, keepdim=True)
        beside = repeat_kv(torch.cat((signs.to(self.dtype), sizes), dim=-1), q)
        with exact_products(q.device), torch.no_grad():  # as in evaluation: a kernel may differ under autograd
            ours = torch.cat([block @ beside[:, :, : block.size(3)] for block in self.blocks()], dim=2)
            difference = ours[..., :-1] - self.kernel(q, self.k, signs)
        if self.mask is not None:  # what a query that sees nothing gets is the kernel's affair
            difference = difference.masked_fill((self.mask <= HIDES).all(-1, keepdim=True), 0.0)
        # Scores are rounded in proportion to |q| |k| times their scale. Only keys with weight can move the output.
        scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        rounding = 2 * torch.finfo(self.dtype).eps * scale * q.to(self.dtype).norm(dim=-1) * ours[..., -1]
        return difference.square().mean(-1).sqrt(), rounding.clamp(max=MAX_SCORE_ROUNDING)


class Captured(TorchFunctionMode):
    """The calls of the kernel in a model's last forward pass.

    Layers are these calls in their order. Layers and heads are numbered from zero; -1 is the last.
    """

    def __init__(self, replace: Replace | None = None, with_values: bool = False):
        super().__init__()
        self.replace = replace
        self.with_values = with_values
        self.begin()

    def begin(self, *_: object) -> None:
        """Forget the forward pass before, as a hook."""
        self.residual: Tensor | None = None  # the stream before the final norm of a model of ours, (B, T, C)
        self.output: Tensor | None = None  # of the last call, heads joined, (B, T, H * width of a value)
        self.num_projected = 0  # of the outputs, those that an output projection of a model of ours read as they are
        self.seen: list[Call] = []
        self.left_out: list[str] = []  # the calls that are not attention of a text to itself and its past, in words

    @property
    def calls(self) -> list[Call]:
        """The calls, one for each layer. Raises UserError if none was seen."""
        if not self.seen:
            others = f"; others were: {self.left_out[0]}" if self.left_out else ""
            raise UserError(f"{UNSEEN}{others}")
        return self.seen

    def end(self, norm: nn.Module, inputs: tuple) -> None:
        """Keep the residual stream, as a hook before the final norm."""
        self.residual = inputs[0]

    def project(self, layer: nn.Module, inputs: tuple) -> None:
        """Count an output projection that reads what the kernel returned, as a hook."""
        if self.output is not None:  # else attention was written out before it
            self.num_projected += self.output.to(inputs[0].dtype).equal(inputs[0])

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call a function of PyTorch. See what it does if it attends."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # which is Python, and shows its calls if it finds no mode around it
            with patch.object(F, "has_torch_function", return_value=False), self:
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        return self.see(output, *args, **kwargs) if func is F.scaled_dot_product_attention else output

    def see(
        self,
        output: Tensor,
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
        T_query, T_key = query.size(-2), key.size(-2)
        is_text = T_query == T_key
        mask = None
        if is_causal:
            is_text = is_text and attn_mask is None
        else:
            mask = query.new_zeros(1, 1, T_query, T_key, dtype=dtype)
            if attn_mask is not None:
                is_bool = attn_mask.dtype == torch.bool
                mask = torch.where(attn_mask, mask, -torch.inf) if is_bool else mask + attn_mask.detach().to(dtype)
            sees = mask > HIDES
            # The queries belong to the last keys: behind these is no empty buffer.
            is_text = (is_text or sees[..., -1].any()) and (~sees.triu(T_key - T_query + 1)).all()
        if query.dim() != 4 or query.size(1) % key.size(1) or not is_text:
            self.left_out.append(f"queries {tuple(query.shape)} of keys {tuple(key.shape)}")
            return output
        for call in self.seen:
            if mask is not None and call.mask is not None and mask.equal(call.mask):
                mask = call.mask  # one for the layers that share it
        # Copies, because a model may overwrite its own later, as a cache does.
        q = query.detach().to(dtype, copy=True)
        k = key.detach().to(dtype, copy=True)
        values = value.detach().to(dtype, copy=True) if self.with_values else None
        options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        self.seen.append(Call(q, k, mask, scale, values, partial(F.scaled_dot_product_attention, **options)))
        if self.replace is not None:
            output = self.replace(len(self.seen) - 1, output)
        if self.with_values:
            self.output = output.detach().transpose(1, 2).flatten(2)
        return output

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """L, B, H and T. Raises UserError if there is no layer, or if they differ in sequences, heads or tokens."""
        shapes = [(*call.q.shape[:3], call.k.size(2)) for call in self.calls]
        if len(set(shapes)) > 1:
            raise UserError(f"heads can be compared if all layers have as many, of the same tokens, not {shapes}")
        return len(shapes), *shapes[0][:3]

    def pattern(self, layer: int, head: int) -> Tensor:
        """Return the weights of one head, (B, T_query, T_key): row = query, column = key.

        Raises IndexError if there is no such head, UserError if there is none at all.
        """
        return self.calls[layer].of_head(head).weights()[:, 0]

    def scores(self, repeat: int | None = None, even: bool = False) -> Metrics:
        """Return the metrics of all heads in each sequence: metric -> (B, L, H).

        The metrics are those of `measure` in inspection/metrics.py. No T x T matrix is stored.

        repeat: the length L of the repeated part if the text is a `repeat_probe`.
        even: of heads that attend evenly to all keys they may see.

        Raises UserError as `shape` does.
        """
        _, B, H, _ = self.shape
        layers = [measure((call.even() if even else call).blocks(), repeat) for call in self.calls]
        return {name: torch.stack([layer[name].expand(B, H) for layer in layers], dim=1) for name in layers[0]}

    def verify(self) -> dict[int, float]:
        """Prove the weights of each layer against its kernel: return layer -> the largest error of a row.

        Raises NotTheKernels if an error is larger than rounding explains.
        """
        largest = {}
        for layer, call in enumerate(self.calls):
            dtype = call.q.dtype
            errors, rounding = call.row_errors()
            largest[layer] = errors.max().item()
            if not (errors - rounding).max().item() <= TOLERANCE[dtype]:  # also raises for nan
                raise NotTheKernels(
                    f"layer {layer}: the weights shown are not those of the kernel, a row is off by "
                    f"{largest[layer]:.2g} ({dtype}, at most {TOLERANCE[dtype]:.0e} is rounding)"
                )
        return largest


@contextmanager
def capture(model: nn.Module, replace: Replace | None = None, with_values: bool = False) -> Iterator[Captured]:
    """Capture the calls of the kernel while a model runs inside the `with` block.

    A forward pass replaces the one before. Outputs and gradients are the same as without capture, to the last bit, but
    where our own layers would train by the formula: inside the block they call the kernel. A compiled model runs
    eagerly there.

    replace: a function of a layer and the output of its kernel, before the output projection, that returns the output
        to go on with.
    with_values: also store the values, for inspection/views.py.
    """
    captured = Captured(replace, with_values)
    with ExitStack() as stack:
        stack.enter_context(model.register_forward_pre_hook(captured.begin))
        if isinstance(model, GPT):  # its parts may be called without it, from this one on, as `GPT.generate` does
            stack.enter_context(model.token_embedding.register_forward_pre_hook(captured.begin))
            stack.enter_context(model.final_norm.register_forward_pre_hook(captured.end))
            for name, module in model.named_modules():  # a layer of somebody's own may have none
                if with_values and name.endswith("attention.o_proj"):
                    stack.enter_context(module.register_forward_pre_hook(captured.project))
        stack.enter_context(patch.object(attention, "formula_is_faster", return_value=False))
        if "torch._dynamo" in sys.modules:  # which takes a second to import, and is there if anything is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack.enter_context(captured)

"""Capture the attention of a running model, however the model computes it, and prove the weights that are shown.

    with capture(model) as att:
        model(idx)                    # (B, T)
    att.pattern(layer=5, head=1)      # (B, T, T): row = query, column = key
    att.verify()                      # layer -> how it was seen; raises NotTheKernels if weights are not the kernel's
    att.scores()["entropy"]           # (B, L, H), defined in inspection/metrics.py

The model is any module, ours or another. It knows nothing of that: its calls of PyTorch are seen from outside.

A fused kernel keeps no weights. Of its call the queries and keys are stored, T x D numbers instead of T x T, and the
weights are computed from them on demand. Weights that a model writes out are read where they meet the values: they are
an operand of a product, have no negative number, sum to about one along the axis that is contracted, and give later
tokens nothing. Shapes are named as in model/attention.py.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from errors import UserError
from inspection.metrics import Metrics, Proof, measure
from inspection.products import PRODUCTS, Layout, find_meetings
from model import GPT, attention
from model.attention import attention_weights, repeat_kv
from model.device import exact_products

# The largest error of a row of weights that rounding explains, for each precision of what they are computed from.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_SCORE_ROUNDING = 1e-2  # the most allowed in addition for rounded scores, which matters if they are in the thousands
BLOCK_SIZE = 1 << 21  # weights computed at a time; bounds memory and changes results by rounding only
HIDES = -1e4  # a mask of numbers hides a key by this or less; a bias is larger
MOST_SUM = 2.0  # of a row that is read: dropout of a half doubles a weight
JOINS = ("cat", "concat", "concatenate", "stack")
SIZES = ("size", "dim", "numel", "stride")
UNSEEN = (
    "no attention of a text to itself and its past was seen: neither a call of a kernel of PyTorch nor a product of "
    "weights and values; what runs in a compiled graph or in a kernel of another library cannot be shown"
)
UNMASKED = "the model attends without a causal mask: python -m model.check says where"

Replace = Callable[[int, Tensor], Tensor]  # layer, output of its heads (B, H, T_query, D) -> the output to go on with
Kernel = Callable[[Tensor], Tensor]  # values (B, n_kv_head, T_key, D) -> output (B, H, T_query, D)


class NotTheKernels(ArithmeticError):
    """The weights are not those that the kernel used."""

    exit_code = 1


@dataclass(frozen=True, eq=False)
class Call:
    """The attention of a layer, in which the queries belong to the last T_query positions of the keys."""

    values: Tensor | None  # (B, n_kv_head, T_key, width of a value); None if they were not asked for

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights shown: float32, or float64 of a float64 model."""
        return torch.promote_types(self.source.dtype, torch.float32)

    def weights(self) -> Tensor:
        """Return the attention weights of all heads, (B, H, T_query, T_key), of `dtype`."""
        return torch.cat([F.pad(block, (0, self.shape[3] - block.size(3))) for block in self.blocks()], dim=2)

    def join(self, calls: Sequence["Call"]) -> "Call":
        """Return one call that has the heads of several."""
        parts = {name: [getattr(call, name) for call in calls] for name in self.of_heads}
        return replace(self, **{name: torch.cat(part, dim=1) for name, part in parts.items() if part[0] is not None})


@dataclass(frozen=True, eq=False)
class Computed(Call):
    """A call of the kernel, whose weights are computed from queries and keys."""

    of_heads = ("values", "q", "k")  # the fields with an axis of heads
    q: Tensor  # (B, H, T_query, D)
    k: Tensor  # (B, n_kv_head, T_key, D)
    mask: Tensor | None  # (1 or B, 1 or H, T_query, T_key), numbers to add to the scores; None: the triangle
    scale: float | None  # None: 1 / sqrt(D)

    @property
    def shape(self) -> tuple[int, ...]:
        """B, H, T_query and T_key."""
        return (*self.q.shape[:3], self.k.size(2))

    @property
    def source(self) -> Tensor:
        """The tensor whose precision and device are those of the attention."""
        return self.q

    def of_head(self, head: int) -> "Computed":
        """Return this call with one head alone. Raises IndexError if there is no such head."""
        mask = self.mask if self.mask is None else self.mask[:, head % self.mask.size(1), None]
        return replace(self, q=self.q[:, head, None], k=repeat_kv(self.k, self.q)[:, head, None], mask=mask)

    def sums(self) -> tuple[()]:
        """Return nothing: what a softmax and the mask make of the sums of rows is known."""
        return ()

    def even(self) -> "Computed":
        """Return this call with heads that attend evenly to all keys they may see: one for each mask of its own."""
        mask = self.mask if self.mask is None else self.mask.masked_fill(self.mask > HIDES, 0.0)
        B, H = (1, 1) if mask is None else mask.shape[:2]
        return replace(self, q=self.q[:B, :H], k=self.k[:B, :1], mask=mask, scale=0.0)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the attention weights of all heads before dropout, for one block of queries at a time.

        A block is (B, H, queries, keys up to the last of these queries), of `dtype`. A query that its mask lets see
        nothing has weights of zero.
        """
        B, H, T, num_keys = self.shape
        dtype = self.dtype
        height = max(1, BLOCK_SIZE // (B * H * num_keys))
        for start in range(0, T, height):
            q = self.q[:, :, start : start + height].to(dtype)
            k = self.k[:, :, : num_keys - T + start + height].to(dtype)
            rows = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril(start)
            if self.mask is not None:
                rows = self.mask[:, :, start : start + height, : k.size(2)].to(dtype)
            with exact_products(q.device):
                weights = attention_weights(q, k, rows, self.scale)
            if self.mask is not None and (hidden := rows <= HIDES).all(-1).any():
                weights = weights.masked_fill(hidden, 0.0)
            yield weights

    def kernel(self, values: Tensor) -> Tensor:
        """Return the output of the kernel for other values, (B, n_kv_head, T_key, D) -> (B, H, T_query, D)."""
        grouped = self.q.size(1) != self.k.size(1)
        options = {"is_causal": self.mask is None, "scale": self.scale, "enable_gqa": grouped}
        return F.scaled_dot_product_attention(self.q, self.k, values, self.mask, **options)

    def row_errors(self) -> tuple[Tensor, Tensor]:
        """Estimate the error of each row of the weights, and the error that the rounding of scores explains.

        Both are (B, H, T_query). The kernel runs again on the same queries, keys and mask, with random values of 1 and
        -1. If a row of our weights is wrong by a vector e, the mean square difference of the two outputs over the
        width of a head is |e|^2 on average, whatever the direction of e (Freivalds 1977).
        """
        q = self.q
        dtype = self.dtype
        signs = random_signs(self.k)
        sizes = self.k.to(dtype).norm(dim=-1, keepdim=True)
        beside = repeat_kv(torch.cat((signs.to(dtype), sizes), dim=-1), q)
        with exact_products(q.device), torch.no_grad():  # as in evaluation: a kernel may differ under autograd
            ours = torch.cat([block @ beside[:, :, : block.size(3)] for block in self.blocks()], dim=2)
            difference = ours[..., :-1] - self.kernel(signs)
        if self.mask is not None:  # what a query that sees nothing gets is the kernel's affair
            difference = difference.masked_fill((self.mask <= HIDES).all(-1, keepdim=True), 0.0)
        # Scores are rounded in proportion to |q| |k| times their scale. Only keys with weight can move the output.
        scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        rounding = 2 * torch.finfo(dtype).eps * scale * q.to(dtype).norm(dim=-1) * ours[..., -1]
        return difference.square().mean(-1).sqrt(), rounding.clamp(max=MAX_SCORE_ROUNDING)


@dataclass(frozen=True, eq=False)
class Read(Call):
    """Weights that met the values: a model wrote them out, or its kernel was asked for them."""

    of_heads = ("values", "source")
    source: Tensor  # the weights, (B, H, T_query, T_key), in the model's precision
    kernel: Kernel | None = None  # None: they are the model's own

    @property
    def shape(self) -> tuple[int, ...]:
        """B, H, T_query and T_key."""
        return self.source.shape

    def of_head(self, head: int) -> "Read":
        """Return these weights with one head alone. Raises IndexError if there is no such head."""
        return replace(self, source=self.source[:, head, None])

    def even(self) -> "Read":
        """Return the weights of a head that attends evenly to all keys to which a head of the layer gives any."""
        seen = (self.source > 0).any(1, keepdim=True).float()
        return replace(self, source=seen / seen.sum(-1, keepdim=True).clamp(min=1))

    def blocks(self) -> Iterator[Tensor]:
        """Yield all weights, (B, H, T_query, T_key), of `dtype`."""
        yield self.source.to(self.dtype)

    def sums(self) -> tuple[float, float, float]:
        """Return the least and the largest sum of a row, and the largest share of a row that later tokens have."""
        (weights,) = self.blocks()
        later = weights.triu(weights.size(3) - weights.size(2) + 1)
        return *(x.item() for x in weights.sum(-1).aminmax()), later.sum(-1).max().item()

    def row_errors(self) -> tuple[Tensor, Tensor]:
        """Return the error of each row of the weights of a kernel, (B, H, T_query), and zeros. See `Computed`."""
        signs = random_signs(self.values)
        (weights,) = self.blocks()
        with exact_products(weights.device), torch.no_grad():
            difference = weights @ repeat_kv(signs, weights).to(weights) - self.kernel(signs)
        errors = difference.square().mean(-1).sqrt()
        return errors, torch.zeros_like(errors)


def random_signs(like: Tensor) -> Tensor:
    """Return random values of 1 and -1, the same at each call, of the shape and type of a tensor."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(2, like.shape, generator=generator, dtype=torch.int8) * 2 - 1).to(like)


class Captured(TorchFunctionMode):
    """The attention in a model's last forward pass.

    Layers are its calls in their order. Layers and heads are numbered from zero; -1 is the last.
    """

    def __init__(self, replace: Replace | None = None, with_values: bool = False):
        super().__init__()
        self.replace = replace
        self.with_values = with_values
        self.begin(None, ())

    def begin(self, module: nn.Module | None, args: tuple, kwargs: dict | None = None) -> None:
        """Forget the forward pass before, as a hook. Learn B and T from the token ids."""
        ids = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor) and not x.is_floating_point()]
        self.text = next((tuple(x.shape) for x in ids if x.dim() == 2), None)  # B and T, if known
        self.residual: Tensor | None = None  # the stream before the final norm of a model of ours, (B, T, C)
        self.joined: Tensor | None = None  # the output of the last layer, heads joined, (B, T, H * width of a value)
        self.projections: dict[int, Tensor] = {}  # layer -> weight of the nn.Linear that reads its output as it is
        self.seen: list[Call] = []
        self.single: dict[int, tuple[Tensor, Call, Layout]] = {}  # id -> an output of one head that nothing has read
        self.left_out: list[str] = []  # the calls that are not attention of a text to itself and its past, in words
        self.is_unmasked = False  # whether one of these is attention to later tokens

    @property
    def calls(self) -> list[Call]:
        """The calls, one for each layer. Raises UserError if none was seen."""
        if not self.seen:
            others = f"; others were: {self.left_out[0]}" if self.left_out else ""
            raise UserError(UNMASKED if self.is_unmasked else f"{UNSEEN}{others}")
        return self.seen

    def end(self, norm: nn.Module, inputs: tuple) -> None:
        """Keep the residual stream, as a hook before the final norm."""
        self.residual = inputs[0]

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call a function of PyTorch. See what it does if it attends."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and not isinstance(got := func(*args), Tensor):  # a shape, a type
            return got
        if self.single and name not in SIZES:
            args = self.settle(name, args)
        if func is F.scaled_dot_product_attention:
            return self.see_kernel(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.see_module(func, *args, **kwargs)
        if name == "flex_attention":
            return self.see_flex(func, *args)
        output = func(*args, **kwargs)
        if name in PRODUCTS:
            return self.see_product(output, name, [*args, *kwargs.values()])
        if func is F.linear and self.joined is not None:
            self.see_projection(*args)
        return output

    def see_kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Call the fused kernel, and store its queries and keys. Return its output, or what replaces it."""
        options = {"scale": scale, "enable_gqa": enable_gqa}
        output = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        dtype = output.dtype  # of the inputs, or that to which autocast casts them
        B, T = self.text or (query.size(0), query.size(-2))
        # Heads have an axis of their own or share that of the batch. Of one token, those that share keys may be packed.
        T_query = 1 if T == 1 and query.dim() == 4 else query.size(-2)
        T_key = key.size(-2)
        is_text = T_query == T_key
        mask = None
        if is_causal:
            is_text = is_text and attn_mask is None
        else:
            mask = query.new_zeros(1, 1, T_query, T_key, dtype=dtype)
            if attn_mask is not None:
                attn_mask = attn_mask[..., :T_query, :]
                is_bool = attn_mask.dtype == torch.bool
                mask = torch.where(attn_mask, mask, -torch.inf) if is_bool else mask + attn_mask.detach().to(dtype)
            sees = mask > HIDES
            later = sees.triu(T_key - T_query + 1).any()
            self.is_unmasked |= is_text and bool(later)
            # The queries belong to the last keys: behind these is no empty buffer.
            is_text = (is_text or sees[..., -1].any()) and not later
        is_split = query.size(0) == B if query.dim() == 4 else query.dim() == 3 and query.size(0) % B == 0
        if not is_text or not is_split:
            self.left_out.append(f"queries {tuple(query.shape)} of keys {tuple(key.shape)}")
            return output
        if query.dim() == 3 and mask is not None and mask.size(1) > 1:
            mask = mask.reshape(B, -1, T_query, T_key)
        for call in self.seen:
            if mask is not None and isinstance(call, Computed) and call.mask is not None and mask.equal(call.mask):
                mask = call.mask  # one for the layers that share it
        # Copies, because a model may overwrite its own later, as a cache does.
        q = query.detach().to(dtype, copy=True).reshape(B, -1, T_query, query.size(-1))
        k, values = (x.detach().to(dtype, copy=True).reshape(B, -1, *x.shape[-2:]) for x in (key, value))
        axes = "bhtd"[-query.dim() :]
        layout = Layout(axes, axes, (*q.shape[:3], output.size(-1)))
        return self.keep(Computed(values if self.with_values else None, q, k, mask, scale), output, layout)

    def see_module(self, func: Callable, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Call the function of `nn.MultiheadAttention`, and ask it for its weights. Return what it does, or with a
        replaced output.

        With the identity as its output projection it returns the outputs of the heads.
        """
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        H = given["num_heads"]
        projection, bias = given["out_proj_weight"], given["out_proj_bias"]
        is_kernel = not given.get("need_weights", True)  # whose weights are those before dropout
        given |= {"out_proj_weight": torch.eye(len(projection)).to(projection), "out_proj_bias": None}
        given |= {"dropout_p": 0.0 if is_kernel else given["dropout_p"], "average_attn_weights": False}

        def split(x: Tensor) -> Tensor:
            """Split heads: (T, B, H * D) or (T, H * D) -> (B, H, T, D)."""
            return x.reshape(len(x), -1, H, x.size(-1) // H).permute(1, 2, 0, 3)

        def kernel(values: Tensor) -> Tensor:
            """Attend with other values, (B, H, T, D)."""
            return split(func(**given | {"static_v": values.flatten(0, 1)})[0])

        with torch.no_grad(), torch.random.fork_rng([projection.device] if projection.is_cuda else []):
            joined, weights = func(**given | {"need_weights": True})
        output, returned = func(*args, **kwargs)
        of_value = (
            given["v_proj_weight"] if given.get("use_separate_proj_weight") else given["in_proj_weight"].chunk(3)[2]
        )
        of_bias = given["in_proj_bias"]
        values = split(F.linear(given["value"], of_value, of_bias if of_bias is None else of_bias.chunk(3)[2])).detach()
        call = self.read(weights.reshape(-1, H, *weights.shape[-2:]), values, kernel if is_kernel else None)
        if call is not None:
            self.seen.append(call)
            heads = self.finish(call, split(joined))
            self.projections[len(self.seen) - 1] = projection
            if self.replace is not None:
                output = F.linear(heads.permute(2, 0, 1, 3).flatten(2), projection, bias).reshape(output.shape)
        return output, returned

    def see_flex(self, func: Callable, query: Tensor, key: Tensor, value: Tensor, *options: object) -> tuple:
        """Call FlexAttention, and ask it for its weights, which are what it makes of an identity."""
        identity = torch.eye(key.size(2)).to(value).expand(*value.shape[:2], -1, -1)

        def kernel(values: Tensor) -> Tensor:
            return func(query, key, values, *options)[0]

        output, *others = func(query, key, value, *options)
        with torch.no_grad():
            call = self.read(kernel(identity), value.detach(), kernel)
        if call is not None:
            output = self.keep(call, output, Layout("bhtd", "bhtd", output.shape))
        return output, *others

    def see_product(self, output: Tensor, name: str, operands: Sequence) -> Tensor:
        """Store weights that met values in a product. Return its output, or what replaces it."""
        for weights, values, layout in find_meetings(name, operands, output, self.text):
            call = self.read(weights, values.detach() if self.with_values else None)
            if call is not None:
                return self.keep(call, output, layout)
        return output

    def read(self, weights: Tensor, values: Tensor | None, kernel: Kernel | None = None) -> Read | None:
        """Return weights (B, H, T_query, T_key) as a call if they are those of a text to itself and its past."""
        T_query, T_key = weights.shape[-2:]
        if weights.dtype not in TOLERANCE or T_key < T_query or not weights.min() >= 0:
            return None
        call = Read(values, weights.detach().clone(), kernel)
        least, most, later = call.sums()
        is_one = max(1 - least, most - 1) <= TOLERANCE[weights.dtype]
        if 0 < most <= MOST_SUM and later <= 0.5 and (T_query > 1 or is_one):
            if T_query == T_key or weights[..., -1].any():  # behind the text is no empty buffer
                return call
        if is_one:
            self.is_unmasked |= T_query == T_key
            self.left_out.append(f"weights {tuple(weights.shape)}")
        return None

    def see_projection(self, inputs: Tensor, weight: Tensor, *_: object) -> None:
        """Store the weight of a projection if it reads the output of the last layer as it is."""
        joined = self.joined
        self.joined = None
        if inputs.numel() == joined.numel() and joined.to(inputs.dtype).reshape(inputs.shape).equal(inputs):
            self.projections[len(self.seen) - 1] = weight

    def keep(self, call: Call, output: Tensor, layout: Layout) -> Tensor:
        """Store a call. Return its output, or what replaces it; of a single head that is known when it is read."""
        self.seen.append(call)
        if call.shape[1] == 1:
            self.single[id(output)] = output, call, layout
            return output
        heads = self.finish(call, layout.heads(output))
        return output if self.replace is None else layout.back(heads, output)

    def settle(self, name: str, args: tuple) -> tuple:
        """Return the arguments of a function, with what replaces outputs of single heads.

        Heads that the function joins are one layer.
        """
        is_join = name in JOINS
        given = list(args[0] if is_join else args)
        heads = {place: self.single.pop(id(x)) for place, x in enumerate(given) if id(x) in self.single}
        if not heads:
            return args
        outputs, calls, layouts = zip(*heads.values(), strict=True)
        parts = [layout.heads(output) for output, layout in zip(outputs, layouts, strict=True)]
        if is_join and 1 < len(heads) == len(given):
            joined = calls[0].join(calls)
            self.seen = [joined if call is calls[0] else call for call in self.seen if call not in calls[1:]]
            parts = self.finish(joined, torch.cat(parts, dim=1)).split(1, dim=1)
        else:
            parts = [self.finish(call, part) for call, part in zip(calls, parts, strict=True)]
        if self.replace is not None:
            for place, part, output, layout in zip(heads, parts, outputs, layouts, strict=True):
                given[place] = layout.back(part, output)
        return (given, *args[1:]) if is_join else tuple(given)

    def finish(self, call: Call, heads: Tensor) -> Tensor:
        """Return the output of a stored call, (B, H, T, D), or what replaces it."""
        if self.replace is not None:
            heads = self.replace(self.seen.index(call), heads)
        if self.with_values:
            self.joined = heads.detach().transpose(1, 2).flatten(2)
        return heads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """L, B, H and T. Raises UserError if there is no layer, or if they differ in sequences, heads or tokens."""
        shapes = [call.shape for call in self.calls]
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

    def verify(self) -> dict[int, Proof]:
        """Prove the weights of each layer against its kernel, if it has one: return layer -> what is known of them.

        Raises NotTheKernels if an error is larger than rounding explains.
        """
        proofs = {}
        for layer, call in enumerate(self.calls):
            dtype = call.source.dtype
            largest = math.nan
            if call.kernel is not None:
                errors, rounding = call.row_errors()
                largest = errors.max().item()
                if not (errors - rounding).max().item() <= TOLERANCE[dtype]:  # also raises for nan
                    raise NotTheKernels(
                        f"layer {layer}: the weights shown are not those of the kernel, a row is off by "
                        f"{largest:.2g} ({dtype}, at most {TOLERANCE[dtype]:.0e} is rounding)"
                    )
            proofs[layer] = Proof(largest, *call.sums())
        return proofs


@contextmanager
def capture(model: nn.Module, replace: Replace | None = None, with_values: bool = False) -> Iterator[Captured]:
    """Capture the attention of a model while it runs inside the `with` block.

    A forward pass replaces the one before. Outputs and gradients are the same as without capture, to the last bit, but
    where our own layers would train by the formula: inside the block they call the kernel. A compiled model runs
    eagerly there.

    replace: a function of a layer and the output of its heads, before the output projection, that returns the output
        to go on with.
    with_values: also store the values, for inspection/views.py.
    """
    captured = Captured(replace, with_values)
    with ExitStack() as stack:
        stack.enter_context(model.register_forward_pre_hook(captured.begin, with_kwargs=True))
        if isinstance(model, GPT):  # its parts may be called without it, from this one on, as `GPT.generate` does
            stack.enter_context(model.token_embedding.register_forward_pre_hook(captured.begin))
            stack.enter_context(model.final_norm.register_forward_pre_hook(captured.end))
        stack.enter_context(patch.object(attention, "formula_is_faster", return_value=False))
        if "torch._dynamo" in sys.modules:  # which takes a second to import, and is there if anything is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack.enter_context(captured)

"""Capture the attention of a running model, however the model computes it, and prove the weights that are shown.

    with capture(model) as att:
        model(idx)                    # (B, T)
    att.pattern(layer=5, head=1)      # (B, T, T): row = query, column = key
    att.verify()                      # layer -> how it was seen; raises NotTheKernels if weights are not the kernel's
    att.scores()["entropy"]           # (B, L, H), defined in inspection/metrics.py

The model is any module, ours or another. It knows nothing of that: its calls of PyTorch are seen from outside.

A fused kernel keeps no weights. Of its call queries, keys and values are stored, T x D numbers instead of T x T, and
the weights are computed from them on demand. Weights that a model writes out are read where they meet the values: they
are an operand of a product, have no negative number, sum to about one along the axis that is contracted, and give later
tokens nothing. Shapes are named as in model/attention.py.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from model import GPT
from model.attention import attention_weights, repeat_kv
from model.device import exact_products
from tril.errors import UserError
from tril.metrics import Metrics, Proof, measure
from tril.products import PRODUCTS, find_attention

# The largest error of a row of weights that rounding explains, for each precision of what they are computed from.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_SCORE_ROUNDING = 1e-2  # the most allowed in addition for rounded scores, which matters if they are in the thousands
BLOCK_SIZE = 1 << 21  # weights computed at a time; bounds memory and changes results by rounding only
HIDES = -1e4  # a mask of numbers hides a key by this or less; a bias is larger
MOST_SUM = 10.0  # of a row that is read in training: dropout of nine tenths makes a weight ten times as large
LEAK = 0.01  # the largest share of a row that later tokens may have, if its mask only lowers their scores
SIZES = ("size", "dim", "numel", "stride", "__get__")  # what is asked of an output before anything reads it
UNSEEN = (
    "no attention of a text to itself and its past was seen: neither a call of a kernel of PyTorch nor a product of "
    "weights and values; what runs in a compiled graph or in a kernel of another library cannot be shown"
)
UNMASKED = "attends without a causal mask"

Replace = Callable[[int, Tensor], Tensor]  # layer, output of its heads (B, H, T_query, D) -> the output to go on with


class NotTheKernels(ArithmeticError):
    """The weights are not those that the kernel used."""

    exit_code = 1


@dataclass(frozen=True, eq=False)
class Call:
    """The attention of a layer, in which the queries belong to the last T_query positions of the keys."""

    values: Tensor  # (B, n_kv_head, T_key, width of a value)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights shown: float32, or float64 of a float64 model."""
        return torch.promote_types(self.values.dtype, torch.float32)

    def of_head(self, head: int) -> "Call":
        """Return this call with one head alone, and the keys, values and mask that it may share with others.

        Raises IndexError if there is no such head.
        """
        H = self.shape[1]
        own = {name: x[:, head * x.size(1) // H, None] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **own)

    def weights(self) -> Tensor:
        """Return the attention weights of all heads, (B, H, T_query, T_key), of `dtype`."""
        return torch.cat([F.pad(weights, (0, self.shape[3] - weights.size(3))) for weights, _ in self.blocks()], dim=2)


@dataclass(frozen=True, eq=False)
class Computed(Call):
    """A call of the kernel, whose weights are computed from queries and keys."""

    q: Tensor  # (B, H, T_query, D)
    k: Tensor  # (B, n_kv_head, T_key, D)
    mask: Tensor  # (1 or B, 1 or H, T_query, T_key), numbers to add to the scores
    is_causal: bool  # whether the kernel is given no mask but draws the triangle itself
    scale: float | None  # None: 1 / sqrt(D)

    @property
    def shape(self) -> tuple[int, ...]:
        """B, H, T_query and T_key."""
        return (*self.q.shape[:3], self.k.size(2))

    @property
    def is_padded(self) -> bool:
        """Whether there are keys that no query may see."""
        return not (self.mask > HIDES).any(2).all()

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the weights of all heads before dropout, and the keys they may see, for one block of queries at a time.

        Weights are (B, H, queries, keys up to the last of these queries), of `dtype`. A query that may see nothing
        has weights of zero. What may be seen is bool, (1 or B, 1 or H, queries, keys).
        """
        B, H, T, num_keys = self.shape
        height = max(1, BLOCK_SIZE // (B * H * num_keys))
        for start in range(0, T, height):
            queries = slice(start, start + height)
            keys = slice(num_keys - T + start + height)
            mask = self.mask[:, :, queries, keys].to(self.dtype)
            visible = mask > HIDES
            with exact_products(mask.device):
                q, k = self.q[:, :, queries].to(self.dtype), self.k[:, :, keys].to(self.dtype)
                weights = attention_weights(q, k, mask, self.scale)
            yield weights.masked_fill(~visible.any(-1, keepdim=True), 0.0), visible

    def kernel(self, values: Tensor) -> Tensor:
        """Return the output of the kernel for other values, (B, n_kv_head, T_key, D) -> (B, H, T_query, D)."""
        mask = None if self.is_causal else self.mask
        grouped = self.q.size(1) != self.k.size(1)
        return F.scaled_dot_product_attention(
            self.q, self.k, values, mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=grouped
        )

    def prove(self, layer: int) -> Proof:
        """Return the largest error of a row of the weights. Raises NotTheKernels if it is more than rounding.

        The kernel runs again on the same queries, keys and mask, with random values of 1 and -1. If a row of our
        weights is wrong by a vector e, the mean square difference of the two outputs over the width of a head is |e|^2
        on average, whatever the direction of e (Freivalds 1977). layer: the number of this layer.
        """
        q = self.q
        generator = torch.Generator().manual_seed(0)
        signs = torch.randn(self.k.shape, generator=generator).sign().to(q)
        sizes = self.k.to(self.dtype).norm(dim=-1, keepdim=True)
        beside = repeat_kv(torch.cat((signs.to(self.dtype), sizes), dim=-1), q)
        with exact_products(q.device), torch.no_grad():  # as in evaluation: a kernel may differ under autograd
            ours = torch.cat([weights @ beside[:, :, : weights.size(3)] for weights, _ in self.blocks()], dim=2)
            difference = ours[..., :-1] - self.kernel(signs)
        # What a query that sees nothing gets is the kernel's affair.
        difference = difference.masked_fill((self.mask <= HIDES).all(-1, keepdim=True), 0.0)
        # Scores are rounded in proportion to |q| |k| times their scale. Only keys with weight can move the output.
        scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        rounding = 2 * torch.finfo(self.dtype).eps * scale * q.to(self.dtype).norm(dim=-1) * ours[..., -1]
        errors = difference.square().mean(-1).sqrt()
        largest = errors.max().item()
        if not (errors - rounding.clamp(max=MAX_SCORE_ROUNDING)).max() <= TOLERANCE[q.dtype]:  # also raises for nan
            raise NotTheKernels(
                f"layer {layer}: the weights shown are not those of the kernel, a row is off by "
                f"{largest:.2g} ({q.dtype}, at most {TOLERANCE[q.dtype]:.0e} is rounding)"
            )
        return Proof(largest)


@dataclass(frozen=True, eq=False)
class Read(Call):
    """Weights that met the values: a model wrote them out, or was asked for them."""

    source: Tensor  # the weights, (B, H, T_query, T_key), in the model's precision

    @property
    def shape(self) -> tuple[int, ...]:
        """B, H, T_query and T_key."""
        return tuple(self.source.shape)

    @property
    def is_padded(self) -> bool:
        """Whether keys have no weight in some texts alone. In all of them a head may just rest on another key."""
        seen = self.source.sum((1, 2)) > 0
        return bool((seen != seen[0]).any())

    def prove(self, layer: int) -> Proof:
        """Return what rows sum to, and the largest share of one that later tokens have."""
        weights = self.weights()
        sums = weights.sum(-1)
        later = weights.triu(weights.size(3) - weights.size(2) + 1).sum(-1)
        shares = (later / sums).nan_to_num(0.0)  # a row may be all zeros
        return Proof(math.nan, sums.min().item(), sums.max().item(), shares.max().item())

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all weights, as `Computed` does in blocks, and the keys to which any head of the layer gives some."""
        yield self.source.to(self.dtype), (self.source > 0).any(1, keepdim=True)


Output = tuple[Tensor, Call, Tensor]  # what a call returned, and a view of it: batch, heads, T, D


class Captured(TorchFunctionMode):
    """The attention in a model's last forward pass.

    Layers are its calls in their order. Layers and heads are numbered from zero; -1 is the last.
    """

    def __init__(self, replace: Replace | None = None):
        super().__init__()
        self.replace = replace
        self.begin(nn.Module(), (), {})

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forget the forward pass before, as a hook. Learn B and T from the token ids."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        ids = [x for x in given if x.dim() == 2 and not x.is_floating_point() and x.dtype != torch.bool]
        self.text = max(ids, key=len).shape if ids else None  # B and T; positions may have a batch of one
        self.is_training = module.training
        self.residual: Tensor | None = None  # what the last norm was given; in a model of ours the stream, (B, T, C)
        self.joined: Tensor | None = None  # the output of the last layer, heads joined, (B, T, H * width of a value)
        self.projections: dict[int, Tensor] = {}  # layer -> weight of the nn.Linear that reads its output as it is
        self.seen: list[Call] = []
        self.pending: dict[int, Output] = {}  # id -> the output of one head, which nothing has read yet
        self.left_out: list[str] = []  # the calls that are not attention of a text to itself and its past, in words

    @property
    def calls(self) -> list[Call]:
        """The calls, one for each layer. Raises UserError if none was seen."""
        if not self.seen:
            others = "; others were: ".join([UNSEEN, *self.left_out[:1]])
            unmasked = f"the model {UNMASKED}: python -m model.check says where"
            raise UserError(unmasked if UNMASKED in self.left_out else others)
        return self.seen

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call a function of PyTorch. See what it does if it attends."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.pending and (name not in SIZES or isinstance(func(*args), Tensor)):  # `.mT` is no size
            self.settle((args, kwargs))
        if func is F.multi_head_attention_forward:
            return self.see_module(func, args, kwargs)
        if name == "flex_attention":
            return self.see_flex(func, *args)
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.see_kernel(output, *args, **kwargs)
        if name in PRODUCTS:
            for found in find_attention(name, (args, kwargs), output, self.text):
                output = self.see_weights(output, *found)
        elif func is F.linear:
            self.see_projection(*args, **kwargs)
        elif func in (F.layer_norm, F.rms_norm):
            self.residual = args[0]
        return output

    def see_kernel(
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
        """Store a call of the fused kernel. Return its output, or what replaces it."""
        T_query, T_key = query.size(-2), key.size(-2)
        mask = output.new_zeros(1, 1, T_query, T_key)  # in the precision of the inputs, or to which autocast casts them
        if is_causal:
            mask.fill_(-torch.inf).triu_(1)
        elif attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            mask = torch.where(attn_mask, mask, -torch.inf) if is_bool else mask + attn_mask.detach().to(mask)
        visible = mask > HIDES
        is_past = not visible.triu(T_key - T_query + 1).any()
        # The queries are all of the text, and belong to the last keys: behind these is no empty buffer.
        is_whole = (self.text is None or T_query == self.text[1]) and (T_query == T_key or visible[..., -1].any())
        if not is_past or not is_whole or query.dim() not in (3, 4):
            shapes = f"queries {tuple(query.shape)} of keys {tuple(key.shape)}"
            self.left_out.append(UNMASKED if T_query == T_key and not is_past else shapes)
            return output
        B = self.text[0] if self.text and query.dim() == 3 else len(query)  # the heads may be joined with the batch
        if query.dim() == 3 and mask.size(1) > 1:
            mask = mask.reshape(B, -1, T_query, T_key)
        for call in self.seen:
            if isinstance(call, Computed) and mask.equal(call.mask):
                mask = call.mask  # one for the layers that share it
        # Copies, because a model may overwrite its own later, as a cache does.
        q, k, v = (x.detach().to(mask, copy=True).reshape(B, -1, *x.shape[-2:]) for x in (query, key, value))
        return self.keep(Computed(v, q, k, mask, is_causal, scale), output)

    def see_module(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None]:
        """Call the function of `nn.MultiheadAttention`, and once more for its weights. Return what it does.

        If heads are replaced in their outputs, so is its output. With keys of its own behind the text it is left out.
        """
        _, _, value, _, H, of_all, bias, *_, dropout_p, out_proj, out_bias = args  # as PyTorch hands them on
        with torch.random.fork_rng([value.device] if value.is_cuda else []):
            _, weights = func(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})
        output, returned = func(*args, **kwargs)
        if weights.size(-1) != len(value):
            self.left_out.append(f"weights {tuple(weights.shape)}")
            return output, returned
        of_value = kwargs["v_proj_weight"] if of_all is None else of_all.chunk(3)[2]
        values = F.linear(value, of_value, bias if bias is None else bias.chunk(3)[2])
        values = values.reshape(len(values), -1, H, values.size(-1) // H)  # (T, B, H, D), and B = 1 without that axis
        weights = weights.reshape(-1, *weights.shape[-3:])
        heads = torch.einsum("bhij,jbhd->ibhd", weights, values)

        def project(heads: Tensor) -> Tensor:
            """Return the output, of those of the heads."""
            return F.linear(heads.flatten(2), out_proj, out_bias).reshape(output.shape)

        error = (project(heads) - output).norm() / output.norm()
        if not (kwargs["training"] and dropout_p) and error > TOLERANCE[output.dtype]:
            raise NotTheKernels(
                f"nn.MultiheadAttention: with its weights its output differs by {error:.2g} of its size"
            )
        replaced = self.see_weights(heads, weights.detach(), values.detach().permute(1, 2, 0, 3), "tbhd->bhtd")
        self.see_projection(replaced.flatten(2), out_proj)
        return output if replaced.equal(heads) else project(replaced), returned

    def see_flex(self, func: Callable, query: Tensor, key: Tensor, value: Tensor, *args: object) -> tuple:
        """Call FlexAttention, and ask it for its weights, which are what it makes of an identity."""
        output, *others = func(query, key, value, *args)
        identity = torch.eye(key.size(2)).to(value).expand(*value.shape[:2], -1, -1)
        weights, *_ = func(query, key, identity, *args)
        return self.see_weights(output, weights.detach(), value.detach()), *others

    def see_weights(self, output: Tensor, weights: Tensor, values: Tensor, order: str = "...->...") -> Tensor:
        """Store weights (B, H, T_query, T_key) if they are those of a text to itself and its past.

        They and the values (B, H, T_key, D) are detached: what is asked of them must leave no trace for autograd.

        order: an equation that orders the axes of the output: batch, heads, T, D.

        Returns the output, or what replaces it.
        """
        T_query, T_key = weights.shape[-2:]
        if not weights.min() >= 0:
            return output
        call = Read(values, weights.clone())
        _, least, most, later = call.prove(len(self.seen))
        rounding = TOLERANCE[weights.dtype]
        is_past = later <= LEAK
        if T_query != T_key:  # the queries belong to the last keys: behind these is no empty buffer
            is_past = later == 0 and weights[..., -1].any()
        if is_past and 0 < most <= (MOST_SUM if self.is_training else 1 + rounding):
            return self.keep(call, output, order)
        if max(1 - least, most - 1) <= rounding:
            self.left_out.append(UNMASKED if T_query == T_key else f"weights {tuple(weights.shape)}")
        return output

    def see_projection(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Store the weight of a projection if it reads the output of the last layer as it is."""
        joined = self.joined
        if joined is not None and joined.numel() == input.numel() and joined.to(input).flatten().equal(input.flatten()):
            self.projections[len(self.seen) - 1] = weight
        self.joined = None

    def keep(self, call: Call, output: Tensor, order: str = "...->...") -> Tensor:
        """Store a call. Return its output, in which heads may be replaced later, but before anything reads it.

        An output without an axis of heads may be one of several that are joined, which is known when it is read.
        """
        if self.replace is not None:
            output = output.clone()
        self.seen.append(call)
        found = output, call, torch.einsum(order, output)
        if call.shape[1] == 1 and output.dim() < 4:
            self.pending[id(output)] = found
        else:
            self.finish([found])
        return output

    def settle(self, arguments: tuple[tuple, dict]) -> None:
        """Finish the outputs of single heads among the arguments of a function.

        Alike heads that one function reads, as `torch.cat` does, are one layer.
        """
        layers = defaultdict(list)
        for x in tree_leaves(arguments):
            if id(x) in self.pending:
                found = self.pending.pop(id(x))
                call = found[1]
                layers[x.shape, vars(call).get("scale"), id(vars(call).get("mask"))].append(found)
        for layer in layers.values():
            self.finish(layer)

    def finish(self, found: Sequence[Output]) -> None:
        """Make one layer of calls, and replace its heads in their outputs."""
        _, calls, parts = zip(*found, strict=True)
        layer = self.seen.index(calls[0])
        if len(calls) > 1:
            names = vars(calls[0]).keys() & {"values", "q", "k", "source"}
            joined = {name: torch.cat([vars(call)[name] for call in calls], dim=1) for name in names}
            self.seen[layer] = replace(calls[0], **joined)
            self.seen = [call for call in self.seen if call not in calls]
        heads = torch.cat([part.reshape(*calls[0].shape[:3], -1) for part in parts], dim=1)
        if self.replace is not None:
            heads = self.replace(layer, heads).expand_as(heads)
            with torch.inference_mode(parts[0].is_inference()):  # else PyTorch lets nobody change such a tensor
                for part, changed in zip(parts, heads.tensor_split(len(parts), dim=1), strict=True):
                    part.copy_(changed.reshape(part.shape))
        self.joined = heads.detach().transpose(1, 2).flatten(2)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """L, B, H and T. Raises UserError if there is no layer, or if they differ in sequences, heads or tokens."""
        shapes = [call.shape for call in self.calls]
        if len(set(shapes)) > 1:
            unmasked = f"; one {UNMASKED}" if UNMASKED in self.left_out else ""
            raise UserError(
                f"heads can be compared if all layers have as many, of the same tokens, not {shapes}{unmasked}"
            )
        return len(shapes), *shapes[0][:3]

    def pattern(self, layer: int, head: int) -> Tensor:
        """Return the weights of one head, (B, T_query, T_key): row = query, column = key.

        Raises IndexError if there is no such head, UserError if there is none at all.
        """
        return self.calls[layer].of_head(head).weights()[:, 0]

    def scores(self, repeat: int | None = None) -> Metrics:
        """Return the metrics of all heads in each sequence: metric -> (B, L, H).

        The metrics are those of `measure` in inspection/metrics.py. Of a kernel no T x T matrix is stored.

        repeat: the length L of the repeated part if the text is a `repeat_probe`.

        Raises UserError as `shape` does, and for texts with padding.
        """
        return self.scores_and_chance(repeat)[0]

    def scores_and_chance(self, repeat: int | None = None) -> tuple[Metrics, Metrics]:
        """Return `scores`, and the same of heads that attend evenly to all keys they may see."""
        _, B, H, _ = self.shape
        if any(call.is_padded for call in self.calls):
            raise UserError("some tokens no query may see, as padding: scores are means over all, so read texts alone")
        layers = [measure(call.blocks(), repeat) for call in self.calls]
        return tuple(
            {name: torch.stack([layer[name][:, part].expand(B, H) for layer in layers], dim=1) for name in layers[0]}
            for part in (slice(H), slice(H, None))
        )

    def verify(self) -> dict[int, Proof]:
        """Prove the weights of each layer against its kernel, if it has one: return layer -> what is known of them.

        Raises NotTheKernels if an error is larger than rounding explains.
        """
        return {layer: call.prove(layer) for layer, call in enumerate(self.calls)}


@contextmanager
def capture(model: nn.Module, replace: Replace | None = None) -> Iterator[Captured]:
    """Capture the attention of a model while it runs inside the `with` block.

    A forward pass replaces the one before. Outputs and gradients are the same as without capture, to the last bit. A
    compiled model runs eagerly there. If a model joins heads and batch in one axis, the batch has to come first.

    replace: a function of a layer and the output of its heads, before the output projection, that returns the output
        to go on with.
    """
    captured = Captured(replace)
    # Parts of a model of ours may be called without it, as `GPT.generate` does.
    first = model.token_embedding if isinstance(model, GPT) else model
    # To import it takes a second, and it is there if anything is compiled.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with first.register_forward_pre_hook(captured.begin, with_kwargs=True), eager, captured:
        yield captured

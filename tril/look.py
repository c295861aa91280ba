"""Look at a running model: its attention, however it is computed, and its logits; perhaps with heads changed.

    att, logits = look(model, ids)                # (B, T) -> what was seen, and logits
    look(model, ids, {(5, 1): torch.zeros_like})  # the same without head 5.1

    with capture(model) as att:                   # the same of a model that is run by hand
        model(ids)
    att.pattern(layer=5, head=1)                  # (B, T, T): row = query, column = key
    att.verify()                                  # layer -> how it was seen; raises NotTheKernels if weights are others
    att.scores()["entropy"]                       # (B, L, H), defined in tril/metrics.py

The model is any module. It knows nothing of that: its calls of PyTorch are seen from outside. A fused kernel keeps no
weights. Of its call queries, keys and values are stored, T x D numbers instead of T x T, and the weights are computed
from them on demand. Weights that a model writes out are read where they meet the values: they are an operand of a
product, have no negative number, sum to about one along the axis that is contracted, and give later tokens nothing; and
their product goes on as it is. Shapes are named as in tril/weights.py; L is the number of layers.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tril.decoder import evaluating, logits_at
from tril.errors import UserError
from tril.metrics import Head, Metrics, layer_metrics
from tril.products import PRODUCTS, find_attention, is_plain, num_texts, tensors
from tril.weights import HIDES, TOLERANCE, Call, Computed, Proof, WrittenOut, join, repeat_heads

MOST_SUM = 10.0  # of a row that is read with dropout: dropout of nine tenths makes a weight ten times as large
LEAK = 0.01  # the largest share of a row that later tokens may have, if its mask only lowers their scores
MOST_REASONS = 3  # in a sentence
UNSEEN = "no attention of a text to itself and its past was seen"
NOWHERE = "nor a product: a compiled or scripted graph, and a kernel of another library, cannot be looked into"
NUMERATORS = "numerators, which are divided by their sums after the product with the values"
UNMASKED = "attention without a causal mask, to the text itself or to a memory as long"

HIDING = (F.multi_head_attention_forward, F.normalize)  # functions in Python that would hide what they call

Edits = Mapping[Head, Callable[[Tensor], Tensor]]  # head -> function of its output, (B, T, D) -> what goes on


class Captured(TorchFunctionMode):
    """The attention in a model's last forward pass.

    Layers are its calls in their order. Layers and heads are numbered from zero; -1 is the last. Heads that have a call
    each are one layer if they are alike, and nothing reads the output of one before the last is there.

    edits: what changes outputs of heads, before the output projection.
    """

    stored = staticmethod(Tensor.detach)  # of what a kernel is given

    def __init__(self, edits: Edits | None = None):
        super().__init__()
        self.edits = edits or {}
        self.is_inside = False  # of the model
        self.begin()

    def begin(self) -> None:
        """Forget the forward pass before."""
        self.text = None  # B and T of the token ids, if known
        self.at_once = 1  # of the texts, so many has the last linear layer read
        self.has_dropout = False
        self.projections = {}  # layer -> weight of the nn.Linear that reads its output as it is
        self.layers: list[list[Call]] = []  # of each its calls, of several heads or of one each
        self.outputs = []  # of the last layer, each and that by head, (B, H, T, D), until a linear layer reads them
        self.is_open = False  # whether nothing has read these
        self.flat = []  # those since the last linear layer whose heads have an axis with the texts
        self.exponentials = WeakIdKeyDictionary()  # what was made of them, not divided -> layers, perhaps of numerators
        self.left_out = []  # what is not attention of a text to itself and its past, in words
        self.edited = set()  # heads

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begin with the ids that a model, or its embedding alone, is given, as a hook. Positions may be among them."""
        if self.is_inside:
            return
        given = tensors((args, kwargs))
        ids = [x for x in given if x.dim() in (1, 2) and not x.is_floating_point() and x.dtype != torch.bool]
        self.begin()
        if ids:
            self.text = tuple(torch.atleast_2d(max(ids, key=torch.numel)).shape)
            self.at_once = self.text[0]
        self.is_inside = not isinstance(module, nn.Embedding)

    def leave(self, *_: object) -> None:
        """Note the end of a forward pass, as a hook."""
        self.is_inside = False

    @property
    def layer(self) -> int:
        """The number of the last layer."""
        return sum(map(bool, self.layers)) - 1

    @property
    def calls(self) -> list[Call]:
        """The calls, one for each layer. Raises UserError if none was seen."""
        self.layers = [[join(layer)] for layer in self.layers if layer]
        if not self.layers:
            reasons = [*dict.fromkeys(self.left_out)] or [NOWHERE]
            raise UserError(f"{UNSEEN}: {'; '.join(reasons[:MOST_REASONS])}")
        return [call for (call,) in self.layers]

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call a function of PyTorch. See what it does if it attends."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in HIDING:
            with patch.multiple(F, has_torch_function=never, has_torch_function_variadic=never), self:
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if self.is_open or self.exponentials or name == "exp":
            self.follow(name, args, kwargs, output)
        if name == "flex_attention":
            return self.see_flex(func, output, *args)
        is_kernel = func is F.scaled_dot_product_attention
        if (is_kernel or name in PRODUCTS) and not all(map(is_plain, tensors((args, kwargs)))):
            self.left_out.append("what is nested or sparse, or inside torch.vmap, cannot be looked into")
        elif is_kernel:
            return self.see_kernel(output, *args, **kwargs)
        elif name in PRODUCTS:
            return self.see_product(name, (args, kwargs), output)
        elif name == "tensordot":
            self.note("torch.tensordot cannot be looked into", args)
        elif name in ("mul", "__mul__"):
            weights = [x for x in tensors(args) if x.dim() > 3 and x.size(-1) == 1]  # (..., T, T, 1)
            self.note("a sum of products cannot be looked into", weights)
        elif func is F.linear:
            self.see_linear(output, *args, **kwargs)
        elif func is F.dropout:
            self.has_dropout |= output is not args[0]  # rows of weights may sum to more than one
        return output

    def follow(self, name: str, args: tuple, kwargs: dict, output: object) -> None:
        """Note what reads outputs of heads, and what is made of exponentials until they are divided by their sum."""
        made = tensors(output)
        given = tensors((args, kwargs))
        if made or output is None:  # else it was asked for a size
            self.is_open &= not {id(x) for x in given} & {id(x) for x, _ in self.outputs}
        if name != "exp":
            given = [x for x in given if x in self.exponentials]
        layers = [layer for x in given for layer in self.exponentials.get(x, [])]
        if name.rstrip("_") in ("div", "mul") and len(given) > 1:
            for layer in filter(None, layers):
                if self.edits:  # they would be those of the next layer
                    raise UserError(f"heads of this model cannot be changed: it has {NUMERATORS}")
                layer.clear()
                self.outputs = []
                self.flat = []
                self.left_out.append(NUMERATORS)
        elif given and "softmax" not in name and name not in ("linear", "addmm"):
            for x in made:
                self.exponentials[x] = layers

    def note(self, reason: str, arguments: object) -> None:
        """Note what may be attention and cannot be looked into, if anything in it has two axes as long as the text."""
        given = tensors(arguments)
        if not all(map(is_plain, given)) or any(x.shape.count(self.text[1]) > 1 for x in given if self.text):
            self.left_out.append(reason)

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
        **_: object,
    ) -> Tensor:
        """Store a call of the fused kernel. Return its output, perhaps with heads changed."""
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
        is_whole = T_query == T_key or visible[..., -1].any()
        is_flat = query.dim() == 3  # the heads may be joined with the batch
        B = len(query)
        if self.text:
            B = num_texts(self.at_once, B) if is_flat else B
            is_whole &= T_query == self.text[1] and B in (1, self.text[0])
        if not is_past or not is_whole or query.dim() not in (3, 4):
            shapes = f"queries {tuple(query.shape)} of keys {tuple(key.shape)}"
            self.left_out.append(UNMASKED if T_query == T_key and not is_past else shapes)
            return output
        if is_flat and mask.size(1) > 1:
            mask = mask.reshape(B, -1, T_query, T_key)
        for layer in filter(None, self.layers):
            if isinstance(layer[0], Computed) and mask.equal(layer[0].mask):
                mask = layer[0].mask  # one for the layers that share it
        # Copies, because a model may overwrite its own later, as a cache does.
        q, k, v = (self.stored(x).to(mask, copy=True).reshape(B, -1, *x.shape[-2:]) for x in (query, key, value))
        scale = q.size(-1) ** -0.5 if scale is None else scale
        return self.keep(Computed(v, q, k, mask, is_causal, scale), output, is_flat=is_flat)

    def see_flex(
        self, func: Callable, output: tuple, query: Tensor, key: Tensor, value: Tensor, *args: object
    ) -> tuple:
        """Ask FlexAttention for its weights, which are what it makes of an identity. Return what it does."""
        output, *others = output
        identity = torch.eye(key.size(2)).to(value).expand(*value.shape[:2], -1, -1)
        weights, *_ = func(query, key, identity, *args)
        return self.see_product("matmul", (weights, repeat_heads(value, query.size(1))), output), *others

    def see_product(self, name: str, arguments: tuple, output: Tensor) -> Tensor:
        """Look for weights and values among the factors of a product. Return its output, perhaps with heads changed.

        Weights and values are detached: what is asked of them must leave no trace for autograd.
        """
        given = tensors(arguments)
        if len(given) > 2 and name == "einsum":
            self.note("an einsum of three factors cannot be looked into", given)
        is_doubtful = any(x in self.exponentials for x in given)
        reasons = []
        for weights, values, order, is_flat in find_attention(name, arguments, output, self.text, self.at_once):
            call = WrittenOut(values, weights.clone())
            reason = self.judge(call, is_doubtful)
            if reason is None:
                output = self.keep(call, output, order, is_flat)
                if is_doubtful and not call.sums_to_one:  # else it is normalised, whatever is made of it
                    self.exponentials[output] = [self.layers[-1]]
                return output
            reasons += [reason] * bool(reason)
        self.left_out += reasons[:1]
        return output

    def judge(self, call: WrittenOut, is_doubtful: bool) -> str | None:
        """Return why weights are not those of a text to itself and its past: "" if they are nothing like it.

        is_doubtful: whether they may be numerators.
        """
        T_query, T_key = call.shape[2:]
        shape = f"weights {call.shape}"
        if not call.source.min() >= 0:
            return ""
        least, most, later = call.prove(len(self.layers))
        rounding = TOLERANCE[call.source.dtype]
        is_past = later <= LEAK
        if T_query != T_key:  # the queries belong to the last keys: behind these is no empty buffer
            is_past = T_query < T_key and later == 0 and call.source[..., -1].any()
        if is_past and 0 < most <= (MOST_SUM if self.has_dropout else 1 + rounding):
            return None
        if not is_past and call.sums_to_one:
            return UNMASKED if T_query == T_key else shape
        return f"{shape} whose rows sum to {least:.2f} to {most:.2f}" if (is_past and most) or is_doubtful else ""

    def see_linear(self, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Store the weight if it reads the output of the last layer as it is. Join texts that attended one by one."""
        if self.text:
            is_one = input.numel() == self.text[1] * input.size(-1)
            self.at_once = 1 if is_one else self.text[0]
        heads = [heads for _, heads in self.outputs]
        if self.text and len(self.flat) == self.text[0] > 1:
            texts = torch.stack([x.flatten(0, 1) for x in self.flat])  # (B, H, T, D)
            if self.flat[0].size(1) > 1 or is_same(texts, input):
                calls = []
                while len(calls) < len(texts):
                    calls = self.layers.pop() + calls
                self.layers.append([join(calls, are_texts=True)])
                heads = [texts]
        if heads and is_same(torch.cat(heads, dim=1), input):
            self.projections[self.layer] = weight
        self.flat = []
        if not self.is_open:  # else this may be a projection of the next of several heads
            self.outputs = []

    def keep(self, call: Call, output: Tensor, order: str = "...->...", is_flat: bool = False) -> Tensor:
        """Store a call. Return its output, perhaps with heads changed.

        order: an equation that orders the axes of the output: batch, heads, T, D. is_flat: those of batch and heads are
        one.
        """
        is_single = call.shape[1] == 1 and output.dim() < 4  # perhaps one of several that are joined
        if not (self.is_open and is_single and call.common == self.layers[-1][0].common):
            self.layers.append([])
            self.outputs = []
        B, H, T, _ = call.shape
        first = len(self.layers[-1])
        self.layers[-1].append(call)
        ordered = torch.einsum(order, output)
        heads = ordered.reshape(B, H, T, -1)
        changed = self.change([(self.layer, first + head) for head in range(H)], heads)
        if changed is not heads:
            output = torch.empty_like(output)
            torch.einsum(order, output).copy_(changed.reshape(ordered.shape))
        self.outputs.append((output, changed.detach()))
        self.flat += [changed.detach()] * is_flat
        self.is_open = is_single
        return output

    def change(self, names: list[Head], heads: Tensor) -> Tensor:
        """Return what goes on of outputs of heads, (B, H, T, D): the same tensor if no edit changes one of them."""
        for number in [number for number, head in enumerate(names) if head in self.edits]:
            heads = heads.clone()
            heads[:, number] = self.edits[names[number]](heads[:, number])
            self.edited.add(names[number])
        return heads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """L, B, H and T. Raises UserError if there is no layer, or if they differ in sequences, heads or tokens."""
        shapes = [call.shape for call in self.calls]
        if len(set(shapes)) > 1:
            raise UserError(f"expected all layers to have the same (B, H, T, T_key), got {shapes}")
        return len(shapes), *shapes[0][:3]

    def pattern(self, layer: int, head: int) -> Tensor:
        """Return the weights of one head, (B, T_query, T_key): row = query, column = key.

        Raises IndexError if there is no such head, UserError if there is none at all.
        """
        return self.calls[layer].of_head(head).weights()[:, 0]

    def scores(self, repeat: int | None = None) -> Metrics:
        """Return the metrics of all heads in each sequence: metric -> (B, L, H).

        The metrics are those of `layer_metrics` in tril/metrics.py. Of a kernel no T x T matrix is stored.

        repeat: the length L of the repeated part if the text is a `repeat_probe`.

        Raises UserError as `shape` does, and for texts with padding.
        """
        return self.scores_and_chance(repeat)[0]

    def scores_and_chance(self, repeat: int | None = None) -> tuple[Metrics, Metrics]:
        """Return `scores`, and the same of heads that attend evenly to all keys they may see."""
        _, B, H, _ = self.shape
        if any(call.is_padded for call in self.calls):
            raise UserError("scores are means over all tokens, but no query may see padding: read each text alone")
        layers = [layer_metrics(call.blocks(), repeat) for call in self.calls]
        return tuple(
            {name: torch.stack([layer[name][:, part].expand(B, H) for layer in layers], dim=1) for name in layers[0]}
            for part in (slice(H), slice(H, None))
        )

    def verify(self) -> dict[int, Proof]:
        """Prove the weights of each layer against its kernel, if it has one: return layer -> what is known of them.

        Raises NotTheKernels if an error is larger than rounding explains.
        """
        return {layer: call.prove(layer) for layer, call in enumerate(self.calls)}


def never(*_: object) -> bool:
    """Answer a function of PyTorch that asks whether a mode is to be called in its place."""
    return False


def is_same(heads: Tensor, input: Tensor) -> bool:
    """Return whether an input is outputs of heads, (B, H, T, D), joined and not changed."""
    if heads.numel() != input.numel() or not is_plain(input):
        return False
    return heads.transpose(1, 2).flatten().to(input).equal(input.flatten())


@contextmanager
def capture(model: nn.Module, edits: Edits | None = None, kind: type[Captured] = Captured) -> Iterator[Captured]:
    """Capture the attention of a model while it runs inside the `with` block.

    A forward pass replaces the one before. Outputs and gradients are the same as without capture, to the last bit. A
    compiled model runs eagerly there. If a model joins heads and batch in one axis, the batch has to come first.

    edits: those of `Captured`. kind: it, or a subclass that sees more.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("a scripted model is a graph, which cannot be looked into: give the module that was scripted")
    captured = kind(edits)
    # Parts of a model may be called without it, as `GPT.generate` does.
    embedding = next((part for part in model.modules() if isinstance(part, nn.Embedding)), model)
    # To import it takes a second, and it is there if anything is compiled, as FlexAttention is when it is called.
    compiles = {"torch._dynamo", "torch.nn.attention.flex_attention"} & sys.modules.keys()
    eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    with (
        model.register_forward_pre_hook(captured.enter, with_kwargs=True),
        embedding.register_forward_pre_hook(captured.enter, with_kwargs=True),
        model.register_forward_hook(captured.leave, always_call=True),
        eager,
        captured,
    ):
        yield captured


@torch.no_grad()
def look(
    model: nn.Module,
    idx: Tensor,
    edits: Edits | None = None,
    positions: slice | Tensor = slice(1),
    kind: type[Captured] = Captured,
) -> tuple[Captured, Tensor]:
    """Run a model on texts, (B, T), in eval mode. Return its attention, and logits of these positions, (B, n, V).

    edits: head -> function of its output, (B, T, D), that returns what goes on. kind: that of `capture`.

    Raises UserError if the model cannot be read, or for an edit of a head that there is not.
    """
    with evaluating(model), capture(model, edits, kind) as att:
        logits = logits_at(model, idx, positions)
    if missing := {*(edits or {})} - att.edited:
        raise UserError(f"there is no head {'.'.join(map(str, min(missing)))} to change")
    return att, logits

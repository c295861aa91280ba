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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tril.decoder import evaluating, read
from tril.errors import UserError
from tril.metrics import Head, Metrics, measure
from tril.products import PRODUCTS, factors_of, find_attention, is_plain
from tril.weights import HIDES, TOLERANCE, Call, Computed, NotTheKernels, Proof, Read

MOST_SUM = 10.0  # of a row that is read with dropout: dropout of nine tenths makes a weight ten times as large
LEAK = 0.01  # the largest share of a row that later tokens may have, if its mask only lowers their scores
ENDS = (*PRODUCTS, "linear", "addmm", "layer_norm", "rms_norm")  # what they return is no longer an output of heads
MOST_REASONS = 3  # in a sentence
UNSEEN = "no attention of a text to itself and its past was seen"
NOWHERE = "nor any product: a compiled or scripted graph, and a kernel of another library, cannot be looked into"
UNMASKED = "attends to all tokens, without a causal mask or to something else than the text"

Edits = Mapping[Head, Callable[[Tensor], Tensor]]  # head -> function of its output, (B, T, D) -> what goes on


class Captured(TorchFunctionMode):
    """The attention in a model's last forward pass.

    Layers are its calls in their order. Layers and heads are numbered from zero; -1 is the last. Heads that have a call
    each are one layer if they are alike, and one function reads them all, as `torch.cat` does.

    edits: what changes outputs of heads, before the output projection. order: `order` of a pass before, which tells
    the heads of each call. text: B and T of the token ids; None learns them from what the model is given.
    """

    def __init__(self, edits: Edits | None = None, order: Sequence = (), text: tuple[int, int] | None = None):
        super().__init__()
        self.edits = edits or {}
        self.expected = order
        self.given = text
        self.is_inside = False  # of the model
        self.begin(text)

    def begin(self, text: tuple[int, int] | None) -> None:
        """Forget the forward pass before. text: B and T of the token ids."""
        self.text = text
        self.has_dropout = False
        self.edited: set[Head] = set()
        self.residual: Tensor | None = None  # what the last norm was given; in a model of ours the stream, (B, T, C)
        self.joined: list[Tensor] = []  # outputs of the last layer that nothing has projected yet, (B, heads, T, D)
        self.projected: dict[int, Tensor] = {}  # first call of a layer -> weight of what reads its output as it is
        self.parts: list[Call | None] = []  # the calls; None if one has turned out to be no attention
        self.first_of: list[int] = []  # of each call, the first call of its layer
        self.unread: dict[int, tuple[int, Tensor, Tensor]] = {}  # id -> call of one head, its output, and that by head
        self.doubts: dict[int, set[str]] = {}  # call -> what is in doubt: its "sums", its "batch"
        self.followed: dict[int, tuple[int, Tensor]] = {}  # id -> call in doubt, and what was made of its output
        self.left_out: list[str] = []  # what is not attention of a text to itself and its past, in words
        self.unlike: dict[str, None] = {}  # what cannot be looked into, in words
        self.built: list[Call] | None = None

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begin with the ids that a model, or its embedding alone, is given, as a hook. Positions may be among them."""
        if self.is_inside:
            return
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        ids = [x for x in given if x.dim() in (1, 2) and not x.is_floating_point() and x.dtype != torch.bool]
        text = tuple(torch.atleast_2d(max(ids, key=torch.numel)).shape) if ids else None
        self.begin(self.given or text)
        self.is_inside = not isinstance(module, nn.Embedding)

    def leave(self, *_: object) -> None:
        """Note the end of a forward pass, as a hook."""
        self.is_inside = False

    @property
    def calls(self) -> list[Call]:
        """The calls, one for each layer. Raises UserError if none was seen."""
        if self.built is None:
            layers = {}
            for first, call in zip(self.first_of, self.parts, strict=True):
                if call is not None:
                    layers.setdefault(first, []).append(call)
            self.built = [join(layers[first]) for first in sorted(layers)]
        if not self.built:
            if UNMASKED in self.left_out:
                raise UserError(f"the model {UNMASKED}: tril.check_causality(model) says which token is seen")
            reasons = [*dict.fromkeys(self.left_out), *self.unlike] or [NOWHERE]
            raise UserError(f"{UNSEEN}: {'; '.join(reasons[:MOST_REASONS])}")
        return self.built

    @property
    def firsts(self) -> list[int]:
        """The first call of each layer."""
        return sorted({first for first, call in zip(self.first_of, self.parts, strict=True) if call is not None})

    @property
    def order(self) -> list[Head | None]:
        """The layer of each call, and its first head; None for a call that has turned out to be no attention."""
        firsts = self.firsts
        found = []
        for number, (first, call) in enumerate(zip(self.first_of, self.parts, strict=True)):
            before = [self.parts[i].shape[1] for i in range(number) if self.first_of[i] == first and self.parts[i]]
            found.append(None if call is None else (firsts.index(first), sum(before)))
        return found

    @property
    def projections(self) -> dict[int, Tensor]:
        """Layer -> weight of the linear layer that reads its output as it is; without those that read it otherwise."""
        return {layer: self.projected[first] for layer, first in enumerate(self.firsts) if first in self.projected}

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call a function of PyTorch. See what it does if it attends."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.multi_head_attention_forward:
            return self.see_module(func, args, kwargs)
        output = func(*args, **kwargs)
        if self.unread or self.followed:
            self.follow(name, (args, kwargs), output)
        if name == "flex_attention":
            return self.see_flex(func, output, *args)
        if func is F.scaled_dot_product_attention:
            return self.see_kernel(output, *args, **kwargs)
        if name in PRODUCTS:
            return self.see_product(name, (args, kwargs), output)
        if name == "tensordot":
            self.unlike["torch.tensordot cannot be looked into"] = None
        elif func is F.linear:
            self.see_projection(*args, **kwargs)
        elif func in (F.layer_norm, F.rms_norm):
            self.residual = args[0]
        elif func is F.dropout:
            self.see_dropout(*args, **kwargs)
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
        """Store a call of the fused kernel. Return its output, perhaps with heads changed."""
        if not self.is_plain(query, key, value):
            return output
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
        is_flat = query.dim() == 3  # the heads may be joined with the batch
        B = self.text[0] if self.text and is_flat else len(query)
        if not is_past or not is_whole or query.dim() not in (3, 4) or len(query) % B:
            shapes = f"queries {tuple(query.shape)} of keys {tuple(key.shape)}"
            self.left_out.append(UNMASKED if T_query == T_key and not is_past else shapes)
            return output
        if is_flat and mask.size(1) > 1:
            mask = mask.reshape(B, -1, T_query, T_key)
        for call in self.parts:
            if isinstance(call, Computed) and mask.equal(call.mask):
                mask = call.mask  # one for the layers that share it
        # Copies, because a model may overwrite its own later, as a cache does.
        q, k, v = (x.detach().to(mask, copy=True).reshape(B, -1, *x.shape[-2:]) for x in (query, key, value))
        return self.keep(Computed(v, q, k, mask, is_causal, scale), output, doubts={"batch"} if is_flat else set())

    def see_module(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None]:
        """Call the function of `nn.MultiheadAttention`, and once more for its weights. Return what it does.

        If heads are changed, so is its output. With keys of its own behind the text it is left out.
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
        is_random = kwargs["training"] and dropout_p
        if not is_random and error > TOLERANCE[output.dtype]:
            raise NotTheKernels(
                f"nn.MultiheadAttention: with its weights its output differs by {error:.2g} of its size"
            )
        self.has_dropout |= is_random > 0
        call = Read(values.detach().permute(1, 2, 0, 3), weights.detach())
        changed = self.see_weights([call], heads, ["tbhd->bhtd"])
        self.see_projection(changed.flatten(2), out_proj)
        return output if changed is heads else project(changed), returned

    def see_flex(
        self, func: Callable, output: tuple | Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object
    ):
        """Ask FlexAttention for its weights, which are what it makes of an identity. Return what it does."""
        output, *others = output
        identity = torch.eye(key.size(2)).to(value).expand(*value.shape[:2], -1, -1)
        weights, *_ = func(query, key, identity, *args)
        return self.see_weights([Read(value.detach(), weights.detach())], output, ["...->..."]), *others

    def see_product(self, name: str, arguments: tuple, output: Tensor) -> Tensor:
        """Look for weights and values among the factors of a product. Return its output, perhaps with heads changed."""
        given = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        if not self.is_plain(*given):
            return output
        if len(given) > 2 and name == "einsum":
            self.unlike["an einsum of three factors cannot be looked into"] = None
        found = [*find_attention(factors_of(name, arguments, output), self.text)]
        calls = [Read(each.values, each.weights) for each in found]
        has_batch = all(each.has_batch for each in found)
        return self.see_weights(calls, output, [each.order for each in found], set() if has_batch else {"batch"})

    def see_weights(self, calls: list[Read], output: Tensor, orders: list[str], doubts: Iterable[str] = ()) -> Tensor:
        """Store the first of these ways to read a product that is attention of a text to itself and its past.

        Weights and values are detached: what is asked of them must leave no trace for autograd. orders: of each way an
        equation that orders the axes of the output: batch, heads, T, D. Returns the output, perhaps with heads changed.
        """
        reasons = []
        for call, order in zip(calls, orders, strict=True):
            weights = call.source
            T_query, T_key = weights.shape[-2:]
            if not weights.min() >= 0:
                continue
            least, most, later = call.prove(len(self.parts))
            rounding = TOLERANCE[weights.dtype]
            is_one = max(1 - least, most - 1) <= rounding
            is_past = later <= LEAK
            if T_query != T_key:  # the queries belong to the last keys: behind these is no empty buffer
                is_past = T_query < T_key and later == 0 and weights[..., -1].any()
            if is_past and 0 < most <= (MOST_SUM if self.has_dropout else 1 + rounding):
                call = replace(call, source=weights.clone())
                return self.keep(call, output, order, {*doubts} if is_one else {*doubts, "sums"})
            if is_one and not is_past:
                reasons.append(UNMASKED if T_query == T_key else f"weights {tuple(weights.shape)}")
            elif is_past and most > 0:
                reasons.append(f"weights {tuple(weights.shape)} whose rows sum to {least:.2f} to {most:.2f}")
        self.left_out += reasons[:1]
        return output

    def see_projection(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Store the weight of a projection if it reads the output of the last layer as it is."""
        if self.joined and sum(map(torch.numel, self.joined)) == input.numel() and self.is_plain(input):
            joined = torch.cat(self.joined, dim=1).transpose(1, 2).flatten()
            if joined.to(input).equal(input.flatten()):
                self.projected[self.first_of[-1]] = weight
        self.joined = []

    def see_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
        """Note that rows of weights may sum to more than one."""
        self.has_dropout |= training and p > 0

    def is_plain(self, *tensors: Tensor) -> bool:
        """Return whether tensors have numbers to look at; note it if not."""
        if not all(map(is_plain, tensors)):
            self.unlike["what is nested or sparse, or inside torch.vmap, cannot be looked into"] = None
            return False
        return True

    def keep(self, call: Call, output: Tensor, order: str = "...->...", doubts: set[str] = frozenset()) -> Tensor:
        """Store a call. Return its output, perhaps with heads changed."""
        number = len(self.parts)
        self.parts.append(call)
        self.first_of.append(number)
        self.built = None
        if self.edits:
            output = self.edit(number, output, order)
        heads = torch.einsum(order, output.detach()).reshape(*call.shape[:3], -1)
        self.joined = [heads]
        if self.text is None or self.text[0] == 1:
            doubts = doubts - {"batch"}
        if doubts:
            self.doubts[number] = doubts
            self.followed[id(output)] = number, output
        if call.shape[1] == 1 and output.dim() < 4:  # perhaps one of several that are joined
            self.unread[id(output)] = number, output, heads
        return output

    def edit(self, number: int, output: Tensor, order: str) -> Tensor:
        """Return the output of a call with its heads changed. Raises UserError if the pass before had fewer calls."""
        if number >= len(self.expected):
            raise UserError("the model attends more often than in the pass before: its heads cannot be told apart")
        layer, first = self.expected[number] or (None, 0)
        B, H, T, _ = self.parts[number].shape
        changes = {head: self.edits[layer, head] for head in range(first, first + H) if (layer, head) in self.edits}
        if not changes:
            return output
        output = output.clone()
        view = torch.einsum(order, output)
        heads = view.reshape(B, H, T, -1).clone()
        for head, change in changes.items():
            heads[:, head - first] = change(heads[:, head - first])
            self.edited.add((layer, head))
        view.copy_(heads.reshape(view.shape))
        return output

    def follow(self, name: str, arguments: tuple[tuple, dict], output: object) -> None:
        """Follow outputs to what reads them: heads to what joins them, calls in doubt to their projection."""
        made = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        given = {id(x): x for x in tree_leaves(arguments) if isinstance(x, Tensor)}
        if output is None:
            made = [*given.values()][:1]  # what was written to
        if not made:
            return  # it was asked for a size
        self.join_heads([self.unread.pop(key) for key in given if key in self.unread])
        for number, x in [self.followed[key] for key in given if key in self.followed]:
            others = [y for y in given.values() if y is not x and y.numel() > 1]
            reason = self.refute(number, name, x, others, made) if self.parts[number] else None
            if reason:
                self.parts[number] = None
                self.built = None
                self.left_out.append(reason)
            if reason or name in ENDS:
                self.followed = {key: found for key, found in self.followed.items() if found[0] != number}
            elif self.parts[number]:
                self.followed |= {id(y): (number, y) for y in made}

    def refute(self, number: int, name: str, x: Tensor, others: list[Tensor], made: list[Tensor]) -> str | None:
        """Return why a call in doubt is no attention of these texts, as what a function makes of its output tells.

        x: what was made of the output so far; others: what else the function is given; made: what it returns.
        """
        doubts = self.doubts[number]
        is_by_row = "div" in name or ("mul" in name and any(y.size(-1) == 1 for y in others))
        if "sums" in doubts and others and is_by_row and name not in ENDS:
            return "numerators, which are divided by their sums after the product with the values"
        if "batch" in doubts:
            B, T = self.text
            weight = others[-1].T if others and name == "addmm" else others[0] if others and name == "linear" else None
            parts = [part for y in made if y.numel() == B * x.numel() for part in y.reshape(B, *x.shape)]
            if (weight is not None and x.numel() == T * weight.size(-1)) or any(part.equal(x) for part in parts):
                return f"heads of one text at a time, of {B}: give one text alone"
        return None

    def join_heads(self, read: list[tuple[int, Tensor, Tensor]]) -> None:
        """Make a layer of those calls of one head that are alike, of all that one function reads."""
        layers = {}
        for number, output, heads in read:
            kept = vars(self.parts[number]) if self.parts[number] else {}
            alike = output.shape, kept.keys(), kept.get("scale"), id(kept.get("mask"))
            layers.setdefault(str(alike), []).append((number, heads))
        for layer in layers.values():
            for number, _ in layer:
                self.first_of[number] = layer[0][0]
            self.joined = [heads for _, heads in layer]
            self.built = None

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

        The metrics are those of `measure` in tril/metrics.py. Of a kernel no T x T matrix is stored.

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


def join(calls: Sequence[Call]) -> Call:
    """Return one call with the heads of all; they have one mask and scale."""
    if len(calls) == 1:
        return calls[0]
    names = vars(calls[0]).keys() & {"values", "q", "k", "source"}
    return replace(calls[0], **{name: torch.cat([vars(call)[name] for call in calls], dim=1) for name in names})


@contextmanager
def capture(
    model: nn.Module, edits: Edits | None = None, order: Sequence = (), text: tuple[int, int] | None = None
) -> Iterator[Captured]:
    """Capture the attention of a model while it runs inside the `with` block.

    A forward pass replaces the one before. Outputs and gradients are the same as without capture, to the last bit. A
    compiled model runs eagerly there. If a model joins heads and batch in one axis, the batch has to come first.

    edits, order, text: those of `Captured`; `look` finds the order by itself.
    """
    captured = Captured(edits, order, text)
    # Parts of a model may be called without it, as `GPT.generate` does.
    embedding = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
    hooks = [part.register_forward_pre_hook(captured.enter, with_kwargs=True) for part in (model, embedding) if part]
    hooks.append(model.register_forward_hook(captured.leave, always_call=True))
    # To import it takes a second, and it is there if anything is compiled.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with eager, captured:
            yield captured
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def look(
    model: nn.Module,
    idx: Tensor,
    edits: Edits | None = None,
    positions: slice | Tensor = slice(1),
    order: Sequence[Head | None] | None = None,
) -> tuple[Captured, Tensor]:
    """Run a model on texts, (B, T), in eval mode. Return its attention, and logits of these positions, (B, n, V).

    edits: head -> function of its output, (B, T, D), that returns what goes on. order: that of a pass before, if there
        was one; without it the model runs once more, to learn which call is which layer.

    Raises UserError if the model cannot be read, or for an edit of a head that there is not.
    """
    if edits and order is None:
        order = look(model, idx)[0].order
    with evaluating(model), capture(model, edits, order or (), tuple(idx.shape)) as att:
        logits = read(model, idx, positions)
    if missing := {*(edits or {})} - att.edited:
        raise UserError(f"there is no head {'.'.join(map(str, min(missing)))} to change")
    return att, logits

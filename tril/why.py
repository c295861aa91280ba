"""Say why a head looks where it does: split scores of attention over who wrote what queries and keys are made of.

The residual stream is the sum of all that was written so far, and each part of a block reads it through a norm. With
the scale that the norm has for the whole sum, a query and a key are linear in what was written. So both are sums over
the writers, and so is the score, their product (Elhage et al. 2021; transformer-circuits.pub/2025/attention-qk).

Nothing is known of the model but its calls of PyTorch. The pass is cut behind the embedding, behind each head, and
behind what is not linear, which is an MLP: these are the writers. Constants that are added are written by biases, or by
positions if they differ between tokens. What is between is followed by its derivative. The sums prove all of this: the
parts have to add up to the queries and keys of which the weights are made.

Shapes are named as in tril/weights.py; n is a number of writers.
"""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import TensorWeakRef

from tril.errors import UserError, errors_as_user_error
from tril.experiments import CPU_FLOPS
from tril.kinds import name_of
from tril.look import Captured
from tril.metrics import Head, Heads
from tril.products import PRODUCTS, tensors
from tril.weights import HIDES, TOLERANCE, Computed, exact_products

# Names of functions, without the underscores around them. Of those that add, the arguments that are added.
ADD = {**dict.fromkeys(("add", "iadd", "radd"), (0, 1)), "linear": (2,), "addmm": (0,)}
MULTIPLY = ("mul", "imul", "rmul", "div", "truediv", *(name.strip("_") for name in PRODUCTS))
NOT_LINEAR = frozenset(
    "abs clamp elu erf exp expm1 gelu hardswish leaky_relu linalg_norm linalg_vector_norm log maximum mish norm pow "
    "reciprocal relu relu6 rsqrt selu sigmoid silu softmax softplus sqrt square std tanh var".split()
)
UNKNOWN = "where heads look is known, why is not"
MOST_PARTS = 5  # of a side that are shown
MOST_KEYS = 3  # of a token, on a page

# n writers, and what each has given to queries, (n, H, T, D), and to keys, (n, n_kv_head, T_key, D)
Parts = tuple[list[str], Tensor, Tensor]


def layer_norm(x: Tensor, shape: object, weight: object = None, bias: object = None, eps: float = 1e-5) -> Tensor:
    """Normalise as `F.layer_norm`, in steps."""
    x = rms_norm(x - x.mean(-1, keepdim=True), shape, weight, eps)
    return x if bias is None else x + bias


def rms_norm(x: Tensor, shape: object, weight: object = None, eps: float | None = None) -> Tensor:
    """Normalise as `F.rms_norm`, in steps."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is None else x * weight


IN_STEPS = {F.layer_norm: layer_norm, F.rms_norm: rms_norm}


class Writers(Captured):
    """The attention of a pass of one text, (1, T), and who wrote what it reads.

    Of all tensors only what was written, and what is made of that, has a gradient: a derivative by what was written is
    linear in it.
    """

    stored = staticmethod(Tensor.clone)  # queries and keys as they are made
    not_linear = NOT_LINEAR

    def begin(self) -> None:
        """Forget the forward pass before."""
        super().begin()
        self.written: list[tuple[list[str], TensorWeakRef]] = []  # by whom, and what; of heads all of a call

    def write(self, names: list[str], x: Tensor) -> Tensor:
        """Cut the pass here: what is made of x from now on is made of what these have written."""
        x = x.detach().requires_grad_()
        self.written.append((names, TensorWeakRef(x)))
        return x.clone()  # a model may change it in place

    @property
    def alive(self) -> list[tuple[list[str], Tensor]]:
        """By whom was written what, as far as anything is still made of it: most of a long text's memory is not."""
        return [(names, x) for names, ref in self.written if (x := ref()) is not None]

    @torch.inference_mode(False)
    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call a function of PyTorch, and cut the pass there if it writes."""
        if func == Tensor.requires_grad.__get__:  # a layer may compute otherwise if gradients are wanted
            return False
        if func in IN_STEPS:
            with self:
                return IN_STEPS[func](*args, **kwargs or {})
        args, kwargs = tree_map(lambda x: x.detach() if isinstance(x, nn.Parameter) else x, ([*args], kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        for i, x in enumerate(args) if num_written(args) else ():
            is_constant = isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad
            if is_constant and i in ADD.get(name, ()):
                args[i] = self.write(["bias" if x.dim() == 1 else "position"], x)
        before = len(self.written)
        output = super().__torch_function__(func, types, args, kwargs)
        if func is F.embedding and not self.written and args[0].numel() == self.text[1]:
            return self.write(["embedding"], output)
        num = num_written((args, kwargs))
        if len(self.written) == before and ((num and name in self.not_linear) or (num > 1 and name in MULTIPLY)):
            # One number for a token, or for all, is the scale of a norm.
            return output.detach() if output.shape[-1:].numel() == 1 else self.write([f"mlp {self.layer}"], output)
        return output

    def change(self, names: list[Head], heads: Tensor) -> Tensor:
        """Cut the pass behind heads."""
        return self.write([*map(name_of, names)], super().change(names, heads))

    @errors_as_user_error(UNKNOWN)
    @torch.inference_mode(False)
    def parts(self, layer: int) -> Parts:
        """Return what the queries and keys of a layer are made of. Raises UserError if that is not known."""
        call = self.calls[layer]
        made = [call.q, call.k] if isinstance(call, Computed) else []
        if num_written(made) < 2 or self.written[0][0] != ["embedding"]:
            raise UserError(
                f"{UNKNOWN}: it needs F.scaled_dot_product_attention of what the embedding writes, not attention "
                "written out (transformers: model.set_attn_implementation('sdpa'))"
            )
        zeros = [torch.zeros_like(x, requires_grad=True) for x in made]
        # A part is the Jacobian times what was written: the derivative of the product with the transpose.
        alive = self.alive
        pulled = torch.autograd.grad(made, [x for _, x in alive], zeros, create_graph=True, allow_unused=True)
        found = {}
        for (names, x), back in zip(alive, pulled, strict=True):
            if back is None:
                continue
            each = x.detach()[None]
            if (H := len(names)) > 1:
                each = each * torch.eye(H).to(x).view(H, 1, H, 1, 1)
            parts = torch.autograd.grad(back, zeros, each, True, is_grads_batched=True, materialize_grads=True)
            for name, *both in zip(names, *parts, strict=True):
                found[name] = [one + more for one, more in zip(both, found.get(name, (0.0, 0.0)), strict=True)]
        return [*found], *(torch.stack(x).flatten(1, -3) for x in zip(*found.values(), strict=True))


def num_written(given: object) -> int:
    """Return the number of tensors that are made of what was written."""
    return sum(x.requires_grad for x in tensors(given))


@torch.no_grad()
def explain(att: Captured, parts: Parts, head: Head, queries: slice, keys: Tensor) -> tuple[list[str], Tensor, Tensor]:
    """Return who makes Q queries of a head look at K keys of each, (Q, K): writers, scores, and advantages.

    Softmax feels differences of scores alone. So a score is compared with the mean score of the query's other keys, by
    their weights. Scores are (Q, K), as the kernel has them before its softmax. Advantages are (2, n, Q, K): of what
    was written to the query, and of what was written to the keys. The n of each side sum to that of the score.

    att: what `look` saw of the text; parts: of the layer, from `Writers`; queries, keys: numbers of tokens.

    Raises UserError if the parts do not sum to the queries and keys of which the weights are computed.
    """
    layer, number = head
    names, *both = parts
    call = att.calls[layer]
    of_query, of_key = (x[:, number * x.size(1) // call.shape[1]].to(call.dtype) for x in both)
    call = call.of_head(number)
    q, k, mask = (x[0, 0].to(call.dtype) for x in (call.q, call.k, call.mask))
    rounding = 10 * TOLERANCE[call.q.dtype]
    # Rounding is in proportion to the lengths of vectors, whose product may be small.
    are_sums = [
        ((x.sum(0) - whole).norm(dim=-1) <= rounding * x.norm(dim=-1).sum(0)).all()
        for x, whole in ((of_query, q), (of_key, k))
    ]
    if not all(are_sums):
        raise UserError(f"{UNKNOWN}: what queries and keys of head {name_of(head)} are made of cannot be followed")
    chosen = F.one_hot(keys.to(q.device) + len(k) - len(q), len(k))  # (Q, K, T_key)
    mask = mask[queries]
    bias = mask.masked_fill(mask <= HIDES, 0.0)
    with exact_products(q.device):
        scores = call.scale * q[queries] @ k.mT + mask
        sides = call.scale * torch.stack((of_query[:, queries] @ k.mT, q[queries] @ of_key.mT))
        if bias.any():  # of positions, as ALiBi's
            names = [*names, "mask"]
            sides = torch.cat((sides, bias.expand(2, 1, *bias.shape)), dim=1)
        scores = scores[:, None].expand(chosen.shape)
        others = scores.masked_fill(chosen > 0, -torch.inf).softmax(-1).nan_to_num()  # nan: there is no other key
        return names, scores[chosen > 0].view(keys.shape), torch.einsum("snqt,qkt->snqk", sides, chosen - others)


def explain_strongest(att: Captured, writers: Writers, heads: Heads, effort: float = 1.0) -> tuple[list[str], Tensor]:
    """Return why each token of a text looks at the MOST_KEYS tokens that have most of a head's weight.

    These are names of writers, and numbers, int32 (2 + 4 * MOST_PARTS, heads, T, MOST_KEYS): the key; its advantage; of
    the MOST_PARTS largest parts of what was written to the query the writers, by their places among the names, and the
    parts; and both of what was written to the keys. Parts are in hundredths.

    Raises UserError if that is not known, or is more than `effort` allows a CPU.
    """
    _, _, H, T = att.shape
    values = att.calls[0].values
    flops = 8 * T * (H * values.size(-1)) ** 2 * (H + 1) * sum({layer for layer, _ in heads})  # of projections
    if values.device.type == "cpu" and flops > effort * CPU_FLOPS:
        raise UserError(f"why {len(heads)} heads look there is too much to compute: choose some with --heads")
    numbers = {}
    found = []
    for layer, group in groupby(heads, lambda head: head[0]):
        parts = writers.parts(layer)
        for head in group:
            keys = att.pattern(*head)[0, :, -T:].topk(min(MOST_KEYS, T)).indices
            names, _, sides = explain(att, parts, head, slice(None), keys)
            places = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names]).to(keys)
            order = sides.abs().topk(min(MOST_PARTS, len(names)), dim=1).indices  # (2, parts, T, keys)
            largest = torch.stack((places[order], 100 * sides.gather(1, order)), dim=1)
            largest = F.pad(largest, (0, 0, 0, 0, 0, MOST_PARTS - order.size(1))).flatten(0, 2)
            advantage = 100 * sides[0].sum(0)
            found.append(torch.cat((keys[None], advantage[None], largest)).round().int().cpu())
    return [*numbers], torch.stack(found, dim=1)


class Why(NamedTuple):
    """Why a query looks at a key. It is printed as a table of 80 columns."""

    query: int  # the number of a token
    key: int
    labels: tuple[str, str]  # of these tokens
    weight: float
    score: float  # before the softmax, as the kernel has it
    advantage: float  # over the mean score of the other keys, by their weights
    by_query: dict[str, float]  # writer -> its part of the advantage, for what it wrote to the query
    by_key: dict[str, float]  # the same for what it wrote to the keys

    def __repr__(self) -> str:
        query, key = (f"{i} «{label:.16}»" for i, label in zip(self[:2], self.labels, strict=True))
        lines = [
            f"token {query} looks at {key}: weight {self.weight:.2f},",
            f"score {self.score:.2f}, {self.advantage:+.2f} above its other keys: twice split, by what was written",
            f"{'to the query':>28} {'to the keys':>32}",
        ]
        rows = zip(in_words(self.by_query), in_words(self.by_key), strict=True)  # the writers of both are the same
        return "\n".join(lines + ["{:>20} {:>7} {:>24} {:>7}".format(*query, *key) for query, key in rows])


def in_words(parts: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the largest parts of a side, and the sum of the others."""
    shown = dict(sorted(parts.items(), key=lambda item: -abs(item[1]))[: MOST_PARTS + 1])
    if len(parts) > len(shown):
        shown.popitem()
        shown[f"{len(parts) - MOST_PARTS} others"] = sum(parts.values()) - sum(shown.values())
    return [(name, f"{part:+.2f}") for name, part in shown.items()]

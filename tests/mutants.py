"""Mistakes that people make in attention, and which of our tests notice each.

A mutant is this project with one mistake in it; most were seen in published code. A check is a few tests of this suite,
called by their names. The table in tests/README.md says which check notices which mistake;
tests/model/test_mutants.py holds the two together. To print the table:

    python -m tests.mutants
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data.batches
import model.attention
from errors import UserError
from model import GPT
from model.attention import Attend, CausalSelfAttention
from model.cache import LayerCache
from model.families import MLP
from model.gpt import Block
from tests.data import test_batches
from tests.model import test_attention, test_causality, test_gpt, test_leakage

Weights = Callable[[Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------------------------ mistakes in the weights


def triangle(scores: Tensor, diagonal: int = 0) -> Tensor:
    """(T_query, T_key) bool, the causal mask moved by `diagonal` to the right."""
    T_query, T_key = scores.shape[-2:]
    return torch.ones(T_query, T_key, dtype=torch.bool, device=scores.device).tril(T_key - T_query + diagonal)


def softmax(scores: Tensor, mask: Tensor, value: float = -math.inf, dim: int = -1) -> Tensor:
    return scores.masked_fill(~mask, value).softmax(dim)


def causal(scores: Tensor) -> Tensor:
    return softmax(scores, triangle(scores))


def filled_for_nothing(scores: Tensor, mask: Tensor) -> Tensor:
    scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1)


def laid_over_batch(scores: Tensor, mask: Tensor) -> Tensor:
    return softmax(scores, mask[: scores.size(0), None, None] if len(mask) >= scores.size(0) else mask)


def opened(scores: Tensor, rows: slice, columns: slice = slice(None)) -> Tensor:
    """The weights of a mask that is open in these rows and columns."""
    mask = triangle(scores)
    mask[rows, columns] = True
    return softmax(scores, mask)


# mistake -> (scores, mask) -> weights. scores: (B, H, T_query, T_key).
WEIGHTS: dict[str, Weights] = {
    "no mask": lambda scores, mask: scores.softmax(-1),
    "masked_fill without using its result": filled_for_nothing,
    "mask after softmax": lambda scores, mask: scores.softmax(-1) * mask,
    "mask after softmax, rows rescaled": lambda scores, mask: F.normalize(scores.softmax(-1) * mask, 1, -1),
    "scores multiplied by the mask": lambda scores, mask: (scores * mask).softmax(-1),
    "(1 - mask) times minus infinity": lambda scores, mask: (scores + (1 - mask.to(scores)) * -math.inf).softmax(-1),
    "softmax over the queries": lambda scores, mask: softmax(scores, mask, dim=-2),
    "softmax over the heads": lambda scores, mask: softmax(scores, mask, dim=1),
    "softmax over the heads, -1e9": lambda scores, mask: softmax(scores, mask, -1e9, dim=1),
    "diagonal off by one: sees the next token": lambda scores, mask: softmax(scores, triangle(scores, 1)),
    "diagonal off by one: does not see itself": lambda scores, mask: softmax(scores, triangle(scores, -1)),
    "diagonal off by one: does not see itself, -1e9": lambda scores, mask: softmax(scores, triangle(scores, -1), -1e9),
    "mask transposed": lambda scores, mask: softmax(scores, mask.T if mask.size(0) == mask.size(1) else mask),
    "mask laid over (batch, keys)": laid_over_batch,
    "mask value -1e4": lambda scores, mask: softmax(scores, mask, -1e4),
    "mask value -1e9": lambda scores, mask: softmax(scores, mask, -1e9),
    "scale sqrt(C)": lambda scores, mask: causal(scores / math.sqrt(scores.size(1))),
    "no scale": lambda scores, mask: causal(scores * math.sqrt(5)),
    "dropout of weights in evaluation": lambda scores, mask: F.dropout(causal(scores), 0.1),
    "weights normalised over the batch": lambda scores, mask: F.normalize(causal(scores), 1, 0),
    "no mask in one head": lambda scores, mask: torch.cat((causal(scores[:, :-1]), scores[:, -1:].softmax(-1)), dim=1),
    "no mask beyond 128 tokens": lambda scores, mask: opened(scores, slice(128, None)),
    "only the last but one sees the last token": lambda scores, mask: opened(scores, slice(-2, None)),
    "only the first sees the second token": lambda scores, mask: opened(scores, slice(0, 1), slice(0, 2)),
    "leak of 1e-6": lambda scores, mask: causal(scores) + 1e-6 * scores.softmax(-1),
    "leak of 1e-12, below rounding": lambda scores, mask: causal(scores) + 1e-12 * scores.softmax(-1),
    "is_causal with a cache: aligned to the top left": lambda scores, mask: softmax(
        scores, torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    ),
}
# place -> (layer, scores) -> whether the mask is missing there. The layer knows `group`, query heads per key head, and
# `dropout`.
UNMASKED: dict[str, Callable[[Attend, Tensor], bool]] = {
    "no mask in training": lambda layer, scores: layer.training,
    "no mask in evaluation": lambda layer, scores: not layer.training,
    "no mask with dropout": lambda layer, scores: layer.dropout > 0,
    "no mask under autograd": lambda layer, scores: torch.is_grad_enabled(),
    "no mask without autograd": lambda layer, scores: not torch.is_grad_enabled(),
    "no mask for grouped heads": lambda layer, scores: layer.group > 1,
    "no mask in bfloat16": lambda layer, scores: scores.dtype == torch.bfloat16,
    "no mask when a cache is filled in chunks": lambda layer, scores: scores.size(-2) != scores.size(-1),
}


def attend_with(
    weights: Weights, used: Callable[[Attend, Tensor], bool] = lambda layer, scores: True
) -> Callable[[pytest.MonkeyPatch], None]:
    """The change to a project whose attention has these weights where used(layer, scores), else correct ones."""

    def forward(
        self: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **_
    ) -> Tensor:
        self.group, self.dropout = q.size(1) // k.size(1), dropout
        k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        mask = triangle(scores) if mask is None else mask
        return F.dropout(weights(scores, mask) if used(self, scores) else causal(scores), dropout) @ v

    return lambda patch: patch.setattr(Attend, "forward", forward)


MUTANTS = {name: attend_with(weights) for name, weights in WEIGHTS.items()}
MUTANTS |= {name: attend_with(WEIGHTS["no mask"], used) for name, used in UNMASKED.items()}


# ------------------------------------------------------------------------------------- mistakes around the weights


def replace(name: str, owner: type, method: str) -> Callable:
    """A mutant whose method is the decorated function, which gets the original method as its first argument."""

    def add(wrong: Callable) -> None:
        original = getattr(owner, method)

        def mutated(self: object, *arguments: object, **options: object) -> object:
            return wrong(original, self, *arguments, **options)

        MUTANTS[name] = lambda patch: patch.setattr(owner, method, mutated)

    return add


@replace("queries and keys swapped", Attend, "forward")
def _(original: Callable, self: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object) -> Tensor:
    if q.size(-2) != k.size(-2):
        return original(self, q, k, v, *rest, **options)
    return original(self, k.repeat_interleave(q.size(1) // k.size(1), dim=1), q, v, *rest, **options)


def without_a_transpose(before: bool) -> Callable:
    """A forward pass that does not transpose the heads after attention, nor, if `before`, before it."""

    def forward(original: Callable, self: CausalSelfAttention, x: Tensor, cache: object = None, **options) -> Tensor:
        if cache is not None:
            return original(self, x, cache, **options)
        B, T, _ = x.shape
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.view(B, -1, T, self.head_dim) if before else self.split_heads(y) for y in (q, k, v))
        return self.o_proj(self.attend(q, k, v, None).reshape(B, T, -1))

    return forward


replace("heads viewed without a transpose, both ways", CausalSelfAttention, "forward")(without_a_transpose(True))
replace("heads merged without a transpose", CausalSelfAttention, "forward")(without_a_transpose(False))


def alter(name: str, owner: type, method: str, change: Callable[[Tensor], Tensor], number: int = 0) -> None:
    """A mutant that changes an argument of a method, the first or the one of this number."""

    def altered(original: Callable, self: object, *arguments: object, **options: object) -> object:
        arguments = list(arguments)
        arguments[number] = change(arguments[number])
        return original(self, *arguments, **options)

    replace(name, owner, method)(altered)


alter("values centred over time", Attend, "forward", lambda v: v - 0.1 * v.mean(2, keepdim=True), number=2)
alter("norm with statistics over time", Block, "forward", lambda x: x - 0.1 * x.mean(1, keepdim=True))
alter("norm with statistics over the batch", Block, "forward", lambda x: x - 0.1 * x.mean(0, keepdim=True))
alter("MLP that shifts the wrong way", MLP, "forward", lambda x: x + 0.1 * x.roll(-1, 1))
alter("logits of the next position", GPT, "logits", lambda hidden: hidden.roll(-1, -2))


@replace("projections in a Python list", CausalSelfAttention, "__init__")
def _(original: Callable, self: CausalSelfAttention, *arguments: object, **options: object) -> None:
    original(self, *arguments, **options)
    self.heads = [self.q_proj]
    del self.q_proj
    self.__dict__["q_proj"] = self.heads[0]


@replace("the next token's embedding is added", GPT, "forward")
def _(original: Callable, self: GPT, idx: Tensor, **options: object) -> Tensor:
    ahead = self.token_embedding.register_forward_hook(lambda module, inputs, x: x + 0.1 * x.roll(-1, 1))
    try:
        return original(self, idx, **options)
    finally:
        ahead.remove()


@replace("no mask in the last layer", GPT, "__init__")
def _(original: Callable, self: GPT, *arguments: object, **options: object) -> None:
    original(self, *arguments, **options)
    seeing = self.blocks[-1].attention.attend
    kernel = F.scaled_dot_product_attention
    seeing.forward = lambda q, k, v, mask, dropout=0.0, **_: kernel(q, k, v, dropout_p=dropout, enable_gqa=True)


@replace("remembers the text before", GPT, "forward")
def _(original: Callable, self: GPT, idx: Tensor, **options: object) -> Tensor:
    before = self.__dict__.get("before", 0.0)
    logits = original(self, idx, **options)
    self.__dict__["before"] = logits.detach().mean()
    return logits + 0.01 * before


@replace("positions counted from the end", GPT, "hidden")
def _(original: Callable, self: GPT, idx: Tensor, *rest: object, **options: object) -> Tensor:
    table = self.position_embedding.weight
    flipped = torch.cat((table[: idx.size(1)].flip(0), table[idx.size(1) :]))
    self.position_embedding.weight = nn.Parameter(flipped)
    try:
        return original(self, idx, *rest, **options)
    finally:
        self.position_embedding.weight = table


@replace("mask not filled again after to_empty", GPT, "_apply")
def _(original: Callable, self: GPT, fn: Callable, recurse: bool = True) -> GPT:
    nn.Module._apply(self, fn, recurse)
    self.lm_head.weight = self.token_embedding.weight
    return self


@replace("cache returns the keys of this call only", LayerCache, "store")
def _(original: Callable, self: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = original(self, k, v)
    return keys[:, :, -k.size(2) :], values[:, :, -k.size(2) :]


@replace("cache forgets the oldest value", LayerCache, "store")
def _(original: Callable, self: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    began = self.length
    keys, values = original(self, k, v)
    if began:
        self.values[:, :, 0] = 0
    return keys, values


@replace("the first part of a cached text sees its own mean", CausalSelfAttention, "forward")
def _(original: Callable, self: CausalSelfAttention, x: Tensor, cache: object = None, **options: object) -> Tensor:
    is_prompt = cache is not None and cache.length == 0
    return original(self, x, cache, **options) + (0.1 * x.mean(1, keepdim=True) if is_prompt else 0)


@replace("a window in the mask of one layer, which the kernel does not read", GPT, "__init__")
def _(original: Callable, self: GPT, *arguments: object, **options: object) -> None:
    original(self, *arguments, **options)
    layer = self.blocks[0].attention
    layer.triangle = layer.causal_mask = layer.causal_mask.triu(-2)


def formula_without_mask(q: Tensor, k: Tensor, *_: object, **__: object) -> Tensor:
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1)


def unmask_the_formula(patch: pytest.MonkeyPatch) -> None:
    for user in (model.attention, test_attention, test_leakage):
        patch.setattr(user, "attention_weights", formula_without_mask)


def do_not_shift_targets(patch: pytest.MonkeyPatch) -> None:
    def to_device(windows: object, device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(windows.copy()).long()
        return ids[:, :-1], ids[:, :-1]

    patch.setattr(data.batches, "to_device", to_device)


def fill_the_triangle(patch: pytest.MonkeyPatch) -> None:
    for user in (model.attention, model.gpt):
        patch.setattr(user, "make_causal_mask", lambda T, device=None: torch.ones(T, T, dtype=torch.bool))
    attend_with(softmax)(patch)  # the fused kernel has its own mask


MUTANTS["the triangle itself is full"] = fill_the_triangle
MUTANTS["no mask where weights are asked for"] = unmask_the_formula
MUTANTS["targets are the inputs"] = do_not_shift_targets


# ------------------------------------------------------------------------------------------------------- the checks


def for_heads(test: Callable, *arguments: object) -> list[partial]:
    """The calls of a test with one key head and with three, of three."""
    return [partial(test, *arguments, n_kv_head) for n_kv_head in (1, 3)]


FUTURE = test_leakage.test_changing_the_future_changes_no_bit_of_the_past
LOOPS = test_attention.test_layer_equals_three_loops_over_plain_numbers
CHECKS = {
    "certificate": [
        partial(test_causality.test_what_is_causal_passes, 11, 3, torch.float32),
        partial(test_causality.test_what_is_causal_passes, 11, 1, torch.bfloat16),
        partial(test_causality.test_what_is_causal_passes, 131, 3, torch.float32),
    ],
    "training": for_heads(FUTURE, test_leakage.training),
    "autocast": for_heads(FUTURE, test_leakage.autocast),
    "gradient": for_heads(test_leakage.test_gradient_is_zero_to_the_future_and_not_to_the_past, test_leakage.plain),
    "oracle": [partial(LOOPS, n_kv_head, "triangle") for n_kv_head in (1, 3)],
    "cache": for_heads(test_leakage.test_logits_through_the_cache_are_those_of_one_pass),
    "batch": [test_leakage.test_sequences_of_a_batch_do_not_see_each_other],
    "extreme": for_heads(test_leakage.test_extreme_scores_hide_no_leak),
    "half": [partial(test_attention.test_half_precision_is_finite, dtype) for dtype in (torch.float16, torch.bfloat16)],
    "long": [test_leakage.test_no_token_sees_the_future_of_a_long_text],
    "mask": [test_gpt.test_one_mask_and_a_tied_head_wherever_the_model_goes],
    "targets": [test_batches.test_targets_are_the_next_tokens],
}


@contextlib.contextmanager
def mutated(mistake: str) -> Iterator[None]:
    """The project with this mistake in it."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mistake](patch)
        yield


def run(check: str) -> None:
    """Run the tests of a check, quietly."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        for call in CHECKS[check]:
            call()


def kills(check: str, mistake: str) -> bool:
    """True if a test of the check fails on the mutant. The certificate has to refuse it; a crash is not enough."""
    with mutated(mistake):
        try:
            run(check)
        except UserError:
            return True
        except Exception:
            return check != "certificate"
    return False


def table() -> str:
    """Format as Markdown which checks notice which mistake."""
    lines = ["| mistake | certificate | others that notice it |", "|---|---|---|"]
    for mistake in MUTANTS:
        killers = [check for check in CHECKS if kills(check, mistake)]
        certificate = "refuses" if "certificate" in killers else "-"
        lines.append(f"| {mistake} | {certificate} | {', '.join(k for k in killers if k != 'certificate')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())

"""The proof of the proof: attention as it is got wrong, and which of our tests notice.

Each mutant is this project with one mistake in it, most of them seen in published code; each check is tests of this
suite by their names. tests/test_mutants.py wants every mutant killed by the checks named beside it, and all that leak
by the certificate. The whole matrix, for tests/README.md:

    python -m tests.mutants
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data.batches
import inspection.patterns
import model.attention
from model import GPT
from model.attention import Attend, CausalSelfAttention
from model.cache import LayerCache
from model.families import MLP
from model.gpt import Block
from tests import test_attention, test_batches, test_capture, test_causality, test_gpt, test_leakage
from training.config import TrainError

MINUS_INFINITY = float("-inf")


class Mutant(NamedTuple):
    apply: Callable[[pytest.MonkeyPatch], None]
    killers: str
    """Checks that must notice it, separated by spaces."""
    leaks: bool = True
    """Whether the certificate must refuse it: a position sees, or misses, what it should not."""


MUTANTS: dict[str, Mutant] = {}


# ------------------------------------------------------------------------------------------ mistakes in the weights


def triangle(scores: Tensor, diagonal: int = 0) -> Tensor:
    """(T_query, T_key) bool, the causal mask moved by `diagonal` to the right."""
    T_query, T_key = scores.shape[-2:]
    return torch.ones(T_query, T_key, dtype=torch.bool).tril(T_key - T_query + diagonal)


def weigh(name: str, killers: str, leaks: bool = True) -> Callable:
    """A mutant whose weights are computed from scores and mask by the decorated function."""

    def add(weights: Callable[[Attend, Tensor, Tensor], Tensor]) -> None:
        def forward(self: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
            group = q.size(1) // k.size(1)
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            self.group, self.dropout = group, dropout
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return F.dropout(weights(self, scores, mask), dropout) @ v

        MUTANTS[name] = Mutant(lambda patch: patch.setattr(Attend, "forward", forward), killers, leaks)

    return add


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(~triangle(scores), MINUS_INFINITY).softmax(-1)


@weigh("the correct formula", "", leaks=False)
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-1)


@weigh("no mask", "future gradient oracle prefix")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.softmax(-1)


@weigh("masked_fill without using its result", "future gradient oracle prefix")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    scores.masked_fill(~mask, MINUS_INFINITY)
    return scores.softmax(-1)


@weigh("mask after softmax", "future gradient oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.softmax(-1) * mask


@weigh("mask after softmax, rows rescaled", "extreme")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    weights = scores.softmax(-1) * mask
    return weights / weights.sum(-1, keepdim=True)


@weigh("scores multiplied by the mask", "future gradient oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return (scores * mask).softmax(-1)


@weigh("(1 - mask) times minus infinity", "oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + (1 - mask.to(scores)) * MINUS_INFINITY).softmax(-1)


@weigh("softmax over the queries", "future oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-2)


@weigh("softmax over the heads", "oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(1)


@weigh("softmax over the heads, -1e9", "future oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -1e9).softmax(1)


@weigh("diagonal off by one: sees the next token", "future gradient oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~triangle(scores, 1), MINUS_INFINITY).softmax(-1)


@weigh("diagonal off by one: does not see itself", "oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~triangle(scores, -1), MINUS_INFINITY).softmax(-1)


@weigh("diagonal off by one: does not see itself, -1e9", "future oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~triangle(scores, -1), -1e9).softmax(-1)


@weigh("mask transposed", "future gradient oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    mask = mask.T if mask.size(0) == mask.size(1) else mask
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-1)


@weigh("mask laid over (batch, keys)", "future oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    mask = mask[: scores.size(0), None, None] if len(mask) >= scores.size(0) else mask
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-1)


@weigh("mask value -1e4", "extreme")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -1e4).softmax(-1)


@weigh("mask value -1e9", "half", leaks=False)
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -1e9).softmax(-1)


@weigh("scale sqrt(C)", "oracle", leaks=False)
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return causal(scores / math.sqrt(scores.size(1)))


@weigh("no scale", "oracle", leaks=False)
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return causal(scores * math.sqrt(5))


@weigh("dropout of weights in evaluation", "repeatable oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return F.dropout(causal(scores), 0.1)


@weigh("weights normalised over the batch", "batch oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    weights = causal(scores)
    return weights / weights.sum(0, keepdim=True).clamp(min=1e-9)


@weigh("no mask in training", "training")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.softmax(-1) if self.training else causal(scores)


@weigh("no mask in evaluation", "future oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return causal(scores) if self.training else scores.softmax(-1)


@weigh("no mask with dropout", "training")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.softmax(-1) if self.dropout else causal(scores)


@weigh("no mask under autograd", "gradient oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.softmax(-1) if torch.is_grad_enabled() else causal(scores)


@weigh("no mask without autograd", "future")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return causal(scores) if torch.is_grad_enabled() else scores.softmax(-1)


@weigh("no mask for grouped heads", "future oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.softmax(-1) if self.group > 1 else causal(scores)


@weigh("no mask in one head", "future oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return torch.cat((causal(scores[:, :-1]), scores[:, -1:].softmax(-1)), dim=1)


@weigh("no mask in bfloat16", "autocast")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.softmax(-1) if scores.dtype == torch.bfloat16 else causal(scores)


@weigh("no mask beyond 128 tokens", "long")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    mask = triangle(scores)
    mask[128:] = True
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-1)


@weigh("only the last but one sees the last token", "future gradient oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    mask = triangle(scores)
    mask[-2:] = True
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-1)


@weigh("only the first sees the second token", "future gradient oracle")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    mask = triangle(scores)
    mask[0, :2] = True
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-1)


@weigh("leak of 1e-6", "future gradient")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return causal(scores) + 1e-6 * scores.softmax(-1)


@weigh("leak of 1e-12, below rounding", "gradient")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return causal(scores) + 1e-12 * scores.softmax(-1)


@weigh("is_causal with a cache: aligned to the top left", "cache")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, MINUS_INFINITY).softmax(-1)


@weigh("no mask when a cache is filled in chunks", "cache")
def _(self: Attend, scores: Tensor, mask: Tensor) -> Tensor:
    return causal(scores) if scores.size(-2) == scores.size(-1) else scores.softmax(-1)


# ------------------------------------------------------------------------------------- mistakes around the weights


def replace(name: str, owner: type, method: str, killers: str, leaks: bool = True) -> Callable:
    """A mutant in which the decorated function takes the place of a method; it gets the original as its first."""

    def add(wrong: Callable) -> None:
        original = getattr(owner, method)

        def mutated(self: object, *arguments: object, **options: object) -> object:
            return wrong(original, self, *arguments, **options)

        MUTANTS[name] = Mutant(lambda patch: patch.setattr(owner, method, mutated), killers, leaks)

    return add


@replace("queries and keys swapped", Attend, "forward", "oracle", leaks=False)
def _(original: Callable, self: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    if q.size(-2) != k.size(-2):
        return original(self, q, k, v, *rest)
    return original(self, k.repeat_interleave(q.size(1) // k.size(1), dim=1), q, v, *rest)


@replace("values centred over time", Attend, "forward", "future gradient oracle")
def _(original: Callable, self: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return original(self, q, k, v - 0.1 * v.mean(2, keepdim=True), *rest)


@replace("summaries of whole blocks", Attend, "forward", "future gradient oracle")
def _(original: Callable, self: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    y = original(self, q, k, v, *rest)
    if q.size(-2) != k.size(-2):
        return y
    block = torch.arange(v.size(2)) // 4
    same = (block[:, None] == block).to(v)
    summary = (same / same.sum(-1, keepdim=True)) @ v
    return y + summary.repeat_interleave(q.size(1) // v.size(1), dim=1)


@replace("heads viewed without a transpose, both ways", CausalSelfAttention, "forward", "gradient oracle")
def _(original: Callable, self: CausalSelfAttention, x: Tensor, cache: object = None) -> Tensor:
    if cache is not None:
        return original(self, x, cache)
    B, T, _ = x.shape
    q, k, v = (proj(x).view(B, -1, T, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
    return self.o_proj(self.attend(q, k, v, self.causal_mask[:T, :T]).reshape(B, T, -1))


@replace("heads merged without a transpose", CausalSelfAttention, "forward", "future gradient oracle")
def _(original: Callable, self: CausalSelfAttention, x: Tensor, cache: object = None) -> Tensor:
    if cache is not None:
        return original(self, x, cache)
    B, T, _ = x.shape
    q, k, v = (self.split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
    return self.o_proj(self.attend(q, k, v, self.causal_mask[:T, :T]).reshape(B, T, -1))


@replace("projections in a Python list", CausalSelfAttention, "__init__", "parameters", leaks=False)
def _(original: Callable, self: CausalSelfAttention, *arguments: object, **options: object) -> None:
    original(self, *arguments, **options)
    self.heads = [self.q_proj]
    del self.q_proj
    self.__dict__["q_proj"] = self.heads[0]


@replace("the next token's embedding is added", GPT, "forward", "future")
def _(original: Callable, self: GPT, idx: Tensor) -> Tensor:
    ahead = self.token_embedding.register_forward_hook(lambda module, inputs, x: x + 0.1 * x.roll(-1, 1))
    try:
        return original(self, idx)
    finally:
        ahead.remove()


@replace("norm with statistics over time", Block, "forward", "future gradient")
def _(original: Callable, self: Block, x: Tensor, cache: object = None) -> Tensor:
    return original(self, x - 0.1 * x.mean(1, keepdim=True), cache)


@replace("norm with statistics over the batch", Block, "forward", "batch")
def _(original: Callable, self: Block, x: Tensor, cache: object = None) -> Tensor:
    return original(self, x - 0.1 * x.mean(0, keepdim=True), cache)


@replace("MLP that shifts the wrong way", MLP, "forward", "future gradient")
def _(original: Callable, self: MLP, x: Tensor) -> Tensor:
    return original(self, x + 0.1 * x.roll(-1, 1))


@replace("logits of the next position", GPT, "logits", "future gradient")
def _(original: Callable, self: GPT, hidden: Tensor) -> Tensor:
    return original(self, hidden.roll(-1, -2))


@replace("no mask in the last layer", GPT, "__init__", "future gradient")
def _(original: Callable, self: GPT, *arguments: object) -> None:
    original(self, *arguments)
    seeing = self.blocks[-1].attention.attend
    seeing.forward = lambda q, k, v, mask, dropout=0.0: F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, enable_gqa=True
    )


@replace("remembers the text before", GPT, "forward", "repeatable")
def _(original: Callable, self: GPT, idx: Tensor) -> Tensor:
    before = self.__dict__.get("before", 0.0)
    logits = original(self, idx)
    self.__dict__["before"] = logits.detach().mean()
    return logits + 0.01 * before


@replace("positions counted from the end", GPT, "hidden", "prefix cache", leaks=False)
def _(original: Callable, self: GPT, idx: Tensor, caches: list | None = None) -> Tensor:
    table = self.position_embedding.weight
    flipped = torch.cat((table[: idx.size(1)].flip(0), table[idx.size(1) :]))
    self.position_embedding.weight = nn.Parameter(flipped)
    try:
        return original(self, idx, caches)
    finally:
        self.position_embedding.weight = table


@replace("mask not filled again after to_empty", GPT, "_apply", "mask", leaks=False)
def _(original: Callable, self: GPT, fn: Callable, recurse: bool = True) -> GPT:
    nn.Module._apply(self, fn, recurse)
    self.lm_head.weight = self.token_embedding.weight
    return self


@replace("cache returns the keys of this call only", LayerCache, "append", "cache")
def _(original: Callable, self: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = original(self, k, v)
    return keys[:, :, -k.size(2) :], values[:, :, -k.size(2) :]


@replace("cache forgets the oldest value", LayerCache, "append", "cache", leaks=False)
def _(original: Callable, self: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    began = self.length
    keys, values = original(self, k, v)
    if began:
        self.values[:, :, 0] = 0
    return keys, values


def unmasked_weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1)


def unmask_the_formula(patch: pytest.MonkeyPatch) -> None:
    for user in (model.attention, inspection.patterns, test_attention, test_leakage):
        patch.setattr(user, "attention_weights", unmasked_weights)


def targets_not_shifted(patch: pytest.MonkeyPatch) -> None:
    def to_device(windows: object, device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(windows.copy()).long()
        return ids[:, :-1], ids[:, :-1]

    patch.setattr(data.batches, "to_device", to_device)


def all_see_all(patch: pytest.MonkeyPatch) -> None:
    for user in (model.attention, model.gpt):
        patch.setattr(user, "make_causal_mask", lambda T, device=None: torch.ones(T, T, dtype=torch.bool))
    MUTANTS["the correct formula"].apply(patch)


MUTANTS["the triangle itself is full"] = Mutant(all_see_all, "future mask")
MUTANTS["no mask where weights are asked for"] = Mutant(unmask_the_formula, "weights inspection", leaks=False)
MUTANTS["targets are the inputs"] = Mutant(targets_not_shifted, "targets", leaks=False)


# ------------------------------------------------------------------------------------------------------- the checks

HEADS = (1, 3)  # key heads, of 3


def calls(test: Callable, *arguments: Iterable) -> list[partial]:
    """The calls of a test with all combinations of these arguments."""
    return [partial(test, *values) for values in product(*arguments)]


def on_path(name: str) -> list[partial]:
    """The test of the future's bits on one way through the model."""
    return calls(test_leakage.test_changing_the_future_changes_no_bit_of_the_past, [test_leakage.PATHS[name]], HEADS)


CHECKS = {
    "certificate": [
        partial(test_causality.test_what_is_causal_passes, 11, 3, torch.float32),
        partial(test_causality.test_what_is_causal_passes, 11, 1, torch.bfloat16),
        partial(test_causality.test_what_is_causal_passes, 131, 3, torch.float32),
    ],
    "future": on_path("eval"),
    "training": on_path("train"),
    "autocast": on_path("autocast"),
    "weights": on_path("weights"),
    "inspection": calls(test_capture.test_the_weights_of_earlier_tokens_do_not_move_when_later_tokens_do),
    "gradient": calls(
        test_leakage.test_gradient_is_zero_to_the_future_and_not_to_the_past, [test_leakage.plain], HEADS
    ),
    "oracle": calls(test_attention.test_layer_equals_three_loops_over_plain_numbers, HEADS),
    "cache": calls(test_leakage.test_logits_through_the_cache_are_those_of_one_pass, HEADS),
    "prefix": calls(test_leakage.test_a_prefix_has_the_logits_it_has_inside_the_whole, HEADS),
    "batch": calls(test_leakage.test_sequences_of_a_batch_do_not_see_each_other),
    "repeatable": calls(test_leakage.test_the_same_tokens_have_the_same_logits_again),
    "extreme": calls(test_leakage.test_extreme_scores_hide_no_leak, HEADS),
    "half": calls(test_attention.test_half_precision_is_finite, [torch.float16, torch.bfloat16]),
    "long": calls(test_leakage.test_no_token_sees_the_future_of_a_long_text),
    "parameters": calls(test_gpt.test_gpt2_small_has_its_published_size),
    "mask": calls(test_gpt.test_one_mask_for_all_layers_wherever_the_model_goes),
    "targets": calls(test_batches.test_targets_are_the_next_tokens),
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The project with this mistake in it."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name].apply(patch)
        yield


def run(check: str) -> None:
    """Run the tests of a check, quietly."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        for call in CHECKS[check]:
            call()


def kills(check: str, mutant: str) -> bool:
    """Whether a test of the check fails on the mutant."""
    with mutated(mutant):
        try:
            run(check)
        except TrainError:
            return True
        except Exception:
            return check != "certificate"  # which has to say it; elsewhere a crash is a kill too
    return False


def matrix() -> str:
    """Which checks notice which mistake, and which tests the checks are, as Markdown."""
    lines = ["| mistake | certificate | others that notice it |", "|---|---|---|"]
    for mutant in MUTANTS:
        killers = [check for check in CHECKS if kills(check, mutant)]
        certificate = "refuses" if "certificate" in killers else "-"
        lines.append(f"| {mutant} | {certificate} | {', '.join(k for k in killers if k != 'certificate') or '-'} |")
    lines += ["", "| check | tests |", "|---|---|"]
    for check, tests in CHECKS.items():
        names = dict.fromkeys(f"`{call.func.__module__.removeprefix('tests.')}.{call.func.__name__}`" for call in tests)
        values = dict.fromkeys(name for call in tests for name, path in test_leakage.PATHS.items() if path in call.args)
        lines.append(f"| {check} | {', '.join(names)}{f' [{values.popitem()[0]}]' if values else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(matrix())

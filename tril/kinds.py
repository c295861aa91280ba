"""Kinds of heads: what a head does on the texts that were measured, and which heads to look at first.

A head is of the first of KINDS whose score stands out from chance, which is the score of a head that attends evenly.
Induction comes first and the first token late, because a head that has nothing to do rests on the first token (Xiao et
al. 2023), and most heads do so on most texts.
"""

import fnmatch
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tril.errors import UserError
from tril.metrics import METRICS, Head, Heads, HeadScores

# Metric, or "other" -> where a head of this kind looks, and the keys: so many tokens behind an earlier "copy" of the
# query's token, the "query" itself, or the "first" token.
KINDS = {
    "induction": ("what followed the same token before", "copy", 1),
    "duplicate": ("an earlier copy of the token", "copy", 0),
    "previous": ("the token before", "query", -1),
    "current": ("the token itself", "query", 0),
    "sink": ("the first token of the text", "first", 0),
    "other": ("nowhere in particular", "nothing", 0),
}
LEAST = 0.2  # of the way from chance to 1: the least score of a head of a kind
RARE = 100  # among so many heads that look at random keys, one at most has such a score by luck, for each kind


class Kind(NamedTuple):
    """What a head does: a key of KINDS, its score, and the score by chance. For "other" the score is 1 - entropy."""

    name: str
    score: float
    chance: float


class Upstream(NamedTuple):
    """A head's score on the probe: plain, without each upstream head, the lowest first, and without the median head."""

    score: float
    without: dict[Head, float]
    median: float
    sides: dict[Head, dict[str, float]]  # that head -> "keys" and "queries": the score if these alone are without it

    def __str__(self) -> str:
        """Say it, as ".44, without 0.1 .05 (by keys .06, by queries .41), the median head .43"."""
        text = f"{short(self.score)}, without "
        for head, score in self.without.items():
            sides = ", ".join(f"by {side} {short(score)}" for side, score in self.sides.get(head, {}).items())
            text += f"{name_of(head)} {short(score)}{f' ({sides})' * bool(sides)}, "
        return f"{text}the median head {short(self.median)}"


def name_of(head: Head) -> str:
    """Return the name of a head, LAYER.HEAD: (5, 1) -> "5.1"."""
    return "{}.{}".format(*head)


def kind_of(scores: HeadScores, head: Head) -> Kind:
    """Return the kind of a head. A metric with a control has to stand out from its control as well."""
    mean = scores.mean
    for name in KINDS:
        if name not in scores.rows:  # "other", or without a probe
            continue
        chance = scores.chance[name]
        control = mean.get(f"{name}_control", chance)
        if stands_out(mean[name][head], torch.maximum(chance, control)[head], scores.rows[name]):
            return Kind(name, mean[name][head].item(), chance[head].item())
    return Kind("other", 1 - mean["entropy"][head].item(), 0.0)


def stands_out(score: Tensor, chance: Tensor, rows: int) -> bool:
    """Return whether a score is far above chance, and too high for luck.

    Of heads that look at a random key in each of so many rows, a share of at most exp(-rows * divergence) has such a
    score by luck (Hoeffding 1963, theorem 1). The divergence is that of Kullback and Leibler. On a text of a few tokens
    no score is too high for luck.
    """
    score = score.clamp(max=1)  # rounding may exceed it
    divergence = torch.xlogy(score, score / chance) + torch.xlogy(1 - score, (1 - score) / (1 - chance))
    return bool((score - chance >= LEAST * (1 - chance)) & (rows * divergence >= math.log(RARE)))


def tag(kind: Kind) -> str:
    """Return the title of a kind and the score in a few characters, as "prev .81"; empty for "other"."""
    return "" if kind.name == "other" else f"{METRICS[kind.name][0]} {short(kind.score)}"


def short(score: float) -> str:
    """Return a score with two decimals and without the zero before the point: 0.81 -> ".81"."""
    return f"{score:.2f}".removeprefix("0")


def by_kind(scores: HeadScores, heads: Heads) -> dict[str, list[tuple[Head, Kind]]]:
    """Group heads by kind; the highest score first. Kinds without a head are left out."""
    found = sorted(((head, kind_of(scores, head)) for head in heads), key=lambda pair: -pair[1].score)
    return {name: group for name in KINDS if (group := [pair for pair in found if pair[1].name == name])}


def choose_heads(patterns: str | Sequence[str | Head], shape: Sequence[int]) -> list[Head]:
    """List the heads that match, as "5.1" or "-1.*", in the order of the patterns; without patterns all.

    shape: L, B, H, T of a `Captured`.

    Raises UserError for a head that does not exist.
    """
    L, _, H, _ = shape
    # Layers are also counted from the last, which is -1.
    heads = {f"{layer}.{head}": (layer % L, head) for layer in range(-L, L) for head in range(H)}
    chosen = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ["*"]:
        pattern = pattern if isinstance(pattern, str) else name_of(pattern)
        found = sorted(map(heads.get, fnmatch.filter(heads, pattern)))
        if not found:
            shape = f"{L} layers of {H} heads, written as 0.1 0.* -1.*"
            raise UserError(f"there is no head {pattern:.80}: the model has {shape}")
        chosen |= dict.fromkeys(found)
    return list(chosen)

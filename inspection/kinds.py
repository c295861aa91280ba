"""Kinds of heads: what a head does on the texts that were measured, and which heads to look at first.

A head's kind is the first in KINDS whose score reaches LEAST. Induction comes first and the first token late, because a
head that has nothing to do rests on the first token (Xiao et al. 2023), and most heads do so on most texts.
"""

from collections.abc import Sequence

from torch import Tensor

from inspection.metrics import METRICS

Head = tuple[int, int]  # layer and head, both from zero
KINDS = {  # metric, or "other" -> where a head of this kind looks
    "induction": "what followed the same token before",
    "duplicate": "an earlier copy of the token",
    "previous": "the token before",
    "current": "the token itself",
    "sink": "the first token of the text",
    "token": "one token",
    "other": "nowhere in particular",
}
LEAST = 0.2  # the score of a head of a kind
EVEN = 0.95  # the entropy of a head that attends to everything alike, and is of no kind


def name_of(head: Head) -> str:
    """(5, 1) -> "5.1"."""
    return f"{head[0]}.{head[1]}"


def kind_of(mean: dict[str, Tensor], head: Head) -> tuple[str, float]:
    """Return the kind of a head and its score, as a key of KINDS. For "other" the score is one minus the entropy.

    mean: metric -> (L, H), as in `HeadScores`. A metric with a control has to exceed that by LEAST.
    """
    entropy = mean["entropy"][head].item()
    for kind in KINDS:
        if kind in mean and entropy < EVEN:
            control = mean[f"{kind}_control"][head] if f"{kind}_control" in mean else 0.0
            if mean[kind][head] - control >= LEAST:
                return kind, mean[kind][head].item()
    return "other", 1 - entropy


def tag(kind: str, score: float) -> str:
    """Name kind and score in a few characters, as "prev .81"; empty for "other"."""
    return "" if kind == "other" else f"{METRICS[kind][0]} {short(score)}"


def short(score: float) -> str:
    """0.81 -> ".81"."""
    return f"{score:.2f}".removeprefix("0")


def by_kind(mean: dict[str, Tensor], heads: Sequence[Head]) -> dict[str, list[tuple[Head, float]]]:
    """Group heads, each with its score, by kind; the highest score first. Kinds without a head are left out."""
    groups = {kind: [] for kind in KINDS}
    for head in heads:
        kind, score = kind_of(mean, head)
        groups[kind].append((head, score))
    return {kind: sorted(group, key=lambda found: -found[1]) for kind, group in groups.items() if group}

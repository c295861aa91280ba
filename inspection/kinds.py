"""Kinds of heads: what a head does on the texts that were measured, and which heads are worth a look first.

A head is of the first kind in KINDS whose metric is at least MUCH. Induction comes first and the first token last,
because a head that has nothing to do rests on the first token (Xiao et al. 2023): most heads do so on most texts.
"""

from collections.abc import Sequence

from torch import Tensor

from inspection.metrics import METRICS

Head = tuple[int, int]  # layer and head, both from zero
KINDS = {  # metric -> name of the kind
    "induction": "induction",
    "duplicate": "duplicate token",
    "previous": "previous token",
    "current": "the token itself",
    "other": "none of these",  # the sharpest first
    "sink": "first token",
}
MUCH = 0.2


def name_of(head: Head) -> str:
    """(5, 1) -> "5.1"."""
    return f"{head[0]}.{head[1]}"


def kind_of(mean: dict[str, Tensor], head: Head) -> tuple[str, float]:
    """Return the kind of a head and its score; for "other" the score is one minus the entropy.

    mean: metric -> (L, H), as in `HeadScores`.
    """
    for metric in KINDS:
        if metric in mean and mean[metric][head] >= MUCH:
            return metric, mean[metric][head].item()
    return "other", 1 - mean["entropy"][head].item()


def tag(mean: dict[str, Tensor], head: Head) -> str:
    """Name kind and score of a head in a few characters, as "prev .81"; empty for "other"."""
    kind, score = kind_of(mean, head)
    return "" if kind == "other" else f"{METRICS[kind][0]} {score:.2f}".replace(" 0.", " .")


def by_kind(mean: dict[str, Tensor], heads: Sequence[Head]) -> dict[str, list[Head]]:
    """Group heads by kind, the highest score first. Kinds without a head are left out."""
    found = {head: kind_of(mean, head) for head in heads}
    groups = {kind: [head for head in heads if found[head][0] == kind] for kind in KINDS}
    return {kind: sorted(group, key=lambda head: -found[head][1]) for kind, group in groups.items() if group}


def most_telling_first(mean: dict[str, Tensor], heads: Sequence[Head]) -> list[Head]:
    """Order heads by kind, and within a kind by score."""
    return [head for group in by_kind(mean, heads).values() for head in group]

"""Kinds of heads: what a head does on the texts that were measured, and which heads to look at first.

A head's kind is the first in KINDS whose score reaches LEAST. Induction comes first and the first token late, because a
head that has nothing to do rests on the first token (Xiao et al. 2023), and most heads do so on most texts.
"""

from collections.abc import Sequence

from inspection.metrics import METRICS, Metrics

Head = tuple[int, int]  # layer and head, both from zero
Heads = Sequence[Head]
KINDS = {  # metric, or "other" -> where a head of this kind looks
    "induction": "what followed the same token before",
    "duplicate": "an earlier copy of the token",
    "previous": "the token before",
    "current": "the token itself",
    "sink": "the first token of the text",
    "token": "one token",
    "other": "nowhere in particular",
}
LEAST = 0.2  # the least score of a head of a kind
EVEN = 0.95  # a head of this entropy or more attends to everything alike, and is of no kind


def name_of(head: Head) -> str:
    """Return the name of a head, LAYER.HEAD: (5, 1) -> "5.1"."""
    return f"{head[0]}.{head[1]}"


def kind_of(mean: Metrics, head: Head) -> tuple[str, float]:
    """Return the kind of a head, a key of KINDS, and its score. For "other" the score is one minus the entropy.

    mean: metric -> (L, H), as in `HeadScores`. A metric with a control has to exceed its control by LEAST.
    """
    scores = {name: values[head].item() for name, values in mean.items()}
    entropy = scores["entropy"]
    if entropy < EVEN:
        for kind in KINDS:
            if scores.get(kind, 0.0) - scores.get(f"{kind}_control", 0.0) >= LEAST:
                return kind, scores[kind]
    return "other", 1 - entropy


def tag(kind: str, score: float) -> str:
    """Return the title of a kind and a score in a few characters, as "prev .81"; empty for "other"."""
    return "" if kind == "other" else f"{METRICS[kind][0]} {short(score)}"


def short(score: float) -> str:
    """Return a score with two decimals and without the zero before the point: 0.81 -> ".81"."""
    return f"{score:.2f}".removeprefix("0")


def by_kind(mean: Metrics, heads: Heads) -> dict[str, list[tuple[Head, float]]]:
    """Group heads, each with its score, by kind; the highest score first. Kinds without a head are left out.

    mean: as in `kind_of`.
    """
    groups = {kind: [] for kind in KINDS}
    for head in heads:
        kind, score = kind_of(mean, head)
        groups[kind].append((head, score))
    return {kind: sorted(group, key=lambda found: -found[1]) for kind, group in groups.items() if group}

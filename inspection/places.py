"""The strongest places of heads over a long text: what looks at what there, and the words that heads look from and at.

A head that is judged by one text misleads. Of a whole corpus those queries are shown that have the largest weights for
one key (as headvis does, transformer-circuits.pub 2026). Shapes are named as in model/attention.py; N texts are read.
"""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from cli.bars import progress_bar
from inspection.decoder import evaluating, read
from inspection.inputs import TEXT_LENGTH, Inputs, context_length, draw_texts, sizes_of
from inspection.kinds import LEAST, Head, short
from inspection.metrics import summarise
from inspection.patterns import capture

MOST_PLACES = 12  # of a head
MOST_ALIKE = 2  # of them, with the same words as query and key
MOST_WORDS = 5  # that it looks from, and at
MINUTE = 4e12  # floating-point operations of a CPU core in about a minute
WEIGHT_FLOPS = 600  # what each weight of attention takes of these, besides the model
TEXT_FLOPS = 2e9  # what each text takes

Word = tuple[str, float, float]  # a token, its share of a head's attention, and its share of the text


class Place(NamedTuple):
    """A query and the key that it looks at, by their numbers in a text, which begins at token `start` of the corpus."""

    weight: float
    start: int
    query: int
    key: int
    labels: Sequence[str]  # of the text, (T,)


class Places(NamedTuple):
    """Where a head looks in a corpus. It is printed as a table of 80 columns."""

    strongest: Sequence[Place]
    looks_from: Sequence[Word]  # those that stand out most from the text
    looks_at: Sequence[Word]
    note: str  # says what was read, how its weights were proved, and how much of the attention the words have

    def __repr__(self) -> str:
        lines = [self.note]
        for title, words in (("from", self.looks_from), ("at", self.looks_at)):
            lines.append(f"looks {title}  " + "  ".join(f"{word} {a:.1%} ({b:.1%})" for word, a, b in words))
        lines = [textwrap.fill(line, 80, subsequent_indent="  ") for line in lines]
        lines.append("  w.   query   key              «what it looks at» and ‹what looks›")
        for weight, start, query, key, labels in self.strongest:
            before, between, after = map("".join, (labels[:key], labels[key + 1 : query], labels[query + 1 :]))
            if len(between) > 23:
                between = f"{between[:10]} … {between[-10:]}"
            line = f"{before[-12:]:>12}«{labels[key]:.10}»{between}‹{labels[query]:.10}›{after}"
            lines.append(f"{short(weight):>4} {start + query:7d} {key - query:5d} {line:.60}")
        return "\n".join(lines)


@torch.no_grad()
def find_places(model: nn.Module, inputs: Inputs) -> dict[Head, Places]:
    """Find the strongest places of the heads to show in the corpus of the inputs, in eval mode.

    It is read in texts of the model's context: all, or evenly drawn as many as a CPU core can read in about a minute.
    That is estimated, so that a model has the same places on every machine. Queries in the first eighth of a text have
    few keys to choose from, and are no places. Words and places are elsewhere: the first token and the token itself, as
    keys, are left out. They are places of a head that does nothing else: no weight elsewhere is LEAST or more.

    Words are those that add most to the divergence of the attention from the text (Kullback and Leibler 1951).

    Raises NotTheKernels if the weights are not those that the kernel used.
    """
    T = min(context_length(model) or inputs.measured.size(1), TEXT_LENGTH)
    size = sum(parameter.numel() for parameter in model.parameters())
    L, H, _ = sizes_of(model)
    flops = T * (2 * size + WEIGHT_FLOPS * L * H * T) + TEXT_FLOPS
    starts, texts = draw_texts(inputs.corpus, T, int(MINUTE // flops))
    texts[:, : len(inputs.start)] = torch.tensor(inputs.start)
    N, T = texts.shape
    # Of each query its largest weight and that key, elsewhere and at all; what tokens give as queries, and get as keys.
    seen = torch.zeros(len(inputs.heads), 6, N, T)
    proofs = []
    with evaluating(model):
        for n in progress_bar(iterable=range(N), unit=" texts", leave=False, delay=1):
            with capture(model) as att:
                read(model, texts[n, None], slice(1))
            proofs += att.verify().values()
            for h, head in enumerate(inputs.heads):
                weights = att.pattern(*head)[0, :, -T:].cpu().float()
                elsewhere = weights.tril(-1)
                elsewhere[:, 0] = 0.0
                rows = *elsewhere.max(1), *weights.max(1), elsewhere.sum(1), elsewhere.sum(0)
                seen[h, :, n] = torch.stack(rows)
    seen[:, :4, :, : T // 8] = 0.0
    tokens, words, counts = texts.unique(return_inverse=True, return_counts=True)
    of_text = counts / counts.sum()
    names = np.array([inputs.label(token) for token in tokens.tolist()], dtype=object)
    note = f"{N * T:,} of {len(inputs.corpus):,} tokens; {summarise(proofs)}"
    found = {}
    for head, (*best, given, got) in zip(inputs.heads, seen, strict=True):
        largest, keys = best[:2] if best[0].max() >= LEAST else best[2:]
        order = largest.flatten().argsort(descending=True, stable=True)[: largest.count_nonzero()]
        strongest = []
        alike = Counter()
        for place in order.tolist():
            n, query = divmod(place, T)
            labels, key = names[words[n]], int(keys[n, query])
            pair = labels[query], labels[key]
            alike[pair] += 1
            if alike[pair] <= MOST_ALIKE:
                strongest.append(Place(largest[n, query].item(), int(starts[n]), query, key, labels))
            if len(strongest) == MOST_PLACES:
                break
        looks = []
        for attention in (given, got):
            shares = F.normalize(words.flatten().bincount(attention.flatten()), p=1, dim=0)
            chosen = torch.xlogy(shares, shares / of_text).argsort(descending=True)[:MOST_WORDS].tolist()
            looks.append([(names[word], shares[word].item(), of_text[word].item()) for word in chosen])
        beyond = f"{given.mean():.1%} of its attention goes beyond the first token and itself"
        found[head] = Places(strongest, *looks, f"{note}; {beyond}")
    return found

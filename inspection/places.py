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
from torch import Tensor, nn

from cli.bars import progress_bar
from inspection.decoder import evaluating, read
from inspection.inputs import TEXT_LENGTH, Inputs, context_length, draw_texts
from inspection.kinds import LEAST, Head, short
from inspection.metrics import summarise
from inspection.patterns import capture

MOST_PLACES = 12  # of a head
MOST_ALIKE = 2  # of them, with the same words as query and key
MOST_WORDS = 5  # that it looks from, and at
AROUND = 120  # characters that are kept before and after a query and a key
MINUTE = 4e12  # floating-point operations of a model in about a minute of two cores, with what else is done:
WEIGHT_FLOPS, TEXT_FLOPS = 600, 2e9  # with each weight of attention, and with each text

Word = tuple[str, float, float]  # a token, its share of a head's attention, and its share of the text


class Place(NamedTuple):
    """A query and the key that it looks at, with their numbers in the corpus."""

    weight: float
    query: int
    key: int
    text: Sequence[str]  # before the key, the key, up to the query, the query, and after it, as far as the model read


class Places(NamedTuple):
    """Where a head looks in a corpus. It is printed as a table of 80 columns."""

    strongest: Sequence[Place]
    looks_from: Sequence[Word]  # those that stand out most from the text
    looks_at: Sequence[Word]
    note: str  # says what was read, and how its weights were proved

    def __repr__(self) -> str:
        lines = [self.note]
        for title, words in (("from", self.looks_from), ("at", self.looks_at)):
            lines.append(f"looks {title}  " + "  ".join(f"{word} {a:.1%} ({b:.1%})" for word, a, b in words))
        lines = [textwrap.fill(line, 80, subsequent_indent="  ") for line in lines]
        for weight, query, key, (before, looked_at, between, looking, after) in self.strongest:
            line = f"{before[-12:]:>12}«{looked_at:.10}»{shorten(between, 10)}‹{looking:.10}›{after}"
            lines.append(f"{short(weight):>4} {query:7d} {key - query:5d} {line:.60}")
        return "\n".join(lines)


def shorten(text: str, length: int) -> str:
    """Return so much of the beginning and of the end of a text, or all of it."""
    return text if len(text) <= 2 * length + 3 else f"{text[:length]} … {text[-length:]}"


@torch.no_grad()
def find_places(model: nn.Module, inputs: Inputs) -> dict[Head, Places]:
    """Find the strongest places of the heads to show in the corpus of the inputs, in eval mode.

    It is read in texts of the model's context: all, or evenly drawn as many as two cores can read in about a minute.
    That is estimated, so that a model has the same places on every machine. Queries in the first eighth of a text have
    few keys to choose from, and are no places. Words and places leave out the first token and the token itself as keys;
    but these count LEAST of their weight for places, and so are shown of a head that does nothing else.

    Words are those that add most to the divergence of the attention from the text (Kullback and Leibler 1951).

    Raises NotTheKernels if the weights are not those that the kernel used.
    """
    ids, start_of_text, name = inputs.corpus
    T = min(context_length(model) or TEXT_LENGTH, TEXT_LENGTH, len(ids))
    size = sum(parameter.numel() for parameter in model.parameters())
    flops = T * (2 * size + WEIGHT_FLOPS * len(inputs.heads) * T) + TEXT_FLOPS
    starts, texts = draw_texts(ids, T, int(MINUTE // flops))
    texts[:, : len(start_of_text)] = torch.tensor(start_of_text)
    tokens, words, counts = texts.unique(return_inverse=True, return_counts=True)
    labels = np.array([inputs.label(token) for token in tokens.tolist()], dtype=object)
    attention = torch.zeros(len(inputs.heads), 2, len(tokens))  # that a token gives as a query, and gets as a key
    best = torch.zeros(2, len(inputs.heads), *texts.shape)  # for each query, its weight and its key
    proofs = []
    with evaluating(model):
        for n in progress_bar(iterable=range(len(texts)), unit=" texts", leave=False, delay=1):
            with capture(model) as att:
                read(model, texts[n, None], slice(1))
            proofs += att.verify().values()
            for h, head in enumerate(inputs.heads):
                weights = att.pattern(*head)[0, :, -T:].cpu().float()
                elsewhere = weights.tril(-1)
                elsewhere[:, 0] = 0.0
                attention[h].index_add_(1, words[n], torch.stack((elsewhere.sum(1), elsewhere.sum(0))))
                best[:, h, n] = torch.stack(torch.maximum(elsewhere, LEAST * weights).max(1))
    best[0, ..., : T // 8] = 0.0
    shares, of_text = F.normalize(attention, p=1, dim=-1), counts / counts.sum()
    note = f"{texts.numel():,} of the {len(ids):,} tokens of {name}; {summarise(proofs)}"
    found = {}
    for h, head in enumerate(inputs.heads):
        chosen = torch.xlogy(shares[h], shares[h] / of_text).topk(min(MOST_WORDS, len(tokens))).indices
        looks = [
            [(labels[word], shares[h, side, word].item(), of_text[word].item()) for word in chosen[side].tolist()]
            for side in (0, 1)
        ]
        found[head] = Places(choose(*best[:, h], labels[words], starts), *looks, note)
    return found


def choose(weights: Tensor, keys: Tensor, labels: np.ndarray, starts: Sequence[int]) -> list[Place]:
    """Return the strongest of the places of a head, few of which have the same words.

    weights, keys: of each query, (N, T); labels: (N, T); starts: the number of the first token of each text.
    """
    found = []
    alike = Counter()
    for place in weights.flatten().argsort(descending=True, stable=True).tolist():
        n, query = divmod(place, weights.size(1))
        key = int(keys[n, query])
        text = labels[n]
        words = text[query], text[key]
        alike[words] += 1
        if alike[words] <= MOST_ALIKE:
            weight = weights[n, query].item() / (LEAST if key in (0, query) else 1)
            before, between, after = map("".join, (text[:key], text[key + 1 : query], text[query + 1 :]))
            around = before[-AROUND:], text[key], shorten(between, AROUND), text[query], after[:AROUND]
            found.append(Place(weight, int(starts[n]) + query, int(starts[n]) + key, around))
        if len(found) == MOST_PLACES:
            break
    return found

"""The strongest places of heads over a long text: what looks at what there, and the words that heads look from and at.

A head that is judged by one text misleads. Of a whole corpus those queries are shown that have the largest weights for
one key (as headvis does, transformer-circuits.pub 2026). Shapes are named as in tril/weights.py; N texts are read.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tril.experiments import progress
from tril.kinds import LEAST
from tril.look import look
from tril.metrics import Head, Heads
from tril.texts import draw_texts

MOST_PLACES = 12  # of a head
MOST_WORDS = 5  # that it looks from, and at
MINUTE = 1.2e12  # tokens times parameters that a CPU core reads in about a minute
LEAST_SIZE = 5e6  # parameters that are added for the attention, most of the work of a small model
WORDS = "{:17.17} {:9.1%} {:7.1%}   {:17.17} {:9.1%} {:7.1%}"  # that a head looks from and at, with their shares

Word = tuple[str, float, float]  # a token, its share of a head's attention, and its share of the text


class Place(NamedTuple):
    """A query and the key that it looks at, by their numbers in a text, which begins at token `start` of the corpus."""

    weight: float
    start: int
    query: int
    key: int
    labels: list[str]  # of the text, (T,)

    def near(self, i: int) -> str:
        """Return a token of the text and what is around it, in 32 characters."""
        return f"{''.join(self.labels[:i])[-12:]:>12}«{self.labels[i]:.9}»{''.join(self.labels[i + 1 :]):18}"[:32]

    def __repr__(self) -> str:
        return f"{self.weight:.2f} {self.start + self.query:7d}  {self.near(self.query)}  {self.near(self.key)}"


class Places(NamedTuple):
    """Where a head looks in a corpus. It is printed as a table of 80 columns."""

    strongest: list[Place]
    looks_from: list[Word]  # those whose share of the attention exceeds that of the text most
    looks_at: list[Word]
    note: str  # says what was read, and how much of the attention the words have

    def __repr__(self) -> str:
        words = [WORDS.format(*both[0], *both[1]) for both in zip(self.looks_from, self.looks_at, strict=True)]
        of_words = "looks from        attention    text   looks at          attention    text"
        of_places = "  w.   query           «what looks»                       at «what»"
        return "\n".join([self.note, "", of_words, *words, "", of_places, *map(repr, self.strongest)])


def find_places(
    model: nn.Module, corpus: Sequence[int], T: int, heads: Heads, label: Callable[[int], str]
) -> dict[Head, Places]:
    """Find the strongest places of heads in a corpus, in eval mode.

    It is read in texts of T tokens: all, or evenly drawn as many as a CPU core can read in a minute, about. The size of
    the model decides, so that it has the same places on every machine. label: names a token.

    Raises NotTheKernels if the weights are not those that the kernel used.
    """
    size = LEAST_SIZE + sum(parameter.numel() for parameter in model.parameters())
    starts, texts = draw_texts(corpus, T, int(MINUTE / size / T))
    seen = {head: [] for head in heads}
    for text in progress(texts, desc="strongest places", unit=" texts"):
        att, _ = look(model, text[None])
        att.verify()
        for head, rows in seen.items():
            weights = att.pattern(*head)[0, :, -len(text) :].cpu()
            elsewhere = weights.tril(-1)
            elsewhere[:, 0] = 0.0
            rows.append(torch.stack((*elsewhere.max(1), *weights.max(1), elsewhere.sum(1), elsewhere.sum(0))))
    read = f"{texts.numel():,} of {len(corpus):,} tokens"
    return {
        head: describe(starts.tolist(), texts, torch.stack(rows, dim=1), label, read) for head, rows in seen.items()
    }


def describe(starts: list[int], texts: Tensor, seen: Tensor, label: Callable[[int], str], read: str) -> Places:
    """Describe where a head looks in the texts, (N, T).

    Words are of the attention elsewhere than to the first token and the token itself. So are places, but of a head that
    does nothing else, with no weight of LEAST elsewhere. Queries in the first eighth of a text have few keys to choose
    from, and are no places.

    seen: (6, N, T), of each query the largest weight elsewhere and its key, the same of all keys, what it gives
        elsewhere, and what the token gets there as a key. read: how much of the corpus this is.
    """
    seen[:4, :, : texts.size(1) // 8] = 0.0
    elsewhere, anywhere, attention = seen.split(2)
    weights, keys = elsewhere if elsewhere[0].max() >= LEAST else anywhere
    present, words, counts = texts.unique(return_inverse=True, return_counts=True)
    of_text = counts / words.numel()
    pairs = words * len(present) + words.gather(1, keys.long())
    strongest = []
    while len(strongest) < MOST_PLACES and weights.any():
        n, query = divmod(weights.argmax().item(), texts.size(1))
        labels = [*map(label, texts[n].tolist())]
        strongest.append(Place(weights[n, query].item(), starts[n], query, int(keys[n, query]), labels))
        weights[pairs == pairs[n, query]] = 0.0
    looks = []
    for amounts in attention.flatten(1):
        shares = (words.flatten().bincount(amounts) / amounts.sum()).nan_to_num()
        most = (shares - of_text).argsort(descending=True)[:MOST_WORDS].tolist()
        looks.append([(label(present[i].item()), shares[i].item(), of_text[i].item()) for i in most])
    beyond = f"{attention[0].mean():.1%} of its attention goes beyond the first token and itself"
    return Places(strongest, *looks, f"{read}; {beyond}")

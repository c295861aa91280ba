"""Places in a long text: where heads look most strongly, where they typically look, and what is missed without them.

A head that is judged by one text misleads, and so do its strongest places alone. Of a whole corpus those queries are
shown that have the largest weights for one key, and some of all sizes (as headvis does, transformer-circuits.pub 2026).
Shapes are named as in tril/weights.py; N texts are read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.errors import UserError
from tril.experiments import Ablation, progress, rises
from tril.kinds import LEAST
from tril.look import look
from tril.metrics import Head, Heads
from tril.texts import draw_texts
from tril.views import Stream, projected_values

MOST_PLACES = 12  # of a head
MOST_LIKELIEST = 3  # tokens that are made likelier at a place
FEW = 8  # tokens of a text in which it is learnt how what is written reaches the logits
NUM_PIECES = 8  # of a corpus, in which losses are measured without a head
MINUTE = 1.2e12  # tokens times parameters that a CPU core reads in about a minute
LEAST_SIZE = 5e6  # parameters that are added for the attention, most of the work of a small model
STRONGEST = "strongest: weight, number, what looks, at what, and what that makes likelier"
MISSED = "missed: rise of the loss without the head, mean {:+.4f} over {:,} tokens"
DECILES = "typical: the weights that 10 %, 20 %, ... of all tokens exceed"


class Place(NamedTuple):
    """A query and the key that it looks at, by their numbers in a text, which begins at token `start` of the corpus."""

    amount: float  # the weight, or how much the loss of the next token rises without the head
    start: int
    query: int
    key: int
    likeliest: list[str]  # the tokens that the head makes likeliest by what it moves from the key
    labels: list[str]  # of the text, (T,)

    def near(self, i: int) -> str:
        """Return a token of the text and what is around it, in 27 characters."""
        return f"{''.join(self.labels[:i])[-10:]:>10}«{self.labels[i]:.9}»{''.join(self.labels[i + 1 :]):15}"[:27]

    def __repr__(self) -> str:
        line = f"{self.amount:.2f} {self.start + self.query:8d} {self.near(self.query)} {self.near(self.key)}"
        return f"{line} {' '.join(self.likeliest):.10}".rstrip()


class Places(NamedTuple):
    """Places of a head in a corpus, in groups. It is printed as tables of 80 columns."""

    note: str  # says what was read
    groups: list[tuple[str, list[Place]]]  # each with a title that says which

    def __repr__(self) -> str:
        tables = ["\n".join((title, *map(repr, places))) for title, places in self.groups]
        return "\n\n".join((self.note, *tables))


@torch.no_grad()
def find_places(
    model: nn.Module,
    corpus: Sequence[int],
    T: int,
    heads: Heads,
    label: Callable[[int], str],
    without: Heads = (),
    mode: Ablation = "mean",
) -> dict[Head, Places]:
    """Find places of heads in a corpus, in eval mode.

    It is read in texts of T tokens: all, or evenly drawn as many as a CPU core can read in a minute, about. The size of
    the model decides, so that it has the same places on every machine.

    label: names a token. without, mode: heads that are taken away in NUM_PIECES texts, and how; see `rises`.

    Raises NotTheKernels if the weights are not those that the kernel used.
    """
    size = LEAST_SIZE + sum(parameter.numel() for parameter in model.parameters())
    starts, texts = draw_texts(corpus, T, int(MINUTE / size / T))
    pick = partial(choose, starts, texts, label)
    found = {}
    for head, (weights, keys) in looks(model, texts, heads).items():
        weights[:, : texts.size(1) // 8] = 0.0  # these queries have few keys to choose from
        order = weights.flatten().argsort(descending=True)[: weights.count_nonzero()]
        tenths = order[len(order) * torch.arange(1, 10) // 10]
        some = torch.zeros_like(weights).put(tenths, weights.take(tenths))
        groups = [(STRONGEST, pick(weights, keys)), (DECILES, pick(some, keys))]
        found[head] = Places(f"{texts.numel():,} of {len(corpus):,} tokens", groups)
    if without:
        starts, texts = draw_texts(corpus, T, NUM_PIECES)
        lost = rises(model, texts, without, mode)
        for head, (_, keys) in looks(model, texts, without).items():
            title = MISSED.format(lost[head].mean(), lost[head].numel())
            missed = choose(starts, texts, label, lost[head], keys)
            found[head].groups.insert(1, (title, missed))
    add_likeliest(model, corpus, T, found, label)
    return found


def looks(model: nn.Module, texts: Tensor, heads: Iterable[Head]) -> dict[Head, tuple[Tensor, Tensor]]:
    """Return the largest weight of each query of texts, (N, T), and its key: head -> (N, T) of both.

    It is that elsewhere than at the first token and the token itself, where most heads rest; of a head that does
    nothing else, with no weight of LEAST elsewhere, that anywhere.
    """
    seen = {head: [] for head in heads}
    for text in progress(texts, desc="places", unit=" texts"):
        att, _ = look(model, text[None])
        att.verify()
        for head, rows in seen.items():
            weights = att.pattern(*head)[0, :, -len(text) :].cpu()
            elsewhere = weights.tril(-1)
            elsewhere[:, 0] = 0.0
            rows.append((*elsewhere.max(1), *weights.max(1)))
    found = {}
    for head, rows in seen.items():
        elsewhere, at, anywhere, at_any = map(torch.stack, zip(*rows, strict=True))
        found[head] = (elsewhere, at) if elsewhere[:, len(text) // 8 :].max() >= LEAST else (anywhere, at_any)
    return found


def choose(
    starts: Sequence[int], texts: Tensor, label: Callable[[int], str], amounts: Tensor, keys: Tensor
) -> list[Place]:
    """Return the places with the largest amounts above zero, no two of the same two tokens.

    starts: where each of the texts, (N, T), begins; amounts, keys: of their queries, (N, T); amounts may be (N, T - 1).
    """
    amounts = F.pad(amounts, (0, texts.size(1) - amounts.size(1)))  # a copy
    pairs = texts * (texts.max() + 1) + texts.gather(1, keys)
    found = []
    while len(found) < MOST_PLACES and amounts.max() > 0:
        n, query = divmod(amounts.argmax().item(), texts.size(1))
        labels = [*map(label, texts[n].tolist())]
        found.append(Place(amounts[n, query].item(), int(starts[n]), query, keys[n, query].item(), [], labels))
        amounts[pairs == pairs[n, query]] = 0.0
    return found


def add_likeliest(
    model: nn.Module, corpus: Sequence[int], T: int, found: Mapping[Head, Places], label: Callable[[int], str]
) -> None:
    """Add to places, but those by decile, what the head makes likeliest there, if that is known of the model."""
    try:
        stream, logits = look(model, draw_texts(corpus, min(FEW, T), 1)[1], positions=slice(None), kind=Stream)
        logits_of = stream.unembedding(logits)
    except UserError:
        return
    by_text = defaultdict(list)
    for head, places in found.items():
        for _, group in places.groups[:-1]:
            for place in group:
                by_text[place.start].append((head, place))
    for start, there in progress(by_text.items(), desc="likeliest there", unit=" texts"):
        T = len(there[0][1].labels)
        att, _ = look(model, draw_texts(corpus[start : start + T], T, 1)[1])
        for head, place in there:
            logits = logits_of(head[0], projected_values(att, head)[place.key - T], 0)
            place.likeliest.extend(map(label, logits.argsort(descending=True)[:MOST_LIKELIEST].tolist()))

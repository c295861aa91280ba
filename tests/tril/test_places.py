"""The strongest places of heads that are planted: what a head does is read off its places and its words alone."""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tril.places
from model.attention import attention_weights
from tril import NotTheKernels
from tril.places import Place, find_places

T, WORDS = 29, "abcdefghijklm()"
CORPUS = [WORDS.index(letter) for letter in random.Random(0).choices(WORDS, [5] * 13 + [6, 7], k=997)]
OPENING, CLOSING = map(WORDS.index, "()")
BRACKETS, FIRST, SELF, EVEN = HEADS = [(0, head) for head in range(4)]


def planted(ids: Tensor) -> Tensor:
    """The weights of the heads on a text (T,), (4, T, T): they look at the last opening bracket, most from a closing
    one, and else rest on the first token; at the first token; at the token itself; and evenly.
    """
    T = len(ids)
    scores = torch.full((4, T, T), -9.0)
    opened = 0
    for query in range(T):
        opened = query if ids[query] == OPENING else opened
        scores[0, query, opened] = 4 if ids[query] == CLOSING else query / T + ids[query] / 7
        scores[0, query, 0] = 3
        scores[1, query, 0] = scores[2, query, query] = 7
    scores[3] = 0
    return scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)


class Planted(nn.Module):
    """A decoder of one layer that attends by these weights, through PyTorch's kernel or written out; with a sink, a key
    in front of the text has a half of each row.
    """

    def __init__(self, by_kernel: bool = True, has_sink: bool = False):
        super().__init__()
        self.by_kernel, self.has_sink = by_kernel, has_sink
        self.config = SimpleNamespace(context_length=T)
        self.seen = []

    def forward(self, idx: Tensor) -> Tensor:
        assert not self.training
        self.seen.append(idx[0].tolist())
        weights = planted(idx[0])[None]
        if self.has_sink:
            weights = F.pad(weights / 2, (1, 0), value=0.5)
        values = torch.ones(1, 4, weights.size(3), 5)
        if self.by_kernel:
            output = F.scaled_dot_product_attention(
                torch.zeros(1, 4, len(idx[0]), 5), 0 * values, values, weights.log()
            )
        else:
            output = weights @ values
        return F.pad(output.mean((1, 3))[..., None], (0, len(WORDS)))


def found_by(model: nn.Module, **changes: object):
    return find_places(model, changes.get("corpus", CORPUS), T, HEADS, WORDS.__getitem__)


@pytest.mark.parametrize("by_kernel, has_sink", [(True, False), (False, False), (True, True), (False, True)])
def test_a_planted_head_is_recognised_by_its_places_and_words(by_kernel: bool, has_sink: bool) -> None:
    found = found_by(Planted(by_kernel, has_sink))
    part = 0.5 if has_sink else 1.0
    for (_, head), places in found.items():
        assert len(places.strongest) == 12
        assert len({(place.labels[place.query], place.labels[place.key]) for place in places.strongest}) == 12
        for weight, start, query, key, labels in places.strongest:
            ids = CORPUS[start : start + T]
            assert list(labels) == [WORDS[token] for token in ids] and query >= T // 8
            assert weight == pytest.approx(planted(torch.tensor(ids))[head, query, key].item() * part, abs=1e-5)

    brackets = found[BRACKETS]
    for place in brackets.strongest:
        before = "".join(place.labels[: place.query])
        assert place.key == before.rindex("(") > 0 and place.labels[place.query] != "("
    assert brackets.looks_at[0][0] == "(" and brackets.looks_from[0][0] == ")"
    assert brackets.looks_at[0][1] > 4 * brackets.looks_at[0][2] and len(brackets.looks_at) == 5
    assert all(place.key == 0 for place in found[FIRST].strongest)
    assert all(place.key == place.query for place in found[SELF].strongest)


def test_places_and_the_shares_of_words_are_those_of_all_texts() -> None:
    model = Planted()
    found = found_by(model)
    texts = model.seen
    assert len(texts) == len(CORPUS) // T and texts[0] == CORPUS[:T] and texts[-1] == CORPUS[-T:]
    given, got, read = Counter(), Counter(), Counter()
    for ids in texts:
        weights = planted(torch.tensor(ids))[0].tolist()
        read.update(ids)
        for query in range(T):
            for key in range(1, query):
                given[ids[query]] += weights[query][key]
                got[ids[key]] += weights[query][key]
    places = found[BRACKETS]
    share = given.total() / len(texts) / T
    assert places.note.endswith(f"; {share:.1%} of its attention goes beyond the first token and itself")
    for words, counted in ((places.looks_from, given), (places.looks_at, got)):
        for word, share, of_text in words:
            token = WORDS.index(word)
            assert share == pytest.approx(counted[token] / counted.total(), abs=1e-5)
            assert of_text == pytest.approx(read[token] / read.total(), abs=1e-6)
        excess = {WORDS[token]: counted[token] / counted.total() - read[token] / read.total() for token in read}
        assert [word for word, _, _ in words] == sorted(excess, key=excess.get, reverse=True)[:5]

    # The even head looks at token 1 as much as at any other; its place in the text decides between equal weights.
    first = [(WORDS[ids[T // 8]], WORDS[ids[1]]) for ids in texts]
    strongest = [(labels[query], labels[key]) for _, _, query, key, labels in found[EVEN].strongest]
    assert strongest == [*dict.fromkeys(first)][:12]


def test_what_cannot_be_read_in_a_minute_is_drawn_evenly(monkeypatch) -> None:
    model = Planted()
    monkeypatch.setattr(tril.places, "MINUTE", 3.5 * T * (5 + 7))
    monkeypatch.setattr(tril.places, "LEAST_SIZE", 5)
    model.weight = nn.Parameter(torch.zeros(7))
    found = found_by(model)
    assert found[EVEN].note.startswith("87 of 997 tokens; ")
    starts = [0, (997 - T) // 2, 997 - T]
    assert model.seen == [CORPUS[start : start + T] for start in starts]
    assert {place.start for place in found[FIRST].strongest} <= {*starts}


def test_a_text_of_few_words_has_few_places() -> None:
    assert not found_by(Planted(), corpus=np.array([2, 3]))[SELF].looks_at[0][1]
    found = found_by(Planted(), corpus=np.array([0, 1] * 50))
    assert [(place.key - place.query, place.labels[place.key]) for place in found[SELF].strongest] == [
        (0, "b"),
        (0, "a"),
    ]


def test_a_line_shows_both_tokens_in_what_is_around_them() -> None:
    place = Place(0.987, 900, 17, 3, [*"abcdefghijklmnopqrstuvwxyz"])
    assert repr(place) == "0.99     917  fghijklmnopq«r»stuvwxyz                    abc«d»efghijklmnopqrstu"


def test_places_are_proved(monkeypatch) -> None:
    monkeypatch.setattr("tril.weights.attention_weights", lambda *given: 0.9 * attention_weights(*given))
    with pytest.raises(NotTheKernels):
        found_by(Planted())

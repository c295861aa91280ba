"""The places of heads that are planted: what a head does is read off its places alone."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tril.places
from tests.conftest import make_gpt
from tril import NotTheKernels, ablate
from tril.look import look
from tril.places import MISSED, STRONGEST, Place, find_places
from tril.texts import draw_texts
from tril.views import Stream, attribute_logits
from tril.weights import attention_weights

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


def found_by(model: nn.Module, corpus=CORPUS, without=()):
    return find_places(model, corpus, T, HEADS, WORDS.__getitem__, without)


@pytest.mark.parametrize("by_kernel, has_sink", [(True, False), (False, False), (True, True), (False, True)])
def test_a_planted_head_is_recognised_by_its_places(by_kernel: bool, has_sink: bool) -> None:
    found = found_by(Planted(by_kernel, has_sink))
    part = 0.5 if has_sink else 1.0
    for (_, head), places in found.items():
        assert len(places.groups[0][1]) == 12
        assert len({(place.labels[place.query], place.labels[place.key]) for place in places.groups[0][1]}) == 12
        for weight, start, query, key, _, labels in places.groups[0][1]:
            ids = CORPUS[start : start + T]
            assert list(labels) == [WORDS[token] for token in ids] and query >= T // 8
            assert weight == pytest.approx(planted(torch.tensor(ids))[head, query, key].item() * part, abs=1e-5)

    brackets = found[BRACKETS]
    for place in brackets.groups[0][1]:
        before = "".join(place.labels[: place.query])
        assert place.key == before.rindex("(") > 0 and place.labels[place.query] != "("
    assert all(place.key == 0 for place in found[FIRST].groups[0][1])
    assert all(place.key == place.query for place in found[SELF].groups[0][1])


def test_places_are_those_of_all_texts_and_some_are_of_all_sizes() -> None:
    model = Planted()
    found = found_by(model)
    texts = model.seen[: len(CORPUS) // T]
    assert texts[0] == CORPUS[:T] and texts[-1] == CORPUS[-T:] and found[EVEN].note == "986 of 997 tokens"

    # The even head looks at token 1 as much as at any other; its place in the text decides between equal weights.
    first = [(WORDS[ids[T // 8]], WORDS[ids[1]]) for ids in texts]
    strongest = [(place.labels[place.query], place.labels[place.key]) for place in found[EVEN].groups[0][1]]
    assert strongest == [*dict.fromkeys(first)][:12]

    weights = torch.cat([planted(torch.tensor(ids))[0].tril(-1)[T // 8 :, 1:].amax(-1) for ids in texts])
    title, deciles = found[BRACKETS].groups[-1]
    assert title.startswith("typical: the weights that 10 %") and len(deciles) == 9
    for tenth, place in enumerate(deciles, start=1):
        assert (
            (weights > place.amount + 1e-5).sum() <= tenth * len(weights) / 10 <= (weights > place.amount - 1e-5).sum()
        )
    assert found[BRACKETS].groups[0][1][0].amount > 3 * deciles[4].amount


def test_what_is_missed_is_shown_where_the_loss_rises_most(monkeypatch) -> None:
    """The rises are made up: of the pieces, in their order, and of one of the heads."""
    model = Planted()
    starts, pieces = draw_texts(CORPUS, T, 8)
    rises = torch.zeros(8, T - 1)
    rises[5, 17], rises[2, 3], rises[0, 11] = 6.25, 0.5, -9
    monkeypatch.setattr(tril.places, "rises", lambda *_: {BRACKETS: rises})
    found = found_by(model, without=[BRACKETS])
    assert len(found[EVEN].groups) == 2
    title, missed = found[BRACKETS].groups[1]
    assert title == MISSED.format(rises.mean(), 8 * (T - 1))
    assert [(place.amount, place.start, place.query) for place in missed] == [
        (6.25, starts[5], 17),
        (0.5, starts[2], 3),
    ]
    for place, text in zip(missed, (pieces[5], pieces[2]), strict=True):
        assert place.labels == [WORDS[token] for token in text]
        weights = planted(text)[0, place.query]
        assert place.key == weights[1 : place.query].argmax() + 1
    assert repr(found[BRACKETS]).count("\n\n") == 3


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_the_mean_of_what_is_missed_is_the_column_loss_and_a_zero_head_is_not_missed(mode: str) -> None:
    model = make_gpt(family="llama", n_embd=18, n_kv_head=3).eval()
    model.blocks[0].attention.v_proj.weight.data[:6] = 0  # of head 0.0
    corpus = torch.randint(17, (11 * 13,)).tolist()
    heads = [(layer, head) for layer in range(2) for head in range(3)]
    _, pieces = draw_texts(corpus, 11, 8)
    means = ablate(model, pieces, heads, mode).mean(0)
    for head, places in find_places(model, corpus, 11, heads, str, heads, mode).items():
        title, missed = places.groups[1]
        assert f" {means[head]:+.4f} " in title and (means[head] == 0) == (head == (0, 0)) == (missed == [])


@torch.no_grad()
def test_what_a_head_writes_is_its_direct_logits_at_a_weight_of_one() -> None:
    model = make_gpt(family="llama", n_embd=18, n_kv_head=3, context_length=7).eval()
    corpus = torch.randint(17, (7 * 11,)).tolist()
    for head, places in find_places(model, corpus, 7, [(0, 1), (1, 2)], str).items():
        for place in places.groups[0][1]:
            att, _ = look(model, torch.tensor([[*map(int, place.labels)]]))
            alone = torch.zeros(7, 7)
            alone[place.query, place.key] = 1
            att.pattern = lambda *_, alone=alone: alone[None]
            stream = look(model, torch.tensor([[*map(int, place.labels)]]), positions=slice(None), kind=Stream)
            found = attribute_logits(att, *stream, [head])
            assert [*place.likeliest] == [*map(str, found[head][0][place.query, :3].tolist())]


def test_what_cannot_be_read_in_a_minute_is_drawn_evenly(monkeypatch) -> None:
    model = Planted()
    monkeypatch.setattr(tril.places, "MINUTE", 3.5 * T * (5 + 7))
    monkeypatch.setattr(tril.places, "LEAST_SIZE", 5)
    model.weight = nn.Parameter(torch.zeros(7))
    found = found_by(model)
    assert found[EVEN].note == "87 of 997 tokens"
    starts = [0, (997 - T) // 2, 997 - T]
    assert model.seen[:3] == [CORPUS[start : start + T] for start in starts]
    assert {place.start for place in found[FIRST].groups[0][1]} <= {*starts}


def test_a_text_of_few_words_has_few_places() -> None:
    assert found_by(Planted(), corpus=np.array([2, 3]))[SELF].groups[0][1]
    found = found_by(Planted(), corpus=np.array([0, 1] * 50))
    assert [(place.key - place.query, place.labels[place.key]) for place in found[SELF].groups[0][1]] == [
        (0, "b"),
        (0, "a"),
    ]


def test_a_line_shows_both_tokens_in_what_is_around_them_and_what_is_written() -> None:
    place = Place(0.987, 900, 17, 3, ["e", "␣a", "x" * 9], [*"abcdefghijklmnopqrstuvwxyz"])
    assert repr(place) == "0.99      917 hijklmnopq«r»stuvwxyz              abc«d»efghijklmnopqr e ␣a xxxxx"
    assert len(repr(place)) == 80 >= len(STRONGEST)


def test_places_are_proved(monkeypatch) -> None:
    monkeypatch.setattr("tril.weights.attention_weights", lambda *given: 0.9 * attention_weights(*given))
    with pytest.raises(NotTheKernels):
        found_by(Planted())

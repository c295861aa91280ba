"""Two models side by side: a model beside itself, beside itself with its heads in another order, and beside another."""

import copy
import json
import re
import zlib
from base64 import b64decode
from pathlib import Path

import pytest
import torch
from torch import nn

import tril
from tests.conftest import make_gpt
from tril.comparison import distances

V, T = 17, 7
IDX = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0)).tolist()
NAMES = [f"t{token}" for token in IDX]


def sharp() -> nn.Module:
    """A model whose heads look at different tokens."""
    model = make_gpt(family="llama", n_embd=18, n_head=3)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight.mul_(40)
    return model.eval()


def permuted(model: nn.Module, order: list[int]) -> nn.Module:
    """The same model with the heads of each layer in this order."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for block in other.blocks:
            attention = block.attention
            for part in (attention.q_proj, attention.k_proj, attention.v_proj):
                part.weight.copy_(part.weight.unflatten(0, (3, -1))[order].flatten(0, 1))
            o = attention.o_proj.weight
            o.copy_(o.unflatten(1, (3, -1))[:, order].flatten(1))
    return other


def test_a_model_beside_itself_is_the_same() -> None:
    model = sharp()
    a, b = (tril.inspect_heads(each, IDX, NAMES) for each in (model, copy.deepcopy(model)))
    both = tril.compare(a, b)
    assert [(match.head, match.distance) for match in both.matches] == [(match.other, 0.0) for match in both.matches]
    assert len(both.matches) == 6 and all(match.next_best > 0.01 for match in both.matches)
    assert all(not places for _, places in both.known.groups) and "+0.0000" in both.known.note


def test_heads_in_another_order_are_matched_in_that_order() -> None:
    model, order = sharp(), [2, 0, 1]
    a, b = (tril.inspect_heads(each, IDX, NAMES) for each in (model, permuted(model, order)))
    both = tril.compare(a, b)
    assert all(order[match.other[1]] == match.head[1] for match in both.matches), both.matches
    assert max(match.distance for match in both.matches) < 1e-5
    apart = distances(a, b)
    weights = a.pattern(0, 0), b.pattern(1, 1)
    expected = (weights[0] - weights[1]).abs().sum(-1)[1:].mean() / 2
    assert apart[0, 4] == pytest.approx(expected.item(), abs=1e-5)
    assert ((0 <= apart) & (apart <= 1)).all()


def test_another_model_knows_some_tokens_better_and_both_are_on_a_page(tmp_path: Path) -> None:
    a, b = (tril.inspect_heads(each, IDX, NAMES) for each in (sharp(), make_gpt(n_embd=15, n_head=3)))
    both = tril.compare(a, b)
    printed = repr(both)
    assert max(map(len, printed.splitlines())) <= 80 and "known better by" in printed
    amounts = [place.amount for _, places in both.known.groups for place in places]
    assert len(amounts) == len({*amounts}) and min(amounts) > 0
    both.save(tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    (places,) = re.findall(r'id="1/places">([^<]*)<', page)
    texts, shown = json.loads(zlib.decompress(b64decode(places)))
    assert len(shown) == len(both.matches) and texts
    with pytest.raises(tril.UserError, match="the name of an output must end in one of .html"):
        both.save(tmp_path / "both.png")


def test_models_that_read_other_tokens_are_refused() -> None:
    a = tril.inspect_heads(sharp(), IDX, NAMES)
    others = (IDX, [name.upper() for name in NAMES]), (IDX[::-1], NAMES[::-1])
    for ids, names in others:
        with pytest.raises(tril.UserError, match="models are compared on the same tokens of the same tokenizer"):
            tril.compare(a, tril.inspect_heads(sharp(), ids, names))

"""Two models beside each other: one that is the same, one whose heads have changed places, and others."""

import json
import re
import zlib
from base64 import b64decode
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from errors import UserError
from model import GPT
from tests.conftest import make_gpt
from tests.tril.test_page import content
from tril import Inspection, compare, inspect_heads
from tril.kinds import name_of

T, V, L, H, D = 11, 17, 2, 3, 6
HEADS = [(layer, head) for layer in range(L) for head in range(H)]
IDX = torch.arange(T).mul(5).remainder(V)
ORDER = {0: [2, 0, 1], 1: [1, 2, 0]}  # layer -> the head of the first model that each head is


def llama(**changes: object) -> GPT:
    """A model whose heads look at something each: queries and keys are large."""
    model = make_gpt(**{"family": "llama", "n_embd": H * D, "n_kv_head": H, **changes}).eval()
    for block in model.blocks:
        block.attention.q_proj.weight.data *= 40
    return model


def reordered(model: GPT) -> GPT:
    """The same function of ids, whose heads have other numbers."""
    other = llama()
    other.load_state_dict(model.state_dict())
    for layer, order in ORDER.items():
        rows = torch.cat([torch.arange(D) + D * head for head in order])
        attention = other.blocks[layer].attention
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.data = projection.weight[rows]
        attention.o_proj.weight.data = attention.o_proj.weight[:, rows]
    return other


def inspected(model: GPT, name: str, **options: object) -> Inspection:
    found = inspect_heads(model, IDX, **options)
    found.name = name
    return found


def test_a_model_beside_itself_differs_in_nothing() -> None:
    model = llama()
    both = compare(inspected(model, "a"), inspected(model, "b"))
    assert [(match.head, match.other, match.distance) for match in both.matches] == [(head, head, 0) for head in HEADS]
    assert all(match.next_best > 0.05 for match in both.matches)
    loss = f"{both.a.loss:.4f}"
    assert both.known.note == f"loss {loss} of a, {loss} of b: +0.0000"
    assert [places for _, places in both.known.groups] == [[], []]


def test_heads_in_another_order_are_found_in_that_order() -> None:
    model = llama()
    both = compare(inspected(model, "a"), inspected(reordered(model), "b"))
    expected = {(layer, order[head]): (layer, head) for layer, order in ORDER.items() for head in range(H)}
    assert {match.head: match.other for match in both.matches} == expected
    assert max(match.distance for match in both.matches) < 1e-5 and both.b.heads == [expected[head] for head in HEADS]
    alone = compare(inspected(model, "a", heads="1.0"), inspected(reordered(model), "b"))
    assert [(match.head, match.other) for match in alone.matches] == [((1, 0), expected[1, 0])]


def test_distances_and_losses_are_those_of_the_models() -> None:
    """Of models of other sizes. Each distance is half of what two rows differ by, on average."""
    models = llama(), llama(n_layer=1, n_embd=20, n_head=5, n_kv_head=5)
    a, b = map(inspected, models, "ab")
    both = compare(a, b)
    unmatched = name_of(*{*HEADS} - {match.head for match in both.matches})
    (match,) = compare(inspected(models[0], "a", heads=unmatched), b).matches  # alone it has the closest of all
    assert name_of(match.head) == unmatched and match.distance <= match.next_best
    assert len({match.other for match in both.matches}) == len(both.matches) == 5
    for head, other, distance, next_best in both.matches:
        apart = {
            beside: (a.pattern(*head) - b.pattern(*beside)).abs().sum(1)[1:].mean().item() / 2
            for beside in [(0, number) for number in range(5)]
        }
        assert distance == pytest.approx(apart.pop(other), abs=1e-6)
        assert next_best == pytest.approx(min(apart.values()), abs=1e-6)
    pairs = [(match.head, match.other) for match in both.matches]
    for head, other in ((head, other) for head, _ in pairs for _, other in pairs):  # no two prefer each other
        apart = (a.pattern(*head) - b.pattern(*other)).abs().sum(1)[1:].mean().item() / 2
        assert (
            apart >= min(match.distance for match in both.matches if head == match.head or other == match.other) - 1e-6
        )

    losses = [F.cross_entropy(model(IDX[None])[0, :-1], IDX[1:], reduction="none") for model in models]
    rise = (losses[1] - losses[0]).detach()
    for (title, places), amounts in zip(both.known.groups, (rise, -rise), strict=True):
        assert title.startswith("known better by ") and places
        for place in places:
            assert place.amount == pytest.approx(amounts[place.query].item(), abs=1e-5) and place.key == place.query + 1
    assert f": {rise.mean():+.4f}" in repr(both)


def test_models_of_one_name_and_of_two_precisions_are_told_apart() -> None:
    model = llama()
    other = llama().double()
    both = compare(inspect_heads(model, IDX), inspect_heads(other, IDX))
    assert [title for title, _ in both.known.groups] == [
        f"known better by GPT {side}: nats, number, token, next" for side in "ab"
    ]
    assert [bool(places) for _, places in both.known.groups] == [True, True]


def test_other_tokens_are_refused_in_a_sentence(tmp_path: Path) -> None:
    model = llama()
    for other in (inspect_heads(model, IDX[1:]), inspect_heads(model, IDX, [*"abcdefghijk"])):
        with pytest.raises(UserError, match="not read the same tokens: compare models of one tokenizer, on one text"):
            compare(inspect_heads(model, IDX), other)
    with pytest.raises(UserError, match="must end in one of .html"):
        compare(inspected(model, "a"), inspected(model, "b")).save(tmp_path / "a.png")


@pytest.mark.long
def test_the_page_has_each_head_beside_its_match(tmp_path: Path, browser) -> None:
    both = compare(inspected(llama(), "a"), inspected(llama(), "b"))
    both.save(tmp_path / "both.html")
    text = (tmp_path / "both.html").read_text()
    pairs = content(text)["checkpoints"][1]["pairs"]
    assert [pair[:2] for pair in pairs] == [[name_of(match.head), name_of(match.other)] for match in both.matches]
    other = dict(pair[:2] for pair in pairs)["1.0"]
    for side, (found, name) in enumerate(((both.a, "1.0"), (both.b, other))):  # the match has the name of the head
        packed = zlib.decompress(b64decode(re.search(rf'id="{side}/1.0">([^<]*)<', text)[1]))
        weights = found.pattern(*map(int, name.split(".")))[*torch.tril_indices(T, T)]
        assert (torch.frombuffer(bytearray(packed), dtype=torch.uint16) / 65535 - weights).abs().max() < 1e-4
    (places,) = re.findall(r'id="1/places">([^<]*)<', text)
    assert json.loads(zlib.decompress(b64decode(places)))[1][0][0] == both.known.note

    page = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "both.html").as_uri() + "#1.0/7")
    page.locator("#read", has_text="of a,").wait_for()
    assert page.locator("h1").inner_text() == "Heads of a and b"
    assert page.locator("#head").inner_text() == "Head 1.0"  # of the first model
    assert page.locator("header label").inner_text().split() == ["a", "b"]
    assert "by layer · left a, right b" in page.locator("#strip-note").inner_text()
    distance = pairs[3][2]
    button = page.locator("#heads button").nth(3)
    assert button.inner_text() == f"1.0 | {other} {distance}" and button.locator("canvas").count() == 2
    pictures = "(button) => [...button.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    first, second = button.evaluate(pictures)
    assert first != second
    for side, name in enumerate(("1.0", other)):
        button.locator("canvas").nth(side).click()
        page.locator("#head", has_text=f"Head {name}").wait_for()
        assert page.locator("#slider").input_value() == str(side)
        page.wait_for_function("(end) => location.hash.endsWith(end)", arg=("/7", "/b")[side])
        assert (
            page.locator("#upstream")
            .inner_text()
            .startswith(f"match {('1.0', other)[1 - side]} differs by {distance}, next best")
        )
    assert button.evaluate(pictures) == [first, second]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280 and not complaints
    page.close()

"""The page of attention heads: the file, read without a browser, and what a browser shows of it."""

import base64
import html
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from inspection import Inspection
from inspection.heads import HeadScores
from inspection.inputs import Inputs
from inspection.kinds import KINDS, by_kind, kind_of, name_of, tag
from inspection.page import render

L, H, T = 2, 3, 11
HEADS = [(layer, head) for layer in range(L) for head in range(H)]
HOSTILE = ["</script><img onerror=alert(1) src=x>", "<!--<script>", "\u2028", "\u202e\u05d0\u05d1", "'", '"', "\\"]
HOSTILE += ["&lt;", "${T}", "{{ policy }}", "↵"]


def pattern(name: str, step: int = 400) -> Tensor:
    """Return (T, T): rows of random weights that sum to 1."""
    generator = torch.Generator().manual_seed(1000 * step + sum(ord(letter) for letter in name))
    scores = 3 * torch.randn(T, T, generator=generator)
    return scores.masked_fill(~torch.ones(T, T).tril().bool(), float("-inf")).softmax(-1)


def inspected(step: int = 400, name: str = "", **changes: object) -> Inspection:
    samples = {name: pattern(name, step)[None, -L:, :H] for name in ("entropy", "induction", "ablation")}
    samples["ablation"][:, 0, 1] = float("nan")
    samples["previous"] = 1 - samples["induction"]
    samples["token"] = samples["entropy"] / 2
    influence = pattern("influence", step)
    influence[[3, 9]] = float("nan")
    inputs = Inputs(
        heads=HEADS,
        measured=None,
        shown=None,
        labels=[f"␣w{i}" for i in range(T)],
        label=lambda token: f"<b>{token}",
        note="a text",
        probe=None,
        pool="",
    )
    return Inspection(
        name=name or f"step-{step:08d}",
        verified="weights match the kernel",
        inputs=replace(inputs, **changes),
        scores=HeadScores(samples, torch.tensor([1000 / step]), 0.0, torch.arange(L * H).view(L, H)),
        att=SimpleNamespace(pattern=lambda layer, head: pattern(f"{layer}.{head}", step)[None]),
        influence=influence,
        predictions=[(f"next{i}", (i + 1) / (T + 2)) for i in range(T)],
    )


def write(path: Path, *inspections: Inspection) -> None:
    path.write_text(render(inspections or [inspected()]), encoding="utf-8")


def stored(path: Path, name: str) -> np.ndarray:
    """Return the triangle of this name, decoded as inspection/page.py says: (T, T), 0 above the diagonal."""
    packed = re.search(rf'id="{re.escape(name)}">([^<]*)</script>', path.read_text())[1]
    square = np.zeros((T, T))
    square[np.tril_indices(T)] = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype="<u2") / 65535
    return square


def data_of(path: Path) -> dict:
    return json.loads(re.search(r'id="page">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def labels_of(path: Path) -> list[str]:
    strip = path.read_text().split('id="attention"')[1].split("</div>")[0]
    return [html.unescape(label) for label in re.findall("<bdi>(.*?)</bdi>", strip)]


def test_the_file_loads_nothing_and_tokens_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write(path, inspected(name=HOSTILE[0], labels=HOSTILE, note=HOSTILE[0]))
    text = path.read_text()
    policy = "content=\"default-src 'none'; script-src 'sha256-[^' ]+'; style-src 'sha256-[^' ]+'\""
    assert re.search(policy, html.unescape(text))
    assert labels_of(path) == HOSTILE and data_of(path)["checkpoints"][0]["summary"].startswith(HOSTILE[0])
    assert "<img" not in text and text.count("<script") == text.count("</script>") == 2 + len(HEADS) + 1


def test_the_scores_of_a_head_are_in_words(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write(path, inspected(400), inspected(800, heads=HEADS[1:]))
    entropy, induction = (inspected(800).scores.mean[name][0, 1] for name in ("entropy", "induction"))
    kind, _ = kind_of(inspected(800).scores.mean, (0, 1))
    scores = f"looks at {KINDS[kind]} · entropy {entropy:.2f} · prev {1 - induction:.2f} · "
    scores += f"token <b>1 {entropy / 2:.2f} · ind {induction:.2f} · loss –"
    assert data_of(path)["checkpoints"][1]["scores"][0] == scores


# ---- The page in a browser.


@pytest.fixture
def show(browser, tmp_path: Path) -> Iterator[Callable]:
    """Return show(inspections...), which opens the page in a browser. At the end: no complaint and no other request."""
    path, complaints, requests, contexts = tmp_path / "page.html", [], [], []

    def open_page(*inspections: Inspection, width: int = 1300, scheme: str = "light"):
        write(path, *inspections)
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))  # also reports a violated policy
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.locator("#readout:not(:empty)").wait_for()
        return page

    yield open_page
    assert complaints == []
    assert set(requests) == {path.as_uri()}
    for context in contexts:
        context.close()


def cell(page, row: int, key: int) -> dict[str, float]:
    """Return the place of a weight in the large picture."""
    size = page.locator("#picture").bounding_box()["width"]
    return {"x": (key + 0.5) * size / T, "y": (row + 0.5) * size / T}


def assert_read(page, row: int, key: int, head: str = "0.0", step: int = 400) -> None:
    """Assert that the page shows this weight of this head, and its influence."""
    found = re.fullmatch(
        rf"query {row} ␣w{row}, key {key} ␣w{key}: weight ([\d.]+), influence ([\d.]+)",
        page.locator("#readout").inner_text(),
    )
    expected = pattern(head, step)[row, key].item(), inspected(step).influence[row, key].item()
    assert [float(number) for number in found.groups()] == pytest.approx(expected, abs=1.3e-5)


@pytest.mark.long
def test_heads_are_chosen_and_share_one_scale(show: Callable) -> None:
    page = show(inspected(heads=HEADS[1:]))
    mean = inspected().scores.mean
    captions = [f"{name_of(head)} {tag(*kind_of(mean, head))}".strip() for head in HEADS[1:]]
    assert page.locator("#heads button").all_inner_texts() == captions
    page.locator("#heads button").last.click()
    assert page.locator("#heads button[aria-pressed=true] b").inner_text() == "1.2"
    assert page.locator("#head").inner_text() == "Head 1.2" and not page.locator("#slider").is_visible()
    page.locator("#picture").hover(position=cell(page, 7, 2))
    assert_read(page, 7, 2, "1.2")
    pixel = """([n, x, y]) => {
        const copy = new OffscreenCanvas(1, 1).getContext("2d");
        copy.drawImage(document.querySelectorAll("canvas")[n], -x, -y);
        return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    assert page.evaluate(pixel, [0, 1, 0])[3] == 0 and page.evaluate(pixel, [0, T - 1, T - 2])[3] == 0  # the future
    assert {tuple(page.evaluate(pixel, [n, 0, 0])) for n in range(L * H)} == {(254, 236, 110, 255)}  # weights of 1


@pytest.mark.long
def test_the_pointer_reads_weights_and_chooses_what_the_strips_show(show: Callable) -> None:
    page = show()
    picture, query = page.locator("#picture"), page.locator("#attention .query")
    for row, key in ((7, 2), (5, 5), (10, 0)):
        picture.hover(position=cell(page, row, key))
        assert_read(page, row, key)
    picture.hover(position=cell(page, 2, 7))  # the future
    best = name_of(next(iter(by_kind(inspected().scores.mean, HEADS).values()))[0][0])
    assert pattern(best)[5:].amax(-1).argmax() == 9 - 5  # its largest weight in the later half, without influence
    _, opened = max((pattern(best)[query].max(), query) for query in (5, 6, 7, 8, 10))
    assert page.locator("#readout").inner_text() == f"query {opened} ␣w{opened}"
    assert query.inner_text() == f"␣w{opened}"
    picture.click(position=cell(page, 6, 4))
    assert query.inner_text() == "␣w6"
    page.locator("#attention bdi").nth(5).click()
    page.locator("#influence bdi").nth(4).hover()
    assert_read(page, 5, 4)
    opacity = "(part) => Number(getComputedStyle(part).backgroundColor.match(/[\\d.]+/g)[3] ?? 1)"
    for strip, row in (("#attention", pattern("0.0")[5]), ("#influence", inspected().influence[5])):
        parts = page.locator(f"{strip} bdi").all()
        shades = [part.evaluate(opacity) for part in parts[:6]]
        assert shades == pytest.approx((row[:6] / row.max()).tolist(), abs=5e-3)  # a browser keeps 8 bits
        assert all(part.get_attribute("style") in (None, "") for part in parts[6:])
    assert page.locator("#next").inner_text() == "next5" and page.locator("#chance").inner_text() == "46.2%"
    page.locator("#attention bdi").nth(3).click()
    assert page.locator("#influence-shade").inner_text() == "was not computed for this token"
    assert page.locator("#influence bdi[style*=color]").count() == 0


@pytest.mark.long
def test_slider_travels_through_checkpoints(show: Callable) -> None:
    page = show(inspected(400), inspected(800), inspected(1200))
    head = name_of(next(iter(by_kind(inspected(1200).scores.mean, HEADS).values()))[0][0])
    assert page.locator("#head").inner_text() == f"Head {head}" != "Head 0.0"
    for number, step in ((0, 400), (1, 800), (2, 1200)):
        page.locator("#slider").fill(str(number))
        page.locator("#checkpoint", has_text=f"step-{step:08d} · loss {1000 / step:.4f}").wait_for()
        page.locator("#picture").hover(position=cell(page, 7, 2))
        assert_read(page, 7, 2, head, step)


@pytest.mark.long
def test_hostile_tokens_are_text_on_any_screen(show: Callable) -> None:
    colours = {}
    for width, scheme in ((360, "light"), (1600, "dark")):
        hostile = {"name": HOSTILE[0], "labels": HOSTILE, "note": HOSTILE[0]}
        page = show(inspected(400, **hostile), inspected(800, **hostile), width=width, scheme=scheme)
        assert page.locator("h1").inner_text() == f"Heads of {HOSTILE[0]}"
        for place in ("#attention", "#queries"):
            assert [part.text_content() for part in page.locator(f"{place} bdi").all()] == HOSTILE
        assert page.locator("img").count() == 0 and page.locator("script").count() == 2 + 2 * (len(HEADS) + 1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]

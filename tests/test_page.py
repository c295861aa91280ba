"""The page of attention heads: the file, read without a browser, and what a browser shows of it."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from inspection import HeadScores, Inspection
from inspection.page import write_page
from inspection.terminal import kind
from model import ModelError

L, H, T = 2, 3, 11
HEADS = [(layer, head) for layer in range(L) for head in range(H)]
HOSTILE = [
    "</script><img onerror=alert(1) src=x>",
    "<!--<script>",
    "\u2028",
    "\u202e\u05d0\u05d1",
    "'",
    '"',
    "\\",
    "https://a.example/ HTTP://a.example/",
    "href=import(`${T}`)",
    "{{patterns}}",
    "↵",
]
FORBIDDEN = ["http:", "https:", "src=", "href=", "import("]


def pattern(name: str, step: int = 400, length: int = T) -> Tensor:
    """(T, T): rows of random weights that sum to 1."""
    generator = torch.Generator().manual_seed(1000 * step + sum(ord(letter) for letter in name))
    scores = 3 * torch.randn(length, length, generator=generator)
    return scores.masked_fill(~torch.ones(length, length).tril().bool(), float("-inf")).softmax(-1)


class Patterns:
    """Stands for Captured: patterns by layer and head."""

    def __init__(self, step: int):
        self.step = step

    def pattern(self, layer: int, head: int) -> Tensor:
        return pattern(f"{layer}.{head}", self.step)[None]


def inspected(step: int = 400) -> Inspection:
    samples = {
        name: pattern(name, step)[None, -L:, :H].repeat(2, 1, 1) for name in ("entropy", "induction", "ablation")
    }
    samples["entropy"][1] += 0.1
    samples["ablation"][:, 0, 1] = float("nan")
    influence = pattern("influence", step)
    influence[3] = float("nan")
    return Inspection(
        name=f"step-{step:08d}",
        step=step,
        verified="weights match the kernel",
        config={},
        scores=HeadScores(samples, torch.tensor([1000 / step]), 0.0),
        att=Patterns(step),
        influence=influence,
        predictions=[(f"next{i}", (i + 1) / (T + 2)) for i in range(T)],
    )


def write(path: Path, *inspections: Inspection, **options: object) -> None:
    options = {"note": "a text", "heads": HEADS, "labels": [f"␣w{i}" for i in range(T)]} | options
    write_page(path, inspections=inspections or [inspected()], **options)


def stored(path: Path, name: str) -> np.ndarray:
    """The triangle of this name, decoded as inspection/page.py says: (T, T), 0 above the diagonal."""
    packed = re.search(rf'id="{re.escape(name)}">([^<]*)</script>', path.read_text())[1]
    plain = np.frombuffer(zlib.decompress(base64.b64decode(packed + "=" * (-len(packed) % 4))), dtype=np.uint8)
    low, high = plain.astype(np.int64).reshape(2, -1)
    square = np.zeros((T, T))
    square[np.tril_indices(T)] = (low + 256 * high) / 65535
    return square


def data_of(path: Path) -> dict:
    return json.loads(re.search(r'id="page">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_file_names_no_address_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write(path, replace(inspected(), name=HOSTILE[0]), labels=HOSTILE, note=HOSTILE[7])
    text = path.read_text(encoding="ascii", errors="ignore").lower()
    assert not [word for word in FORBIDDEN if word in text]
    assert "default-src 'none'" in text and "unsafe" not in text
    assert data_of(path)["labels"] == HOSTILE and data_of(path)["title"] == f"Heads of {HOSTILE[0]}"
    assert text.count("</script>") == 2 + len(HEADS) + 1  # data, code, heads, influence
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_stored_weights_are_the_patterns(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write(path, inspected(400), inspected(800), heads=HEADS[1:])
    for number, step in enumerate((400, 800)):
        for layer, head in HEADS[1:]:
            error = np.abs(stored(path, f"{number}/{layer}.{head}") - pattern(f"{layer}.{head}", step).numpy()).max()
            assert error <= 1 / 65535
        influence = np.nan_to_num(inspected(step).influence.numpy())
        assert np.abs(stored(path, f"{number}/influence") - influence).max() <= 1 / 65535
        checkpoint = data_of(path)["checkpoints"][number]
        assert checkpoint["explained"] == [i for i in range(T) if i != 3]
        assert checkpoint["scores"]["ablation"][0][1] is None  # not measured
        assert np.allclose(checkpoint["scores"]["induction"], inspected(step).scores.mean["induction"], rtol=1e-5)
        assert np.allclose(checkpoint["errors"]["entropy"], 0.05)


def test_a_page_that_is_too_large_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write(path)
    size = path.stat().st_size
    write(path, limit=size)
    path.write_text("old")
    with pytest.raises(
        ModelError, match=r"larger than 0\.0\d+ MiB: choose fewer heads .*fewer checkpoints.*shorter text"
    ):
        write(path, limit=size - 1)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["page.html"]


# ---- The page in a browser.


@pytest.fixture
def show(browser, tmp_path: Path) -> Iterator[Callable]:
    """show(inspections...): the page in a browser. At the end it has complained of nothing and asked for nothing."""
    path, complaints, requests, contexts = tmp_path / "page.html", [], [], []

    def open_page(*inspections: Inspection, width: int = 1300, scheme: str = "light", **options: object):
        write(path, *inspections, **options)
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))  # also reports a violated policy
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.locator("#attention-name:not(:empty)").wait_for()
        settle(page)
        return page

    yield open_page
    assert complaints == []
    assert set(requests) == {path.as_uri()}
    for context in contexts:
        context.close()


def settle(page) -> None:
    """Wait until everything that was decoded is drawn."""
    page.evaluate("(async () => { for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); })()")


def cell(page, row: int, key: int) -> dict[str, float]:
    """The place of a weight in the large picture."""
    return page.evaluate(
        "([row, key]) => ({ x: box.left + (key + 0.5) * box.cell, y: box.top + (row + 0.5) * box.cell })", [row, key]
    )


def readout(page) -> str:
    settle(page)
    return page.locator("#readout").inner_text()


def wait_for_head(page, head: str) -> None:
    page.locator("#attention-name", has_text=f"head {head} ").wait_for()
    settle(page)


@pytest.mark.long
def test_heads_are_chosen_and_share_one_scale(show: Callable) -> None:
    page = show(heads=HEADS[1:])
    assert page.locator("#grid button").count() == L * H - 1 and page.locator("#rows tr").count() == L * H
    for layer, head in HEADS[1:]:
        button = page.locator(f"#grid button[aria-label^='head {layer}.{head}']")
        assert button.locator("span").inner_text() == kind(inspected().scores.mean, (layer, head))
    button.click()
    wait_for_head(page, "1.2")
    assert page.locator("#grid button[aria-pressed=true] strong").inner_text() == "1.2"
    assert page.locator("#rows tr[aria-current] td").first.inner_text() == "1.2"
    assert not page.locator("#rows tr[data-head='0.0'] button").count()  # it has no picture
    assert not page.locator("#time").is_visible()  # one checkpoint has no timeline
    pixel = """([n, x, y]) => {
        const copy = new OffscreenCanvas(1, 1).getContext("2d");
        copy.drawImage(document.querySelectorAll("#grid canvas")[n], -x, -y);
        return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    assert page.evaluate(pixel, [0, 1, 0])[3] == 0 and page.evaluate(pixel, [0, T - 1, T - 2])[3] == 0  # the future
    assert {tuple(page.evaluate(pixel, [n, 0, 0])) for n in range(L * H - 1)} == {(254, 236, 110, 255)}  # weights of 1


@pytest.mark.long
def test_pointing_names_a_weight_and_clicking_chooses_a_row(show: Callable) -> None:
    page = show()
    for row, key in ((7, 2), (5, 5), (10, 0)):
        page.locator("#matrix").hover(position=cell(page, row, key))
        found = re.fullmatch(rf"query {row} ␣w{row}, key {key} ␣w{key}: weight (0\.\d+|1\.0+)", readout(page))
        assert float(found[1]) == pytest.approx(pattern("0.0")[row, key].item(), abs=1.3e-5)
    page.locator("#matrix").hover(position=cell(page, 2, 7))  # the future
    assert "weight" not in readout(page)
    page.locator("#matrix").click(position=cell(page, 6, 4))
    settle(page)
    assert page.locator("#attention .query").inner_text() == "␣w6"
    page.locator("#attention bdi").nth(8).click()
    page.locator("#attention bdi").nth(3).hover()
    assert re.match(r"query 8 ␣w8, key 3 ␣w3: weight", readout(page))
    assert page.locator("#attention-name").inner_text().startswith("Attention of head 0.0 from token 8 ␣w8")


@pytest.mark.long
def test_keys_choose_row_key_head_and_checkpoint(show: Callable) -> None:
    page = show(inspected(400), inspected(800))
    page.locator("#matrix").press("ArrowUp")
    page.locator("#attention").press("ArrowUp")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.locator("#matrix").press(key)
    found = re.fullmatch(r"query 8 ␣w8, key 6 ␣w6: weight ([\d.]+)", readout(page))
    assert float(found[1]) == pytest.approx(pattern("0.0", 800)[8, 6].item(), abs=1.3e-5)
    for key, head in (("]", "0.1"), ("[", "0.0"), ("[", "1.2"), ("]", "0.0")):
        page.keyboard.press(key)
        wait_for_head(page, head)
    page.keyboard.press(",")
    assert page.locator("#checkpoint").inner_text().startswith("step-00000400")
    page.keyboard.press(".")
    assert page.locator("#checkpoint").inner_text().startswith("step-00000800")


@pytest.mark.long
def test_strips_show_attention_influence_and_prediction(show: Callable) -> None:
    page = show()
    opacity = "(part) => Number(getComputedStyle(part).backgroundColor.match(/[\\d.]+/g)[3] ?? 1)"
    page.locator("#attention bdi").nth(5).click()
    settle(page)
    for strip, row in (("#attention", pattern("0.0")[5]), ("#influence", inspected().influence[5])):
        parts = page.locator(f"{strip} bdi").all()
        shades = [part.evaluate(opacity) for part in parts[:6]]
        assert shades == pytest.approx((row[:6] / row.max()).tolist(), abs=5e-3)  # a browser keeps 8 bits
        assert all(part.get_attribute("style") in (None, "") for part in parts[6:])
        title = parts[2].get_attribute("title")
        assert title.startswith("token 2: ") and float(title.split()[-1]) == pytest.approx(row[2].item(), abs=1.3e-5)
    predicts = page.locator("#predicts").inner_text()
    assert predicts == "At token 5 the model predicts next5, 46 %; the text goes on with ␣w6"
    page.locator("#attention bdi").nth(3).click()
    settle(page)
    assert "not computed for this row" in page.locator("#influence-name").inner_text()
    assert page.locator("#influence bdi[style*=rgb]").count() == 0


@pytest.mark.long
def test_table_is_sorted_and_chooses(show: Callable) -> None:
    page = show()
    means = inspected().scores.mean
    for metric, column in (("induction", 2), ("ablation", 3)):
        measured = [head for head in HEADS if not means[metric][head].isnan()]
        for order in ("descending", "ascending"):
            page.locator("#columns button").nth(column).click()
            expected = sorted(measured, key=lambda head: means[metric][head].item(), reverse=order == "descending")
            expected += [head for head in HEADS if head not in measured]
            shown = [row.split("\t")[0] for row in page.locator("#rows tr").all_inner_texts()]
            assert shown == [f"{layer}.{head}" for layer, head in expected]
            assert page.locator(f"th[aria-sort={order}]").inner_text().startswith(metric)
    page.locator("#rows tr[data-head='1.0'] button").click()
    wait_for_head(page, "1.0")


@pytest.mark.long
def test_slider_travels_through_checkpoints(show: Callable) -> None:
    page = show(inspected(400), inspected(800), inspected(1200))
    for number, step in ((0, 400), (1, 800), (2, 1200)):
        page.locator("#slider").fill(str(number))
        page.evaluate("choose({})")
        settle(page)
        page.locator("#matrix").hover(position=cell(page, 7, 2))
        assert page.locator("#checkpoint").inner_text() == f"step-{step:08d} · step {step} · loss {1000 / step:.4f}"
        weight = float(re.search(r"weight ([\d.]+)", readout(page))[1])
        assert weight == pytest.approx(pattern("0.0", step)[7, 2].item(), abs=1.3e-5)
    assert re.match(r"induction of 0\.0: 0\..*; loss: 2\.5", page.locator("#chart").get_attribute("aria-label"))


@pytest.mark.long
def test_hostile_tokens_are_text(show: Callable) -> None:
    page = show(replace(inspected(), name=HOSTILE[0]), labels=HOSTILE, note=HOSTILE[0])
    assert page.locator("h1").inner_text() == f"Heads of {HOSTILE[0]}"
    assert [part.text_content() for part in page.locator("#attention bdi").all()] == HOSTILE
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2 + len(HEADS) + 1


@pytest.mark.long
def test_page_is_as_wide_as_the_screen_and_as_dark(show: Callable) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        for width in (360, 1600):
            checkpoints = [replace(inspected(step), influence=None, predictions=(), step=None) for step in (400, 800)]
            page = show(*checkpoints, width=width, scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]

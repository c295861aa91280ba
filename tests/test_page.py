"""The page of attention heads: what is in the file, read without a browser, and what a browser makes of it."""

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

from inspection.page import Snapshot, pool, write_page
from model import ModelError

L, H, T = 2, 3, 11
HEADS = [f"{layer}.{head}" for layer in range(L) for head in range(H)]
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


def pattern(head: str, step: int = 0, length: int = T) -> Tensor:
    """(T, T): rows of random weights that sum to 1."""
    generator = torch.Generator().manual_seed(1000 * step + sum(ord(letter) for letter in head))
    scores = 3 * torch.randn(length, length, generator=generator)
    return scores.masked_fill(~torch.ones(length, length).tril().bool(), float("-inf")).softmax(-1)


def snapshot(step: int = 400, length: int = T) -> Snapshot:
    scores = {name: pattern(name, step, 7)[-L:, :H] for name in ("entropy", "induction", "delta")}
    scores["delta"][0, 1] = float("nan")
    influence = pattern("influence", step, length)
    influence[3] = float("nan")
    return Snapshot(
        name=f"step-{step:08d}",
        step=step,
        loss=1000 / step,
        note="weights match the kernel",
        scores=scores,
        errors={"entropy": scores["entropy"] / 7},
        pattern=lambda head: pattern(head, step, length),
        rollout=pattern("rollout", step, length),
        influence=influence,
        predictions=[(f"next{i}", (i + 1) / (length + 2)) for i in range(length)],
    )


def write(path: Path, *snapshots: Snapshot, labels: list[str] | None = None, **options: object) -> list[str]:
    labels = labels or [f"␣w{i}" for i in range(T)]
    options = {"title": "Heads", "text_note": "a text", "heads": HEADS} | options
    return write_page(path, labels=labels, snapshots=snapshots or [snapshot()], **options)


def stored(path: Path, name: str, length: int) -> np.ndarray:
    """What the file holds under a name, decoded as its docstring says: (length, length), 0 above the diagonal."""
    packed = re.search(rf'id="{re.escape(name)}">([^<]*)</script>', path.read_text())[1]
    plain = np.frombuffer(zlib.decompress(base64.b64decode(packed + "=" * (-len(packed) % 4))), dtype=np.uint8)
    low, high = plain.astype(np.int64).reshape(2, -1)
    square = np.zeros((length, length))
    square[np.tril_indices(length)] = (low + 256 * high) / 65535
    return square


def header(path: Path) -> dict:
    return json.loads(re.search(r'id="page">(.*?)</script>', path.read_text(), re.DOTALL)[1])


# ---- The file.


def test_file_names_no_address_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write(path, labels=HOSTILE, title=HOSTILE[0], text_note=HOSTILE[7])
    text = path.read_text(encoding="ascii", errors="ignore").lower()
    assert not [word for word in FORBIDDEN if word in text]
    assert "default-src 'none'" in text and "unsafe" not in text
    assert header(path)["labels"] == HOSTILE and header(path)["title"] == HOSTILE[0]
    assert text.count("</script>") == 2 + len(HEADS) + 3  # data, code, heads, and small pictures, rollout, influence
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_stored_weights_are_the_patterns(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert write(path, snapshot(400), snapshot(800)) == []
    for number, step in enumerate((400, 800)):
        for name in [*HEADS, "rollout"]:
            error = np.abs(stored(path, f"{number}/{name}", T) - pattern(name, step).numpy()).max()
            assert error <= 1 / 65535
        influence = np.nan_to_num(snapshot(step).influence.numpy())
        assert np.abs(stored(path, f"{number}/influence", T) - influence).max() <= 1 / 65535
        assert header(path)["snapshots"][number]["influence"] == [i for i in range(T) if i != 3]


def test_snapshots_are_taken_one_at_a_time_and_each_head_once(tmp_path: Path) -> None:
    asked = []

    def one(step: int) -> Snapshot:
        asked.append(step)
        return replace(snapshot(step), pattern=lambda head: asked.append(head) or pattern(head, step))

    write_page(tmp_path / "page.html", "", "", ["a"] * T, HEADS, (one(step) for step in (400, 800)), limit=40_000)
    assert asked == [400, *HEADS, 800, *HEADS]


def test_scores_that_were_not_measured_are_null(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write(path, heads=HEADS[1:3])
    scores = header(path)["snapshots"][0]["scores"]
    assert scores["delta"][0][1] is None
    assert np.allclose(scores["induction"], snapshot().scores["induction"], rtol=1e-5)
    assert np.array(scores["entropy"]).shape == (L, H)  # of all heads, though two are pictured


@pytest.mark.parametrize("length, factor", [(11, 1), (11, 2), (11, 3), (13, 5), (7, 7), (7, 11)])
def test_pooling_keeps_the_maximum_of_each_block(length: int, factor: int) -> None:
    square = np.tril(np.random.default_rng(0).integers(1, 65535, (length, length)).astype(np.uint16))
    blocks = range(0, length, factor)
    expected = [square[i : i + factor, j : j + factor].max() for i in blocks for j in blocks if j <= i]
    assert pool(square[np.tri(length, dtype=bool)], length, factor).tolist() == expected


def test_page_beyond_the_limit_is_pooled_and_says_so(tmp_path: Path) -> None:
    path, length = tmp_path / "page.html", 67
    labels = [str(i) for i in range(length)]
    write(path, snapshot(length=length), labels=labels)
    full = path.stat().st_size
    for limit in (full - 1, full - 15_000, full - 30_000):
        notes = write(path, snapshot(length=length), labels=labels, limit=limit)
        factor = header(path)["factor"]
        assert path.stat().st_size <= limit and factor > 1
        assert len(notes) == 1 and f"{factor} x {factor}" in notes[0] and notes[0] in header(path)["notes"]
        rows = -(-length // factor)
        expected = torch.nn.functional.max_pool2d(pattern("1.2", 400, length)[None], factor, ceil_mode=True)[0].tril()
        assert np.abs(stored(path, "0/1.2", rows) - expected.numpy()).max() <= 1 / 65535
    assert write(path, snapshot(length=length), labels=labels, limit=full) == []
    assert path.stat().st_size == full


def test_page_that_cannot_fit_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(ModelError, match="fewer heads or checkpoints"):
        write(path, limit=1000)
    with pytest.raises(ValueError, match=r"head 0\.0 of step-00000400 has weights that are not numbers"):
        write(path, replace(snapshot(), pattern=lambda head: pattern(head) * float("nan")))
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["page.html"]


# ---- The page in a browser.


@pytest.fixture
def show(browser, tmp_path: Path) -> Iterator[Callable]:
    """show(snapshots...): the page in a browser. At the end it has complained of nothing and asked for nothing."""
    path, complaints, requests, contexts = tmp_path / "page.html", [], [], []

    def open_page(*snapshots: Snapshot, width: int = 1300, scheme: str = "light", **options: object):
        write(path, *snapshots, **options)
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))  # a violated policy is reported here too
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("shown.big !== undefined")
        settle(page)
        return page

    yield open_page
    assert complaints == []
    assert set(requests) == {path.as_uri()}
    for context in contexts:
        context.close()


def settle(page) -> None:
    """Wait until what was decoded is drawn."""
    page.evaluate("(async () => { for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); })()")


def cell(page, row: int, key: int) -> dict[str, float]:
    """Where a weight lies in the large picture."""
    return page.evaluate(
        "([row, key]) => ({ x: box.left + (key + 0.5) * box.cell, y: box.top + (row + 0.5) * box.cell })", [row, key]
    )


def readout(page) -> str:
    settle(page)
    return page.locator("#readout").inner_text()


def choose(page, head: str) -> None:
    page.locator(f"#grid button[aria-label^='head {head}']").click()
    page.wait_for_function(f"document.getElementById('view-name').textContent === 'Head {head}'")
    settle(page)


def test_the_text_is_shaded_evenly_whatever_the_colours_of_the_pictures(show: Callable) -> None:
    page = show()
    choose(page, "1.2")
    shades = "[...document.querySelectorAll('#attention bdi')].map((part) => part.style.backgroundColor)"
    even = page.evaluate(shades)
    assert len(set(even)) > 5
    page.locator("[name=scale][value=log]").check()
    settle(page)
    assert page.evaluate(shades) == even


def test_heads_are_laid_out_and_chosen(show: Callable) -> None:
    page = show(heads=HEADS[1:])
    assert page.locator("#grid button").count() == L * H - 1
    assert page.locator("#rows tr").count() == L * H
    choose(page, "1.2")
    assert page.locator("#grid button[aria-pressed=true] strong").inner_text() == "1.2"
    for head in HEADS[1:]:
        induction = snapshot().scores["induction"][int(head[0]), int(head[2])].item()
        caption = f"ind {f'{induction:.2f}'.removeprefix('0')}" if induction >= 0.2 else ""
        assert page.locator(f"#grid button[aria-label^='head {head}'] span").inner_text() == caption
    assert page.locator("#rows tr[aria-current] td").first.inner_text() == "1.2"
    assert not page.locator("#rows tr[data-head='0.0'] button").count()  # it has no picture
    assert not page.locator("#time").is_visible()  # one checkpoint: nothing to compare


def test_thumbnails_share_one_scale_and_leave_the_future_blank(show: Callable) -> None:
    page = show()
    pixel = """([n, x, y]) => {
        const copy = new OffscreenCanvas(1, 1).getContext("2d");
        copy.drawImage(document.querySelectorAll("#grid canvas")[n], -x, -y);
        return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    assert page.evaluate(pixel, [0, 1, 0])[3] == 0 and page.evaluate(pixel, [0, T - 1, T - 2])[3] == 0
    first = [page.evaluate(pixel, [n, 0, 0]) for n in range(len(HEADS))]  # the first token has only itself: 1
    assert first == [[254, 236, 110, 255]] * len(HEADS)


def test_readout_names_the_weight_that_is_pointed_at(show: Callable) -> None:
    page = show()
    choose(page, "1.1")
    for row, key in ((7, 2), (5, 5), (10, 0)):
        page.locator("#matrix").hover(position=cell(page, row, key))
        weight = pattern("1.1", 400)[row, key].item()
        found = re.fullmatch(r"query (\d+) ␣w\1, key (\d+) ␣w\2: weight (0\.\d+|1\.0+)", readout(page))
        assert found and (int(found[1]), int(found[2])) == (row, key)
        assert float(found[3]) == pytest.approx(weight, abs=1.3e-5)
    page.locator("#matrix").hover(position=cell(page, 2, 7))  # the future
    assert "weight" not in readout(page)


def test_rows_are_pinned_by_picture_strip_and_keys(show: Callable) -> None:
    page = show()
    page.locator("#matrix").click(position=cell(page, 6, 4))
    assert "query 6 ␣w6, key 4 ␣w4" in readout(page) and "pinned" in readout(page)
    page.locator("#matrix").hover(position=cell(page, 9, 3))
    assert "query 9" in readout(page) and "row 6 is pinned" in readout(page)
    assert page.locator("#attention .query").inner_text() == "␣w6"
    page.locator("#attention bdi").nth(8).click()
    settle(page)
    assert page.locator("#strip-name").inner_text().startswith("Attention of head 0.0 from token 8 ␣w8")
    page.mouse.move(0, 0)
    page.locator("#attention").press("ArrowUp")
    assert "query 7" in readout(page) and "pinned" in readout(page)
    page.locator("#matrix").press("ArrowDown")
    for key in ("ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.locator("#matrix").press(key)
    found = re.fullmatch(r"query 9 ␣w9, key 8 ␣w8: weight ([\d.]+) · pinned", readout(page))
    assert float(found[1]) == pytest.approx(pattern("0.0", 400)[9, 8].item(), abs=1.3e-5)
    page.keyboard.press("Escape")
    assert "pinned" not in readout(page)
    page.keyboard.press("]")
    page.wait_for_function("document.getElementById('view-name').textContent === 'Head 0.1'")
    page.keyboard.press("[")
    page.keyboard.press("[")
    page.wait_for_function("document.getElementById('view-name').textContent === 'Head 1.2'")


def test_strips_show_attention_influence_and_prediction(show: Callable) -> None:
    page = show()
    opacity = "(part) => Number(getComputedStyle(part).backgroundColor.match(/[\\d.]+/g)[3] ?? 1)"
    page.locator("#attention bdi").nth(5).click()
    settle(page)
    for strip, row in (("#attention", pattern("0.0", 400)[5]), ("#influence", snapshot().influence[5])):
        parts = page.locator(f"{strip} bdi").all()
        shades = [part.evaluate(opacity) for part in parts]
        assert shades[:6] == pytest.approx((row[:6] / row.max()).tolist(), abs=5e-3)  # a browser keeps 8 bits of it
        assert shades[6:] == [0] * (T - 6)
        title = parts[2].get_attribute("title")
        assert title.startswith("token 2: ") and float(title.split()[-1]) == pytest.approx(row[2].item(), abs=1.3e-5)
    assert (
        page.locator("#predicts").inner_text() == "At token 5 the model predicts next5, 46 %; the text goes on with ␣w6"
    )
    page.locator("#attention bdi").nth(3).click()
    settle(page)
    assert "not computed for this row" in page.locator("#influence-name").inner_text()
    assert {part.evaluate(opacity) for part in page.locator("#influence bdi").all()} == {0}


def test_big_view_switches_matrix_and_colours(show: Callable) -> None:
    page = show()
    for view in ("rollout", "influence"):
        page.locator(f"[name=view][value={view}]").check()
        page.wait_for_function(f"state.view === '{view}'")
        settle(page)
        page.locator("#matrix").hover(position=cell(page, 7, 2))
        weight = pattern(view, 400)[7, 2].item()
        assert f"{view} " in readout(page) and float(readout(page).split()[-1]) == pytest.approx(weight, abs=1.3e-5)
    page.locator("#matrix").hover(position=cell(page, 3, 2))
    assert "not computed" in readout(page)
    before = page.evaluate("document.querySelector('#grid canvas').toDataURL()")
    page.locator("[name=scale][value=log]").check()
    settle(page)
    assert page.evaluate("document.querySelector('#grid canvas').toDataURL()") != before


def test_view_without_rollout_and_influence(show: Callable) -> None:
    page = show(replace(snapshot(), rollout=None, influence=None, step=None, loss=None))
    assert page.locator("[name=view]:disabled").count() == 2
    assert "not computed for this checkpoint" in page.locator("#influence-name").inner_text()


def test_table_is_sorted_and_chooses(show: Callable) -> None:
    page = show()
    scores = snapshot().scores
    for metric, column in (("induction", 2), ("delta", 3)):
        flat = {head: scores[metric][tuple(map(int, head.split(".")))].item() for head in HEADS}
        measured = [head for head in HEADS if flat[head] == flat[head]]
        for order in ("descending", "ascending"):
            page.locator("#columns button").nth(column).click()
            expected = sorted(measured, key=flat.get, reverse=order == "descending")
            shown = [row.split("\t")[0] for row in page.locator("#rows tr").all_inner_texts()]
            assert shown == expected + [head for head in HEADS if head not in measured]
            assert page.locator(f"th[aria-sort={order}]").inner_text().startswith(metric)
    page.locator("#rows tr[data-head='1.0']").click()
    page.wait_for_function("document.getElementById('view-name').textContent === 'Head 1.0'")


def test_slider_travels_through_checkpoints(show: Callable) -> None:
    page = show(snapshot(400), snapshot(800), snapshot(1200))
    page.locator("#matrix").click(position=cell(page, 7, 2))
    seen = {}
    for number, step in ((0, 400), (1, 800), (2, 1200)):
        page.locator("#slider").fill(str(number))
        page.wait_for_function(f"shown.big && state.snapshot === {number}")
        page.evaluate("choose({})")
        settle(page)
        assert page.locator("#snapshot").inner_text() == f"step-{step:08d} · step {step} · loss {1000 / step:.4f}"
        seen[step] = float(re.search(r"weight ([\d.]+)", readout(page))[1])
        assert seen[step] == pytest.approx(pattern("0.0", step)[7, 2].item(), abs=1.3e-5)
    assert len(set(seen.values())) == 3
    page.locator("#matrix").press(",")
    assert page.locator("#snapshot").inner_text().startswith("step-00000800")
    assert "induction of 0.0: 0." in page.locator("#chart").get_attribute("aria-label")


def test_hostile_tokens_are_text(show: Callable) -> None:
    page = show(labels=HOSTILE, title=HOSTILE[0], text_note=HOSTILE[0])
    assert page.locator("h1").inner_text() == HOSTILE[0]
    assert [part.text_content() for part in page.locator("#attention bdi").all()] == HOSTILE
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2 + len(HEADS) + 3


def test_page_is_as_wide_as_the_screen_and_as_dark(show: Callable) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        for width in (360, 1600):
            page = show(snapshot(400), snapshot(800), width=width, scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]


def test_pooled_page_says_what_a_cell_is(show: Callable) -> None:
    length = 67
    page = show(snapshot(length=length), labels=[f"␣w{i}" for i in range(length)], limit=50_000)
    factor = page.evaluate("factor")
    assert factor > 1 and "Pooled" in page.locator("#notes").inner_text()
    page.locator("#matrix").hover(position=cell(page, 40, 20))
    tile = [slice(i - i % factor, i - i % factor + factor) for i in (40, 20)]
    largest = pattern("0.0", 400, length)[tile[0], tile[1]].max().item()
    assert "at most" in readout(page) and float(readout(page).split()[-1]) == pytest.approx(largest, abs=1.3e-5)

"""The pictures of heads show what they should: pixels, numbers and words are read back from the page and from a PNG.

Each small fault of tests/picture_mutants.py makes at least one of these checks fail.
"""

import base64
import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jinja2
import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from tests.picture_mutants import MUTANTS
from tests.tril.test_page import HEADS, UNKNOWN, inspected, write
from tril import Inspection, page, plots
from tril.kinds import kind_of, name_of, short, tag
from tril.metrics import METRICS

SMALL, LONG = 13, 601  # tokens; of the longer text pictures show pools
STEPS = (400, 800)
SCALE = 1.25  # pixels of the screen to one of the page
STOPS = np.array([[45, 30, 92], [48, 78, 140], [32, 127, 143], [52, 171, 117], [160, 211, 72], [254, 236, 110]])
LOOK = """async (link) => {
    history.replaceState(null, "", link || location.hash);
    if (link) await show(stateOf(location.hash));
    const plain = (text) => text.trim().replaceAll("\u00a0", " ");
    const texts = (selector) => [...document.querySelectorAll(selector)].map((part) => plain(part.innerText));
    const table = (selector) => [...document.querySelectorAll(`${selector} tr`)].map((row) =>
        [...row.children].map((cell) => cell.innerText.trim()));
    const box = large.getBoundingClientRect();
    const inTokens = (pixels) => (pixels / box.width) * (across ?? 0);
    const pixels = (canvas) => {
        const { width, height } = canvas;
        const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        let text = "";
        for (const byte of data) text += String.fromCharCode(byte);
        return [canvas.getBoundingClientRect().width, width, height, btoa(text)];
    };
    const axis = (name, start, side) => [...document.querySelectorAll(`#${name} span`)].map((mark) => {
        const of_mark = mark.getBoundingClientRect();
        const middle = side === "y" ? of_mark.top + of_mark.height / 2 : of_mark.left + of_mark.width / 2;
        return [mark.innerText, inTokens(middle - box[start])];
    });
    const shades = (selector) => [...document.querySelectorAll(`${selector} .token`)].map((part) =>
        Number(part.style.backgroundColor.match(/([\\d.]+)%/)?.[1] ?? 0));
    const outline = document.querySelector("#outline").getBoundingClientRect();
    return {
        large: pixels(large),
        tiles: [...document.querySelectorAll("#heads canvas")].map(pixels),
        outline: [outline.left - box.left, outline.top - box.top, outline.width, outline.height].map(inTokens),
        queries: axis("queries", "top", "y"),
        keys: axis("keys", "left", "x"),
        captions: [...document.querySelectorAll("#heads span")].map((part) => plain(part.textContent)),
        chosen: texts("#heads [aria-pressed=true] span"),
        words: texts(`#sentence, #head, #kind, #of-scores, #checkpoint, #next, #chance, #last, #pooled, #strip-note,
            .columns p`),
        ticks: texts("#ticks span").map(Number),
        scores: table("#scores"),
        most: table("#most"),
        shades: shades("#text"),
        influence: shades("#influence"),
        link: address(),
    };
}"""


def colours(share: np.ndarray) -> np.ndarray:
    """Return RGBA bytes of shares of the largest amount; nan is blank."""
    place = np.sqrt(share.clip(0, 1)) * 5
    stop = np.nan_to_num(place).clip(0, 4).astype(int)
    rgb = STOPS[stop] + (STOPS[stop + 1] - STOPS[stop]) * (place - stop)[..., None]
    return np.nan_to_num(np.concatenate((rgb, np.full((*share.shape, 1), 255.0) + 0 * share[..., None]), -1))


def pooled(cells: np.ndarray, step: int) -> np.ndarray:
    """Return the largest of each square of `step` cells, nan where there is none."""
    size = -(-len(cells) // step)
    padded = np.full((size * step, size * step), -1.0)
    padded[: len(cells), : len(cells)] = np.where(np.tri(len(cells), dtype=bool), cells, -1)
    largest = padded.reshape(size, step, size, step).max((1, 3))
    return np.where(largest < 0, np.nan, largest)


def assert_painted(picture: list, cells: np.ndarray) -> int:
    """Assert that a canvas shows these cells, and no more pixels than it has on the screen. Return the pool's side."""
    on_page, width, height, packed = picture
    step = -(-len(cells) // int(on_page * SCALE))
    expected = colours(pooled(cells, step))
    found = np.frombuffer(base64.b64decode(packed), np.uint8).reshape(height, width, 4)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2
    return step


def around(labels: list[str], i: int) -> list[str]:
    """Return the words before a token, and the token with those after it: on each side what fits ten letters."""
    first = next(start for start in range(i + 1) if len("".join(labels[start:i])) <= 10)
    end = next(end for end in range(len(labels), i, -1) if len("".join(labels[i + 1 : end])) <= 10)
    return ["".join(labels[first:i]), "".join(labels[i:end])]


def largest_shares(amounts: np.ndarray) -> list[float]:
    """Return amounts in percent of the largest; all 0 where there is none."""
    return (100 * amounts / (amounts.max() or 1)).tolist()


def assert_shows(
    found: dict, inspection: Inspection, head: tuple, token: int, who: bool = False, view: str = "weights"
):
    """Assert that the page shows one head, token and view of an inspection in all its parts."""
    shown, labels = inspection.heads, inspection.labels
    T = len(labels)
    factor = inspection.value_norms if view == "values" else dict.fromkeys(shown, torch.ones(T))
    amounts = {each: (inspection.pattern(*each) * factor[each]).numpy() for each in shown}
    end = max(each.max() for each in amounts.values()) if view == "values" else 1.0
    step = assert_painted(found["large"], amounts[head] / end)
    tiles = zip(found["tiles"], shown, strict=True)
    (tile_step,) = {assert_painted(tile, amounts[each] / end) for tile, each in tiles}
    assert found["ticks"] == pytest.approx([end * place**2 for place in (0, 0.2, 0.4, 0.6, 0.8, 1)], rel=0.051)

    tags = {each: f"{name_of(each)} {tag(kind_of(inspection.scores, each))}".strip() for each in shown}
    assert found["captions"] == list(tags.values()) and found["chosen"] in ([tags[head]], [""])  # hidden if small
    box = (token, token, 1, T - token) if who else (0, token, token + 1, 1)
    assert found["outline"] == pytest.approx(box, abs=0.01 * T / 13)
    for axis in ("queries", "keys"):
        for text, place in found[axis]:
            number = int(text.split()[-1])
            assert place == pytest.approx(number + 0.5, abs=0.2 * T / 13)
            assert text in (str(number), f"␣w{number} {number}")
        assert [text.split()[-1] for text, _ in found[axis]] == [str(i) for i in range(0, T, 1 if T == SMALL else 50)]

    row = amounts[head][:, token] if who else amounts[head][token]
    assert found["shades"] == pytest.approx(largest_shares(row), abs=0.06)
    influence = inspection.influence[token].nan_to_num(0).numpy()
    assert found["influence"] == pytest.approx(largest_shares(influence), abs=0.2)

    named = f"{labels[token]} ({token})"
    verbs = ("takes from", "gives to") if view == "values" else ("looks at", "is looked at by")
    kind = kind_of(inspection.scores, head)
    guess, chance, _ = inspection.scores.predictions[token]
    pool = f"a point is the largest of {{0}} × {{0}} {'values' if view == 'values' else 'weights'}"
    words = {
        f"{named} {verbs[who]}",
        f"Head {name_of(head)}",
        f"Scores of head {name_of(head)}: {tag(kind)} ({short(kind.chance)} if it attended evenly)",
        inspection.label(guess),
        f"{chance:.1%}",
        named,
        pool.format(step) if step > 1 else "",
        f"{len(shown)} heads, by layer" + (f" · {pool.format(tile_step)}" if tile_step > 1 else ""),
    }
    assert words <= set(found["words"])
    summary = rf"({inspection.name} · )?loss {inspection.scores.losses.mean():.4f} · .*"
    assert any(re.fullmatch(summary, word) for word in found["words"])
    mean = inspection.scores.mean
    metrics = [name for name in METRICS if name in mean and not mean[name][head].isnan()]
    for name, line in zip(metrics, found["scores"][1:], strict=True):
        numbers = [of[name][head] for of in (mean, inspection.scores.chance) if name in of]
        assert line[1:3] == [*(format(number, METRICS[name][1]) for number in numbers), ""][:2]
    if view == "logits":
        assert f"makes likeliest after {named}" in found["words"]
        tokens, logits = inspection.logit_attribution[head]
        assert [line[0] for line in found["most"]] == [f"<b>{number}" for number in tokens[token].tolist()]
        numbers = [float(line[1].replace("−", "-")) for line in found["most"]]
        assert numbers == pytest.approx(logits[token].tolist(), abs=0.0051)
    else:
        order = np.argsort(-row, kind="stable")[: len(found["most"])]
        least = 1e-9 if view == "values" else 0.0005  # what rounds to 0 is left out
        assert len(order) >= min(5, sum(row >= least)) and row[order[-1]] >= least
        assert [int(line[0]) for line in found["most"]] == order.tolist()
        assert [line[1:3] for line in found["most"]] == [around(labels, i) for i in order]
        assert [float(line[3]) for line in found["most"]] == pytest.approx(row[order], abs=6e-4, rel=0.006)


@functools.cache
def made_up(step: int, length: int, *heads: tuple) -> Inspection:
    """Return an inspection whose patterns are computed once, to the last bit as the page stores them."""
    inspection = inspected(step, f"run step-{step:08d}", length, heads=list(heads))
    patterns = {head: (inspection.pattern(*head) * 65535).round()[None] / 65535 for head in heads}
    inspection.att = SimpleNamespace(pattern=lambda *head: patterns[head])
    return inspection


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """opened(inspections...): the page of these, anew."""
    path = tmp_path_factory.mktemp("pictures") / "page.html"
    context = browser.new_context(viewport={"width": 1280, "height": 800}, device_scale_factor=SCALE)
    tab = context.new_page()
    tab.set_default_timeout(3000)

    def open_page(*inspections: Inspection):
        write(path, *inspections)
        tab.goto("about:blank")
        tab.mouse.move(1, 1)
        tab.goto(path.as_uri())
        tab.wait_for_function("() => document.onkeydown")
        return tab

    yield open_page
    context.close()


def point(tab, row: float, key: float, length: int) -> None:
    box = tab.locator("#picture canvas").bounding_box()
    tab.mouse.move(box["x"] + key * box["width"] / length, box["y"] + row * box["height"] / length)


def check_small(opened: Callable) -> None:
    """Check a short text in two checkpoints: every view, both ways to look, and all that changes what is shown."""
    first, last = (made_up(step, SMALL, *HEADS) for step in STEPS)
    tab = opened(first, last)
    for link, inspection, *state in (
        ("#1.2/7", last, (1, 2), 7),
        ("#0.1/4/who", last, (0, 1), 4, True),
        ("#1.0/9/values", last, (1, 0), 9, False, "values"),
        ("#0.2/5/who/values/step-00000400", first, (0, 2), 5, True, "values"),
        ("#1.1/8/who/logits", last, (1, 1), 8, True, "logits"),
    ):
        found = tab.evaluate(LOOK, link)
        assert found["link"] == link
        assert_shows(found, inspection, *state)
    tab.evaluate(LOOK, "#0.1/11/values")
    point(tab, 9.5, 4.5, SMALL)
    weight, length = last.pattern(0, 1)[9, 4], last.value_norms[0, 1][4]
    tab.evaluate("$('influence').scrollTop")
    expected = f"query ␣w9 (9)\nkey ␣w4 (4)\nweight {weight:.5f} × length {length:#.4g}\nvalue {weight * length:#.4g}"
    assert tab.locator("#readout").inner_text() == expected
    assert tab.locator("#text .shown").inner_text() == "␣w9" and tab.locator("#text .other").inner_text() == "␣w4"
    tab.mouse.down()
    tab.mouse.up()
    tab.mouse.move(1, 1)
    assert_shows(tab.evaluate(LOOK, ""), last, (0, 1), 9, False, "values")
    tab.keyboard.press("1")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    tab.locator("#slider").fill("0")
    tab.evaluate("show({})")
    assert_shows(tab.evaluate(LOOK, ""), first, (0, 2), 10)
    tab.locator("#text .token").nth(2).hover()
    assert_shows(tab.evaluate(LOOK, ""), first, (0, 2), 2)
    tab.locator("#heads button").nth(3).click()
    tab.locator("#who").click()
    tab.mouse.move(1, 1)
    assert_shows(tab.evaluate(LOOK, ""), first, (1, 0), 10, True)
    tab.evaluate(LOOK, f"#0.1/{UNKNOWN}/logits")
    most = tab.locator("#most").inner_text()
    assert most.startswith("Not computed at this token. The nearest that was is ␣w5 (5), 1")
    found = tab.evaluate(LOOK, "#0.2/7/why")
    assert [line[:2] for line in found["most"]] == [["0.1", "+3.00"], ["mlp 0", "−0.50"], ["embedding", "+2.50"]]
    assert re.match(r"␣w6 \(6\) \.\d\d\s+score \+2\.50 above", tab.locator("#most").inner_text())
    tab.locator("#most button", has_text="0.1").click()  # a head that wrote
    assert tab.evaluate(LOOK, "")["link"] == "#0.1/7/why"


def check_long(opened: Callable) -> None:
    """Check a text of more tokens than the pictures have pixels."""
    heads = ((0, 1), (1, 0), (1, 2))
    inspection = made_up(STEPS[0], LONG, *heads)
    tab = opened(inspection)
    assert_shows(tab.evaluate(LOOK, "#1.0/300"), inspection, (1, 0), 300)
    assert_shows(tab.evaluate(LOOK, "#1.2/211/who/values"), inspection, (1, 2), 211, True, "values")
    tab.evaluate(LOOK, "#1.0/300")
    weights = inspection.pattern(1, 0)
    for place in (1, 2, 3):  # of the largest in a pool of 2 x 2
        pools = ((key, weights[400:402, key : key + 2]) for key in range(100, 400, 2))
        row, (key, pool) = 400, next(found for found in pools if found[1].argmax() == place)
        down, right = divmod(pool.argmax().item(), 2)
        point(tab, row + 1, key + 1, LONG + 1)
        shown = [f"query ␣w{row + down} ({row + down})", f"key ␣w{key + right} ({key + right})"]
        shown.append(f"weight {pool.max():.5f}")
        assert tab.locator("#readout").inner_text().split("\n")[:3] == shown


def check_png(path: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every cell, name and number of a picture of six heads in two rows."""
    inspection = made_up(STEPS[0], length, *HEADS)
    figures = []

    def figure(**options: object) -> Figure:
        figures.append(Figure(**options))
        return figures[-1]

    monkeypatch.setattr(plots, "DPI", 30)
    monkeypatch.setattr(plots, "LABEL_HEIGHT", 1.2)
    monkeypatch.setattr(plots, "Figure", figure)
    inspection.save(path)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    ax, bar = figures[0].axes
    side = int(figures[0].axes[0].images[0].get_array().shape[1] / 3.1)  # more than a tile's, which three and gaps fill
    step = -(-length // side)
    size = -(-length // step)
    pitch = size + max(1, size // 16)
    viridis = matplotlib.colormaps["viridis"]
    assert ax.yaxis_inverted() and not ax.xaxis_inverted()  # the first query is above, the first key on the left
    for number, head in enumerate(HEADS):
        top, left = (place * pitch for place in divmod(number, 3))
        cells = pooled(inspection.pattern(*head).numpy(), step)
        expected = np.where(np.isnan(cells)[..., None], 255, 255 * viridis(np.sqrt(cells))[..., :3])
        y, x = np.mgrid[top : top + size, left : left + size]
        places = ax.transData.transform(np.stack((x.ravel(), y.ravel()), -1))
        row, column = (len(pixels) - places[:, 1]).astype(int), places[:, 0].astype(int)
        near = [pixels[row + down, column + right] for down in (-1, 0, 1) for right in (-1, 0, 1)]
        missed = np.abs(np.stack(near) - expected.reshape(-1, 3)).max(-1).min(0).reshape(size, size)
        clear = np.ones((size, size), dtype=bool)
        clear[: size // 2, size // 4 :] = np.tri(size, dtype=bool)[: size // 2, size // 4 :]  # where no name is written
        clear[:, 0] = clear[-1] = False  # the marks of the axes touch these
        assert missed[clear].max() <= 3
        name = ax.texts[number]
        assert name.get_text() == f"{name_of(head)} {tag(kind_of(inspection.scores, head))}"
        assert left <= name.get_position()[0] <= left + size and top <= name.get_position()[1] <= top + size
    for axis, count in ((ax.xaxis, 3), (ax.yaxis, 2)):
        marks = [label.get_text() for label in axis.get_ticklabels()]
        each = len(marks) // count
        for i, (place, mark) in enumerate(zip(axis.get_ticklocs(), marks, strict=True)):
            number = int(mark.split()[-1])
            assert mark == f"{inspection.labels[number]} {number}"
            assert (place + 0.5 - i // each * pitch) * step == pytest.approx(number + 0.5, abs=1e-3)
        assert marks[0].endswith(" 0") and each > 3
    assert [float(label.get_text()) for label in bar.get_yticklabels()] == pytest.approx(bar.get_yticks())
    assert bar.get_ylim() == (0, 1)
    title = figures[0].get_suptitle()
    assert "a row is a query, the token that looks; a column is a key, a token it can look at" in title
    assert (f"a point is the largest of {step} x {step} weights" in title) == (step > 1)


@contextlib.contextmanager
def mutated(file: str, old: str, new: str) -> Iterator[None]:
    """Replace text of a file of tril/, in memory, and restore it."""
    path = Path(page.__file__).with_name(file)
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1
    changed = source.replace(old, new)
    module = importlib.import_module(f"tril.{path.stem}")
    kept = dict(vars(Inspection))
    try:
        if file == "inspection.py":
            exec(compile(changed, path, "exec"), found := dict(vars(module)))
            for name in ("page_data", "save"):
                setattr(Inspection, name, vars(found["Inspection"])[name])
        elif path.suffix == ".js":
            whole = module.environment()
            loader = jinja2.ChoiceLoader([jinja2.DictLoader({file: changed}), whole.loader])
            module.environment = lambda: whole.overlay(loader=loader)
        else:
            exec(compile(changed, path, "exec"), module.__dict__)
        yield
    finally:
        for name in ("page_data", "save"):
            setattr(Inspection, name, kept[name])
        if file != "inspection.py":
            importlib.reload(module)


def test_the_page_shows_what_was_measured(opened: Callable) -> None:
    check_small(opened)
    check_long(opened)


@pytest.mark.parametrize("length", [SMALL, LONG])
def test_a_png_shows_what_was_measured(tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_png(tmp_path / "heads.png", length, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path, monkeypatch, request: pytest.FixtureRequest) -> None:
    file, old, new = MUTANTS[fault]
    with mutated(file, old, new), pytest.raises(AssertionError):
        if file == "plots.py" or fault.startswith("tags"):
            check_png(tmp_path / "heads.png", LONG, monkeypatch)
        else:
            check = check_long if "pool" in fault else check_small
            check(request.getfixturevalue("opened"))

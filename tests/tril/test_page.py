"""The page of attention heads: the file, read without a browser, and what a person can do with it in one."""

import base64
import html
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tril import Inspection, page
from tril.kinds import KINDS, Upstream, by_kind, name_of
from tril.metrics import HeadScores
from tril.places import Place, Places

L, H, T = 2, 3, 11
HEADS = [(layer, head) for layer in range(L) for head in range(H)]
HOSTILE = ["</script><img onerror=alert(1) src=x>", "<!--<script>", "\u2028", "\u202e\u05d0\u05d1", "'\"", 99 * "w"]
HOSTILE += ["\\", "&lt;", "${T}", "{{ nonce }}", "↵"]
SIDES = {(0, 2): {"keys": 0.06, "queries": 0.41}, (0, 0): {"keys": 0.4, "queries": 0.35}}
FOUND = {(1, 1): Upstream(0.44, {(0, 2): 0.05, (0, 0): 0.31}, 0.43, SIDES)}
FOUND[1, 2] = Upstream(1.0, {(0, 2): 0.02}, 1.0, {})
# Complains of a page that is not drawn when it has loaded: a screenshot would be blank.
BLANK = """addEventListener("load", () => {
    if (document.querySelector("#sentence:empty, #outline:not([style])")) console.error("loaded blank");
})"""
UNKNOWN = 6  # a position at which no logits were computed


def noise(name: str, step: int, *shape: int) -> Tensor:
    """Return the same random numbers for the same name, checkpoint and shape."""
    generator = torch.Generator().manual_seed(1000 * step + sum(ord(letter) for letter in name))
    return torch.randn(*shape, generator=generator)


def pattern(name: str, step: int = 400, length: int = T) -> Tensor:
    """Return (T, T): rows of random weights that sum to 1."""
    future = ~torch.ones(length, length).tril().bool()
    return (3 * noise(name, step, length, length)).masked_fill(future, float("-inf")).softmax(-1)


def inspected(
    step: int = 400,
    name: str = "",
    length: int = T,
    shape: tuple[int, int] = (L, H),
    known: bool = True,
    **changes: object,
) -> Inspection:
    """Return a made-up inspection; known: also of values and logits."""
    heads = list(np.ndindex(shape))
    names = ("entropy", "distance", "previous", "current", "sink", "duplicate", "induction", "ablation")
    samples = {name: noise(name, step, 1, *shape).sigmoid().double() for name in names}
    samples["ablation"][:, 0, 1:2] = float("nan")
    chance = {name: noise(name + "?", step, *shape).sigmoid().double() / 5 for name in names[:-1]}
    rows = dict.fromkeys(names[2:-1], 997)
    influence = pattern("influence", step, length)
    influence[3::6] = float("nan")
    logits = noise("logits", step, *shape, length, 14).sort(-1, descending=True).values[..., [0, 1, 2, 13, 12, 11]]
    logits[:, :, UNKNOWN : UNKNOWN + 1] = float("nan")
    predictions = [(i, (i + 1) / (length + 2), float("inf") if i == 3 else i / 7) for i in range(length)]
    lengths = noise("lengths", step, *shape, length).exp()
    tokens = noise("tokens", step, *shape, length, 6).argsort(-1) + 10 * step
    found = Inspection(
        decoder=None,
        names=SimpleNamespace(label=changes.pop("label", lambda token: f"<b>{token}")),
        measured=None,
        shown=None,
        labels=[f"␣w{i}" for i in range(length)],
        text_note="a text",
        name=name or f"step-{step:08d}",
    )
    measured = dict(
        heads=heads,
        verified="weights match the kernel",
        scores=HeadScores(samples, torch.tensor([1000 / step]), predictions, [], chance, rows),
        att=SimpleNamespace(pattern=lambda layer, head: pattern(f"{layer}.{head}", step, length)[None]),
        influence=influence,
        explained=(WRITERS, reasons_of(len(heads), length)),
        value_norms={head: lengths[head] for head in heads} if known else {},
        logit_attribution={head: (tokens[head], logits[head]) for head in heads} if known else {},
        upstream={},
        strongest={},
    )
    for field, value in (measured | changes).items():
        setattr(found, field, value)
    return found


WRITERS = ["embedding", "0.1", "mlp 0"]


def reasons_of(num_heads: int, length: int) -> torch.Tensor:
    """Made-up reasons, as `explain_strongest` returns them, of one key a token: the one before."""
    numbers = torch.zeros(22, num_heads, length, 1, dtype=torch.int32)
    numbers[0] = torch.arange(length)[:, None] - 1
    numbers[1] = 250
    numbers[2:4], numbers[7:9] = torch.tensor([1, 2]).view(2, 1, 1, 1), torch.tensor([300, -50]).view(2, 1, 1, 1)
    numbers[12], numbers[17] = 0, 250
    return numbers


def write(path: Path, *inspections: Inspection) -> None:
    path.write_text(page.render([each.page_data() for each in inspections or [inspected()]]), encoding="utf-8")


def stored(path: Path, name: str) -> np.ndarray:
    """Return the triangle of this name, decoded as tril/page.py says: (T, T), 0 above the diagonal."""
    packed = re.search(rf'id="{re.escape(name)}">([^<]*)</script>', path.read_text())[1]
    square = np.zeros((T, T))
    square[np.tril_indices(T)] = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype="<u2") / 65535
    return square


def content(text: str) -> dict:
    """Return what a page knows but its pictures."""
    return json.loads(re.search(r'id="page">(.*?)</script>', text, re.DOTALL)[1])


def data_of(path: Path) -> dict:
    return content(path.read_text())


def test_the_file_loads_nothing_and_tokens_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    hostile = dict(name=HOSTILE[0], labels=HOSTILE, text_note=HOSTILE[0], label=HOSTILE.__getitem__)
    write(path, inspected(**hostile, known=False))
    text = path.read_text()
    nonces = re.findall(r"""nonce[-=]['"]?([\w-]{43})['"]""", text)
    assert len(nonces) == 4 and len({*nonces}) == 1 and nonces[0] not in page.render([inspected().page_data()])
    policy = "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'".format(nonces[0])
    for part in (f'content="{policy}"', f'<style nonce="{nonces[0]}">', f'<script nonce="{nonces[0]}">'):
        assert text.count(part) == 1
    found = content(text)
    assert found["labels"] == HOSTILE and found["checkpoints"][0]["summary"].startswith(HOSTILE[0])
    assert "<img" not in text and text.count("<script") == text.count("</script>") == 3 + len(HEADS) + 1


def test_upstream_heads_stand_below_the_table() -> None:
    table = inspected(upstream=FOUND).table()
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80 and "\nupstream heads: a head's score on the probe, and without one of a" in table
    text = " ".join(" ".join(lines[-3:]).split())
    assert text == f"1.1 {FOUND[1, 1]} 1.2 {FOUND[1, 2]}"
    assert str(FOUND[1, 1]).startswith(".44, without 0.2 .05 (by keys .06, by queries .41), 0.0 .31 (by keys .40, by")


# ---- The page in a browser. What its pictures show is tested in tests/inspection/test_pictures.py.


@pytest.fixture
def show(browser, tmp_path: Path) -> Iterator[Callable]:
    """Return show(inspections...), which opens the page in a browser. At the end: no complaint and no other request."""
    path, complaints, requests, contexts = tmp_path / "page.html", [], [], []

    def open_page(
        *inspections: Inspection,
        link: str = "",
        width: int = 1280,
        height: int = 800,
        frame: bool = False,
        **options: object,
    ):
        write(path, *inspections)
        if frame:
            path.write_text(f'<iframe srcdoc="{html.escape(path.read_text())}" width="1200" height="900"></iframe>')
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))  # also reports a violated policy
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.add_init_script(BLANK)
        page.goto(path.as_uri() + link)
        return page.frames[1] if frame else page

    yield open_page
    assert complaints == []
    assert set(requests) - {"about:srcdoc"} == {path.as_uri()}
    for context in contexts:
        context.close()


def expect(page, sentence: str, link: str) -> None:
    """Wait until the page shows and links to what is expected."""
    found = "() => [document.querySelector('#sentence').innerText, location.hash]"
    page.wait_for_function(f"(wanted) => JSON.stringify(({found})()) === JSON.stringify(wanted)", arg=[sentence, link])


@pytest.mark.long
def test_a_finger_is_enough(show: Callable) -> None:
    page = show(link="#1.2/5", width=375, has_touch=True, is_mobile=True)
    for sentence, link in (("␣w4 (4) looks at", "#1.2/4"), ("␣w4 (4) is looked at by", "#1.2/4/who")):
        page.locator("#text .token").nth(4).tap()
        expect(page, sentence, link)
    size = page.locator("#picture").bounding_box()["width"]
    page.locator("#picture").tap(position={"x": 2.5 * size / T, "y": 9.5 * size / T})
    expect(page, "␣w2 (2) is looked at by", "#1.2/2/who")
    assert page.locator("#readout").inner_text().startswith("query ␣w9 (9)\nkey ␣w2 (2)\nweight ")
    page.locator("#views label").nth(1).tap()
    expect(page, "␣w2 (2) gives to", "#1.2/2/who/values")


@pytest.mark.long
def test_keys_do_all_and_leave_the_slider_its_own(show: Callable) -> None:
    page = show(inspected(400), inspected(800, labels=[*"abcdabcdabc"]), link="#0.1/9")
    keys = {"ArrowRight": "#0.1/10", "ArrowDown": "#0.2/10", "Enter": "#0.2/10/who", "2": "#0.2/10/who/values"}
    keys |= {"Home": "#0.2/0/who/values", "End": "#0.2/10/who/values"}
    keys |= {"ArrowLeft": "#0.2/9/who/values", "ArrowUp": "#0.1/9/who/values", " ": "#0.1/9/values"}
    for key, link in keys.items():
        page.keyboard.press(key)
        page.wait_for_function("(wanted) => location.hash === wanted", arg=link)
    stops = []
    for _ in range(7 + len(HEADS)):
        page.keyboard.press("Tab")
        stop = page.evaluate("""() => {
            const { id, name, className } = document.activeElement;
            return [id || name || className, getComputedStyle(document.activeElement).outlineStyle];
        }""")
        stops.append(stop[0])
        assert stop[1] != "none" or stop[0] == "view"  # the ring of a view is around its word
        if stop[0] == "slider":
            page.keyboard.press("ArrowLeft")
            page.wait_for_function("() => location.hash === '#0.1/9/values/step-00000400'")
    assert {"slider", "view", "before", "after", "who", "clearest", "token shown"} < set(stops)


@pytest.mark.long
def test_a_press_goes_to_an_upstream_head_and_back(show: Callable) -> None:
    page = show(inspected(400), inspected(800, upstream=FOUND), link="#1.1/4")
    for head, sentence in (
        ("1.1", f"score {FOUND[1, 1]}"),
        ("0.2", "upstream of 1.1, 1.2"),
        ("1.2", "score 1.00, without 0.2 .02, the median head 1.00"),
    ):
        page.wait_for_function("(head) => $('head').innerText === `Head ${head}`", arg=head)
        assert page.locator("#upstream").inner_text() == sentence
        page.locator("#upstream button").nth(1 if head == "0.2" else 0).click()
    page.locator("#slider").fill("0")
    page.wait_for_function("() => loaded.number === 0")
    assert page.locator("#upstream").inner_text() == "" and page.locator("#upstream").bounding_box()["height"] > 20


@pytest.mark.long
def test_what_the_model_wrote_is_in_italics(show: Callable) -> None:
    page = show(inspected(num_generated=3), link="#1.1/8")
    styles = page.locator("#text .token").evaluate_all(
        "(parts) => parts.map((part) => getComputedStyle(part).fontStyle)"
    )
    assert styles == ["normal"] * 8 + ["italic"] * 3
    assert page.locator("#note i").inner_text() == "in italics"


@pytest.mark.long
def test_links_open_what_was_seen_and_nothing_else(show: Callable) -> None:
    page = show(inspected(400), inspected(800), link="#1.1/4/who/values/step-00000400")
    expect(page, "␣w4 (4) gives to", "#1.1/4/who/values/step-00000400")
    assert page.locator("#slider").input_value() == "0" and page.locator("#head").inner_text() == "Head 1.1"
    best = next(iter(by_kind(inspected(800).scores, HEADS).values()))[0][0]  # without an example, as no word repeats
    for link in ("", "#9.9/4", "#1.1/11", "#1.1", "#1.1/4/nothing", "#%E0%A4%A/1", "#1.1/4/constructor"):
        page.evaluate("(link) => { location.hash = '#0.0/1'; location.hash = link; }", link)
        expect(page, "␣w10 (10) looks at", f"#{name_of(best)}/10")
    page.evaluate("location.hash = '#0.2/3/logits'")
    expect(page, "␣w3 (3) looks at", "#0.2/3/logits")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_opens_where_a_head_does_what_it_is_named_for(show: Callable, kind: str) -> None:
    """Head 1.1 has its kind from row 7. Row 9 looks at nothing of a kind, and row 1 has little choice."""
    keys = {"induction": 2, "duplicate": 1, "previous": 6, "current": 7, "sink": 0, "other": 4}
    _, place, offset = KINDS[kind]  # of a kind that was added
    key = keys[kind] if kind in keys else offset + {"copy": 1, "query": 7, "first": 0}[place]
    weights = torch.ones(T, T).tril()
    weights[7, key] = weights[9, 5] = weights[1, int(kind == "current")] = 50
    found = inspected(labels=[*"abcdaefbghi"])
    for name in found.scores.rows:
        found.scores.samples[name].fill_(0.01)[0, 1, 1] = 0.9 if name == kind else 0.01
    weights = weights / weights.sum(-1, keepdim=True)
    found.att = SimpleNamespace(pattern=lambda *head: weights[None])
    page = show(found)
    token = 10 if kind == "other" else 7
    assert page.locator("#sentence").inner_text() == f"{found.labels[token]} ({token}) looks at"
    button = page.locator("#clearest")
    assert button.is_hidden() == (kind == "other")
    if kind != "other":
        assert button.inner_text() == "clearest for 1.1" and button.get_attribute("aria-pressed") == "true"
        page.keyboard.press("End")
        page.keyboard.press("c")
        expect(page, "b (7) looks at", "#1.1/7")


@pytest.mark.long
def test_a_notebook_shows_it_in_a_frame_without_an_address(show: Callable) -> None:
    frame = show(frame=True)
    frame.locator("#text .token").nth(4).click()
    frame.locator("#sentence", has_text="␣w4 (4) looks at").wait_for()
    frame.page.wait_for_timeout(400)
    assert frame.evaluate("location.href") == "about:srcdoc"


@pytest.mark.long
def test_a_view_that_is_unknown_says_so(show: Callable) -> None:
    described = inspected(known=False).page_data()
    del described.stored["why"]
    described.texts["unexplained"] = "why is not known"
    page = show(SimpleNamespace(page_data=lambda: described), link="#0.1/4/values")
    views = page.locator("#views input:disabled").evaluate_all("(views) => views.map((view) => view.value)")
    assert views == ["values", "logits"]
    assert page.locator("#meaning").inner_text().endswith("Unknown for this type of model: values and logits.")
    page.keyboard.press("4")
    page.locator("#most", has_text="why is not known").wait_for()
    page = show(link=f"#0.1/{UNKNOWN}/logits")
    page.get_by_text("go there").click()
    expect(page, "␣w5 (5) looks at", "#0.1/5/logits")


@pytest.mark.parametrize("width", [1280, 375])
def test_both_sides_of_why_have_one_scale_and_sum_to_the_score(show: Callable, width: int) -> None:
    numbers = reasons_of(len(HEADS), 257)
    sizes = [270, -70, 60, -30, 9]
    numbers[17:] = torch.tensor(sizes).view(5, 1, 1, 1)
    page = show(inspected(length=257, explained=(WRITERS, numbers)), link="#1.1/104/why", width=width)
    assert "how much each writer (embedding, head, MLP) adds" in page.locator("#meaning").inner_text()
    rows = page.locator(".columns tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows[:2]] == ["+3.00", "−0.50"]  # all there are
    assert len(rows) == 8 and rows[-1].split("\t")[:2] == ["the rest", "+0.11"]
    boxes = [bar.bounding_box() for bar in page.locator(".columns .bar").all()]
    shares = [abs(size) / 300 for size in (300, -50, *sizes, 11)]
    assert [box["width"] / boxes[0]["width"] for box in boxes] == pytest.approx(shares, abs=0.01)
    assert boxes[0]["width"] > 150
    tops = [title.bounding_box()["y"] for title in page.locator(".columns p").all()]
    assert (tops[0] == tops[1]) == (width > 375)
    page.locator("#most p").first.evaluate("(part) => part.append('another token '.repeat(9))")
    assert page.locator("#most").evaluate("(part) => part.scrollHeight <= part.clientHeight")


@pytest.mark.long
@pytest.mark.parametrize("width, height", [(1280, 800), (1080, 1920)])
@pytest.mark.parametrize("shape, tokens", [((2, 4), 256), ((4, 4), 257), ((30, 9), 32), ((1, 1), 6)])
def test_all_that_matters_is_seen_at_one_look(
    show: Callable, shape: tuple[int, int], tokens: int, width: int, height: int
) -> None:
    page = show(inspected(length=tokens, shape=shape, upstream=FOUND), width=width, height=height)
    for part in "h1,#upstream,#text,#most,#large,#of-keys,#scale,#heads,#heads button >> nth=-1".split(","):
        box = page.locator(part).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= height and box["x"] + box["width"] <= width, part
    for part in ("#text", "#heads", "#most"):
        assert page.locator(part).evaluate("(part) => part.scrollHeight <= part.clientHeight"), part
    covers = """(part) => {
        const { right, top, height } = part.getBoundingClientRect();
        return document.elementFromPoint(right - 3, top + height / 2).closest("#sentence") === null;
    }"""
    assert not page.locator("#sentence").evaluate(covers)


@pytest.mark.long
def test_a_low_window_has_numbers_on_its_axes_where_names_would_be_too_small(show: Callable) -> None:
    for length, first in ((13, "␣w0 0"), (31, "0")):
        marks = show(inspected(length=length), height=600).locator(":is(#queries, #keys) span")
        sizes = marks.evaluate_all("(marks) => marks.map((mark) => parseFloat(getComputedStyle(mark).fontSize))")
        assert min(sizes) >= 9 and marks.first.inner_text() == first


def places_of(step: int, texts: dict[int, list[str]]) -> dict:
    """Made-up places of all heads, two in each text."""
    found = {}
    for number, head in enumerate(HEADS):
        strongest = [Place(0.875, start, 7 + number % 3, 2, ["so", "on"], text) for start, text in texts.items()]
        rule = [Place(0.25, start, 9, 9, [], text) for start, text in texts.items()]
        found[head] = Places("99 of 999 tokens; weights match", [("strongest", strongest), ("typical", rule)])
    return found


@pytest.mark.long
def test_places_are_lines_that_open_to_their_text(show: Callable) -> None:
    shown = inspected(800).labels
    texts = {0: [*shown, *(f"␣more{i}" for i in range(30))], 9000: [*HOSTILE, *(f"␣far{i}" for i in range(60))]}
    texts[9000][2] = "</summary>"
    page = show(inspected(400), inspected(800, strongest=places_of(800, texts)), link="#1.1/4")
    assert page.locator("#of-places").inner_text() == "Places of head 1.1"
    assert page.locator("#read").inner_text().startswith("99 of 999 tokens; weights match. A line has")
    lines = page.locator("#found .place")
    assert lines.count() == 4 and lines.nth(0).is_visible() and not lines.nth(2).is_visible()
    page.locator("#found .group").nth(1).locator("summary").first.click()
    assert lines.nth(1).locator("summary > span").nth(1).inner_text() == "9,008"
    first = lines.nth(1)
    assert first.locator("summary .key").inner_text() == "</summary>" and first.locator("summary .shown").count() == 1
    assert first.locator("summary .shown").inner_text() == texts[9000][8]
    assert "␣far5" in first.locator("summary").inner_text() and "␣far9" not in first.locator("summary").inner_text()
    own = lines.nth(2).locator("summary .shown")
    assert own.inner_text() == shown[9] and "key" in own.get_attribute("class")
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    first.locator("div bdi >> nth=70").wait_for()
    assert first.locator("div bdi").all_text_contents() == texts[9000] and first.locator("button").count() == 0
    page.keyboard.press("ArrowDown")
    page.locator("#of-places", has_text="1.2").wait_for()
    lines.nth(0).locator("summary").click()
    lines.nth(0).locator("button").click()
    expect(page, f"{shown[9]} (9) looks at", "#1.2/9")
    page.evaluate("location.hash = '#1.1/4/step-00000400'")
    page.locator("#read", has_text="Only the last checkpoint has places.").wait_for()
    assert not lines.nth(0).is_visible()
    assert "give one by corpus= in Python" in show(inspected()).locator("#read").inner_text()


@pytest.mark.long
def test_hostile_tokens_are_text_on_any_screen(show: Callable) -> None:
    colours = {}
    for width, scheme in ((375, "light"), (500, "light"), (1600, "dark")):
        hostile = {"name": HOSTILE[0], "labels": HOSTILE, "text_note": HOSTILE[0], "known": False}
        page = show(inspected(400, **hostile), inspected(800, **hostile), width=width, color_scheme=scheme)
        assert page.locator("h1").inner_text() == f"Heads of {HOSTILE[0]}"
        assert [part.text_content() for part in page.locator("#text .token").all()] == HOSTILE
        assert page.locator("img").count() == 0 and page.locator("script").count() == 2 + 2 * (len(HEADS) + 2)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#most").evaluate("(part) => part.scrollWidth <= part.clientWidth")
        colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]

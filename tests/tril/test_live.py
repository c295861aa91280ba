"""inspect_attention.py --live: who is answered, what is answered, and what a person does with it in a browser."""

import contextlib
import math
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from http.server import HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import torch.nn.functional as F

import inspect_attention
from data.tokenizer import load_tokenizer
from errors import UserError
from model import GPT
from model.checkpoint import find_checkpoint
from tests.conftest import ROOT
from tests.tril.test_page import content
from tril import live, page

TEXT, OTHER = "12 is even.", "13 is odd.\n"  # as many tokens as the model reads


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """serving(answer): serve its pages in a thread, and return the address that a browser is asked to open."""
    opened, servers = queue.Queue(), []

    class Server(HTTPServer):
        def serve_forever(self) -> None:
            servers.append(self)
            super().serve_forever(0.01)

    def serve(answer: Callable[..., str]) -> str:
        threading.Thread(target=live.serve, args=[answer], daemon=True).start()
        return opened.get(timeout=10)

    monkeypatch.setattr(live, "HTTPServer", Server)
    monkeypatch.setattr("webbrowser.open", opened.put)
    yield serve
    for server in servers:
        server.shutdown()


@pytest.fixture
def answer(run, straight: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What the script serves."""
    answers = []
    monkeypatch.setattr(inspect_attention, "serve", answers.append)
    run(inspect_attention, straight, "--live").ok()
    return answers[0]


def ask(address: str, method: str = "GET", path: str | None = None, **headers: str) -> tuple[HTTPResponse, str]:
    """Return a response and its content. path: with {} for the token; headers: their names with _ for -."""
    there = urlsplit(address)
    connection = HTTPConnection(there.hostname, there.port, timeout=20)
    token = there.path.strip("/")
    connection.putrequest(method, there.path if path is None else path.replace("{}", token), skip_host=True)
    for name, value in ({"Host": "127.0.0.1:{}"} | headers).items():
        connection.putheader(name.replace("_", "-"), value.replace("{}", str(there.port)))
    connection.endheaders()
    response = connection.getresponse()
    return response, response.read().decode()


def losses(text: str) -> torch.Tensor:
    """Return what a page says of each token but the first."""
    return torch.tensor([loss for _, _, loss in content(text)["checkpoints"][0]["predictions"][:-1]])


@pytest.mark.parametrize(
    "status, sent",
    [
        (200, {}),
        (200, {"Host": "localhost:{}", "Sec_Fetch_Site": "same-origin"}),
        (200, {"path": "/{}/?text=a", "Sec_Fetch_Site": "none"}),
        (403, {"path": "/"}),
        (403, {"path": "/{}"}),
        (403, {"path": "/x{}/"}),
        (403, {"path": "/{}/../../../../etc/passwd"}),
        (403, {"path": "/%7B%7D/"}),
        (403, {"Host": "evil.example:{}"}),  # a name that its owner leads to 127.0.0.1
        (403, {"Host": "127.0.0.1"}),
        (403, {"Host": "127.0.0.1:1"}),
        (403, {"Host": ""}),
        (403, {"Sec_Fetch_Site": "cross-site"}),
        (501, {"method": "POST"}),
        (501, {"method": "PUT"}),
        (501, {"method": "OPTIONS", "Origin": "https://evil.example"}),
        (414, {"path": "/{}/?text=" + "a" * 70_000}),
    ],
    ids=str,
)
def test_only_who_knows_the_address_is_answered(serving, status: int, sent: dict[str, str]) -> None:
    asked = []
    address = serving(lambda **given: asked.append(given) or "a page")
    response, text = ask(address, **sent)
    assert response.status == status and (text == "a page") == (status == 200) == (len(asked) == 1)
    assert not [name for name in response.headers if name.lower().startswith("access-control")]
    assert address.split("/")[3] not in text
    if status == 200:
        assert response.headers["Referrer-Policy"] == "no-referrer"


def test_a_token_is_long_and_drawn_anew_and_only_this_machine_is_listened_to(serving, capsys) -> None:
    first, second = (urlsplit(serving(str)) for _ in range(2))
    assert first.path != second.path and len(first.path) >= 43
    assert capsys.readouterr().out.splitlines()[0] == f"live:   {first.geturl()}"
    with socket.socket() as other:  # an address of this machine too, as that of its network is
        assert other.connect_ex(("127.0.0.2", first.port)) != 0


def test_who_is_silent_or_leaves_does_not_keep_others_waiting(serving, capfd) -> None:
    address = serving(lambda: "a page" * 1_000_000)
    there = urlsplit(address)
    for words in (b"", b"GET /", f"GET {there.path} HTTP/1.1\r\nHost: {there.netloc}\r\n\r\n".encode()):
        silent = socket.create_connection((there.hostname, there.port))
        silent.sendall(words)
        if words.endswith(b"\n"):
            silent.close()
        start = time.monotonic()
        assert ask(address)[0].status == 200 and time.monotonic() - start < 5
        silent.close()
    for words in (b"GET /", f"GET {there.path} HTTP/1.1\r\nHost: {there.netloc}\r\n\r\n".encode()):
        gone = socket.create_connection((there.hostname, there.port))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets the connection
        gone.sendall(words)
        gone.close()
    dribbling = socket.create_connection((there.hostname, there.port))
    dribbling.sendall(f"GET {there.path} HTTP/1.1\r\n".encode())

    def dribble() -> None:
        with contextlib.suppress(OSError):
            for _ in range(100):
                dribbling.sendall(b"X-Y: Z\r\n")
                time.sleep(0.1)

    threading.Thread(target=dribble, daemon=True).start()
    start = time.monotonic()
    assert ask(address)[0].status == 200 and time.monotonic() - start < 5
    dribbling.close()
    assert not capfd.readouterr().err


def test_a_page_of_an_earlier_start_says_what_to_do(serving) -> None:
    response, text = ask(serving(str), path="/earlier/")
    assert response.status == 403 and text == "this address is of another start: open the one that is printed now"


def test_what_cannot_be_is_one_sentence_and_no_markup(serving) -> None:
    def answer(text: str) -> str:
        raise UserError(f"there is no {text}")

    address = serving(answer)
    for _ in range(2):  # it goes on
        response, text = ask(address, path="/{}/?text=%3Cimg%20src=x%3E%0A%E7%8C%AB")
        assert response.status == 400 and text == "there is no &lt;img src=x&gt;\n猫"


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"text": "a"}, "text: attention is between tokens: give a text of two or more"),
        ({"other": "a"}, "other: attention is between tokens"),
        ({"zero": "9.9"}, "there is no head 9.9: the model has 2 layers of 3 heads"),
        ({"what": "0.1"}, "a head's output becomes zero or mean, got 'what'"),
        ({"what": "1"}, "a head's output becomes zero or mean, got 'what'"),
        ({"text": TEXT, "patch": "0.1"}, "other: attention is between tokens"),
        ({"text": TEXT, "other": "one", "patch": "0.1"}, "a patch needs as many tokens: the text has 11, the other 3"),
        ({"zero": " "}, "there is no head"),
        ({"text": 2 * TEXT}, "a file has room for 0 heads of 11 tokens"),
    ],
)
def test_bad_input_is_one_sentence(answer, monkeypatch, asked: dict[str, str], message: str) -> None:
    if asked == {"text": 2 * TEXT}:
        monkeypatch.setattr(page, "MOST_WEIGHTS", 67)
    with pytest.raises(UserError, match=message):
        answer(**asked)


@torch.no_grad()
def test_heads_become_zero_their_mean_or_those_of_the_other_text(answer, straight: Path) -> None:
    """Compare with a model whose output projections are given other numbers."""
    model, tokenizer = GPT.from_pretrained(straight).eval(), load_tokenizer(find_checkpoint(straight).directory)
    D = model.config.head_dim
    text, other = (torch.tensor([tokenizer.encode(each).tolist()]) for each in (TEXT, OTHER))
    given = {}
    projections = [block.attention.o_proj for block in model.blocks]
    for layer, projection in enumerate(projections):
        projection.register_forward_pre_hook(lambda _, inputs, layer=layer: given.update({layer: inputs[0]}))
    model(other)
    of_other = dict(given)

    def replaced(layer: int, head: int, way: str) -> Callable:
        def replace(_: object, inputs: tuple) -> torch.Tensor:
            x = inputs[0].clone()
            part = x[..., head * D : (head + 1) * D]
            own = of_other[layer][..., head * D : (head + 1) * D]
            part[:] = {"zero": 0 * part, "mean": part.mean(1, keepdim=True), "patch": own}[way]
            return x

        return replace

    def expected() -> torch.Tensor:
        return F.cross_entropy(model(text)[0, :-1], text[0, 1:], reduction="none")

    asked = {"text": TEXT, "other": OTHER}
    before = answer(**asked)
    torch.testing.assert_close(losses(before), expected(), rtol=0, atol=2e-6)
    for layer, head, way in ((0, 0, "zero"), (0, 2, "zero"), (0, 1, "mean"), (1, 2, "patch")):
        plain = expected()
        projections[layer].register_forward_pre_hook(replaced(layer, head, way))
        asked[way] = f"{asked.get(way, '')} {layer}.{head}"
        after = answer(**asked)
        torch.testing.assert_close(losses(after), expected(), rtol=0, atol=2e-6)
        assert (expected() - plain).abs().max() > 2e-5
    for name in ("1.1", "influence"):  # what is seen is of the changed model
        shown = [re.search(rf'id="0/{re.escape(name)}">(\S+)<', each)[1] for each in (before, after)]
        assert shown[0] != shown[1]


def test_a_page_that_is_saved_has_no_form_and_a_hostile_text_is_text(answer, run, straight: Path, tmp_path) -> None:
    text = "</textarea><script>"
    (tmp_path / "text").write_text(text)
    run(inspect_attention, straight, "-o", tmp_path / "a.html", "--text", f"@{tmp_path / 'text'}", "--live")
    saved = (tmp_path / "a.html").read_text()
    assert not re.search("textarea|fetch|connect-src|drawLive", saved)
    served = inspect_attention.serve.__self__[-1]()
    assert f"\n{text}</textarea>".replace("<", "&lt;", 2).replace(">", "&gt;", 2) in served
    assert served.count("<textarea") == served.count("</textarea>") == 2
    assert "connect-src 'self'; form-action 'none'\">" in served


def test_the_first_page_is_of_what_was_inspected(answer, run, straight: Path, tmp_path: Path) -> None:
    """With what the model wrote, and the probe's scores and upstream heads, also of a changed model."""
    words = ["--text", TEXT[:5], "--generate", 3, "-o", tmp_path / "a.html", "--live"]
    assert run(inspect_attention, straight, *words).exit_code == 0
    saved = content((tmp_path / "a.html").read_text())
    served = inspect_attention.serve.__self__[-1]
    for asked in ({}, {"zero": "0.0"}):
        first = content(served(**asked))
        assert first["labels"] == saved["labels"] and len(first["labels"]) == 8 and first["given"] == 5
        for old, new in zip(saved["checkpoints"][0]["heads"], first["checkpoints"][0]["heads"], strict=True):
            assert new["upstream"] == old["upstream"] and new["scores"]["induction"] == old["scores"]["induction"]


@pytest.mark.long
def test_ctrl_c_ends_it_at_once(straight: Path) -> None:
    """Even while a page is made."""
    words = ["inspect_attention.py", straight, "--text", TEXT, "--live"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts with & ignore it
    process = subprocess.Popen([sys.executable, *words], **options, env=os.environ | {"BROWSER": "true"})
    signal.signal(signal.SIGINT, before)
    address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
    response, text = ask(address)
    assert response.status == 200 and content(text)["labels"][:2] == ["1", "2"]
    with socket.create_connection(("127.0.0.1", urlsplit(address).port)) as waiting:
        waiting.sendall(f"GET {urlsplit(address).path} HTTP/1.1\r\nHost: {urlsplit(address).netloc}\r\n\r\n".encode())
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err.splitlines()[-1] == "inspect_attention.py: interrupted"
    assert "Traceback" not in err and time.monotonic() - start < 5


@pytest.mark.long
def test_a_person_tries_a_text_changes_a_head_and_goes_back(browser, serving, answer) -> None:
    complaints = []
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    address = serving(answer)
    tab.goto(address)

    def rows(columns: int) -> list[list[str]]:
        """Wait for the predictions, and return their lines."""
        tab.locator(f"#predicted tbody tr:first-child td:nth-child({columns}):last-child").wait_for(timeout=9000)
        return [line.split("\t") for line in tab.locator("#predicted tbody").inner_text().splitlines()]

    def focus_is_on(name: str) -> None:
        tab.wait_for_function("(name) => document.activeElement.name === name", arg=name, timeout=5000)

    assert len(rows(3)) == 11 and tab.locator("#problem").inner_text() == ""
    tab.locator("#heads [aria-pressed=false]").first.click()
    head = tab.locator("#chosen").inner_text()
    tab.locator("[name=text]").fill("1 \nis <b>")
    tab.keyboard.press("Shift+Enter")  # a line more
    tab.keyboard.press("Enter")
    tab.wait_for_url(lambda url: f"/?text=1+%0Ais+%3Cb%3E%0A#{head}/9" in url)
    before = rows(3)
    focus_is_on("text")
    assert tab.evaluate("document.activeElement.selectionStart") == 10  # to write on
    assert [line[0] for line in before] == [*"1␣↵is␣<b>↵"]
    tab.locator("#views label", has_text="logits").click()
    assert tab.locator(".columns p").first.inner_text() == "makes likeliest after ↵ (9)"
    tab.locator("[name=zero]").click()
    tab.wait_for_url(lambda url: f"&zero={head}#{head}/" in url)
    changed = rows(5)
    focus_is_on("zero")
    assert [line[:3] for line in changed] == before
    tab.locator("#predicted th", has_text="next, changed (pink worse, green better)").wait_for()
    assert tab.locator(".columns p").first.inner_text() == "not added; would make likeliest after ↵ (9)"
    assert tab.locator(".columns p").last.inner_text() == "not added; would make unlikeliest (logits)"
    assert tab.locator("#kind").inner_text() == "its output is not added (zero)"
    assert tab.locator("[name=zero]").get_attribute("aria-pressed") == "true"
    tab.locator("[name=other]").fill("2 \nis <b>\n")
    tab.locator("[name=patch]").click()
    tab.wait_for_url(lambda url: f"&other=2+%0Ais+%3Cb%3E%0A&patch={head}#{head}/" in url)
    assert [line[5] for line in rows(8)] == [*"2␣↵is␣<b>↵"]
    focus_is_on("patch")
    for width in (375, 1280):  # in one column, or side by side; tokens may be long
        tab.set_viewport_size({"width": width, "height": 800})
        wide = """(parts) => parts.map((part) => {
            for (const token of part.querySelectorAll("bdi")) token.textContent = "w".repeat(29);
            return part.scrollWidth - part.clientWidth;
        })"""
        assert tab.locator("#predicted, #asked, #asked textarea").evaluate_all(wide) == [0] * 4
    for _ in range(2):
        tab.go_back()
    assert rows(3) == before and tab.locator("#changes").inner_text() == ""
    tab.go_forward()
    assert rows(5) == changed and tab.locator("[name=other]").input_value() == ""
    tab.locator("#changes button").press("Enter")
    assert rows(3) == before
    focus_is_on("mean")  # before patch, which has no other text, and the button that is gone
    assert complaints == []
    tab.locator("[name=text]").fill("a")
    tab.locator("button", has_text="read").click()
    tab.get_by_text("text: attention is between tokens: give a text of two or more").wait_for()
    tab.locator("#heads button").first.click()
    assert tab.locator("#problem").inner_text() == ""
    assert math.isclose(tab.evaluate("document.documentElement.scrollWidth"), 1280)
    tab.route("**", lambda route: route.abort("connectionrefused"))
    tab.locator("[name=zero]").click()
    tab.get_by_text("nobody answers: start it again by inspect_attention.py ... --live").wait_for()
    focus_is_on("zero")
    tab.close()

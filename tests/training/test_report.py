"""What a run tells: its report stays text and costs nothing, and wandb gets what metrics.jsonl gets, and no more."""

import json
import os
import re
import shutil
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn.functional as F

import train
import tril.weights
from cli.options import parse
from cli.script import printable
from model.checkpoint import step_directories
from tests.conftest import metrics, same_bits, tiny_run, weights
from training.options import Config, to_toml
from training.report import HEADS as CHARTS
from training.report import MOST_POINTS, Tracker, flat, read_metrics, report_page
from tril import Captured

HOSTILE = "</pre><script>alert(1)</script><img onerror=alert(1) src=x><!--\x1b[31m\x00\u202e{{ name }}{% %}'\"\\&lt;"
SEEN = HOSTILE.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\u202e", "\\u202e")  # as escapes
TAGS = {*"html head meta title style body h1 h2 p dl div dt dd pre main section figure figcaption".split()}
TAGS |= {*"svg marker circle path polyline text".split()}
HEADS = {"induction": [[0.5, None, 0.25], [0.9, 0.0, 0.1]], "sink": [[None] * 3] * 2}  # of 2 layers of 3 heads


EVALUATED = {"val_loss": 5.0, "val_bits_per_byte": 2.0, "train_seconds": 13.0}
TRAINED = {"train_loss": 4.0, "grad_norm": 0.7, "tokens_per_second": 1234.5}
LINES = [{"step": 0, **EVALUATED, "heads": HEADS, "sample": HOSTILE}, {"step": 7, **TRAINED}, {"step": 11, **EVALUATED}]


def make_run(directory: Path, lines: list[dict] = LINES, **options: str) -> Path:
    """A run directory without a checkpoint, of 17 steps."""
    directory.mkdir()
    config = train.read_config(["--train.max_steps=17", *(f"--{name}={value}" for name, value in options.items())])
    (directory / "config.toml").write_text(to_toml(config))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


class Page(HTMLParser):
    """The report of a run directory, written anew: its (tag, attributes), and for each tag the texts in it."""

    def __init__(self, directory: Path):
        super().__init__()
        self.tags, self.texts = [], defaultdict(list)
        about = {"certificate": {}, "environment": {}}
        for checkpoint in step_directories(directory)[:1]:
            about = json.loads((checkpoint / "manifest.json").read_text())
        self.feed(report_page(directory, parse(Config, [], directory / "config.toml"), read_metrics(directory), about))
        self.summary = self.texts["p"][0].split(" · ")
        self.entries = dict(zip(self.texts["dt"], [*filter(None, self.texts["dd"]), *self.texts["pre"]], strict=True))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        if data.strip():  # not the space between two elements
            self.texts[self.tags[-1][0]][-1] += data


def test_a_finished_run_is_shown_in_full(straight: Path) -> None:
    page, losses = Page(straight), metrics(straight, "val_loss")
    source = re.search('source = "(.*)"', (straight / "config.toml").read_text())[1]
    assert page.summary == ["gpt2", "2 layers of 15", source, "cpu", "float32", "step 12 of 12"]
    assert page.texts["h1"] == [page.texts["title"][0]] == ["straight"]
    assert sorted(page.texts["title"][1:]) == sorted(len(CHARTS) * ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"])
    assert page.entries["Validation loss, nats a token"] == f"{losses[12]:.4f}"
    assert page.entries["Best checkpoint"] == f"step-{min((4, 8, 12), key=losses.get):08d}"
    assert page.entries["causal"].startswith("yes, none of the ")
    assert page.entries["config.toml"] == (straight / "config.toml").read_text()
    assert page.texts["pre"][0].endswith(f"inspect_attention.py {straight} -o {straight}/heads.html")
    # `make train` writes the page of the heads after this one: the link is there before.
    assert ("a", {"href": "heads.html"}) in page.tags
    assert "once the last command of Next has written that page" in page.texts["a"][0]
    (straight / "heads.html").touch()
    page = Page(straight)
    assert ("a", {"href": "heads.html"}) in page.tags and "last command" not in page.texts["a"][0]
    for step, text in metrics(straight, "sample").items():
        assert page.entries[f"step {step}: {losses[step]:.4f} nats a token"] == printable(text)
    shutil.rmtree(straight / "checkpoints" / "step-00000012")
    assert Page(straight).texts["pre"][0].startswith(f"python train.py --resume {straight}\n")


def test_text_of_the_run_stays_text(tmp_path: Path) -> None:
    source = f"hf:{HOSTILE}".replace("\x00", "").replace("'", "")
    page = Page(make_run(tmp_path / "<b>&amp;", **{"data.source": source, "train.sample_prompt": "<b>"}))
    assert page.texts["h1"] == ["<b>&amp;"] and SEEN in page.entries.values()
    assert page.entries["Latest speed, tokens a second"] == "1,234"
    assert '"<b>"' in page.entries["config.toml"] and "\\x1b[31m" in page.summary[2]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(map("".join, page.texts.values())))
    assert {tag for tag, _ in page.tags} == TAGS
    assert not {"href", "style", "src", "onerror"} & {name for _, attributes in page.tags for name in attributes}
    nonce = dict(page.tags)["style"]["nonce"]
    assert len(nonce) == 43 and nonce != dict(Page(tmp_path / "<b>&amp;").tags)["style"]["nonce"]
    policy = f"default-src 'none'; style-src 'nonce-{nonce}'"
    assert page.tags[3] == ("meta", {"http-equiv": "Content-Security-Policy", "content": policy})


def test_curves_and_labels_are_where_their_values_are(tmp_path: Path) -> None:
    lines = [{"step": step, "train_loss": loss} for step, loss in [(3, 2.0), (5, None), (7, 12.0), (14, 7.0)]]
    left, right, top, bottom = 50, 460, 10, 214  # the edges of the plot

    def drawn(directory: Path, lines: list[dict]) -> tuple[dict[str, str], list[str], list[str]]:
        """Return the points of the curves, the places of the lines of the grid, and the labels."""
        page = Page(make_run(directory, lines))
        points = {given["class"]: given["points"] for tag, given in page.tags if tag == "polyline"}
        return points, [given["d"] for tag, given in page.tags if tag == "path"], page.texts["text"]

    points, grid, labels = drawn(tmp_path / "loss", lines)
    first = round(left + 3 / 14 * (right - left), 1)
    middle = f"{(left + right) / 2},{top}.0"
    assert points["train_loss"].split() == [f"{right}.0,{(top + bottom) / 2}", middle, f"{first},{bottom}.0"]
    assert grid[0] == f"M{left} {bottom}.0H{right}" and grid[-1] == f"M{left} {top}.0H{right}"
    assert labels == ["2", "4.5", "7", "9.5", "12", "0", "4", "7", "10", "14", "train_loss"]
    points, _, labels = drawn(tmp_path / "constant", [{"step": 1, "grad_norm": 0.0}])
    assert points["grad_norm dot"].endswith(f",{bottom}.0 ") and labels[-6:] == ["0", "1", "2", "3", "4", "grad_norm"]


def test_a_long_run_is_shown_by_so_many_points_the_newest_among_them(tmp_path: Path) -> None:
    of_step = lambda step: {"heads": {"sink": [[step / 1000, 0.5]]}, "val_loss": 1000.0 - step}  # noqa: E731
    page = Page(make_run(tmp_path / "run", [{"step": step, **of_step(step)} for step in range(0, 1000, 3)]))
    points = [given["points"].split() for tag, given in page.tags if tag == "polyline"]
    assert len(points) == 3 and all(MOST_POINTS / 2 < len(places) <= MOST_POINTS for places in points)
    assert all(float(places[0].split(",")[0]) == edge for places, edge in zip(points, (460, 158, 158), strict=True))


def test_heads_that_are_not_the_kernels_are_left_out_and_the_run_goes_on(
    run, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch
) -> None:
    proofs = Page(straight).texts["p"][3:]
    assert proofs == [f"step {step}: {said}" for step, said in metrics(straight, "heads_proof").items()][::-1]
    assert all(re.fullmatch(r"step \d+: weights match the fused kernel: max row error \d.\de-0\d", p) for p in proofs)
    formula = tril.weights.attention_weights
    monkeypatch.setattr(
        tril.weights, "attention_weights", lambda q, *others: formula(10 * F.normalize(q, dim=-1), *others)
    )
    asked, verify = [], Captured.verify
    monkeypatch.setattr(Captured, "verify", lambda self: asked.append(self) or verify(self))
    result = run(train, *tiny_run(corpus_file, tmp_path / "run"))
    assert len(asked) == 4 * (1 + 2 * 8)  # every text and probe: ranks that read them together stay together
    left_out = metrics(tmp_path / "run", "heads_proof")
    assert result.exit_code == 0 and list(left_out) == [0, 4, 8, 12] and not metrics(tmp_path / "run", "heads")
    for reason in left_out.values():
        assert reason.startswith("heads are left out: layer 0: the weights shown are not those of the kernel, a row is")
        assert f"{'':12} | {reason}\n" in result.out
    page = Page(tmp_path / "run")
    assert page.texts["p"][2:] == [f"step {step}: {reason}" for step, reason in left_out.items()][::-1]
    assert not page.texts["figcaption"] and same_bits(weights(straight), weights(tmp_path / "run"))


def test_it_is_written_when_something_is_new_and_its_failure_costs_a_line(
    run, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch
) -> None:
    seen = []

    def failing(directory: Path, config: Config, lines: list[dict], about: dict) -> None:
        seen.append(lines[-1]["step"] if lines else 0)
        raise RuntimeError("a\nbug\x1b")

    monkeypatch.setattr("training.run.report_page", failing)
    result = run(train, *tiny_run(corpus_file, tmp_path / "run"))
    assert seen == [0, 0, 4, 4, 8, 8, 12, 12]  # at the start, at each evaluation, and at each checkpoint
    assert result.exit_code == 0 and result.out.count("there is no new report.html: ") == 8 and "\x1b" not in result.out
    assert same_bits(weights(straight), weights(tmp_path / "run"))


def test_lines_are_sent_flat_until_the_first_failure_which_costs_a_line(monkeypatch, tmp_path: Path, capsys) -> None:
    sent, axes = [], []

    def log(values: dict) -> None:
        sent.append(values)
        if values["step"] > 3:
            raise ConnectionError("gone\nand a hint")

    run = SimpleNamespace(log=log, define_metric=lambda *name, **axis: axes.append((name, axis)), id="1", sync_dir="")
    asked = {}
    init = lambda **options: asked.update(options) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DATA_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert Tracker("disabled", None, tmp_path, {}).run is None
    tracker = Tracker("online", None, tmp_path, {})
    assert (asked["project"], asked["name"], asked["mode"]) == ("mine", tmp_path.name, "offline")
    assert tracker.run_id == "1" and axes == [(("*",), {"step_metric": "step"})]
    tracker.call("log", flat({"step": 3, "val_loss": 2.5, "heads": {"sink": [[0.1, 0.2], [None, 0.4]]}}))
    capsys.readouterr()
    for step in (4, 5):
        tracker.call("log", {"step": step})
    tracker.call("finish", 0)  # the fake has no such method
    heads = {"sink/0.0": 0.1, "sink/0.1": 0.2, "sink/1.0": None, "sink/1.1": 0.4}
    assert sent == [{"step": 3, "val_loss": 2.5, **heads}, {"step": 4}]
    said = "wandb is off, metrics.jsonl has everything: ConnectionError('gone\\nand a hint')\n"
    assert capsys.readouterr().out == said


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The real one, in a home of its own and without settings from outside; it ends after the test."""
    import wandb

    for name in ("exit", "excepthook"):  # wandb replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    for name in {"WANDB_DATA_DIR", *(name for name in os.environ if name.startswith("WANDB_"))}:
        monkeypatch.setenv(name, "")  # so that the end of the test also unsets what the tracker sets
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-host")
    yield
    wandb.teardown(1)


@pytest.mark.long
def test_a_run_and_its_resumption_are_one_run(wandb, run, corpus_file: Path, tmp_path: Path) -> None:
    out, quiet = tmp_path / "run", {"train__eval_every": 100, "train__wandb": "offline"}
    assert run(train, *tiny_run(corpus_file, out, **quiet, train__max_steps=7)).exit_code == 0
    time.sleep(1.01 - time.time() % 1)  # wandb names a session by its second
    result = run(train, "--resume", out, "--train.max_steps", 12)
    assert result.exit_code == 0 and "wandb is off" not in result.out
    first, second = (path.read_bytes() for path in sorted(out.glob("wandb/offline-run-*/*.wandb")))
    trainer = json.loads((out / "checkpoints" / "step-00000012" / "trainer.json").read_text())
    assert trainer["wandb_id"].encode() in first and trainer["wandb_id"].encode() in second
    assert b"previous/1.2" in second
    for step, loss in metrics(out, "train_loss").items():
        assert repr(loss).encode() in (first if step <= 7 else second)
    for private in (sys.executable, "train.py", "name-of-host"):
        assert private.encode() not in first + second
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.parent.name != "logs"]

"""The report of a run: what is in it, when it is written, that it costs no run, and what a browser makes of it."""

import base64
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import train
import training.report
from configs import to_toml, visible
from model import GPT, disk
from tests.conftest import metrics, same_bits, tiny_run, weights
from training.config import TrainError
from training.report import MOST_LETTERS, MOST_POINTS, MOST_SCORES, read_heads, thin, with_peaks, write_report

ROOT = Path(__file__).parent.parent
HOSTILE = "</script><img onerror=alert(1) src=x><!--<script>\u2028\x1b[31m\x00\u202e{{policy}}{{run}}'\"\\&lt;"
SEEN = HOSTILE.replace("\x1b", "\\x1b").replace("\x00", "\\x00")  # control characters as escapes
L, H = 2, 3


def validation(step: int, **more: object) -> dict:
    scores = {"entropy": 0.5, "previous": step / 100, "induction": 0.01}
    heads = {name: [[x * (1 + i + j / 7) for j in range(H)] for i in range(L)] for name, x in scores.items()}
    loss = {"val_loss": 5 - step / 10, "val_bits_per_byte": 2 - step / 30}
    return {"step": step, **loss, "train_seconds": 13.0 * step, "heads": heads, **more}


def training_line(step: int, **more: object) -> dict:
    speed = {"tokens": 77 * step, "tokens_per_second": 1234.5 + step}
    return {"step": step, "train_loss": 5 - step / 9, "lr": 0.01 / step, "grad_norm": 0.7, **speed, **more}


LINES = [
    validation(0),
    {"step": 0, "sample": HOSTILE},
    *(training_line(step) for step in range(1, 12)),
    {"step": 8, "loss_spike": 4.75, "median_loss": 4.25, "windows": [[3, 5]]},
    validation(11),
    {"step": 11, "sample": "7 is odd.\n8 is even."},
]


def make_run(directory: Path, lines: list[dict] = LINES, **options: object) -> Path:
    """A run directory without a checkpoint; it is of 17 steps."""
    directory.mkdir()
    config = train.read_config(["--train.max_steps", "17", *(f"--{name}={value}" for name, value in options.items())])
    (directory / "config.toml").write_text(to_toml(config))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def content(directory: Path) -> dict:
    """What the page in a run directory says of it."""
    return json.loads(re.search(r'id="run">(.*?)</script>', (directory / "report.html").read_text(), re.DOTALL)[1])


# ---- What is in the file.


def test_a_finished_run_is_told_in_full(run, corpus_file: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    run(train, *tiny_run(corpus_file, straight))
    told = content(straight)
    num_parameters = sum(p.numel() for p in GPT.from_pretrained(straight).parameters())
    size, where = f"gpt2, {num_parameters:,} parameters", "cpu, float32"
    assert told["summary"] == f"{size} · {corpus_file}, bytes · {where} · step 12 of 12 · finished"
    assert (told["title"], told["state"], told["step"], told["max_steps"]) == ("straight", "finished", 12, 12)
    charts = {line["name"]: line for chart in told["charts"] for line in chart["lines"]}
    keys = {"training": "train_loss", "validation": "val_loss", "bits a byte": "val_bits_per_byte"}
    keys |= {"learning rate": "lr", "norm": "grad_norm", "tokens a second": "tokens_per_second"}
    assert charts.keys() == keys.keys()
    for name, key in keys.items():
        logged = metrics(straight, key)
        assert charts[name]["steps"] == [*logged] and charts[name]["all"] == len(logged)
        assert charts[name]["values"] == pytest.approx([*logged.values()], rel=1e-5)
    assert told["samples"] == [[step, visible(text)] for step, text in metrics(straight, "sample").items()]
    heads = metrics(straight, "heads")
    assert told["heads"]["steps"] == [0, 4, 8, 12] and told["heads"]["scores"].keys() == heads[12].keys()
    assert told["heads"]["scores"]["previous"][2][1] == pytest.approx(heads[8]["previous"][1], rel=1e-2)
    assert told["config"] == (straight / "config.toml").read_text()
    about = dict(told["about"])
    assert about["causal"].startswith("yes, each position sees its past") and about["dtype"] == "float32"
    figures = {name: value for name, value, _ in told["figures"]}
    assert figures["Validation loss"] == f"{metrics(straight, 'val_loss')[12]:.4f}" and figures["Tokens"] == "792"
    assert [command.split(" ", 1)[1] for _, command in told["commands"]] == [
        f'sample.py {straight} --prompt "..."',
        f"inspect_attention.py {straight} -o heads.html",
        f"train.py {straight}/config.toml --train.max_steps 24 --train.out_dir {straight}_longer",
        f"-m training.report {straight}",
    ]


def test_the_state_is_that_of_the_directory(straight: Path) -> None:
    lock = os.open(straight, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_report(straight)
    assert content(straight)["state"] == "running"
    os.close(lock)
    shutil.rmtree(straight / "checkpoints" / "step-00000012")
    write_report(straight)
    told = content(straight)
    assert told["state"] == "interrupted" and told["summary"].endswith("step 12 of 12 · interrupted")
    assert told["commands"][0][0] == "Go on from step 8" and told["commands"][0][1].endswith(f"--resume {straight}")


def test_a_run_without_a_checkpoint_or_metrics_has_a_report(tmp_path: Path) -> None:
    told = content(write_report(make_run(tmp_path / "new", lines=[])).parent)
    assert told["charts"] == told["samples"] == told["figures"] == [] and told["heads"] is None
    assert [what for what, _ in told["commands"]] == ["Go on from step 0", "Make this page again"]
    (tmp_path / "new" / "metrics.jsonl").unlink()
    write_report(tmp_path / "new")
    old = [{name: value for name, value in line.items() if name != "heads"} for line in LINES if "sample" not in line]
    assert len(content(write_report(make_run(tmp_path / "old", old)).parent)["charts"]) == 5


def test_text_of_the_run_stays_text(tmp_path: Path) -> None:
    options = {"data.source": f"hf:{HOSTILE}".replace("\x00", "").replace("'", ""), "train.sample_prompt": "<b>"}
    text = write_report(make_run(tmp_path / "<b>&amp;", **options)).read_text(encoding="utf-8")
    told = content(tmp_path / "<b>&amp;")
    assert told["title"] == "<b>&amp;" and told["samples"][0] == [0, SEEN] and "<b>" in told["config"]
    assert text.count("</script>") == text.count("<script") == 2 and "<img" not in text and "<b>" not in text
    assert "\\x1b" in told["summary"] and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", json.dumps(told))
    policy = re.search(r'Security-Policy" content="(.*?)"', text)[1]
    for tag in ("script", "style"):
        (only,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(only.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    code = training.report.TEMPLATE.read_text(encoding="utf-8")
    assert not [word for word in ("https:", "src=", "href=", "import(", "innerHTML", "url(", "eval(") if word in code]


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="is not the directory of a run: it has no config.toml"):
        write_report(tmp_path)
    bad = [{"step": "x"}, {"step": 3, "sample": 5}, {"step": 3, "train_loss": "x"}, {"step": 3, "heads": 7}]
    bad += [{"step": 3, "heads": {"entropy": 7}}, {"step": 3, "loss_spike": 1}, {"step": 3, "val_loss": 2.5}]
    for number, line in enumerate(bad):
        directory = make_run(tmp_path / str(number), [*LINES, line])
        if line["step"] == "x":
            write_report(directory)  # which ends the metrics there, as for a resume
            continue
        with pytest.raises(TrainError, match="does not hold the files of a run"):
            write_report(directory)
        assert not (directory / "report.html").exists()
    (directory / "config.toml").write_text("[train]\nmax_steps = ")
    with pytest.raises(TrainError, match="TOMLDecodeError"):
        write_report(directory)


def test_a_damaged_checkpoint_is_said_to_be(straight: Path) -> None:
    for name in ("manifest.json", "model.safetensors"):
        (straight / "checkpoints" / "step-00000012" / name).write_bytes(b"{}")
        write_report(straight)
        assert dict(content(straight)["about"])["causal"].startswith("unknown, step-00000012 cannot be read: ")


def test_a_long_run_makes_no_long_page(tmp_path: Path) -> None:
    lines = [training_line(step, grad_norm=None if step % 5 == 0 else 1.0) for step in range(1, 7000)]
    lines[1_234]["grad_norm"] = 99.0
    layers = [[0.123456] * 16] * 24
    evaluations = [{**validation(step), "heads": {"entropy": layers, "previous": layers}} for step in range(0, 2700, 9)]
    samples = [{"step": step, "sample": "a word " * 1_000} for step in range(0, 2700, 9)]
    path = write_report(make_run(tmp_path / "long", [*lines, *evaluations, *samples]))
    assert path.stat().st_size < 3_000_000
    told = content(path.parent)
    norm = next(line for chart in told["charts"] for line in chart["lines"] if line["name"] == "norm")
    assert len(norm["steps"]) <= MOST_POINTS + 2 and norm["all"] == 6999
    assert norm["values"][norm["steps"].index(1_235)] == 99.0 and norm["steps"][0] == 1 and norm["steps"][-1] == 6999
    assert len(told["samples"]) == 100 and told["samples"][-1] == [2691, ("a word " * 1_000)[:MOST_LETTERS]]
    times = told["heads"]["steps"]
    assert (times[0], times[-1]) == (0, 2691) and len(times) * 2 * 24 * 16 <= MOST_SCORES < 1.01 * len(times) * 768


def test_thinning_keeps_the_ends() -> None:
    for most in (2, 3, 7, 12):
        kept = thin([*range(11)], most)
        assert len(kept) == min(most, 11) and (kept[0], kept[-1]) == (0, 10) and kept == sorted({*kept})
    points = [(step, math.sin(step) if step % 7 else None) for step in range(101)]
    kept = with_peaks(points, 20)
    known = [point for point in points if point[1] is not None]
    assert len(kept) <= 22 and (kept[0], kept[-1]) == (points[0], points[-1]) and kept == sorted(kept)
    assert {min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])} <= {*kept}
    assert with_peaks(points[:20], 20) == points[:20]
    missing = {"step": 5, "heads": {"entropy": [[None, float("nan"), 0.12345]]}}
    assert read_heads([missing])["scores"] == {"entropy": [[[None, None, 0.123]]]}


# ---- When it is written.


def test_it_is_written_at_each_evaluation_and_checkpoint(run, corpus_file, tmp_path, monkeypatch) -> None:
    out, seen, write = tmp_path / "run", [], training.report.write_report

    def spy(directory: Path) -> Path:
        path = write(directory)
        told = content(directory)
        seen.append((told["step"], len(told["samples"]), told["state"]))
        return path

    monkeypatch.setattr(training.report, "write_report", spy)
    options = {"train__checkpoint_every": 5, "train__max_steps": 8}
    result = run(train, *tiny_run(corpus_file, out, **options))
    assert f"report: {out}/report.html\n" in result.out
    assert [(step, samples) for step, samples, _ in seen] == [(0, 0), (0, 1), (4, 2), (5, 2), (8, 3), (8, 3), (8, 3)]
    assert [state for _, _, state in seen] == [*["running"] * 6, "finished"]
    (out / "report.html").unlink()
    run(train, "--resume", out)  # which has nothing else to do
    assert seen[-1] == (8, 3, "finished") and len(seen) == 8
    assert [path.name for path in sorted(out.iterdir())] == [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "report.html",
    ]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a\nbug\x1b")])
def test_a_report_that_fails_costs_a_line(run, straight, corpus_file, tmp_path, monkeypatch, error: Exception) -> None:
    replace = disk.replace

    def full(path: Path, content: bytes) -> None:
        if path.name == "report.html":
            raise error
        replace(path, content)

    monkeypatch.setattr(disk, "replace", full)
    result = run(train, *tiny_run(corpus_file, tmp_path / "run"))
    said = [line for line in result.out.splitlines() if "there is no new report.html: " in line]
    assert result.exit_code == 0 and len(said) == 9 and type(error).__name__ in said[0] and "\x1b" not in result.out
    assert same_bits(weights(straight), weights(tmp_path / "run"))
    assert not (tmp_path / "run" / "report.html").exists()


def test_the_command_makes_it_again(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    command = [sys.executable, "-m", "training.report", str(directory)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{directory}/report.html\n", "")
    assert content(directory)["state"] == "interrupted"


# ---- The page in a browser.


@pytest.fixture
def show(browser, tmp_path: Path) -> Iterator[Callable]:
    """show(lines): the report of a run in a browser. At the end it has complained of nothing and asked for nothing."""
    complaints, requests, contexts = [], set(), []

    def open_page(lines: list[dict] = LINES, width: int = 1300, scheme: str = "light", **options: object):
        path = write_report(make_run(tmp_path / f"run{len(contexts)}", lines, **options))
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))  # a violated policy is reported here too
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.add(request.url != path.as_uri() and request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    assert complaints == [] and requests == {False}
    for context in contexts:
        context.close()


def readouts(page) -> list[str]:
    return page.locator("figure output").all_inner_texts()


def test_pointing_at_a_chart_reads_all_of_them(show: Callable) -> None:
    page = show()
    assert readouts(page)[:3] == [
        "training 3.778 at step 11, validation 3.9 at step 11",
        "1.633 at step 11",
        "9.09e−4 at step 11",
    ]
    box = page.locator("figure svg").first.bounding_box()
    place = page.evaluate("[charts[0].x(3.2), charts[0].y(5 - 3 / 9), charts[0].width]")
    page.mouse.move(box["x"] + place[0] * box["width"] / place[2], box["y"] + place[1])
    assert readouts(page)[0] == "training 4.667 at step 3, validation 5 at step 0"
    assert readouts(page)[4] == "1,238 at step 3"
    dot = page.locator("figure svg").first.locator("g circle").first
    assert float(dot.get_attribute("cy")) == pytest.approx(place[1], abs=0.1)
    page.mouse.move(5, 5)
    assert readouts(page)[4] == "1,246 at step 11"


def test_a_chart_is_read_with_the_keyboard(show: Callable) -> None:
    page = show()
    svg = page.locator("figure svg").nth(3)
    svg.focus()
    for key, step in (
        ("ArrowLeft", 10),
        ("ArrowLeft", 9),
        ("ArrowRight", 10),
        ("Home", 1),
        ("ArrowLeft", 1),
        ("End", 11),
    ):
        page.keyboard.press(key)
        assert svg.get_attribute("aria-valuetext") == f"0.7 at step {step}"
        assert svg.get_attribute("aria-valuenow") == str(step)
    tabs = page.evaluate("[...document.querySelectorAll('[tabindex], select')].length")
    names = []
    for _ in range(tabs):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-labelledby')")
        )
    assert {"strips", "metric", "texts-name", "config-name", "spikes-name"} <= {*names}


def test_curves_run_through_their_points_and_break_where_there_is_none(show: Callable) -> None:
    page = show([training_line(step, grad_norm=None if step == 5 else step) for step in range(1, 12)])
    for number, low, of_step in ((0, 5 - 11 / 9, lambda step: 5 - step / 9), (2, 0, float)):
        high = max(map(of_step, range(1, 12)))
        path = page.locator("figure svg").nth(number).locator("path.curve").get_attribute("d")
        assert path.count("M") == (1 if number == 0 else 2)
        places = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]]
        left, right, top, bottom = page.evaluate(
            f"['left', 'right', 'top', 'bottom'].map((side) => charts[{number}][side])"
        )
        steps = [step for step in range(1, 12) if step != 5 or number == 0]
        for step, (x, y) in zip(steps, places, strict=True):
            assert x == pytest.approx(left + step / 11 * (right - left), abs=0.06)
            assert y == pytest.approx(bottom - (of_step(step) - low) / (high - low) * (bottom - top), abs=0.06)


def test_heads_over_time(show: Callable) -> None:
    page = show()
    assert page.locator("#metric").input_value() == "previous"  # which has more than induction
    assert page.locator("#head").inner_text() == "head 0.0: previous 0.11 at step 11"
    strip = page.locator("#strips .strip").nth(1)
    size = strip.bounding_box()
    strip.hover(position={"x": 0.25 * size["width"], "y": 0.9 * size["height"]})
    assert page.locator("#head").inner_text() == "head 1.2: previous 0 at step 0"
    assert readouts(page)[0].endswith("validation 5 at step 0")
    page.locator("#strips").focus()
    for key, said in (("ArrowRight", "1.2: previous 0.251 at step 11"), ("ArrowUp", "1.1: previous 0.236 at step 11")):
        page.keyboard.press(key)
        assert page.locator("#head").inner_text() == f"head {said}"
    page.locator("#metric").select_option("entropy")
    assert page.locator("#head").inner_text() == "head 1.1: entropy 1.07 at step 11"
    pixel = "canvas.getContext('2d').getImageData(1, 2, 1, 1).data.join()"
    colours = page.evaluate(f"[...document.querySelectorAll('.strip canvas')].map((canvas) => {pixel})")
    assert colours[1] == "254,236,110,255" != colours[0]  # the most there is


@pytest.mark.parametrize("width", [360, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_text_is_seen_as_it_is_and_nothing_overflows(show: Callable, width: int, scheme: str) -> None:
    page = show(width=width, scheme=scheme, **{"data.source": "hf:" + "x" * 300, "train.wandb_group": "<b>"})
    first, second = page.locator("#samples pre").all_text_contents()
    assert first == SEEN and second == "7 is odd.\n8 is even."
    assert 'wandb_group = "<b>"' in page.locator("#config").text_content()
    assert page.locator("img, b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    assert page.locator("#spikes tbody").inner_text().split("\t") == ["7", "4.75", "4.25"]
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 248)"
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((e) => e.scrollHeight <= e.clientHeight + 1)")


def test_a_run_that_has_just_begun_is_shown(show: Callable) -> None:
    page = show([])
    assert page.locator("#summary").inner_text().endswith("step 0 of 17 · interrupted")
    for name in ("#heads", "#texts", "#spikes", "#figures"):
        assert page.locator(name).is_hidden()
    page = show([validation(0)])
    assert readouts(page) == ["5 at step 0", "2 at step 0"] and page.locator("#heads").is_visible()

"""The report of a run: one static HTML page about the files of the run directory.

Training writes report.html at its start, at each evaluation and checkpoint, and at its end. Nothing reads it back.

The page has no script, and its policy forbids every request. All values reach it through one template, in which Jinja
escapes markup and `visible` escapes hidden characters: samples, names and options stay text.
"""

import math
import time
import tomllib
from collections import defaultdict
from pathlib import Path

import jinja2
import numpy as np

from cli.html import own_hash
from cli.script import visible
from files import replace_file
from inspection.kinds import KINDS, name_of
from inspection.metrics import METRICS
from model.checkpoint import step_directories
from training.directory import best_validation, next_commands, read_metrics

Curves = dict[str, list[tuple[int, float]]]  # name -> (step, value) of each point

SOURCE = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
TEMPLATE = jinja2.Template(SOURCE, autoescape=True, finalize=lambda value: visible(str(value)), trim_blocks=True)
# The norm can show trouble before the loss does. The configuration determines the learning rate, one number the speed.
CHARTS = {
    "Loss, nats a token": {"training": "train_loss", "validation": "val_loss"},
    "Gradient norm": {"norm": "grad_norm"},
}
MOST_POINTS = 10_000  # of a chart
MOST_EVALUATIONS = 30


def write_report(directory: Path, about: dict) -> None:
    """Write report.html into a run directory, as a whole or not at all. A failure prints a line, and the run goes on.

    about: the certificate and the environment of a session.
    """
    try:
        page = TEMPLATE.render(read_run(directory, about), own_style=own_hash(SOURCE, "style"))
        replace_file(directory / "report.html", page.encode(errors="replace"))  # a name need not be valid UTF-8
    except Exception as error:
        print(f"there is no new report.html: {error!r:.200}")


def read_run(directory: Path, about: dict) -> dict[str, object]:
    """Return the variables of the template; see `write_report`."""
    config = (directory / "config.toml").read_text(encoding="utf-8")
    options = tomllib.loads(config)
    lines = read_metrics(directory)
    checkpoints = step_directories(directory / "checkpoints")
    saved = int(checkpoints[0].name.removeprefix("step-")) if checkpoints else 0
    finished = saved == options["train"]["max_steps"]  # which is evaluated before it is saved
    latest = {key: value for line in lines for key, value in line.items() if value is not None}
    step = max(saved, latest.get("step", 0))
    best = best_validation(lines, checkpoints)
    if best:
        latest["best"] = best["step"]
    session = about.get("certificate", {}) | about.get("environment", {})
    return {
        "name": directory.absolute().name,
        "options": options,
        "session": session,
        "step": step,
        "saved": saved,
        "finished": finished,
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "latest": latest,
        "charts": {
            title: draw_chart(curves, step) for title, keys in CHARTS.items() if (curves := read_curves(lines, keys))
        },
        "heads": {
            f"{METRICS[kind][0]}: {KINDS[kind]}": draw_chart(curves, step, 0, 1)
            for kind in KINDS
            if (curves := read_heads(lines, kind))
        },
        "sections": {
            "Next": next_commands(directory, saved, best, finished),
            "Evaluations": read_evaluations(lines),
            "Configuration": [("config.toml", config)],
            "Certificate and environment, as the session recorded them": session.items(),
        },
    }


def read_evaluations(lines: list[dict]) -> list[tuple[str, str]]:
    """Return (step and losses, sample) of at most MOST_EVALUATIONS, the newest first; the last one is among them."""
    samples = {line["step"]: line["sample"] for line in lines if "sample" in line}
    evaluations = [
        (
            "step {step:,}: {val_loss:.4f} nats a token, {val_bits_per_byte:.4f} bits a byte".format(**line),
            samples.get(line["step"], ""),
        )
        for line in lines
        if line.get("val_loss") is not None
    ]
    return evaluations[:: -1 - len(evaluations) // MOST_EVALUATIONS]


def read_curves(lines: list[dict], keys: dict[str, str]) -> Curves:
    """Return the points of the numbers with these keys, {name: key}; those without a point are left out."""
    curves = defaultdict(list)
    for line in lines:
        for name, key in keys.items():
            if line.get(key) is not None:
                curves[name].append((line["step"], line[key]))
    return curves


def read_heads(lines: list[dict], kind: str) -> Curves:
    """Return the scores of each head for a kind of head."""
    curves = defaultdict(list)
    for line in lines:
        for head, score in np.ndenumerate(line.get("heads", {}).get(kind, ())):  # of each layer and head
            if score is not None:
                curves[name_of(head)].append((line["step"], score))
    return curves


def draw_chart(curves: Curves, last_step: int, *scale: float) -> dict[str, object]:
    """Return the curves, each from its last point back, and the axes and ticks of a chart from step 0 to `last_step`.

    scale: the lowest and the highest value; by default those of the curves.
    """
    width = max(last_step, 5)  # for ticks at whole steps
    values = scale or [value for points in curves.values() for _, value in points]
    low = min(values)
    height = max(values) - low or abs(low) or 1
    return {
        "curves": {name: points[:: -1 - len(points) * len(curves) // MOST_POINTS] for name, points in curves.items()},
        "width": width,
        "low": low,
        "height": height,
        "columns": ticks(0, width),
        "rows": ticks(low, low + height),
    }


def ticks(low: float, high: float) -> list[float]:
    """Return two to six round numbers between low and high, at distances of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / 5))
    distance = next(digit * power for digit in (1, 2, 5, 10) if 5 * digit * power >= high - low)
    return [number * distance for number in range(math.ceil(low / distance), math.floor(high / distance) + 1)]

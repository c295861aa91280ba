"""The report of a run: one offline HTML page, made from the files of the run directory alone.

    python -m training.report RUN_DIR

Training writes it anew when it begins, at each evaluation and checkpoint, and at its end. It is not part of the run:
nothing reads it, and a run that cannot write it goes on.

The policy in its head lets a browser run the page's own script and forbids every request. Whatever comes from the run
enters as JSON and leaves as text; report.html has the rest.
"""

import base64
import fcntl
import hashlib
import json
import math
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs import visible
from model import ModelError, disk
from model.checkpoint import read_json, step_directories
from training.config import TrainError
from training.directory import command, next_commands, read_metrics
from training.progress import duration

TEMPLATE = Path(__file__).with_name("report.html")
CHARTS = {  # title -> name of a line -> its key in metrics.jsonl
    "Loss, nats a token": {"training": "train_loss", "validation": "val_loss"},
    "Validation, bits a byte": {"bits a byte": "val_bits_per_byte"},
    "Learning rate": {"learning rate": "lr"},
    "Norm of the gradient": {"norm": "grad_norm"},
    "Tokens a second": {"tokens a second": "tokens_per_second"},
    "Share of the peak FLOP/s": {"share": "mfu"},
    "GPU memory, GiB": {"GiB": "memory_gib"},
}
MOST_POINTS, MOST_ROWS = 1500, 100  # of a line in a chart; of samples and spikes
MOST_LETTERS = 5000  # of a sample
MOST_SCORES = 200_000  # of all heads, metrics and steps together: about a megabyte
UNSAFE = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&"})  # none of these is JSON's own


def write_report(directory: Path) -> Path:
    """Write report.html into a run directory, whole or not at all, and return its path.

    Raises TrainError if the files there are not those of a run, OSError if it cannot be written.
    """
    if not (directory / "config.toml").is_file():
        raise TrainError(f"{directory} is not the directory of a run: it has no config.toml")
    template = TEMPLATE.read_text(encoding="utf-8")
    policy = "; ".join(["default-src 'none'", *allowed(template), "base-uri 'none'", "form-action 'none'"])
    try:
        run = json.dumps(read_run(directory), allow_nan=False, separators=(",", ":")).translate(UNSAFE)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise TrainError(f"{directory} does not hold the files of a run: {error!r:.200}") from error
    disk.replace(directory / TEMPLATE.name, template.replace("{{policy}}", policy).replace("{{run}}", run).encode())
    return directory / TEMPLATE.name


def allowed(template: str) -> Iterator[str]:
    """What the policy lets run: the one script and the one style in the template, by their hashes."""
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[1]
        yield f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def read_run(directory: Path) -> dict:
    """What the page shows of a run, for JSON."""
    config = (directory / "config.toml").read_text(encoding="utf-8")
    options, lines = tomllib.loads(config), read_metrics(directory / "metrics.jsonl", math.inf)
    kept = {int(path.name.removeprefix("step-")): path for path in step_directories(directory / "checkpoints")}
    saved = max(kept, default=0)
    checkpoint = kept.get(saved)
    step, max_steps = max(saved, *(line["step"] for line in lines), 0), options["train"]["max_steps"]
    evaluated = max((line["step"] for line in lines if "val_loss" in line), default=-1)
    finished = saved == evaluated == max_steps
    state = "running" if is_training(directory) else "finished" if finished else "interrupted"
    losses = {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
    best = min(kept.keys() & losses.keys(), key=losses.get, default=None)
    num_parameters, certificate, environment = look_at(checkpoint)
    size = f", {num_parameters:,} parameters" if num_parameters else ""
    source = "the Python standard library" if options["data"]["source"] == "stdlib" else options["data"]["source"]
    summary = [options["model"]["family"] + size, f"{source}, {options['data']['tokenizer']}"]
    summary += [f"{environment['device']}, {environment['dtype']}"] if environment else []
    summary += [f"step {step:,} of {max_steps:,}", state]
    heads = [line for line in lines if "heads" in line]
    samples = [[line["step"], visible(line["sample"][:MOST_LETTERS])] for line in lines if "sample" in line]
    spikes = [line for line in lines if "loss_spike" in line]
    return {
        "title": visible(directory.absolute().name),
        "summary": visible(" · ".join(summary)),
        "state": state,
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "step": step,
        "max_steps": max_steps,
        "figures": figures(lines),
        "charts": [chart for title, keys in CHARTS.items() if (chart := read_chart(lines, title, keys))["lines"]],
        "samples": thin(samples, MOST_ROWS),
        "heads": read_heads(heads) if heads else None,
        "spikes": [[line["step"] - 1, line["loss_spike"], line["median_loss"]] for line in thin(spikes, MOST_ROWS)],
        "config": visible(config),
        "about": [[name, visible(str(value))] for name, value in {"causal": certificate, **environment}.items()],
        "commands": [
            *next_commands(directory, saved, best, max_steps, finished),
            ("Make this page again", command("-m training.report", directory)),
        ],
    }


def is_training(directory: Path) -> bool:
    """Whether a training process, perhaps this one, holds the run directory."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def look_at(checkpoint: Path | None) -> tuple[int, str, dict[str, str]]:
    """Number of parameters, certificate and environment of a checkpoint, if there is one that can be read."""
    if checkpoint is None:
        return 0, "asked before the first step; the first checkpoint says more", {}
    try:
        num_parameters = 0
        for path in checkpoint.glob("model*.safetensors"):
            with safe_open(path, "numpy") as file:
                num_parameters += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
        manifest = read_json(checkpoint / "manifest.json")
        return num_parameters, manifest["certificate"]["causal"], manifest["environment"]
    except (ModelError, OSError, SafetensorError, LookupError) as error:
        return 0, f"unknown, {checkpoint.name} cannot be read: {error!r:.200}", {}


def figures(lines: list[dict]) -> list[tuple[str, str, str]]:
    """The latest numbers of a run: name, value, remark."""
    found = []
    if validations := [line for line in lines if line.get("val_loss") is not None]:
        last, best = validations[-1], min(validations, key=lambda line: line["val_loss"])
        lowest = "the lowest" if best is last else f"lowest: {best['val_loss']:.4f} at step {best['step']:,}"
        found.append(("Validation loss", f"{last['val_loss']:.4f}", f"nats a token at step {last['step']:,}, {lowest}"))
        found.append(("Bits a byte", f"{last['val_bits_per_byte']:.4f}", "of text that was not trained on"))
        found.append(("Training time", duration(last["train_seconds"]), "without measuring and saving"))
    if speeds := [line for line in lines if "tokens_per_second" in line]:
        found.append(("Speed", f"{speeds[-1]['tokens_per_second']:,.0f}", "tokens a second, lately"))
        found.append(("Tokens", f"{speeds[-1]['tokens']:,}", "read in training"))
    return found


def read_chart(lines: list[dict], title: str, keys: dict[str, str]) -> dict:
    """A chart of the lines that there are: steps, values (None where not finite), and how many points there were."""
    curves = []
    for name, key in keys.items():
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            steps, values = zip(*with_peaks(points, MOST_POINTS), strict=True)
            curves.append({"name": name, "steps": steps, "values": rounded(values, 6), "all": len(points)})
    near = any(key.startswith("val_") for key in keys.values())  # losses are far from zero, and their end matters
    return {"title": title, "zero": not near, "lines": curves}


def read_heads(lines: list[dict]) -> dict:
    """Scores of all heads over time: {metric: [time][layer][head]}, at as many of the steps as there is room for."""
    num_scores = max(1, sum(len(row) for layers in lines[-1]["heads"].values() for row in layers))
    lines = thin(lines, max(2, MOST_SCORES // num_scores))
    scores = {metric: [rounded(line["heads"].get(metric, []), 3) for line in lines] for metric in lines[-1]["heads"]}
    return {"steps": [line["step"] for line in lines], "scores": scores}


def thin(items: list, most: int) -> list:
    """At most so many of them, evenly, with the first and the last."""
    return items if len(items) <= most else [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def with_peaks(points: list[tuple[int, float | None]], most: int) -> list[tuple[int, float | None]]:
    """At most about so many (step, value), with the first, the last, and the lowest and highest wherever some go."""
    if len(points) <= most:
        return points
    kept, size = {0, len(points) - 1}, -(-2 * len(points) // most)
    for start in range(0, len(points), size):
        known = [i for i in range(start, min(start + size, len(points))) if points[i][1] is not None]
        if known:
            kept |= {min(known, key=lambda i: points[i][1]), max(known, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def rounded(values: object, digits: int) -> object:
    """Numbers, or lists of them, to so many digits; None for what JSON cannot say."""
    if isinstance(values, list | tuple):
        return [rounded(value, digits) for value in values]
    return None if values is None or not math.isfinite(values) else float(f"{values:.{digits}g}")


if __name__ == "__main__":
    import tyro

    from configs import parse, run_script

    @dataclass(frozen=True)
    class Options:
        """Make the report of a run from what is in its directory."""

        run: tyro.conf.Positional[Path]
        """A run directory."""

    run_script(lambda: print(write_report(parse(Options, sys.argv[1:]).run)))

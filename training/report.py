"""Show a run: what to do next with it, a page of its metrics, and Weights & Biases for those who want it.

Training writes report.html at its start, at each evaluation and checkpoint, and at its end. Nothing reads it back.

The page has no script, and its policy forbids every request. All values reach it through one template, in which Jinja
escapes markup and `printable` escapes hidden characters: samples, names and options stay text.
"""

import json
import math
import os
import secrets
import shlex
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import jinja2
import numpy as np

from cli.script import printable
from model.checkpoint import step_directories
from training.options import Config, to_toml
from tril.kinds import KINDS, name_of
from tril.metrics import METRICS

SOURCE = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
TEMPLATE = jinja2.Template(SOURCE, autoescape=True, finalize=lambda value: printable(str(value)), trim_blocks=True)
# The norm can show trouble before the loss does. The configuration determines the learning rate, one number the speed.
LOSSES = {"Loss, nats a token": ("train_loss", "val_loss"), "Gradient norm": ("grad_norm",)}
MOST_ABLATED = 50
MOST_POINTS = 100  # of a curve: a page is written at each evaluation
HEADS = {f"{METRICS[kind][0]}: {KINDS[kind][0]}": (f"{kind}/",) for kind in METRICS if kind in KINDS}
WAIT_SECONDS = 15  # for wandb, at the start and at the end of a session; `wandb sync` sends later what is left then


def read_metrics(directory: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl; none if there is no file.

    A damaged line ends the reading with a printed note: the lines that a checkpoint relies on were synced before it.
    """
    path = directory / "metrics.jsonl"
    lines = []
    content = path.read_bytes() if path.exists() else b""
    for text in content.split(b"\n")[:-1]:
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"{path} is damaged after its line {len(lines)}: the rest is left out")
            break
    return lines


def best_checkpoint(directory: Path, lines: list[dict]) -> Path | None:
    """Return the checkpoint of a run with the lowest validation loss, the first one of equal losses, or None.

    lines: those of its metrics.jsonl.
    """
    losses = {f"step-{line['step']:08d}": line["val_loss"] for line in lines if line.get("val_loss") is not None}
    measured = [path for path in step_directories(directory) if path.name in losses]
    return min(reversed(measured), key=lambda path: losses[path.name], default=None)


def next_commands(directory: Path, best: Path | None, finished: bool, shape: dict) -> list[str]:
    """Return the command lines that go on from a run: resume it if it is not finished, sample, and look at its heads.

    best: see `best_checkpoint`. finished: all steps and evaluations are done. shape: the options of the model. Of one
    with many heads it would take long to measure what each is worth.
    """
    run = shlex.quote(str(directory))
    commands = [] if finished else [f"python train.py --resume {run}"]
    checkpoints = step_directories(directory)
    if checkpoints:
        model = shlex.quote(str(best)) if finished and best and best != checkpoints[0] else run
        commands.append(f'python sample.py {model} --prompt "..."')
        if shape["n_layer"] * shape["n_head"] <= MOST_ABLATED:
            commands.append(f"python inspect_attention.py {model} --ablate zero")
        commands.append(f"python inspect_attention.py {model} -o {run}/heads.html")
    return commands


def flat(record: dict) -> dict[str, object]:
    """Return a line of metrics.jsonl with the scores of heads as metric/layer.head."""
    values = dict(record)
    for metric, layers in values.pop("heads", {}).items():
        values |= {f"{metric}/{name_of(head)}": score for head, score in np.ndenumerate(layers)}
    return values


def report_page(directory: Path, config: Config, lines: list[dict], about: dict) -> str:
    """Return report.html.

    lines: those of metrics.jsonl; about: the certificate and the environment of a session.
    """
    newest_first = lines[::-1]
    latest = {key: value for line in lines for key, value in line.items() if value is not None}
    checkpoints = step_directories(directory)
    saved = int(checkpoints[0].name.removeprefix("step-")) if checkpoints else 0
    finished = saved >= config.train.max_steps  # which is evaluated before it is saved
    curves = {}
    for key in (*chain(*LOSSES.values()), "heads_proof", "heads"):
        points = [(line["step"], line[key]) for line in newest_first if line.get(key) is not None]
        curves[key] = points[:: math.ceil(len(points) / MOST_POINTS) or 1]  # evenly spread, the last one among them
    of_heads = defaultdict(list)
    for step, metrics in curves["heads"]:
        for name, score in flat({"heads": metrics}).items():
            if score is not None:
                of_heads[name].append((step, score))
    best = best_checkpoint(directory, lines)
    if best:
        latest["best"] = best.name
    values = {
        "directory": directory,
        "options": config,
        "session": about["certificate"] | about["environment"],
        "step": latest.get("step", saved),
        "saved": saved,
        "finished": finished,
        "latest": latest,
        "charts": draw_charts(curves, LOSSES),
        "heads": draw_charts(of_heads, HEADS, 0, 1),
        "proofs": curves["heads_proof"],
        "commands": next_commands(directory, best, finished, vars(config.model)),
        "newest_first": newest_first,
        "config": to_toml(config),
    }
    return TEMPLATE.render(values, nonce=secrets.token_urlsafe())


def draw_charts(curves: dict[str, list], charts: dict[str, tuple[str, ...]], *scale: float) -> dict[str, dict]:
    """Return charts by title: the curves, the lowest value and the height.

    curves: name -> (step, value) of each point, from the last one back.
    charts: title -> beginnings of the names of its curves; those without a curve are left out.
    scale: the lowest and the highest value; by default those of the curves.
    """
    drawn = {}
    for title, names in charts.items():
        found = {name: points for name, points in curves.items() if points and name.startswith(names)}
        if found:
            values = scale or [value for points in found.values() for _, value in points]
            low = min(values)
            height = max(values) - low or abs(low) or 1
            drawn[title] = {"curves": found, "low": low, "height": height}
    return drawn


class Tracker:
    """A run in wandb. The first failure prints one line and turns it off: training goes on, with its own exit code.

    Args:
        mode: that of `train.wandb`: disabled, offline or online.
        run_id: the id of the run in wandb, None for a new one.
        directory: that of the run.
        options: the configuration, by table.
    """

    run = None

    def __init__(self, mode: str, run_id: str | None, directory: Path, options: dict[str, dict]):
        self.run_id = run_id
        mode = os.environ.get("WANDB_MODE", mode) if mode != "disabled" else mode
        if mode == "disabled":
            return
        where = directory.absolute()
        os.environ.setdefault("WANDB_DATA_DIR", str(where / "wandb"))  # instead of the user's home
        with self.best_effort():
            import wandb  # slow to import, and optional

            # Nothing about the machine or the code is published: no host, user, paths, packages or uncommitted changes.
            settings = wandb.Settings(
                x_disable_machine_info=True,
                x_save_requirements=False,
                host="",
                program="train.py",
                init_timeout=WAIT_SECONDS,
                login_timeout=WAIT_SECONDS,
                finish_timeout=WAIT_SECONDS,
                console="off",
                silent=True,
            )
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tril"),
                name=os.environ.get("WANDB_NAME", where.name),
                id=run_id,
                resume="allow",
                dir=os.environ.get("WANDB_DIR", where),
                mode=mode,
                config=options,
                settings=settings,
            )
            self.run.define_metric("*", step_metric="step")  # the x axis; wandb's own counts the lines of all sessions
            self.run_id = self.run.id
            print(f"wandb:  {self.run.url if mode == 'online' else self.run.sync_dir}")

    @contextmanager
    def best_effort(self) -> Iterator[None]:
        """Turn wandb off if something inside fails."""
        try:
            yield
        except Exception as error:
            self.run = None
            print(f"wandb is off, metrics.jsonl has everything: {error!r:.200}")

    def call(self, method: str, value: object) -> None:
        """Call a method of the run in wandb: log a line of metrics.jsonl, flat, or finish a session by its exit code.

        wandb itself notices a session that ends in an exception or a signal.
        """
        if self.run:
            with self.best_effort():
                getattr(self.run, method)(value)

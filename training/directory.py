"""Reads from a run directory, and the commands that continue from one.

training/run.py writes the directory and training/report.py shows it; both use this file.
"""

import json
import math
import shlex
from pathlib import Path


def read_metrics(directory: Path, step: float = math.inf) -> list[dict]:
    """Return the lines of a run's metrics.jsonl up to and including `step`; none if there is no file.

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
    return [line for line in lines if line["step"] <= step]


def best_validation(lines: list[dict], checkpoints: list[Path]) -> dict | None:
    """Return the line of metrics.jsonl with the lowest validation loss of a step that has a checkpoint, or None.

    Of two equal losses the first one counts.
    """
    saved = {path.name for path in checkpoints}
    measured = [line for line in lines if line.get("val_loss") is not None and f"step-{line['step']:08d}" in saved]
    return min(measured, key=lambda line: line["val_loss"], default=None)


def next_commands(directory: Path, saved: int, best: dict | None, finished: bool) -> list[tuple[str, str]]:
    """Return (purpose, command line) for each useful next thing to do with a run.

    saved: the step of the newest checkpoint, 0 if there is none. best: see `best_validation`. finished: all steps and
    evaluations are done.
    """
    run = shlex.quote(str(directory))
    commands = [] if finished else [(f"Go on from step {saved:,}", f"python train.py --resume {run}")]
    if saved:
        loss_rose = finished and best and best["step"] < saved  # after the best checkpoint
        model = f"{run}/checkpoints/step-{best['step']:08d}" if loss_rose else run
        commands += [
            ("Sample", f'python sample.py {model} --prompt "..."'),
            ("See what each head is worth", f"python inspect_attention.py {model} --ablate zero"),
            ("Write heads.html", f"python inspect_attention.py {model} -o {run}/heads.html"),
        ]
    return commands

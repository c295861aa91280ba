"""Reads from a run directory, and the commands that continue from one.

training/run.py writes the directory and training/report.py shows it; both use this file.
"""

import json
import math
import os
import shlex
from pathlib import Path

from cli.script import how_to_run


def read_metrics(directory: Path, step: float = math.inf) -> list[dict]:
    """Return the lines of a run's metrics.jsonl up to and including `step`; none if there is no file.

    A damaged line ends the reading with a printed note: the lines that a checkpoint relies on were synced before it.
    """
    path = directory / "metrics.jsonl"
    lines = []
    content = path.read_bytes() if path.exists() else b""
    for number, text in enumerate(content.split(b"\n")[:-1]):
        try:
            line = json.loads(text)
            if line["step"] <= step and math.isfinite(line.get("val_loss") or 0):
                lines.append(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            print(f"{path} is damaged after its line {number}: the rest is left out")
            break
    return lines


def best_validation(lines: list[dict], checkpoints: list[Path]) -> dict | None:
    """Return the line of metrics.jsonl with the lowest validation loss of a step that has a checkpoint, or None.

    Of two equal losses the first one counts.
    """
    saved = {int(path.name.removeprefix("step-")) for path in checkpoints}
    candidates = [line for line in lines if line["step"] in saved and line.get("val_loss") is not None]
    return min(candidates, key=lambda line: line["val_loss"], default=None)


def command(script: str, directory: Path) -> str:
    """Return a command line that runs a script on a run directory; train.py goes on with the run."""
    launcher = option = ""
    if script == "train.py":
        option = " --resume"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            launcher = f"-m torch.distributed.run --nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', 'gpu')} "
    return f"{how_to_run(script, launcher)}{option} {shlex.quote(str(directory))}"


def next_commands(directory: Path, saved: int, best: dict | None, finished: bool) -> list[tuple[str, str]]:
    """Return (purpose, command line) for each useful next thing to do with a run.

    saved: the step of the newest checkpoint, 0 if there is none. best: see `best_validation`. finished: all steps and
    evaluations are done.
    """
    loss_rose = finished and best and best["step"] < saved  # after the best checkpoint
    checkpoint = directory / "checkpoints" / f"step-{best['step']:08d}" if loss_rose else directory
    commands = [] if finished else [(f"Go on from step {saved:,}", command("train.py", directory))]
    if saved:
        inspect = command("inspect_attention.py", checkpoint)
        page = shlex.quote(str(directory / "heads.html"))
        commands += [
            ("Sample", f'{command("sample.py", checkpoint)} --prompt "..."'),
            ("See what each head is worth", f"{inspect} --ablate zero"),
            ("Write heads.html", f"{inspect} -o {page}"),
        ]
    return commands

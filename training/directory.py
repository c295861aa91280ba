"""A run directory as others see it: its metrics, its best step, and the commands to go on with it."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path


def read_metrics(path: Path, step: float) -> list[dict]:
    """Read the lines of metrics.jsonl up to `step`, or up to a damaged one.

    Lines that a checkpoint relies on are on the disk before it is, so that damage costs only later ones.
    """
    lines = []
    for text in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            line = json.loads(text)
            if line["step"] <= step:
                lines.append(line)
        except (ValueError, TypeError, KeyError, RecursionError):
            print(f"{path} is damaged after its line {len(lines)}: the rest is left out")
            break
    return lines


def best_step(lines: Iterable[dict], steps: Collection[int]) -> int | None:
    """The step with the lowest validation loss among those that have a checkpoint; None if none has both."""
    losses = {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
    return min((step for step in steps if step in losses), key=losses.get, default=None)


def command(script: str, directory: Path) -> str:
    """A command line that runs a script on a run directory, also where no environment is activated."""
    here = os.path.dirname(shutil.which("python") or "") == os.path.dirname(sys.executable)
    python = "python" if here else os.path.relpath(sys.executable)
    if script.startswith("train.py") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        python = f"{python} -m torch.distributed.run --nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', 'gpu')}"
    return f"{python} {script} {shlex.quote(str(directory))}"


def next_commands(
    directory: Path, saved: int, best: int | None, max_steps: int, finished: bool
) -> list[tuple[str, str]]:
    """Purposes, and commands for them, for a run whose newest checkpoint is that of step `saved`.

    best: the step of the best checkpoint, if a validation loss was measured. finished: all steps and evaluations.
    """
    rose = finished and best not in (None, saved)
    chosen = directory / "checkpoints" / f"step-{best:08d}" if rose else directory
    found = [] if finished else [(f"Go on from step {saved:,}", command("train.py --resume", directory))]
    if saved:
        which = ", of the best checkpoint" if rose else ""
        found.append((f"Sample{which}", command("sample.py", chosen) + ' --prompt "..."'))
        found.append((f"See the heads{which}", command("inspect_attention.py", chosen) + " -o heads.html"))
    if finished and not rose:  # a new run: one whose schedule has ended would have to raise its learning rate again
        longer = f" --train.max_steps {2 * max_steps} --train.out_dir {shlex.quote(f'{directory}_longer')}"
        found.append(("Train longer, from the start", command("train.py", directory / "config.toml") + longer))
    return found

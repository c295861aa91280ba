"""The promise of a resume, checked on the user's machine: a run killed at two instants against one without a break."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs import to_toml
from model.checkpoint import find_checkpoint, load_tensors, sha256, step_directories
from training.config import TrainError

TRAIN = Path(__file__).parent.parent / "train.py"
SHORT = {"max_steps": 12, "checkpoint_every": 3, "keep_checkpoints": 2, "eval_every": 4, "log_every": 1}


class ShortRun:
    """The first steps of a configured run, in a directory and processes of its own."""

    def __init__(self, config: Any, directory: Path):
        self.out, self.log, self.file = directory, directory / "stderr", directory / "asked.toml"
        self.checkpoints = directory / "checkpoints"
        few = {"eval_tokens": min(config.train.eval_tokens, 10_000), "out_dir": str(directory), "wandb": "disabled"}
        directory.mkdir()
        self.file.write_text(to_toml(replace(config, train=replace(config.train, **SHORT, **few))), encoding="utf-8")

    def go(self, until: Callable[[], bool] = lambda: False, delay: float = 0.0) -> None:
        """Begin or go on: to the end, or to a kill -9 so many seconds after `until`.

        Raises TrainError with the run's own sentence if it fails, or if there was no time to kill it.
        """
        arguments = ["--resume", self.out] if step_directories(self.checkpoints) else [self.file]
        with open(self.log, "wb") as log:
            process = subprocess.Popen([sys.executable, TRAIN, *arguments], stdout=subprocess.DEVNULL, stderr=log)
        try:
            while process.poll() is None and not until():
                time.sleep(0.001)
            time.sleep(delay)
        finally:
            process.kill()
        if process.wait() > 0:
            raise TrainError(self.log.read_text(errors="replace").splitlines()[-1])
        if until() and process.returncode == 0:
            raise TrainError("the run was over before it could be killed: verify a larger model")
        if process.returncode:
            print(f"  killed after step {max(self.metrics('train_loss'))}")

    def metrics(self, key: str) -> dict[int, float]:
        """What was logged under a key, by step."""
        complete = (self.out / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return {line["step"]: line[key] for line in map(json.loads, complete) if key in line}

    def difference(self, other: "ShortRun") -> str:
        """What is not the same in the two at the end, in words; empty if all bits are."""
        for file in ("model.safetensors", "optimizer.safetensors"):
            mine, its = (load_tensors(find_checkpoint(run.out) / file) for run in (self, other))
            for name in mine:
                unequal = (mine[name] != its[name]).sum().item()
                if unequal:
                    return f"{unequal} of the {mine[name].numel()} numbers in {name}"
        same = all(self.metrics(key) == other.metrics(key) for key in ("train_loss", "val_loss", "grad_norm", "lr"))
        return "" if same else "the metrics"


def verify_resume(config: Any) -> None:
    """Make the first steps of a run; make them again with two kills and two resumes; compare to the last bit.

    Raises TrainError naming what differs, or with the sentence of a run that failed.
    """
    with tempfile.TemporaryDirectory(prefix="tril-") as directory:
        straight, broken = (ShortRun(config, Path(directory) / name) for name in ("straight", "broken"))
        print(f"{SHORT['max_steps']} steps without a break")
        straight.go()
        seconds = straight.metrics("train_seconds")[SHORT["max_steps"]]
        print("the same steps, killed at a random instant")
        broken.go((broken.checkpoints / "step-00000003").exists, random.uniform(0, seconds / 3))
        print("resumed, and killed while a checkpoint is written")
        broken.go((broken.checkpoints / ".tmp").exists)
        print("resumed, to the end")
        broken.go()
        if difference := straight.difference(broken):
            again = ShortRun(config, Path(directory) / "again")
            again.go()
            unsteady = again.difference(straight)
            reason = (
                "two runs without a break differ too: try --train.deterministic true" if unsteady else "a bug of tril"
            )
            raise TrainError(f"the resumed run is another: {difference} ({reason})")
        digest = sha256(find_checkpoint(broken.out) / "model.safetensors")
        print(f"the same bits: weights (SHA-256 {digest[:12]}...), state of the optimizer, losses of every step")

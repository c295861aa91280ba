"""The promise of a resume, checked on the user's machine: a run killed at two instants against one without a break."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from configs import to_toml
from model import disk
from model.checkpoint import find_checkpoint, sha256, step_directories
from training.config import TrainError

TRAIN = Path(__file__).parent.parent / "train.py"
STEPS = 12
SHORT = {"max_steps": STEPS, "checkpoint_every": 3, "keep_checkpoints": 2, "eval_every": 4, "log_every": 1}


class ShortRun:
    """The first steps of a configured run, in a directory and processes of its own."""

    def __init__(self, config: Any, directory: Path):
        self.out, self.log, self.file = directory, directory / "stderr", directory / "asked.toml"
        self.checkpoints = directory / "checkpoints"
        few = {"eval_tokens": min(config.train.eval_tokens, 10_000), "out_dir": str(directory), "wandb": "disabled"}
        directory.mkdir()
        self.file.write_text(to_toml(replace(config, train=replace(config.train, **SHORT, **few))), encoding="utf-8")

    def go(self, until: Callable[[], bool] | None = None) -> bool:
        """Begin or go on: to the end, or to a kill -9 as soon as `until`; returns whether it came to that.

        Raises TrainError with the run's own sentence if it fails.
        """
        arguments = ["--resume", self.out] if step_directories(self.checkpoints) else [self.file]
        with open(self.log, "wb") as log:
            process = subprocess.Popen([sys.executable, TRAIN, *arguments], stdout=subprocess.DEVNULL, stderr=log)
        try:
            while until and process.poll() is None and not until():
                time.sleep(0.001)
            if not until:
                process.wait()
        finally:
            process.kill()
        exit_code = process.wait()
        if exit_code not in (0, -signal.SIGKILL) or (exit_code and not until):
            said = self.log.read_text(errors="replace").splitlines() or [f"exit code {exit_code}"]
            raise TrainError(f"a run failed: {said[-1].removeprefix(f'{TRAIN.name}: ')}")
        if exit_code:
            print(f"  killed after step {max(self.metrics('train_loss'))}")
        return bool(exit_code)

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return max((int(path.name.removeprefix("step-")) for path in step_directories(self.checkpoints)), default=0)

    def metrics(self, key: str) -> dict[int, float]:
        """What was logged under a key, by step."""
        complete = (self.out / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return {line["step"]: line[key] for line in map(json.loads, complete) if key in line}

    def difference(self, other: "ShortRun") -> str:
        """What is not the same in the two at the end, in words; empty if all bits are."""
        for file in sorted(path.name for path in find_checkpoint(self.out).glob("*.safetensors")):
            mine, its = (find_checkpoint(run.out) / file for run in (self, other))
            if sha256(mine) != sha256(its):
                theirs = load_file(its)
                pairs = [(name, tensor, theirs[name]) for name, tensor in load_file(mine).items()]
                unequal = [(name, (a != b).sum().item()) for name, a, b in pairs if not torch.equal(a, b)]
                name, count = unequal[0] if unequal else (file, "some")
                return f"{count} numbers in {name}"
        same = all(self.metrics(key) == other.metrics(key) for key in ("train_loss", "val_loss", "grad_norm", "lr"))
        return "" if same else "the metrics"


def verify_resume(config: Any) -> None:
    """Make the first steps of a run; make them again with two kills and two resumes; compare to the last bit.

    Raises TrainError naming what differs, or with the sentence of a run that failed.
    """
    with tempfile.TemporaryDirectory(prefix="tril-") as directory:
        straight, broken = (ShortRun(config, Path(directory) / name) for name in ("straight", "broken"))
        print(f"the first {STEPS} steps, without a break")
        straight.go()
        print("the same, killed between two checkpoints")
        killed = broken.go(lambda: broken.newest() >= 3)
        print("resumed, and killed while a checkpoint is written")
        disk.remove(broken.checkpoints / ".tmp")  # if it was killed while one was
        killed += broken.go((broken.checkpoints / ".tmp").exists)
        print("resumed, to the end")
        broken.go()
        if not killed:
            raise TrainError("the run was over before it could be killed: nothing is proved; take a larger model")
        if difference := straight.difference(broken):
            again = ShortRun(config, Path(directory) / "again")
            again.go()
            unsteady = again.difference(straight)
            reason = (
                "two runs without a break differ too: try --train.deterministic true" if unsteady else "a bug of tril"
            )
            raise TrainError(f"the resumed run is another: {difference} ({reason})")
        digest = sha256(min(find_checkpoint(broken.out).glob("model*.safetensors")))
        print(f"the same bits: weights (SHA-256 {digest[:12]}...), state of the optimizer, losses of every step")

"""Write a run directory: config.toml, metrics.jsonl, report.html, checkpoints/."""

import fcntl
import json
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from torch.amp import GradScaler
from torch.optim import Optimizer

from cli.script import visible
from data import disk
from data.corpus import Corpus
from data.known import remember
from errors import UserError
from inspection.heads import PROBE_TOKENS
from model import GPT
from model.checkpoint import step_directories
from model.huggingface import tensors_to_huggingface
from training.directory import best_validation, command, next_commands, read_metrics
from training.optimizer import optimizer_tensors
from training.options import Config, tables, to_toml
from training.report import write_report
from training.resume import Start
from training.save import checkpoint_files, keep_newest, save_checkpoint
from training.sharded import gather
from training.tracking import Tracker
from training.validation import probe_tokens

SAMPLE_WIDTH = 65  # characters of a sample that are printed; metrics.jsonl has all


@dataclass
class Run:
    """The run directory that a session writes. All ranks call the methods, and the first one writes."""

    config: Config
    start: Start
    """The state that the session starts from."""
    corpus: Corpus
    """The text; a checkpoint has its tokenizer."""
    certificate: dict
    """The record of `certify`, for checkpoints and the report."""
    environment: dict[str, str]
    """The facts of training/device.py about the machine and the code, also for both."""
    writes: bool
    """Whether this process is the first rank."""

    def __post_init__(self) -> None:
        self.about = {"certificate": self.certificate, "environment": self.environment}
        self.directory = Path(self.config.train.out_dir)
        self.metrics = self.directory / "metrics.jsonl"
        self.probe_tokens = probe_tokens(self.corpus, self.config.train).tolist()
        self.tracker = Tracker(self.config.train.wandb, self.start.wandb_id)

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that are on the disk, newest first."""
        return step_directories(self.directory / "checkpoints")

    def lock_and_write_config(self) -> None:
        """Lock the directory; write config.toml and the metrics so far; print what differs from the session before.

        Raises UserError if another process uses the directory, or has written to it meanwhile.
        """
        before = self.start.environment  # empty for a new run
        now = self.environment
        changed = [f"{key} {before[key]!s:.60} -> {now[key]}" for key in now if before.get(key, now[key]) != now[key]]
        if changed:
            print(f"note: the numbers may differ from those of an unbroken run: {', '.join(changed)}")
        if not self.writes:
            return
        disk.make_directories(self.directory / "checkpoints")
        self.lock = os.open(self.directory, os.O_RDONLY)  # the system unlocks it when the process ends, however
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.directory} is in use by another training process") from None
        if self.checkpoints != self.start.checkpoints:
            raise UserError(f"another training process has written to {self.directory} meanwhile")
        # With a random number, so that nobody else can have the same file.
        content = f"{to_toml(self.config)}# {secrets.token_hex(16)}\n".encode()
        remember(content)
        disk.replace_file(self.directory / "config.toml", content)
        # Lines after the checkpoint are of steps that will be computed again, or of an abandoned run.
        lines = read_metrics(self.directory, self.start.step) if self.checkpoints else []
        disk.replace_file(self.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.tracker.start_session(self.directory, tables(self.config))
        self.report()
        print(f"report: {self.directory / 'report.html'}")

    def log(self, step: int, **values: object) -> None:
        """Write a line of metrics to metrics.jsonl and wandb."""
        if self.writes:
            record = {"step": step, **values}
            for name, value in values.items():
                if isinstance(value, float) and not math.isfinite(value):
                    record[name] = None  # JSON has no such number
            disk.append_to_file(self.metrics, [(json.dumps(record) + "\n").encode()])
            self.tracker.send(record)

    def log_validation(self, step: int, train_seconds: float, record: dict) -> str:
        """Log a record of `Validation.evaluate`, and return lines to print."""
        sample = record.pop("sample", None)
        self.log(step, **record, train_seconds=train_seconds)
        text = f"step {step:7d} | val loss {record['val_loss']:7.4f} | bits/byte {record['val_bits_per_byte']:6.4f}"
        text += f" | trained {train_seconds:8.1f} s"
        if sample is not None:
            self.log(step, sample=sample)
            text += f"\n{'':12} | {visible(' '.join(sample.split())[:SAMPLE_WIDTH])}"
        self.report()
        return text

    def save(self, step: int, train_seconds: float, model: GPT, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Write a checkpoint, then delete those that are not to be kept. All ranks call this.

        Raises UserError if it cannot be written; the older ones are untouched then.
        """
        # Renamed before the rest is gathered: that copies matrices of a GPT-2, and frees those gathered from shards.
        weights = tensors_to_huggingface(model.config, gather(model.state_dict(), keep=self.writes))
        moments = gather(optimizer_tensors(model, optimizer), keep=self.writes)
        if not self.writes:
            return
        trainer = {
            "step": step,
            "train_seconds": train_seconds,
            "fingerprint": self.corpus.meta["fingerprint"],
            PROBE_TOKENS: self.probe_tokens,
            "wandb_id": self.tracker.run_id,
            "scaler": scaler.state_dict(),
            "config": tables(self.config),
        }
        files = checkpoint_files(model.config, weights, moments, self.corpus.tokenizer, trainer)
        where = self.directory / "checkpoints"
        try:
            disk.sync(self.metrics)
            save_checkpoint(where, step, files, self.about)
        except OSError as error:
            older = self.checkpoints
            kept = f"{older[0].name} is untouched" if older else "there is no earlier one"
            raise UserError(f"cannot save step {step} in {where}: {error.strerror or error}; {kept}") from error
        best = best_validation(read_metrics(self.directory), self.checkpoints)
        best_step = best["step"] if best else 0
        keep_newest(self.checkpoints, step, self.config.train.keep_checkpoints, best_step)
        self.report()

    def report(self) -> None:
        """Write report.html anew."""
        if self.writes:
            write_report(self.directory, self.about)

    def finish(self, exit_code: int = 0) -> None:
        """End the session: tell wandb its exit code, write the report, and unlock the directory."""
        if self.writes:
            disk.sync(self.metrics)
            self.tracker.end_session(exit_code)
            self.report()
            os.close(self.lock)

    def how_to_continue(self, step: int) -> str:
        """Return a sentence for an interrupted run: the step that is saved, and the command that continues."""
        saved = f"saved step {step}" if step else "there was nothing to save yet"
        return f"{saved}; continue with: {command('train.py', self.directory)}"

    def print_next(self, step: int) -> None:
        """Print what to do with the finished run."""
        best = best_validation(read_metrics(self.directory), self.checkpoints)
        if best and best["step"] < step:
            print(f"The best validation loss, {best['val_loss']:.4f}, was that of step {best['step']}.")
        print(f"Next, with the model in {self.directory}, where report.html shows how it went:")
        for _, line in next_commands(self.directory, step, best, finished=True):
            print(f"  {line}")


def is_done(config: Config, start: Start, writes: bool) -> bool:
    """Return whether no steps are left to make. Print so then, and write the report, which may be an older one."""
    directory = Path(config.train.out_dir)
    max_steps = config.train.max_steps
    if start.step < max_steps:
        return False
    if writes:
        write_report(directory, start.base.manifest)
    print(f"{directory} is already at step {start.step}, of {max_steps}: nothing to do")
    return True

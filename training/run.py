"""A run directory: config.toml, metrics.jsonl, report.html, checkpoints/, and what a run keeps between sessions."""

import fcntl
import json
import math
import os
import shlex
import shutil
import sys
from collections import deque
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from configs import to_toml, visible
from data.batches import Batches
from data.corpus import Corpus
from model import GPT, disk
from model.checkpoint import (
    CARD,
    find_checkpoint,
    keep_newest,
    read_json,
    save_checkpoint,
    step_directories,
    tensor_files,
)
from model.huggingface import tensors_to_huggingface
from model.load import read_model
from model.parts import is_part
from training.card import model_card
from training.config import MAY_CHANGE, TrainConfig, TrainError
from training.optimizer import learning_rate_at, load_optimizer_tensors, optimizer_tensors
from training.tracking import Tracker

JOB = ".job"  # a file with the name of what started the run
STATE = {"step": int, "train_seconds": float, "val_loss": float | None}
STATE |= {"best_val_loss": float | None, "best_step": int | None, "wandb_id": str | None, "fingerprint": str | None}

SAMPLE_WIDTH = 100  # characters of a sample that are printed; metrics.jsonl has all


class Run:
    """One training run on disk. What it must remember between sessions is in `state`."""

    def __init__(self, config: Any, writes: bool = True, job: str | None = None):
        """Look at the run directory of a configuration with [model], [data] and [train] tables; write nothing yet.

        writes: whether this process is the one that writes; every other only reads. job: what has the same name when it
        starts this run again by itself (training/distributed.py), and may then go on without --resume.

        Raises TrainError if it holds another run, or cannot be written.
        """
        self.config, self.writes, self.job = config, writes, job
        self.directory = Path(config.train.out_dir)
        self.checkpoints, self.metrics = self.directory / "checkpoints", self.directory / "metrics.jsonl"
        self.state = {**dict.fromkeys(STATE), "step": 0, "train_seconds": 0.0}
        self.base: Path | None = None  # the checkpoint that the weights of this session come from
        self.resumed_from: Path | None = None
        self.resumed_step: int | None = None
        self.evaluated: int | None = None  # the last step whose validation loss is known
        self.lines: list[dict] = []  # the metrics of the steps before this session
        self.validations: dict[int, dict] = {}  # the lines that have a validation loss, by step
        self.tracker = Tracker(config.train if writes else replace(config.train, wandb="disabled"))
        self.found = step_directories(self.checkpoints)
        begun = bool(self.found)  # a run killed before its first checkpoint has not
        if begun and writes and not config.resume and not (job and read_text(self.directory / JOB) == job):
            raise TrainError(
                f"{self.directory} already holds a run: continue it with --resume {self.directory}, "
                "or give another --train.out_dir"
            )
        if begun:
            self.resumed_from = find_checkpoint(self.directory)
            self.state = self.read_state(self.resumed_from / "trainer.json")
            self.resumed_step = self.state["step"]
            self.lines = read_metrics(self.metrics, self.resumed_step)
            self.validations = {line["step"]: line for line in self.lines if line.get("val_loss") is not None}
            for line in self.lines:
                if "val_loss" in line and line["step"] == self.resumed_step:  # perhaps after this checkpoint
                    self.remember(line["val_loss"])
            self.base = self.resumed_from
        elif config.train.init_from:
            self.base = find_checkpoint(Path(config.train.init_from))
        exists = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        if not exists.is_dir() or not os.access(exists, os.W_OK | os.X_OK):
            raise TrainError(f"cannot write to {self.directory}: {exists} is not a directory one may write to")

    def read_state(self, path: Path) -> dict:
        """The state in a checkpoint. Raises TrainError if it is none, or that of a run with another configuration."""
        trainer = read_json(path)
        try:
            state = {name: trainer[name] for name in STATE}
            wrong = [name for name, kind in STATE.items() if not isinstance(state[name], kind)]
            if wrong or not isinstance(trainer["scaler"], dict) or path.parent.name != f"step-{state['step']:08d}":
                raise TypeError(f"{wrong or 'step'} not understood")
            refuse_changes(trainer["config"], tables(self.config))
            warn_of_another_schedule(TrainConfig(**trainer["config"]["train"]), self.config.train, state["step"])
        except (KeyError, TypeError, AttributeError) as error:
            raise TrainError(f"{path} is not the state of a run of this version: {error!r:.200}") from error
        return state

    def begin(self, corpus: Corpus) -> None:
        """Take the run directory for this process, before anything in it is read or written.

        Raises TrainError if another process has it, or the resumed run began with another text.
        """
        before, now = self.state["fingerprint"], corpus.meta["fingerprint"]
        if before not in (None, now):
            source, fingerprints = corpus.meta["source"], f"its fingerprint was {before[:12]}, now {now[:12]}"
            raise TrainError(f"{source} is not the text this run began with ({fingerprints})")
        self.corpus, self.state["fingerprint"] = corpus, now
        if not self.writes:
            return
        disk.make_directories(self.checkpoints)
        self.lock = os.open(self.directory, os.O_RDONLY)  # the system lets go of it when the process ends, however
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainError(f"{self.directory} is in use by another training process") from None
        if step_directories(self.checkpoints) != self.found:
            raise TrainError(f"another training process has written to {self.directory} meanwhile")
        if self.job and read_text(self.directory / JOB) != self.job:
            disk.replace(self.directory / JOB, self.job.encode())

    def start(self, certificate: dict, environment: dict) -> None:
        """Write what the run is, and say in what the environment is not the one it began in.

        Its checkpoints will hold both arguments (training/certificate.py and device.py).
        """
        self.about = {"certificate": certificate, "environment": environment}
        if self.resumed_from:
            before = read_json(self.resumed_from / "manifest.json").get("environment")
            before = before if isinstance(before, dict) else {}
            changed = [
                f"{key} {before[key]} -> {now}" for key, now in environment.items() if before.get(key, now) != now
            ]
            if changed:
                print(visible(f"the numbers will not be those of a run without a break: {', '.join(changed)}"))
        if self.writes:
            disk.replace(self.directory / "config.toml", to_toml(self.config).encode())
            # What came after the checkpoint belongs to a future that will be computed again, or to an abandoned run.
            disk.replace(self.metrics, "".join(map(to_line, self.lines)).encode())
        losses = (line.get("train_loss") for line in self.lines)
        self.recent_losses = deque((loss for loss in losses if loss is not None), maxlen=100)
        self.tracker.begin(self.directory, self.state, tables(self.config))
        self.report()
        print(f"report: {self.directory / 'report.html'}")

    def restore_weights(self, model: GPT) -> None:
        """Give the model the weights of the checkpoint that the run is resumed from, or is to begin with.

        Raises ModelError if there is a weight that no checkpoint could hold: now, and not when it is to be saved.
        """
        tensors_to_huggingface(model.config, {name: tensor.to("meta") for name, tensor in model.state_dict().items()})
        if self.base:
            weights = read_model(self.base).state_dict()
            name, T = "position_embedding.weight", model.config.context_length
            if name in weights:
                weights[name] = weights[name][:T]  # fewer positions may be wanted
            model.load_state_dict(weights)
            print(f"{'resumed' if self.resumed_from else 'weights'} from {self.base}")

    def restore(self, model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Give optimizer and scaler the state of the checkpoint that the run is resumed from."""
        if self.resumed_from:
            load_optimizer_tensors(model, optimizer, self.resumed_from)
            if scaling := read_json(self.resumed_from / "trainer.json")["scaler"]:  # empty if none was needed there
                scaler.load_state_dict(scaling)

    def log(self, **values: float | dict | str) -> None:
        """One line of metrics for this step, to metrics.jsonl and wandb."""
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None  # JSON has no inf
        if values.get("train_loss") is not None:
            self.recent_losses.append(values["train_loss"])
        self.write({"step": self.state["step"], **values})

    def write(self, record: dict) -> None:
        """A line of metrics, unless another process writes them."""
        if not self.writes:
            return
        disk.append(self.metrics, to_line(record).encode())
        self.tracker.log(record)

    def log_spike(self, step: int, loss: float, batches: Batches) -> str:
        """Log the loss of a step, with the windows it was made of, if it stands out; return a line to print.

        What stands out is far above the median of the last losses: by eight times their median distance from it (five
        standard deviations, were they normal) and by a tenth.
        """
        if len(self.recent_losses) < self.recent_losses.maxlen // 5:
            return ""
        typical = median(self.recent_losses)
        distance = median(abs(recent - typical) for recent in self.recent_losses)
        if loss <= typical + max(8 * distance, 0.1 * typical):
            return ""
        accum = self.config.train.grad_accum_steps
        windows = [batches.starts(step * accum + micro_batch).tolist() for micro_batch in range(accum)]
        self.write({"step": step + 1, "loss_spike": loss, "median_loss": typical, "windows": windows})
        return (
            f"loss spike: {loss:.3f} in step {step}, lately {typical:.3f}; metrics.jsonl has the windows of train.bin"
        )

    def log_validation(self, val_loss: float, bits_per_byte: float, heads: dict[str, list], text: str) -> str:
        """Remember and log a validation loss, metrics of the heads and a sample, if wanted; return what to print."""
        step, seconds = self.state["step"], self.state["train_seconds"]
        self.remember(val_loss)
        self.validations[step] = {"val_loss": val_loss, "val_bits_per_byte": bits_per_byte}
        self.log(val_loss=val_loss, val_bits_per_byte=bits_per_byte, train_seconds=seconds, heads=heads)
        said = f"step {step:7d} | val loss {val_loss:7.4f} | bits/byte {bits_per_byte:6.4f} | trained {seconds:8.1f} s"
        if self.config.train.sample_tokens:
            self.log(sample=text)
            said += f"\n{'':12} | {visible(' '.join(text.split()))[:SAMPLE_WIDTH]}"
        self.report()
        return said

    def remember(self, val_loss: float | None) -> None:
        """The validation loss of this step, None if it is not finite; it may be the best of those with a checkpoint."""
        step, best, c = self.state["step"], self.state["best_val_loss"], self.config.train
        self.evaluated, self.state["val_loss"] = step, val_loss
        saved = (step % c.checkpoint_every == 0 and step > 0) or step == c.max_steps
        if saved and val_loss is not None and val_loss < (math.inf if best is None else best):
            self.state.update(best_val_loss=val_loss, best_step=step)

    def save(self, model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Write a checkpoint of this step, then delete those that are not to be kept.

        Where each process has a part of the tensors, all of them call this, and give theirs.

        Raises TrainError if it cannot be written; the older ones are untouched then.
        """
        tensors = optimizer_tensors(model, optimizer)
        if not self.writes:
            for _ in tensor_files(model, tensors) if is_part(model.lm_head.weight) else ():
                pass  # each is gathered from all
            return
        state = dict(self.state)
        step = state.pop("step")
        extra = {"scaler": scaler.state_dict(), "config": tables(self.config)}
        card = model_card(self.config, model, self.corpus, self.state, self.validations, self.about)
        files = {**self.corpus.tokenizer_files, CARD: card.encode()}
        start, end = (self.corpus.tokenizer.document_start or [None])[-1], self.corpus.tokenizer.end_of_text
        trainer = {**state, **extra}
        try:
            disk.sync(self.metrics)
            save_checkpoint(self.checkpoints, step, model, (start, end), files, tensors, trainer, self.about)
        except OSError as error:
            before = [directory.name for directory in step_directories(self.checkpoints)]
            kept = f"{before[0]} is untouched" if before else "there is no earlier one"
            reason = error.strerror or error
            raise TrainError(f"cannot save step {step} in {self.checkpoints}: {reason}; {kept}") from error
        keep_newest(self.checkpoints, step, self.config.train.keep_checkpoints, state["best_step"])
        self.report()

    def report(self) -> None:
        """Write report.html anew. It only looks on: what fails in it costs a printed line, and no step."""
        from training.report import write_report  # which needs this file

        if not self.writes:
            return
        try:
            write_report(self.directory)
        except Exception as error:
            print(visible(f"there is no new report.html: {error!r:.200}"))

    def command(self, script: str) -> str:
        """A command line that runs a script on this directory."""
        return command(script, self.directory)

    def next_commands(self) -> list[tuple[str, str]]:
        """What to do with the finished run, and how."""
        c = self.config.train
        return next_commands(self.directory, self.state["step"], self.state["best_step"], c.max_steps, finished=True)

    def finish(self, exit_code: int = 0) -> None:
        """Tell wandb, if it listens, how this session ended, and let go of the run directory."""
        if not self.writes:
            return
        disk.sync(self.metrics)
        if self.config.train.wandb_checkpoints and exit_code == 0:
            last, best = self.state["step"], self.state["best_step"]
            for step in sorted({best or last, last}):
                self.tracker.log_checkpoint(self.checkpoints / f"step-{step:08d}", *["best"] * (step == best))
        self.tracker.finish(exit_code)
        os.close(self.lock)
        self.report()


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
    """What to do next with a run whose newest checkpoint is that of step `saved`, and how.

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


def read_text(path: Path) -> str:
    """The text of a file, nothing if it is not there or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def tables(config: Any) -> dict[str, dict]:
    """The [model], [data] and [train] tables as plain values."""
    return {name: asdict(value) for name, value in vars(config).items() if is_dataclass(value)}


def refuse_changes(before: dict[str, dict], now: dict[str, dict]) -> None:
    """Raise TrainError if a resumed run is asked to become a different one, naming both values."""
    for table, content in now.items():
        for key, value in content.items():
            was = before[table].get(key, value)
            if was != value and not (table == "train" and key in MAY_CHANGE):
                values = f"it began with {was!r:.60}, now {value!r:.60}"
                raise TrainError(f"a resumed run cannot change {table}.{key}: {values}")


def warn_of_another_schedule(before: TrainConfig, now: TrainConfig, step: int) -> None:
    """Say so if another max_steps would have meant other learning rates in the steps already made.

    Schedules that have parted do not meet again, so that the last of these steps tells.
    """
    if now.max_steps > step > 0 and learning_rate_at(step - 1, before) != learning_rate_at(step - 1, now):
        print(
            f"note: not the run that {now.max_steps} steps from the start would have been: the learning rate, "
            f"planned for {before.max_steps}, was {learning_rate_at(step - 1, before):.2g} "
            f"and is {learning_rate_at(step, now):.2g} now"
        )


def read_metrics(path: Path, step: int) -> list[dict]:
    """The lines until `step`, or until one that is damaged: what a checkpoint relies on was synced before it."""
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


def to_line(record: dict) -> str:
    return json.dumps(record) + "\n"

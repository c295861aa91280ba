"""A run directory: config.toml, metrics.jsonl, report.html, checkpoints/, and what a run keeps between sessions."""

import fcntl
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import torch

from cli.options import tables, to_toml
from cli.script import visible
from data.batches import seed_for
from data.corpus import Corpus
from errors import UserError
from model import GPT, GPTConfig, disk
from model.checkpoint import find_checkpoint, keep_newest, read_json, save_checkpoint, step_directories
from model.huggingface import tensors_to_huggingface
from model.load import load_config
from model.sharded import gather
from training.config import MAY_CHANGE
from training.directory import best_validation, next_commands, read_metrics
from training.distributed import Ranks
from training.optimizer import load_optimizer_tensors, optimizer_tensors
from training.options import Config
from training.report import write_report
from training.tracking import Tracker

SAMPLE_WIDTH = 65  # characters of a sample that are printed; metrics.jsonl has all


class Run:
    """One training run on disk.

    It is used in this order: the constructor finds it, `make_model` and `restore` load it, `begin` locks it; then
    `log`, `log_validation` and `save` write, and `finish` ends the session. All ranks read, and the first one writes.
    """

    def __init__(self, config: Config, ranks: Ranks):
        """Find the newest intact checkpoint of a run, or see that the run is new.

        Raises UserError if the directory holds another run and --resume was not asked for, or cannot be written.
        """
        self.config, self.writes = config, ranks.is_first
        self.directory = Path(config.train.out_dir)
        self.checkpoints, self.metrics = self.directory / "checkpoints", self.directory / "metrics.jsonl"
        self.step, self.train_seconds = 0, 0.0  # as this session finds them
        self.fingerprint: str | None = None  # of the corpus
        self.wandb_id: str | None = None
        self.found = step_directories(self.checkpoints)  # `begin` checks that none has come since
        self.resumed_from: Path | None = None
        self.base: Path | None = None  # the checkpoint that the weights of this session come from
        self.lock: int | None = None
        self.corpus: Corpus | None = None
        self.about: dict = {}  # certificate and environment
        self.tracker = Tracker(config.train if self.writes else replace(config.train, wandb="disabled"))
        if self.found and not config.resume and not ranks.may_resume:
            raise UserError(
                f"{self.directory} already holds a run: continue it with --resume {self.directory}, "
                "or give another --train.out_dir"
            )
        if self.found:
            self.base = self.resumed_from = find_checkpoint(self.directory)
            self.read_state(self.resumed_from / "trainer.json")
        elif config.train.init_from:
            self.base = find_checkpoint(Path(config.train.init_from))
        if config.resume and not self.found:
            print(f"note: {self.directory} has no checkpoint yet, so it begins again")
        nearest = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {self.directory}: {nearest} is not a directory you may write to")

    def is_done(self) -> bool:
        """Return whether there are no steps left to make, and print so."""
        max_steps = self.config.train.max_steps
        if self.step < max_steps:
            return False
        self.report()  # a killed session may have left an older one
        print(f"{self.directory} is already at step {self.step}, of {max_steps}: nothing to do")
        return True

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint that this session goes on from; None if it begins a run."""
        return self.step if self.resumed_from else None

    def best_validation(self) -> dict | None:
        """Return the metrics of the step with the lowest validation loss, of the steps that have a checkpoint."""
        return best_validation(read_metrics(self.directory), step_directories(self.checkpoints))

    def read_state(self, path: Path) -> None:
        """Take over the state in a checkpoint's trainer.json.

        Raises UserError if the file holds no state, or that of a run with another configuration.
        """
        trainer = read_json(path)
        try:
            self.step, self.train_seconds = int(trainer["step"]), float(trainer["train_seconds"])
            self.fingerprint, self.wandb_id = trainer["fingerprint"], trainer["wandb_id"]
            texts = (self.fingerprint, self.wandb_id)
            if path.parent.name != f"step-{self.step:08d}" or not all(isinstance(text, str | None) for text in texts):
                raise TypeError("step, fingerprint or wandb_id not understood")
            if not isinstance(trainer["scaler"], dict):
                raise TypeError("scaler not understood")
            refuse_changes(trainer["config"], tables(self.config))
            planned, now = int(trainer["config"]["train"]["max_steps"]), self.config.train.max_steps
            if now > planned:
                print(f"note: planned for {planned} steps, now {now}: the learning rate may jump (docs/train.md)")
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is not the state of a run of this version: {error!r:.200}") from error

    def make_model(self, corpus: Corpus) -> GPT:
        """Make the model on the CPU, and print text and model.

        Its weights are random, those of the checkpoint, or those of train.init_from.

        Raises UserError for a parameter that no checkpoint could hold (now, not when it is to be saved), UserError if
        the tokenizer has more tokens than the model.
        """
        print(f"data:   {visible(str(corpus))}")
        vocab_size, shape = corpus.tokenizer.vocab_size, asdict(self.config.model)
        config = replace(load_config(self.base), **shape) if self.base else GPTConfig(**shape, vocab_size=vocab_size)
        corpus.tokenizer.check_fits(config.vocab_size)
        if self.base:
            model = GPT.read(self.base, dtype=torch.float32, config=config).train()
            print(f"{'resumed' if self.resumed_from else 'weights'} from {self.base}")
        else:
            torch.manual_seed(seed_for(self.config.train.seed, "weights"))
            model = GPT(config).train()
            tensors_to_huggingface(config, {name: tensor.to("meta") for name, tensor in model.state_dict().items()})
        print(f"model:  {config.family}, {sum(p.numel() for p in model.parameters()):,} parameters")
        return model

    def restore(self, model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Give optimizer and scaler the state they have in the checkpoint, if there is one."""
        if self.resumed_from:
            load_optimizer_tensors(model, optimizer, self.resumed_from)
            if scaling := read_json(self.resumed_from / "trainer.json")["scaler"]:  # empty without loss scaling
                scaler.load_state_dict(scaling)

    def begin(self, corpus: Corpus, certificate: dict, environment: dict) -> None:
        """Lock the directory; write config.toml and the metrics so far; print how the environment has changed.

        Raises UserError if another process has the directory, or has written to it meanwhile.
        """
        self.corpus, self.fingerprint = corpus, corpus.meta["fingerprint"]
        self.about = {"certificate": certificate, "environment": environment}
        if self.resumed_from:
            before = read_json(self.resumed_from / "manifest.json").get("environment", {})
            changed = [
                f"{key} {before[key]} -> {now}" for key, now in environment.items() if before.get(key, now) != now
            ]
            if changed:
                print(visible(f"note: the numbers may differ from those of an unbroken run: {', '.join(changed)}"))
        if not self.writes:
            return
        disk.make_directories(self.checkpoints)
        self.lock = os.open(self.directory, os.O_RDONLY)  # the system unlocks it when the process ends, however
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.directory} is in use by another training process") from None
        if step_directories(self.checkpoints) != self.found:
            raise UserError(f"another training process has written to {self.directory} meanwhile")
        disk.replace(self.directory / "config.toml", to_toml(self.config).encode())
        # Lines after the checkpoint are of steps that will be computed again, or of an abandoned run.
        lines = read_metrics(self.directory, self.step) if self.resumed_from else []
        disk.replace(self.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.tracker.begin(self.directory, self.wandb_id, tables(self.config))
        self.wandb_id = self.tracker.run_id or self.wandb_id
        self.report()
        print(f"report: {self.directory / 'report.html'}")

    def log(self, step: int, **values: object) -> None:
        """Write a line of metrics to metrics.jsonl and wandb."""
        if self.writes:
            record = {"step": step, **values}
            for name, value in values.items():
                if isinstance(value, float) and not math.isfinite(value):
                    record[name] = None  # JSON has no such number
            disk.append(self.metrics, (json.dumps(record) + "\n").encode())
            self.tracker.log(record)

    def log_validation(self, step: int, train_seconds: float, record: dict) -> str:
        """Log what `Validation.measure` has found, and return lines to print."""
        sample = record.pop("sample", None)
        self.log(step, **record, train_seconds=train_seconds)
        text = f"step {step:7d} | val loss {record['val_loss']:7.4f} | bits/byte {record['val_bits_per_byte']:6.4f}"
        text += f" | trained {train_seconds:8.1f} s"
        if sample is not None:
            self.log(step, sample=sample)
            text += f"\n{'':12} | {visible(' '.join(sample.split()))[:SAMPLE_WIDTH]}"
        self.report()
        return text

    def save(
        self,
        step: int,
        train_seconds: float,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Write a checkpoint, then delete those that are not to be kept. All ranks call this.

        Raises UserError if it cannot be written; the older ones are untouched then.
        """
        weights = gather(model.state_dict(), keep=self.writes)
        moments = gather(optimizer_tensors(model, optimizer), keep=self.writes)
        if not self.writes:
            return
        trainer = {
            "train_seconds": train_seconds,
            "fingerprint": self.fingerprint,
            "wandb_id": self.wandb_id,
            "scaler": scaler.state_dict(),
            "config": tables(self.config),
        }
        files, start = self.corpus.tokenizer_files, self.corpus.tokenizer.document_start
        ends = (start[-1] if start else None, self.corpus.tokenizer.end_of_text)
        try:
            disk.sync(self.metrics)
            save_checkpoint(self.checkpoints, step, model.config, weights, moments, ends, files, trainer, self.about)
        except OSError as error:
            before = [directory.name for directory in step_directories(self.checkpoints)]
            kept = f"{before[0]} is untouched" if before else "there is no earlier one"
            reason = error.strerror or error
            raise UserError(f"cannot save step {step} in {self.checkpoints}: {reason}; {kept}") from error
        best = self.best_validation()
        keep_newest(self.checkpoints, step, self.config.train.keep_checkpoints, best["step"] if best else None)
        self.report()

    def report(self) -> None:
        """Write report.html anew. Best effort: a failure prints a line and never stops training."""
        if not self.writes:
            return
        try:
            write_report(self.directory)
        except Exception as error:
            print(visible(f"there is no new report.html: {error!r:.200}"))

    def finish(self, exit_code: int = 0) -> None:
        """End the session: tell wandb how, if it listens, and unlock the directory."""
        if self.writes:
            disk.sync(self.metrics)
            self.tracker.finish(exit_code)
            self.report()
            os.close(self.lock)

    def print_next(self, step: int) -> None:
        """Print what to do with the finished run."""
        best = self.best_validation()
        if best and best["step"] < step:
            print(f"The best validation loss, {best['val_loss']:.4f}, was that of step {best['step']}.")
        print(f"Next, with the model in {self.directory}, where report.html shows how it went:")
        for _, line in next_commands(self.directory, step, best, finished=True):
            print(f"  {line}")


def refuse_changes(before: dict[str, dict], now: dict[str, dict]) -> None:
    """Raise UserError if a resumed run is asked to become a different one, naming both values."""
    for table, content in now.items():
        for key, value in content.items():
            was = before[table].get(key, value)
            if was != value and not (table == "train" and key in MAY_CHANGE):
                values = f"it began with {was!r:.60}, now {value!r:.60}"
                raise UserError(f"a resumed run cannot change {table}.{key}: {values}")

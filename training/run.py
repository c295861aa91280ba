"""The directory of a run (config.toml, metrics.jsonl, report.html, checkpoints/), and the model that it begins with.

run = RunDirectory(config, ranks)              read what an earlier session has left: run.step is 0 for a new run
model = make_model(config, corpus, run.base)   with the weights of a checkpoint, or random ones
run.restore(model, optimizer, scaler)          the rest of the state
run.begin(corpus, probe_tokens, ...)           lock the directory, and write from here on
run.log(step, train_loss=2.5)                  a line of metrics
run.save(progress, model, ...)                 a checkpoint
run.finish(step)
"""

import json
import os
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from cli.script import printable
from data.batches import seed_for
from data.corpus import Corpus
from data.tokenizer import GENERATION_CONFIG
from errors import UserError, errors_as_user_error
from files import expand, lock, make_directories, replace_file, sync
from model import GPT, GPTConfig
from model.checkpoint import (
    PROBE_TOKENS,
    TRAINER,
    Checkpoint,
    find_checkpoint,
    remove,
    save_checkpoint,
    step_directories,
    to_json,
)
from model.huggingface import config_from_huggingface, config_to_huggingface, tensors_to_huggingface
from model.load import load_model
from training.config import MAY_CHANGE, TrainConfig
from training.distributed import Ranks, gather
from training.optimizer import load_optimizer_tensors, optimizer_tensors
from training.options import Config, fit_to_text, tables, to_toml
from training.progress import Progress
from training.report import Tracker, best_checkpoint, flat, next_commands, read_metrics, report_page

BATCHES = 3  # the version of what a run depends on besides its configuration; raised when a step gets another batch
SAMPLE_WIDTH = 65  # characters of a sample that are printed; metrics.jsonl has all
BYTES_PER_LOGIT = 16  # of memory on a CPU, at most: logits, their copy in float32, its softmax, gradients
# First weights of the norms of queries and keys, in the first layer and in the others, for `sharp_first_layer`. With
# equal ones, which layer learns to look at the token before is luck (benchmarks/results/first_run_cpu_2026-11-26.md).
SHARP = 1.6
SOFT = 0.6


class RunDirectory:
    """A run on the disk, as its newest intact checkpoint has left it. All ranks call the methods, the first one writes.

    Raises UserError if the directory holds a run that was not to be resumed, or one with another configuration, or one
    at work, or the text, or files that no run has written.
    """

    def __init__(self, config: Config, ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.writes = ranks.is_first
        self.path = expand(config.train.out_dir)
        self.metrics = self.path / "metrics.jsonl"
        self.lines = []
        """Those of metrics.jsonl."""
        self.found = step_directories(self.path)
        self.base = None
        """The checkpoint that the weights come from: the newest of this run, or train.init_from."""
        self.state = {}
        """The content of its trainer.json, if it is of this run."""
        names = {path.name for path in self.path.glob("*")}
        problem = f"{self.path} is in use by another training process, or cannot be locked"
        self.lock = partial(lock, self.path / ".lock", problem, 0)
        if self.writes and ".lock" in names:
            self.lock().lock.release()  # refuse a run at work before it is read; `begin` locks, and makes directories
        if not (self.found or ".lock" in names):  # which a run has before its first checkpoint
            others = names & {"config.toml", "metrics.jsonl", "report.html"}
            if others or self.path.resolve() == expand(config.data.source).resolve():
                raise UserError(
                    f"{self.path} has {min(others, default='the text')}, which no run has written: give another "
                    "--train.out_dir"
                )
        if self.found:
            if not config.resume and not ranks.may_resume:
                raise UserError(
                    f"{self.path} already holds a run: continue it with --resume {self.path}, or give another "
                    "--train.out_dir"
                )
            self.base = find_checkpoint(self.path, to_resume=True)
            self.state = self.base.trainer
            print(f"resumed from {self.base.directory}")
        elif config.train.init_from:
            self.base = find_checkpoint(config.train.init_from)
            print(f"weights from {self.base.directory}")
        self.step = self.state.get("step", 0)
        """The step that is resumed; 0 for a new run."""
        self.train_seconds = self.state.get("train_seconds", 0.0)
        """Seconds of training so far."""

    def fit(self, corpus: Corpus, device: torch.device) -> Config:
        """Return the configuration, fitted to the text. Raises UserError if the run began with another one."""
        num_tokens = corpus.meta["train"]["tokens"]
        self.config = fit_to_text(self.config, num_tokens, device.type == "cuda", self.ranks.world)
        if self.state:
            self.refuse_changes()
        c = self.config.train
        T = self.config.model.context_length
        if device.type == "cpu" and hasattr(os, "sysconf"):  # which Windows does not have
            warn_of_logits(c.batch_size, T * corpus.tokenizer.vocab_size)
        tokens_per_step = c.batch_size * c.grad_accum_steps * T
        self.tokens = self.state.get("tokens", self.step * tokens_per_step)
        """Tokens of training so far, which checkpoints of 3.1 and before do not say."""
        return self.config

    def refuse_changes(self) -> None:
        """Raise UserError if the resumed run is asked to become a different one."""
        if self.state.get("batches") != BATCHES:
            raise UserError(
                f"{self.base.directory} is of another version of tril, whose batches have another order: it cannot be "
                f"resumed, but --train.init_from {self.path} begins a new run with its weights"
            )
        before = self.state["config"]
        defaults = tables(Config())  # of options that are younger than the run
        for table, options in tables(self.config).items():
            for name, value in options.items():
                was = before[table].get(name, defaults[table][name])
                if was != value and name == "max_steps":
                    print(f"note: the run was to have {was} steps and has {value} now: the learning rate may jump")
                if was != value and (table != "train" or name not in MAY_CHANGE):
                    raise UserError(
                        f"a resumed run cannot change --{table}.{name}: it began with {was!r:.60}, now {value!r:.60}"
                    )

    def restore(self, model: GPT, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Give optimizer and scaler the state that they had when the resumed checkpoint was saved."""
        if self.step:
            load_optimizer_tensors(model, optimizer, self.base.directory)
            if self.state["scaler"]:
                scaler.load_state_dict(self.state["scaler"])

    def begin(self, corpus: Corpus, probe_tokens: np.ndarray, certificate: dict, environment: dict[str, str]) -> None:
        """Lock the directory; write config.toml and the metrics so far; print what differs from the session before.

        Args:
            corpus: the text; a checkpoint has its tokenizer.
            probe_tokens: those of `Validation`, which checkpoints name for the same probe in an inspection.
            certificate: the record of `certify`, for checkpoints and the report.
            environment: the facts of training/device.py about the machine and the code, also for both.

        Raises UserError if another process uses the directory, or has written to it meanwhile.
        """
        self.corpus = corpus
        self.probe_tokens = probe_tokens.tolist()
        self.about = {"certificate": certificate, "environment": environment}
        before = self.base.manifest["environment"] if self.step else {}
        changed = [
            f"{key} {before[key]} -> {now}"
            for key, now in environment.items()
            if key != "code of model/" and before.get(key, now) != now  # load_model has said that of the code
        ]
        if changed:
            print(f"note: the numbers may differ from those of an unbroken run: {', '.join(changed)}")
        if not self.writes:
            return
        make_directories(self.path / "checkpoints")
        self.held = self.lock()
        if step_directories(self.path) != self.found:
            raise UserError(f"another training process has written to {self.path} meanwhile: go on with --resume")
        replace_file(self.path / "config.toml", to_toml(self.config).encode())
        # Lines after the checkpoint are of steps that will be computed again, or of an abandoned run.
        self.lines = [line for line in read_metrics(self.path) if line["step"] <= (self.step or -1)]
        replace_file(self.metrics, "".join(json.dumps(line) + "\n" for line in self.lines).encode())
        self.tracker = Tracker(self.config.train.wandb, self.state.get("wandb_id"), self.path, tables(self.config))
        self.report()
        print(f"report: {self.path / 'report.html'}")

    def log(self, step: int, **values: object) -> None:
        """Write a line of metrics to metrics.jsonl and wandb."""
        if self.writes:
            # JSON has no numbers that are not finite.
            record = json.loads(json.dumps({"step": step, **values}), parse_constant=lambda name: None)
            with open(self.metrics, "a") as file:
                file.write(json.dumps(record) + "\n")
            self.lines.append(record)
            self.tracker.call("log", flat(record))

    def log_validation(self, progress: Progress, record: dict) -> str:
        """Log a record of `Validation.evaluate`, and return lines to print."""
        self.log(progress.step, **record, tokens=progress.tokens, train_seconds=progress.train_seconds)
        if self.writes:
            self.report()
        text = f"step {progress.step:7d} | val loss {record['val_loss']:7.4f}"
        text += f" | bits/byte {record['val_bits_per_byte']:6.4f} | trained {progress.train_seconds:8.1f} s"
        if "heads" not in record:
            text += f"\n{'':12} | {record['heads_proof']}"
        if "sample" in record:
            text += f"\n{'':12} | {printable(' '.join(record['sample'].split())[:SAMPLE_WIDTH])}"
        return text

    def save(self, progress: Progress, model: GPT, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Write a checkpoint, then delete those that are not to be kept.

        Raises UserError if it cannot be written; the older ones are untouched then.
        """
        # Renamed before the rest is gathered: that copies matrices of a GPT-2, and frees those gathered from shards.
        weights = tensors_to_huggingface(model.config, gather(model.state_dict(), keep=self.writes))
        moments = gather(optimizer_tensors(model, optimizer), keep=self.writes)
        if not self.writes:
            return
        step = progress.step
        tokenizer = self.corpus.tokenizer
        known = json.loads(tokenizer.files.get(GENERATION_CONFIG, b"{}"))  # tokenizers of ours have no such file
        ids = {key: known.get(key, tokenizer.end_of_text) for key in ("bos_token_id", "eos_token_id")}
        trainer = {
            "step": step,
            "tokens": progress.tokens,
            "train_seconds": progress.train_seconds,
            "fingerprint": self.corpus.meta["fingerprint"],
            "corpus": self.corpus.directory.name,
            PROBE_TOKENS: self.probe_tokens,
            "wandb_id": self.tracker.run_id,
            "scaler": scaler.state_dict(),
            "batches": BATCHES,
            "config": tables(self.config),
        }
        files = tokenizer.files | {
            "config.json": to_json(config_to_huggingface(model.config) | ids),
            "model.safetensors": weights,
            "optimizer.safetensors": moments,
            TRAINER: to_json(trainer),
        }
        with errors_as_user_error(f"cannot save step {step} in {self.path}, older steps are untouched"):
            sync(self.metrics)
            save_checkpoint(self.path / "checkpoints", step, files, self.about)
        best = best_checkpoint(self.path, self.lines)
        # Checkpoints of later steps stay: they are damaged, or the run would have resumed from them.
        past = [path for path in step_directories(self.path) if path.name <= f"step-{step:08d}"]
        for path in past[self.config.train.keep_checkpoints :]:
            if path != best:
                remove(path, files)
        self.report()

    def report(self) -> None:
        """Write report.html anew, as a whole or not at all. A failure prints a line, and the run goes on."""
        try:
            page = report_page(self.path, self.config, self.lines, self.about)
            replace_file(self.path / "report.html", page.encode(errors="replace"))  # a name need not be valid UTF-8
        except Exception as error:
            print(f"there is no new report.html: {error!r:.200}")

    def finish(self, step: int, exit_code: int = 0) -> str:
        """End the session: tell wandb its exit code, and unlock the directory.

        Returns what to do next with a finished run; with an exit code, how to go on with an interrupted one.
        """
        if self.writes:
            self.tracker.call("finish", exit_code)
            self.held.lock.release()
        best = best_checkpoint(self.path, self.lines)
        commands = next_commands(self.path, best, not exit_code, vars(self.config.model))
        if exit_code:
            saved = f"saved step {step}" if step else "there was nothing to save yet"
            return f"{saved}; continue with: {commands[0]}"
        return "\n  ".join([f"Next, with the model in {self.path}, where report.html shows how it went:", *commands])


def warn_of_logits(batch_size: int, logits: int) -> None:
    """Print a note if the logits of a batch would take more than half of the machine's memory.

    logits: the number in one sequence.
    """
    size = BYTES_PER_LOGIT * logits
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // size
    if batch_size > most:
        print(
            f"note: logits of {batch_size} sequences take {batch_size * size / 1e9:.1f} GB in training; "
            f"{max(1, most)} fit: --train.batch_size {max(1, most)}"
        )


def make_model(config: Config, corpus: Corpus, base: Checkpoint | None) -> GPT:
    """Return the model on the CPU, and print the text and the model.

    base: where the weights come from; None for random ones.

    Raises UserError for a configuration that no checkpoint could hold (now, not when it is to be saved), or if the
    tokenizer has more tokens than the model.
    """
    print(printable(f"data:   {corpus}"))
    shape = asdict(config.model)
    if base:
        model = load_model(base, dtype=torch.float32, **shape)
    else:
        torch.manual_seed(seed_for(config.train.seed, "weights"))
        model = GPT(GPTConfig(**shape, vocab_size=corpus.tokenizer.vocab_size))
        set_first_weights(model, config.train)
    corpus.tokenizer.check_fits(model.config.vocab_size)
    check_config(model.config)
    print(f"model:  {model.config.family}, {sum(p.numel() for p in model.parameters()):,} parameters")
    return model.train()


def set_first_weights(model: GPT, config: TrainConfig) -> None:
    """Begin as `sharp_first_layer` and `zero_outputs` say, where the model has such weights."""
    for name, parameter in model.named_parameters():  # a tied head has the name of the embedding
        if config.sharp_first_layer and name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, SHARP if name.startswith("blocks.0.") else SOFT)
        if config.zero_outputs and name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            torch.nn.init.zeros_(parameter)


def check_config(config: GPTConfig) -> None:
    """Raise UserError unless a checkpoint would give back this configuration."""
    given_back = config_from_huggingface(json.loads(json.dumps(config_to_huggingface(config))))
    lost = [name for name, value in vars(config).items() if getattr(given_back, name) != value]
    if lost:
        raise UserError(
            f"config.json would not give back {', '.join(lost)}: mend model/huggingface.py, or sampling and "
            "inspection would open another model"
        )

"""The start of a session: what an earlier session of the run has left, and the model and optimizer to go on with."""

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from data import errors_as_user_error
from data.batches import seed_for
from data.corpus import Corpus
from errors import UserError
from model import GPT, GPTConfig
from model.checkpoint import Checkpoint, find_checkpoint, step_directories
from model.huggingface import config_from_huggingface, config_to_huggingface, tensors_to_huggingface
from model.load import load_config, load_model
from training.config import MAY_CHANGE
from training.optimizer import load_optimizer_tensors
from training.options import Config, tables

# First weights of the norms of queries and keys, in the first layer and in the others, for `sharpen_first_layer`. With
# equal ones, which layer learns to look at the token before is luck (benchmarks/results/first_run_cpu_2026-11-26.md).
SHARP = 1.6
SOFT = 0.6


@dataclass(frozen=True)
class Start:
    """The state that a session starts from, read once. The defaults are those of a new run."""

    base: Checkpoint | None = None
    """The checkpoint that the weights come from: the newest of this run, or train.init_from."""
    checkpoints: list[Path] = field(default_factory=list)
    """The checkpoints of this run, newest first."""
    step: int = 0
    """Number of steps made."""
    train_seconds: float = 0.0
    """Seconds of training so far."""
    fingerprint: str | None = None
    """The fingerprint of the corpus."""
    wandb_id: str | None = None
    """The id of the run in wandb."""
    scaler: dict = field(default_factory=dict)
    """The state of the gradient scaler; empty without loss scaling."""
    environment: dict = field(default_factory=dict)
    """The facts that decided the last bits of the session before."""

    @property
    def model_directory(self) -> Path | None:
        """The directory of `base`."""
        return self.base.directory if self.base else None

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint that this session resumes; None for a new run."""
        return self.step if self.checkpoints else None


# name -> type of what is read from a checkpoint: the fields after the first two
STATE = {each.name: each.type for each in fields(Start)[2:]}


def find_start(config: Config, may_resume: bool) -> Start:
    """Return the state that a session starts from: that of the newest intact checkpoint of the run, if there is one.

    may_resume: whether a run is resumed without --resume, as after a restart by torchrun.

    Raises UserError if the directory holds another run, or a run that was not to be resumed, or cannot be written.
    """
    directory = Path(config.train.out_dir)
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {directory}: {nearest} is not a directory you may write to")
    checkpoints = step_directories(directory / "checkpoints")
    if checkpoints:
        if not config.resume and not may_resume:
            raise UserError(
                f"{directory} already holds a run: continue it with --resume {directory}, or give another "
                "--train.out_dir"
            )
        return read_start(find_checkpoint(directory), checkpoints, config)
    if config.resume:
        print(f"note: {directory} has no checkpoint yet, so it begins again")
    return Start(find_checkpoint(config.train.init_from) if config.train.init_from else None)


def read_start(checkpoint: Checkpoint, checkpoints: list[Path], config: Config) -> Start:
    """Return the state in a checkpoint of this run.

    Raises UserError if the checkpoint holds no such state, or that of a run with another configuration.
    """
    state = {"environment": checkpoint.manifest.get("environment", {}), **checkpoint.trainer}
    with errors_as_user_error(f"{checkpoint.directory}/trainer.json is not the state of a run of this version"):
        start = Start(checkpoint, checkpoints, **{name: state[name] for name in STATE})
        are_understood = all(isinstance(state[name], kind) for name, kind in STATE.items())
        if not are_understood or checkpoint.directory.name != f"step-{start.step:08d}":
            raise TypeError(f"{', '.join(STATE)} not understood")
        refuse_changes(state["config"], tables(config))
        planned = int(state["config"]["train"]["max_steps"])
    if config.train.max_steps > planned:
        print(
            f"note: planned for {planned!s:.60} steps, now {config.train.max_steps}: the learning rate may jump "
            "(docs/train.md)"
        )
    return start


def refuse_changes(before: dict[str, dict], now: dict[str, dict]) -> None:
    """Raise UserError if a resumed run is asked to become a different one, naming both values."""
    for table, content in now.items():
        for key, value in content.items():
            was = before[table].get(key, value)
            if was != value and not (table == "train" and key in MAY_CHANGE):
                values = f"it began with {was!r:.60}, now {value!r:.60}"
                raise UserError(f"a resumed run cannot change {table}.{key}: {values}")


def make_model(config: Config, corpus: Corpus, start: Start) -> GPT:
    """Return the model on the CPU, and print the text and the model.

    The weights are random, or those of `start.base`.

    Raises UserError for a configuration or a parameter that no checkpoint could hold (now, not when it is to be saved),
    or if the tokenizer has more tokens than the model.
    """
    print(f"data:   {corpus}")
    shape = asdict(config.model)
    if start.base:
        gpt_config = replace(load_config(start.base.directory), **shape)
    else:
        gpt_config = GPTConfig(**shape, vocab_size=corpus.tokenizer.vocab_size)
    corpus.tokenizer.check_fits(gpt_config.vocab_size)
    check_config(gpt_config)
    if start.base:
        model = load_model(start.base, dtype=torch.float32, config=gpt_config)
        print(f"{'resumed' if start.checkpoints else 'weights'} from {start.base.directory}")
    else:
        torch.manual_seed(seed_for(config.train.seed, "weights"))
        model = GPT(gpt_config)
        if config.train.sharp_first_layer:
            sharpen_first_layer(model)
        tensors_to_huggingface(gpt_config, {name: tensor.to("meta") for name, tensor in model.state_dict().items()})
    print(f"model:  {gpt_config.family}, {sum(p.numel() for p in model.parameters()):,} parameters")
    return model.train()


def sharpen_first_layer(model: GPT) -> None:
    """Begin with norms of queries and keys that are SHARP in the first layer and SOFT in the others, if they can be."""
    for number, block in enumerate(model.blocks):
        for norm in (block.attention.q_norm, block.attention.k_norm):
            if getattr(norm, "weight", None) is not None:
                torch.nn.init.constant_(norm.weight, SOFT if number else SHARP)


def check_config(config: GPTConfig) -> None:
    """Raise UserError unless a checkpoint would give back this configuration."""
    with errors_as_user_error("config.json cannot hold this configuration"):
        content = json.loads(json.dumps(config_to_huggingface(config)))
    given_back = vars(config_from_huggingface(content))
    changed = [name for name, value in vars(config).items() if given_back[name] != value]
    if changed:
        raise UserError(
            f"config.json would not give back {', '.join(changed)}: mend model/huggingface.py, or sampling and "
            "inspection would open another model"
        )


def restore_state(start: Start, model: GPT, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Give optimizer and scaler the state that they had when the resumed checkpoint was saved."""
    if start.checkpoints:
        load_optimizer_tensors(model, optimizer, start.base.directory)
        if start.scaler:
            scaler.load_state_dict(start.scaler)

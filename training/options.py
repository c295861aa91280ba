"""The options of train.py: the command line, over a configuration file, over defaults that fit the text."""

import os
import re
import shlex
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path

import tomli_w

from cli.options import parse
from data.config import DataConfig
from data.known import record_of
from errors import UserError
from files import read_small
from model import GPTConfig, ModelConfig
from model.checkpoint import STEP, find_checkpoint
from model.device import resolve_device
from model.load import load_config
from training.config import Config, TrainConfig
from training.fit import fit_to_text, size_of

CONFIGS = Path(__file__).parent.parent / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"
FINETUNE = CONFIGS / "finetune.toml"
FINETUNE_CONTEXT = 1024  # tokens, unless asked for: long contexts need much memory in training
MOST_CONFIG = 1 << 16  # bytes of a run's config.toml
# Options with which a run reads, or talks to, what is outside its directory.
OUTSIDE = ("data.source", "data.val_source", "data.tokenizer", "train.init_from", "train.wandb")
MAY_DIFFER = {"dropout", "context_length"}  # from the model that is fine-tuned


def read_config(argv: list[str]) -> Config:
    """Return the configuration of a run. Print the reasons for values that no file gives.

    Raises UserError for an option that cannot be used.
    """
    asked = parse(Config, [word for word in argv if word not in ("-h", "--help")])
    if asked.resume:
        return read_resumed(argv, asked)
    file = asked.config or (FINETUNE if asked.train.init_from else QUICKSTART)
    config = parse(Config, argv, file)  # --help shows the values of the file
    if config.train.init_from:
        config = fit_to_model(argv, file, config.train.init_from)
        if not asked.config:
            c = config.train
            print(f"config: to fine-tune: {c.optimizer}, a learning rate of {c.learning_rate:g}, {c.max_steps:,} steps")
    elif not asked.config and asked.data.source != DataConfig.source:
        if "RANK" in os.environ:  # ranks might see another text, or none when torchrun starts them again
            print(f"config: {QUICKSTART.name} as it is: with several processes none is fitted to the text")
        else:
            config = read_fitted(argv, config)
    GPTConfig(**asdict(config.model))  # raises UserError now, not after an hour of preparing data
    return config


def read_resumed(argv: list[str], asked: Config) -> Config:
    """Read the configuration of the run that --resume names.

    Raises UserError if that is no run, or if it came from elsewhere and has links, or options that argv has to repeat.
    """
    directory = asked.resume
    if asked.config or asked.train.out_dir != TrainConfig.out_dir:
        raise UserError("--resume takes configuration and directory from the run: give no other with it")
    file = directory / "config.toml"
    if not file.is_file():
        is_step = "; of a run with such a checkpoint, give the directory" if STEP.fullmatch(directory.name) else ""
        raise UserError(f"{directory} is not the directory of a run: it has no config.toml{is_step}")
    content = read_small(file, MOST_CONFIG)
    config = parse(Config, [*argv, "--train.out_dir", str(directory)], file)
    if not record_of(content).exists():
        reason = "was begun by an earlier version, another copy of tril or another machine, or config.toml was edited"
        for path in [*directory.iterdir(), *directory.glob("checkpoints/*")]:
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                advice = "remove it, or if you made it, replace it by what it points to"
                raise UserError(f"{directory} {reason}, and has {path}, a link or no file: {advice}")
        options = []
        for option in OUTSIDE:
            value, given = map(attrgetter(option), (config, asked))
            if value != given and not re.fullmatch(r"data\.tokenizer (bytes|chars|model|bpe:\d+)", f"{option} {value}"):
                options.append(f"--{option} {shlex.quote(str(value))}")
        if options:
            raise UserError(f"{directory} {reason}: to use what it asks for, add this once: {' '.join(options)}")
    return config


def read_fitted(argv: list[str], config: Config) -> Config:
    """Return the configuration of the quickstart, fitted to its text. Options in argv win."""
    num_bytes, tokenizer = size_of(config.data)
    on_gpu = resolve_device(config.train.device).startswith("cuda")
    config = parse(Config, argv, defaults=fit_to_text(config, num_bytes, tokenizer, on_gpu))
    size = f"about {num_bytes:,.0f} bytes of text" if num_bytes >= 0 else "a text of unknown size"  # nan
    shape = f"{config.model.n_layer} layers of {config.model.n_embd}, {config.data.tokenizer}"
    print(f"config: for {size}: {shape}, {config.train.max_steps:,} steps")
    return config


def fit_to_model(argv: list[str], file: Path, init_from: str) -> Config:
    """Return a configuration with the shape and tokenizer of a model, and the rest from the file and argv.

    Raises UserError if there is no such model, or if argv or the file ask for another shape or tokenizer.
    """
    known = load_config(find_checkpoint(init_from).directory)
    shape = {field.name: getattr(known, field.name) for field in fields(ModelConfig)}
    shape["context_length"] = min(known.context_length, FINETUNE_CONTEXT)
    config = parse(Config, argv, file, Config(model=ModelConfig(**shape), data=DataConfig(tokenizer="model")))
    for name, value in asdict(config.model).items():
        if name not in MAY_DIFFER and value != shape[name]:
            raise UserError(f"{init_from} has {name} = {shape[name]}, got {value}: leave model.{name} out")
    asked = config.model.context_length
    if asked > known.context_length:
        raise UserError(f"{init_from} knows {known.context_length} positions, got model.context_length = {asked}")
    if config.data.tokenizer != "model":
        raise UserError(f"{init_from} knows the ids of its own tokenizer: data.tokenizer must be model")
    return config


def tables(config: Config) -> dict[str, dict]:
    """Return the tables of a configuration by name, such as "model", each as a dictionary of its options."""
    return {name: asdict(getattr(config, name)) for name in ("model", "data", "train")}


def to_toml(config: Config) -> str:
    """Return a configuration as TOML, without the options that are None. `parse` reads it."""
    return tomli_w.dumps(
        {name: {key: table[key] for key in table if table[key] is not None} for name, table in tables(config).items()}
    )

"""The options of train.py: the command line, over a configuration file, over defaults that fit the text."""

import os
from dataclasses import asdict, fields, replace
from pathlib import Path

import tomli_w

from cli.options import parse
from data.config import DataConfig
from errors import UserError
from files import expand
from model import GPTConfig, ModelConfig
from model.checkpoint import find_checkpoint
from model.device import find_device
from model.load import load_config
from training.config import Config, TrainConfig
from training.fit import fit_to_text, size_of

CONFIGS = Path(__file__).parent.parent / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"
FINETUNE = CONFIGS / "finetune.toml"
FINETUNE_CONTEXT = 1024  # tokens, unless asked for: long contexts need much memory in training


def read_config(argv: list[str]) -> Config:
    """Return the configuration of a run. Print the reasons for values that no file gives.

    Raises UserError for an option that cannot be used.
    """
    asked = parse(Config, [word for word in argv if word not in ("-h", "--help")])
    if sum(word.partition("=")[0] == "--data.source" for word in argv) > 1:
        raise UserError("--data.source was given twice: give a folder or a quoted glob that has all of the text")
    if asked.resume is not None:
        if asked.config or asked.train.out_dir != TrainConfig.out_dir:
            raise UserError("--resume takes configuration and directory from the run: give no other with it")
        file = expand(asked.resume) / "config.toml"
        if not file.is_file():
            raise UserError(f"there is no run in {asked.resume}: a run has a config.toml, and checkpoints/ beside it")
        return parse(Config, [*argv, "--train.out_dir", asked.resume], file)
    file = asked.config or (FINETUNE if asked.train.init_from else QUICKSTART)
    config = parse(Config, argv, file)  # --help shows the values of the file
    if config.train.init_from:
        config = fit_to_model(argv, file, config.train.init_from)
    elif not asked.config and asked.data.source != DataConfig.source and "RANK" not in os.environ:
        config = read_fitted(argv, config)  # not with ranks, which might see another text
    GPTConfig(**asdict(config.model))  # raises UserError now, not after an hour of preparing data
    if config.train.warmup_steps > config.train.max_steps:
        warmup_steps = config.train.max_steps // 10
        asked = f"a warmup of {config.train.warmup_steps} steps is longer than the run of {config.train.max_steps}"
        print(f"note: {asked}: it is shortened to {warmup_steps}")
        config = replace(config, train=replace(config.train, warmup_steps=warmup_steps))
    return config


def read_fitted(argv: list[str], config: Config) -> Config:
    """Return the configuration of the quickstart, fitted to its text. Options in argv win."""
    num_bytes, tokenizer = size_of(config.data)
    on_gpu = find_device(config.train.device).type == "cuda"
    config = parse(Config, argv, defaults=fit_to_text(config, num_bytes, tokenizer, on_gpu))
    size = f"about {num_bytes:,.0f} bytes of text" if num_bytes >= 0 else "a text of unknown size"  # nan
    shape = f"{config.model.n_layer} layers of {config.model.n_embd}, {config.data.tokenizer}"
    print(f"config: for {size}: {shape}, {config.train.max_steps:,} steps")
    return config


def fit_to_model(argv: list[str], file: Path, init_from: str) -> Config:
    """Return a configuration with the shape and tokenizer of a model, and the rest from the file and argv.

    Raises UserError if there is no such model, or if argv or the file ask for another shape or tokenizer.
    """
    stored = load_config(find_checkpoint(init_from).directory)
    shape = {field.name: getattr(stored, field.name) for field in fields(ModelConfig)}
    model = replace(ModelConfig(**shape), context_length=min(stored.context_length, FINETUNE_CONTEXT))
    config = parse(Config, argv, file, Config(model=model, data=DataConfig(tokenizer="model")))
    for name, value in asdict(config.model).items():
        fits = value <= shape[name] if name == "context_length" else name == "dropout" or value == shape[name]
        if not fits:
            raise UserError(f"{init_from} has {name} = {shape[name]}, got {value}: leave model.{name} out")
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

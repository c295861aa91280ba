"""The options of train.py: the command line, over a configuration file, over defaults that fit the text.

For a text where no file gives a configuration, one is a row of a table, by what the text can fill. With CUDA the model
is as deep as the text can fill at TOKENS_PER_PARAMETER (Hoffmann et al. 2022), read at most EPOCHS times (Muennighoff
et al. 2023). Without CUDA it is the smallest, and reads no more tokens than the quickstart. The learning rate is always
the quickstart's: it hardly depended on the shape in benchmarks/results/rates_cpu_2026-11-22.md (64 to 256 wide, 1 to 8
layers).
"""

import math
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import tomli_w

from cli.options import parse
from data.corpus import is_prepared, open_corpus
from data.sources import COMPRESSED, DataConfig, find_files
from data.token_files import find_token_files
from errors import UserError
from files import expand
from model import GPTConfig, ModelConfig
from model.checkpoint import find_checkpoint
from model.device import find_device
from model.load import load_config
from training.config import Config, TrainConfig

CONFIGS = Path(__file__).parent.parent / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"
FINETUNE = CONFIGS / "finetune.toml"
SHAPE = ("n_layer", "n_embd", "n_head", "context_length", "rope_theta")
SIZES = [  # SHAPE, batch_size, grad_accum_steps
    (2, 128, 4, 256, 1000.0, 8, 1),
    (6, 256, 4, 256, 2000.0, 32, 1),
    (8, 512, 4, 512, 4000.0, 32, 2),
    (12, 768, 6, 1024, 8000.0, 32, 4),
]
TOKENS_PER_PARAMETER = 20
EPOCHS = 4
FEWEST_STEPS = 100  # of a run, and between two evaluations
EVALUATIONS = 8  # at most
TOKENS_ON_CPU = 1400 * 8 * 256  # the quickstart's
EVAL_TOKENS_ON_CPU = 100_000
VOCABULARIES = {100_000: "bytes", 2_000_000: "bpe:512", 500_000_000: "bpe:4096", math.inf: "bpe:32768"}
COMPRESSION = 3  # bytes of text in a byte of a compressed file, roughly
BYTES_PER_TOKEN = {"bytes": 1.0, "chars": 1.0, "bpe:512": 2.1}  # in English or source code; all others: 3.5
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


def size_of(data: DataConfig) -> tuple[float, str | None]:
    """Return the bytes of the text, and its tokenizer if it is tokens already.

    The bytes are an estimate for token files and compressed files, and nan for a source without files, such as a hub
    data set. Raises UserError if there is no text.
    """
    if is_prepared(data.source):
        meta = open_corpus(Path(data.source)).meta
        return meta["train"]["bytes"] + meta["val"]["bytes"], meta["tokenizer"]
    if token_files := find_token_files(data.source):
        tokenizer = token_files[0].tokenizer
        return sum(file.num_tokens for file in token_files) * BYTES_PER_TOKEN.get(tokenizer, 3.5), tokenizer
    packed = (".parquet", *COMPRESSED)
    found = find_files(data.source)
    sizes = [path.stat().st_size * (COMPRESSION if path.suffix.lower() in packed else 1) for path in found]
    return sum(sizes) if found else math.nan, None


def tokens_for(n_layer: int, n_embd: int, *rest: float) -> int:
    """Return the tokens that a model should be trained on: its blocks have about 12 n_layer n_embd^2 parameters."""
    return TOKENS_PER_PARAMETER * 12 * n_layer * n_embd**2


def fit_to_text(config: Config, num_bytes: float, tokenizer: str | None, on_gpu: bool) -> Config:
    """Return the configuration with a shape, a tokenizer, steps and a run directory for the text.

    num_bytes: of the text, nan if not known. tokenizer: None for one that fits the text.
    """
    if tokenizer is None:
        most = num_bytes if on_gpu else min(2_000_000, num_bytes)
        tokenizer = next((name for bound, name in VOCABULARIES.items() if most <= bound), "bpe:4096")
    num_tokens = num_bytes / BYTES_PER_TOKEN.get(tokenizer, 3.5)
    readable = EPOCHS * min(config.data.max_tokens or num_tokens, num_tokens)
    filled = [size for size in SIZES if on_gpu and tokens_for(*size) <= readable]
    size = filled[-1] if filled else SIZES[0]
    *shape, batch_size, grad_accum_steps = size
    model = replace(config.model, **dict(zip(SHAPE, shape, strict=True)))
    tokens = min(tokens_for(*size) if on_gpu else TOKENS_ON_CPU, readable)  # the first if the other is nan
    max_steps = max(FEWEST_STEPS, round(tokens / (batch_size * grad_accum_steps * model.context_length)))
    every = math.ceil(max_steps / min(EVALUATIONS, max_steps // FEWEST_STEPS))  # the last is not a short one
    train = replace(
        config.train,
        batch_size=batch_size,
        grad_accum_steps=grad_accum_steps,
        max_steps=max_steps,
        eval_every=every,
        checkpoint_every=every,
        eval_tokens=config.train.eval_tokens if on_gpu else EVAL_TOKENS_ON_CPU,
        out_dir=f"out/{name_of(config.data.source)}",
        sample_prompt="",
        sharp_first_layer=not on_gpu,  # of more than two layers it is not known to help
    )
    return replace(config, model=model, data=replace(config.data, tokenizer=tokenizer), train=train)


def name_of(source: str) -> str:
    """Return the name of a run on this source: that of a file, or where-part of hf:some/where:part."""
    return re.sub(r"\W+", "-", Path(source).resolve().stem).strip("-") or "text"


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

"""The options of train.py: the command line, over a configuration file, over what fits the text, over the quickstart.

What neither gives of size and length is fitted to a text of the user's own, once its tokens are counted. With CUDA the
model is as deep as the text can fill at TOKENS_PER_PARAMETER (Hoffmann et al. 2022), read at most EPOCHS times
(Muennighoff et al. 2023). Without CUDA it is the smallest, and reads no more tokens than the quickstart. The learning
rate is always the quickstart's: it hardly depended on the shape in benchmarks/results/rates_cpu_2026-11-22.md (64 to
256 wide, 1 to 8 layers).
"""

import math
import re
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path

import tomli_w

from cli.options import names_in, options_in, parse
from data.corpus import is_prepared, open_corpus
from data.sources import COMPRESSED, DataConfig
from data.token_files import find_token_files
from errors import UserError, errors_as_user_error
from files import expand
from model import GPTConfig, ModelConfig
from model.checkpoint import find_checkpoint
from model.device import find_device
from model.load import load_config
from training.config import Config

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
VOCABULARIES = {100_000: "bytes", 2_000_000: "bpe:512", 500_000_000: "bpe:4096", math.inf: "bpe:32768"}  # by bytes
COMPRESSION = 3  # bytes of text in a byte of a compressed file, roughly
RENAMED = {"--train.record=true": ["--train.compile=graph"], "--train.record=false": []}  # in runs of version 4.0
FINETUNE_CONTEXT = 1024  # tokens, unless asked for: long contexts need much memory in training


def read_config(argv: list[str]) -> Config:
    """Return the configuration of a run, before `fit_to_text`. Print what it is made of.

    Raises UserError for an option that cannot be used.
    """
    # torch.distributed.launch adds this to a command line, and to the environment, where it is read.
    argv = [word for word in argv if not re.match("--local[-_]rank=", word)]
    with errors_as_user_error("a run needs names and texts in UTF-8: rename the file or folder"):
        "".join(argv).encode()
    asked = parse(Config, [word for word in argv if word not in ("-h", "--help")])
    if [word.partition("=")[0] for word in argv].count("--data.source") > 1:
        raise UserError("--data.source was given twice: give a folder or a quoted glob that has all of the text")
    given = names_in(argv)
    if asked.resume is not None:
        if asked.config or "train.out_dir" in given:
            raise UserError("--resume takes configuration and directory from the run: give no other with it")
        file = expand(asked.resume) / "config.toml"
        if not file.is_file():
            raise UserError(f"there is no run in {asked.resume}: a run has a config.toml, and checkpoints/ beside it")
        words = chain.from_iterable(RENAMED.get(word, [word]) for word in options_in(file))
        return parse(Config, [*words, *argv, "--train.out_dir", asked.resume])
    files = [asked.config] if asked.config else []
    quickstart = parse(Config, [], QUICKSTART)
    config = parse(Config, argv, *files, defaults=quickstart)  # --help shows these values
    if config.train.init_from:
        return fit_to_model(argv, files, config.train.init_from)
    for file in files:
        given |= names_in(options_in(file))
    on_gpu = find_device(config.train.device).type == "cuda"
    if config.data.source != quickstart.data.source:
        config = replace(config, given=frozenset(given))
        tokenizer = tokenizer_for(config.data, on_gpu) if "data.tokenizer" not in given else ""
        name = re.sub(r"\W+", "-", Path(config.data.source).resolve().stem).strip("-")
        config = with_fitted(config, {"tokenizer": tokenizer, "out_dir": f"out/{name or 'text'}", "sample_prompt": ""})
    if not on_gpu or config.given is None:  # on a GPU the rest of the shape may be another
        GPTConfig(**asdict(config.model))  # raises UserError now, not after an hour of preparing data
    if not given >= names_in(options_in(QUICKSTART)):
        files.append("configs/quickstart.toml")
    print(f"config: {' over '.join(map(str, files))}")
    return config


def with_fitted(config: Config, values: dict[str, object]) -> Config:
    """Return the configuration with the values of those of these options that the user did not give."""
    fitted = {}
    for table, options in tables(config).items():
        own = {name: values[name] for name in options.keys() & values if f"{table}.{name}" not in config.given}
        fitted[table] = replace(getattr(config, table), **own)
    return replace(config, **fitted)


def tokenizer_for(config: DataConfig, on_gpu: bool) -> str:
    """Return the tokenizer for a text by the size of its files; its own, if it is tokens already.

    Raises UserError if there is no text.
    """
    if is_prepared(config.source):
        return open_corpus(Path(config.source)).meta["tokenizer"]
    if token_files := find_token_files(config):
        return token_files[0].tokenizer
    packed = (".parquet", *COMPRESSED)
    sizes = [path.stat().st_size * (COMPRESSION if path.suffix.lower() in packed else 1) for path in config.files]
    if not sizes:  # of the hub
        return DataConfig.tokenizer
    most = sum(sizes) if on_gpu else min(2_000_000, sum(sizes))
    return next(name for bound, name in VOCABULARIES.items() if most <= bound)


def tokens_for(n_layer: int, n_embd: int, *rest: float) -> int:
    """Return the tokens that a model should be trained on: its blocks have about 12 n_layer n_embd^2 parameters."""
    return TOKENS_PER_PARAMETER * 12 * n_layer * n_embd**2


def fit_to_text(config: Config, num_tokens: int, on_gpu: bool, world: int = 1) -> Config:
    """Return the configuration with a size and a length for so many tokens of training, as far as none was given.

    world: the number of ranks, which have to share the micro-batches of a step. Prints what is chosen.
    """
    if config.given is not None:
        readable = EPOCHS * num_tokens
        filled = [size for size in SIZES if on_gpu and tokens_for(*size) <= readable]
        size = filled[-1] if filled else SIZES[0]
        tokens = min(readable, tokens_for(*size) if on_gpu else TOKENS_ON_CPU)
        values = dict(zip((*SHAPE, "batch_size", "grad_accum_steps"), size, strict=True))
        values["grad_accum_steps"] = math.lcm(values["grad_accum_steps"], world)
        values["sharp_first_layer"] = not on_gpu  # of more than two layers it is not known to help
        if not on_gpu:
            values["eval_tokens"] = EVAL_TOKENS_ON_CPU
        config = with_fitted(config, values)
        c = config.train
        tokens_per_step = c.batch_size * c.grad_accum_steps * config.model.context_length
        config = with_fitted(config, {"max_steps": max(FEWEST_STEPS, round(tokens / tokens_per_step))})
        max_steps = config.train.max_steps
        every = math.ceil(max_steps / max(1, min(EVALUATIONS, max_steps // FEWEST_STEPS)))  # the last no short one
        config = with_fitted(config, {"eval_every": every, "checkpoint_every": every})
        print(
            f"config: for {num_tokens:,} tokens to train on: {config.model.n_layer} layers of {config.model.n_embd}, "
            f"{config.data.tokenizer}, {config.train.max_steps:,} steps"
        )
    c = config.train
    if c.warmup_steps > c.max_steps:
        warmup_steps = c.max_steps // 10
        print(
            f"note: a warmup of {c.warmup_steps} steps is longer than the run of {c.max_steps}: it is shortened to "
            f"{warmup_steps}"
        )
        config = replace(config, train=replace(c, warmup_steps=warmup_steps))
    return config


def fit_to_model(argv: list[str], files: list[Path], init_from: str) -> Config:
    """Return a configuration with the shape and tokenizer of a model, and the rest from argv, the files and FINETUNE.

    Raises UserError if there is no such model, or if argv or a file ask for another shape or tokenizer.
    """
    stored = load_config(find_checkpoint(init_from).directory)
    shape = {field.name: getattr(stored, field.name) for field in fields(ModelConfig)}
    model = replace(ModelConfig(**shape), context_length=min(stored.context_length, FINETUNE_CONTEXT))
    of_model = Config(model=model, data=DataConfig(tokenizer="model"))
    config = parse(Config, argv, FINETUNE, *files, defaults=of_model)
    for name, value in asdict(config.model).items():
        fits = value <= shape[name] if name == "context_length" else name == "dropout" or value == shape[name]
        if not fits:
            raise UserError(f"{init_from} has {name} = {shape[name]}, got {value}: leave --model.{name} out")
    if config.data.tokenizer != "model":
        raise UserError(f"{init_from} knows the ids of its own tokenizer: leave --data.tokenizer out")
    return config


def tables(config: Config) -> dict[str, dict]:
    """Return the tables of a configuration by name, such as "model", each as a dictionary of its options."""
    return {name: asdict(getattr(config, name)) for name in ("model", "data", "train")}


def to_toml(config: Config) -> str:
    """Return a configuration as TOML, without the options that are None. `parse` reads it."""
    return tomli_w.dumps(
        {name: {key: table[key] for key in table if table[key] is not None} for name, table in tables(config).items()}
    )

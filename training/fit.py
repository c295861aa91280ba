"""A configuration for a text where no file gives one: a row of a table, by what the text can fill.

With CUDA the model is as deep as the text can fill at TOKENS_PER_PARAMETER (Hoffmann et al. 2022), read at most EPOCHS
times (Muennighoff et al. 2023). Without CUDA it is the smallest, and reads no more tokens than the quickstart. The
learning rate is always the quickstart's: it hardly depended on the shape in benchmarks/results/rates_cpu_2026-11-22.md
(64 to 256 wide, 1 to 8 layers).
"""

import math
import re
from dataclasses import replace
from pathlib import Path

from data.config import DataConfig
from data.corpus import is_prepared, open_corpus
from data.sources import COMPRESSED, find_files
from data.token_files import find_token_files
from training.config import Config

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

"""A configuration for a text where no file gives one: the number of layers decides the rest.

With CUDA the model is as deep as the text can fill at TOKENS_PER_PARAMETER (Hoffmann et al. 2022), read at most EPOCHS
times (Muennighoff et al. 2023). Without CUDA it is the smallest, and reads no more tokens than the quickstart. The
learning rate is always the quickstart's: it hardly depended on the shape in benchmarks/results/rates_cpu_2026-11-22.md
(64 to 256 wide, 1 to 8 layers).
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from data.config import DataConfig
from data.corpus import is_prepared, open_corpus
from data.shards import find_shards, has_shards
from data.sources import files
from model import ModelConfig
from training.config import TrainConfig


class Shape(NamedTuple):
    """Everything that follows from the number of layers."""

    n_embd: int
    n_head: int
    context_length: int
    rope_theta: float
    batch_size: int
    grad_accum_steps: int


SHAPES = {
    2: Shape(128, 4, 256, 1000.0, 8, 1),
    6: Shape(256, 4, 256, 2000.0, 32, 1),
    8: Shape(512, 4, 512, 4000.0, 32, 2),
    12: Shape(768, 6, 1024, 8000.0, 32, 4),
}
TOKENS_PER_PARAMETER, EPOCHS, FEWEST_STEPS, EVALUATIONS = 20, 4, 100, 8
TOKENS_ON_CPU, EVAL_TOKENS_ON_CPU = 1400 * 8 * 256, 100_000
VOCABULARIES = {100_000: "bytes", 2_000_000: "bpe:512", 500_000_000: "bpe:4096", math.inf: "bpe:32768"}
BYTES_PER_TOKEN = {"bytes": 1.0, "chars": 1.0, "bpe:512": 2.1}  # in English or source code; all others: 3.5


def measure(data: DataConfig) -> tuple[float, str | None]:
    """Bytes of the text, an estimate for token files, and its tokenizer if it is tokens already.

    The bytes are nan for a hub data set. Raises DataError if there is no text.
    """
    if data.source.startswith("hf:"):
        return math.nan, None
    if is_prepared(data.source):
        meta = open_corpus(Path(data.source)).meta
        return meta["train"]["bytes"] + meta["val"]["bytes"], meta["tokenizer"]
    if has_shards(data.source):
        shards = find_shards(data.source)
        tokenizer = shards[0].tokenizer
        return sum(shard.num_tokens for shard in shards) * BYTES_PER_TOKEN.get(tokenizer, 3.5), tokenizer
    return sum(path.stat().st_size for path in files(data.source)), None


def count_tokens(num_bytes: float, data: DataConfig) -> float:
    """Estimate the number of tokens in the text; nan if its size is not known."""
    num_tokens = num_bytes / BYTES_PER_TOKEN.get(data.tokenizer, 3.5)
    return num_tokens if data.max_tokens is None else min(data.max_tokens, num_tokens)


def tokens_for(n_layer: int, n_embd: int) -> int:
    """Tokens that a model should be trained on: its blocks have about 12 n_layer n_embd^2 parameters."""
    return TOKENS_PER_PARAMETER * 12 * n_layer * n_embd**2


def choose_shape(
    model: ModelConfig, data: DataConfig, train: TrainConfig, num_bytes: float, tokenizer: str | None, device_type: str
) -> dict[str, object]:
    """Change the tables of a run: the shape of the model, the tokenizer and the run directory for the text.

    tokenizer: None for one that fits the text.
    """
    if tokenizer is None:
        most = num_bytes if device_type == "cuda" else min(2_000_000, num_bytes)
        tokenizer = next((name for bound, name in VOCABULARIES.items() if most <= bound), "bpe:4096")
    data = replace(data, tokenizer=tokenizer)
    readable = EPOCHS * count_tokens(num_bytes, data)
    filled = [n_layer for n_layer, shape in SHAPES.items() if tokens_for(n_layer, shape.n_embd) <= readable]
    n_layer = max(filled if device_type == "cuda" else [], default=min(SHAPES))
    shape = SHAPES[n_layer]._asdict()
    batches = {name: shape.pop(name) for name in ("batch_size", "grad_accum_steps")}
    train = replace(train, **batches, out_dir=f"out/{name_of(data.source)}", sample_prompt="")
    return {"model": replace(model, n_layer=n_layer, **shape), "data": data, "train": train}


def choose_steps(
    model: ModelConfig, data: DataConfig, train: TrainConfig, num_bytes: float, device_type: str
) -> TrainConfig:
    """Change the [train] table to as many steps as this model and text are worth; on a CPU to TOKENS_ON_CPU at most."""
    tokens, num_tokens = tokens_for(model.n_layer, model.n_embd), count_tokens(num_bytes, data)
    if num_tokens > 0:  # else it is not known, or empty, which the preparation will say
        tokens = min(tokens, EPOCHS * num_tokens)
    if device_type != "cuda":
        tokens = min(tokens, TOKENS_ON_CPU)
    max_steps = max(FEWEST_STEPS, round(tokens / (train.batch_size * train.grad_accum_steps * model.context_length)))
    every = max(FEWEST_STEPS, max_steps // EVALUATIONS)
    eval_tokens = train.eval_tokens if device_type == "cuda" else EVAL_TOKENS_ON_CPU
    return replace(train, max_steps=max_steps, eval_every=every, checkpoint_every=every, eval_tokens=eval_tokens)


def name_of(source: str) -> str:
    """Name of the directory for a run on this source."""
    hub = re.fullmatch("hf:(?:.*/)?([^/:@]+).*", source)
    name = hub[1] if hub else Path(source).resolve().stem
    return re.sub(r"\W+", "-", name).strip("-") or "text"

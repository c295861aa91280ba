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


def size_of(data: DataConfig) -> tuple[float, str | None]:
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


def tokens_for(n_layer: int, n_embd: int) -> int:
    """Tokens that a model should be trained on: its blocks have about 12 n_layer n_embd^2 parameters."""
    return TOKENS_PER_PARAMETER * 12 * n_layer * n_embd**2


def fit_to_text(
    model: ModelConfig, data: DataConfig, train: TrainConfig, num_bytes: float, tokenizer: str | None, on_gpu: bool
) -> dict[str, object]:
    """Change the tables of a run: the shape of the model, the tokenizer, the steps and the run directory for the text.

    num_bytes: of the text, nan if not known. tokenizer: None for one that fits the text.
    """
    if tokenizer is None:
        most = num_bytes if on_gpu else min(2_000_000, num_bytes)
        tokenizer = next((name for bound, name in VOCABULARIES.items() if most <= bound), "bpe:4096")
    num_tokens = num_bytes / BYTES_PER_TOKEN.get(tokenizer, 3.5)
    readable = EPOCHS * (num_tokens if data.max_tokens is None else min(data.max_tokens, num_tokens))
    filled = [n_layer for n_layer, shape in SHAPES.items() if tokens_for(n_layer, shape.n_embd) <= readable]
    n_layer = max(filled if on_gpu else [], default=min(SHAPES))
    shape = SHAPES[n_layer]._asdict()
    batches = {name: shape.pop(name) for name in ("batch_size", "grad_accum_steps")}
    tokens = tokens_for(n_layer, shape["n_embd"])
    if readable > 0:  # else it is not known, or empty, which the preparation will say
        tokens = min(tokens, readable)
    if not on_gpu:
        tokens = min(tokens, TOKENS_ON_CPU)
    max_steps = max(FEWEST_STEPS, round(tokens / (math.prod(batches.values()) * shape["context_length"])))
    every = max(FEWEST_STEPS, max_steps // EVALUATIONS)
    steps = {"max_steps": max_steps, "eval_every": every, "checkpoint_every": every}
    steps["eval_tokens"] = train.eval_tokens if on_gpu else EVAL_TOKENS_ON_CPU
    return {
        "model": replace(model, n_layer=n_layer, **shape),
        "data": replace(data, tokenizer=tokenizer),
        "train": replace(train, **batches, **steps, out_dir=f"out/{name_of(data.source)}", sample_prompt=""),
    }


def name_of(source: str) -> str:
    """Name of the directory for a run on this source."""
    hub = re.fullmatch("hf:(?:.*/)?([^/:@]+).*", source)
    name = hub[1] if hub else Path(source).resolve().stem
    return re.sub(r"\W+", "-", name).strip("-") or "text"

"""What to train on a text when no configuration says: one number, the depth, decides the rest.

A model is as deep as the text can fill, with TOKENS_PER_PARAMETER (Hoffmann et al. 2022), each read EPOCHS times at
most (Muennighoff et al. 2023). A CPU gets the smallest, for about two minutes.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from data.corpus import open_corpus
from data.prepare import DataConfig, is_prepared
from data.sources import find_shards
from model import ModelConfig
from training.config import TrainConfig, TrainError


class Shape(NamedTuple):
    """What a depth brings with it."""

    n_embd: int
    n_head: int
    context_length: int
    batch_size: int
    grad_accum_steps: int


SHAPES = {
    4: Shape(128, 4, 128, 16, 1),
    6: Shape(256, 4, 256, 32, 1),
    8: Shape(512, 4, 512, 32, 2),
    12: Shape(768, 6, 1024, 32, 4),
}
TOKENS_PER_PARAMETER, EPOCHS = 20, 4
FEWEST_STEPS, STEPS_ON_CPU, EVALUATIONS = 100, 400, 20
VOCABULARIES = {500_000: "bytes", 5_000_000: "bpe:1024", 500_000_000: "bpe:4096", math.inf: "bpe:32768"}


def choose(
    model: ModelConfig, data: DataConfig, train: TrainConfig, device_type: str, depth: int | None = None
) -> tuple[dict, str]:
    """The tables of a run on a text, made from those given, and why they are so in a line for the user.

    depth: one of SHAPES; None: what fits the text and the device. Raises DataError if there is no such text, TrainError
    if there is no such depth.
    """
    if depth is not None and depth not in SHAPES:
        raise TrainError(f"depth must be one of {', '.join(map(str, SHAPES))}, got {depth}")
    num_bytes, tokenizer = measure(data)
    tokenizer = tokenizer or next(name for most, name in VOCABULARIES.items() if num_bytes <= most)
    num_tokens = num_bytes / bytes_per_token(tokenizer)
    asked = depth is not None
    if not asked:
        fits = [depth for depth in SHAPES if device_type != "cpu" and tokens_for(depth) <= EPOCHS * num_tokens]
        depth = max(fits, default=min(SHAPES))
    shape = SHAPES[depth]
    tokens_per_step = shape.batch_size * shape.grad_accum_steps * shape.context_length
    max_steps = max(FEWEST_STEPS, round(min(tokens_for(depth), EPOCHS * num_tokens) / tokens_per_step))
    if device_type == "cpu" and not asked:
        max_steps = min(max_steps, STEPS_ON_CPU)
    every = max(FEWEST_STEPS, max_steps // EVALUATIONS)
    batches = {"batch_size": shape.batch_size, "grad_accum_steps": shape.grad_accum_steps}
    heads = {"n_layer": depth, "n_head": shape.n_head, "n_embd": shape.n_embd}
    directory = f"out/{Path(re.sub('^hf:|[:@].*', '', data.source)).stem}"
    theta = model.rope_theta * shape.context_length / model.context_length  # as long a wave for its context
    tables = {
        "model": replace(model, **heads, context_length=shape.context_length, rope_theta=theta),
        "data": replace(data, tokenizer=tokenizer),
        "train": replace(
            train, **batches, max_steps=max_steps, eval_every=every, checkpoint_every=every, out_dir=directory
        ),
    }
    size = "a large text" if math.isinf(num_bytes) else f"{num_bytes / 1e6:,.1f} MB of text"
    why = f"{size}, {'depth ' + str(depth) if asked else device_type}: {depth} layers of {shape.n_embd}, {tokenizer}"
    why += f", {max_steps:,} steps"
    if not math.isinf(num_bytes):
        why += f", which read it {max_steps * tokens_per_step / num_tokens:.1f} times"
    return tables, why


def tokens_for(depth: int) -> int:
    """How many tokens a model of this depth should see: its blocks have 12 n_layer n_embd^2 parameters."""
    return TOKENS_PER_PARAMETER * 12 * depth * SHAPES[depth].n_embd ** 2


def bytes_per_token(tokenizer: str) -> float:
    """About so many, in English or in source code."""
    return 1.0 if tokenizer in ("bytes", "chars") else 2.5 if tokenizer == "bpe:1024" else 3.5


def measure(data: DataConfig) -> tuple[float, str | None]:
    """Bytes of the text, inf where only a hub knows, and the tokenizer that it was prepared with, if it was."""
    if data.source.startswith("hf:"):
        return math.inf, None
    if is_prepared(data.source):
        meta = open_corpus(Path(data.source)).meta
        return meta["train"]["bytes"] + meta["val"]["bytes"], meta["tokenizer"]
    return sum(shard.size for shard in find_shards(data.source, data.text_column)), None

"""Fine-tuning: a run that begins with the weights, and so with the shape and the tokenizer, of another model."""

from dataclasses import asdict, fields, replace
from pathlib import Path

from model import GPTConfig, ModelConfig
from model.checkpoint import read_optional
from model.load import load_config
from training.config import TrainConfig, TrainError

MAY_DIFFER = {"dropout", "context_length"}
CONTEXT = 1024  # tokens, if nothing else is asked for: long contexts need much memory in training


def find_shape(base: Path) -> ModelConfig:
    """The shape of a checkpoint or hub model, as the [model] table of a run that begins with it."""
    config = load_config(base)
    return ModelConfig(**{field.name: getattr(config, field.name) for field in fields(ModelConfig)})


def with_context(shape: ModelConfig) -> ModelConfig:
    """The shape a fine-tuning run has unless it is told otherwise."""
    return replace(shape, context_length=min(shape.context_length, CONTEXT))


def check_shape(asked: ModelConfig, shape: ModelConfig, tokenizer: str, init_from: str) -> None:
    """Raise TrainError if the weights do not fit the model, or the ids the weights, that a run asks for."""
    for name, value in asdict(asked).items():
        if name not in MAY_DIFFER and value != getattr(shape, name):
            raise TrainError(f"{init_from} has {name} = {getattr(shape, name)}, got {value}: leave model.{name} out")
    if asked.context_length > shape.context_length:
        known = shape.context_length
        raise TrainError(f"{init_from} knows {known} positions, got model.context_length = {asked.context_length}")
    if tokenizer != "model":
        raise TrainError(f"{init_from} knows the ids of its own tokenizer: data.tokenizer must be model")


def describe_finetuning(train: TrainConfig, base: Path) -> str:
    """How a run fine-tunes the model in `base`, if no configuration was given, in a line."""
    text = f"to fine-tune: {train.optimizer}, a learning rate of {train.learning_rate:g}, {train.max_steps:,} steps"
    optimizer, rate = (
        read_optional(base / "trainer.json", "config", "train", name) for name in ("optimizer", "learning_rate")
    )
    if optimizer == "muon" != train.optimizer and isinstance(rate, float):
        text += f" (it was made with muon: try --train.optimizer muon --train.learning_rate {rate / 2:g})"
    return text


def config_of(shape: ModelConfig, base: Path | None, vocab_size: int) -> GPTConfig:
    """The model of a run, with what its [model] table does not say from the checkpoint it begins with, if any.

    Raises TrainError if the tokenizer has more tokens than that.
    """
    if base is None:
        return GPTConfig(**asdict(shape), vocab_size=vocab_size)
    config = replace(load_config(base), **asdict(shape))
    if vocab_size > config.vocab_size:
        raise TrainError(f"the tokenizer has {vocab_size} tokens, the model of {base} {config.vocab_size}")
    return config

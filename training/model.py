"""The model that a session trains: with random weights, or with those of a checkpoint."""

import json
from dataclasses import asdict

import torch

from cli.script import visible
from data.batches import seed_for
from data.corpus import Corpus
from errors import UserError
from model import GPT, GPTConfig
from model.checkpoint import Checkpoint
from model.huggingface import config_from_huggingface, config_to_huggingface
from model.load import load_model
from training.config import Config, TrainConfig

# First weights of the norms of queries and keys, in the first layer and in the others, for `sharp_first_layer`. With
# equal ones, which layer learns to look at the token before is luck (benchmarks/results/first_run_cpu_2026-11-26.md).
SHARP = 1.6
SOFT = 0.6


def make_model(config: Config, corpus: Corpus, base: Checkpoint | None) -> GPT:
    """Return the model on the CPU, and print the text and the model.

    base: where the weights come from; None for random ones.

    Raises UserError for a configuration that no checkpoint could hold (now, not when it is to be saved), or if the
    tokenizer has more tokens than the model.
    """
    print(visible(f"data:   {corpus}"))
    shape = asdict(config.model)
    if base:
        model = load_model(base, dtype=torch.float32, **shape)
    else:
        torch.manual_seed(seed_for(config.train.seed, "weights"))
        model = GPT(GPTConfig(**shape, vocab_size=corpus.tokenizer.vocab_size))
        set_first_weights(model, config.train)
    corpus.tokenizer.check_fits(model.config.vocab_size)
    check_config(model.config)
    print(f"model:  {model.config.family}, {sum(p.numel() for p in model.parameters()):,} parameters")
    return model.train()


def set_first_weights(model: GPT, config: TrainConfig) -> None:
    """Begin as `sharp_first_layer` and `zero_outputs` say, where the model has such weights."""
    for name, parameter in model.named_parameters():  # a tied head has the name of the embedding
        if config.sharp_first_layer and name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, SHARP if name.startswith("blocks.0.") else SOFT)
        if config.zero_outputs and name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            torch.nn.init.zeros_(parameter)


def check_config(config: GPTConfig) -> None:
    """Raise UserError unless a checkpoint would give back this configuration."""
    given_back = config_from_huggingface(json.loads(json.dumps(config_to_huggingface(config))))
    lost = [name for name, value in vars(config).items() if getattr(given_back, name) != value]
    if lost:
        raise UserError(
            f"config.json would not give back {', '.join(lost)}: mend model/huggingface.py, or sampling and "
            "inspection would open another model"
        )

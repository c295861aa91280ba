"""The configuration of a GPT: the `[model]` table of a run, and the fields that only a checkpoint sets.

Checkpoints store every field automatically. A new option is a field with a default and a docstring in `ModelConfig`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from errors import UserError, check_numbers

MOST_CONTEXT = 2**15  # the mask takes its square in bytes, 1 GiB
SIZES = ("n_head", "n_kv_head", "n_embd", "head_dim", "n_inner", "vocab_size")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model: by itself that of GPT-2 small."""

    family: Literal["gpt2", "llama", "qwen3", "nanochat"] = "gpt2"
    """Kind of transformer, named as in the library `transformers`: see model/families.py."""
    n_layer: int = 12
    """Number of transformer blocks."""
    n_head: int = 12
    """Attention (query) heads per block."""
    n_kv_head: int | None = None
    """Key and value heads per block, each shared by a group of query heads. None: as many as n_head."""
    n_embd: int = 768
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of a head. None: n_embd / n_head."""
    n_inner: int | None = None
    """Width of the MLP. None: 4 n_embd; in llama and qwen3 8/3 n_embd, rounded up to a multiple of 64."""
    context_length: int = 1024
    """Most tokens that the model can attend to."""
    dropout: float = 0.0
    """Probability of dropping an activation in training, in gpt2 also an attention weight; 0 is best unless training
    reads the text many times."""
    bias: bool | None = None
    """Biases in linear layers and layer norms. None: true in gpt2; the other families have none."""
    tied: bool | None = None
    """Share one matrix between embedding and head. None: true, but false in nanochat."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions: the slowest pair of channels turns once in about 2 pi times as many tokens."""


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """A `ModelConfig` and the fields that only a checkpoint sets. Raises UserError if no such model can be built."""

    vocab_size: int = 50257
    """Number of tokens, that of the tokenizer."""
    norm_eps: float | None = None
    """Added to the variance by a norm. None: 1e-5 in gpt2 and llama, 1e-6 in the others."""
    rope_scaling: tuple[float, float, float, int] | None = None
    """Llama 3's scaling of rotary positions: factor, low and high frequency factor, original context length."""

    def __post_init__(self) -> None:
        family = self.family
        # Larger than any real model, so that a damaged or hostile config.json is refused before memory is allocated.
        check_numbers(
            self,
            n_layer=(1, 2**9),
            context_length=(1, MOST_CONTEXT),
            dropout=(0, 0.99),
            **dict.fromkeys(SIZES, (1, 2**24)),
        )
        if self.n_embd % self.n_head != 0 and (self.head_dim is None or family != "qwen3"):
            raise UserError(f"n_embd must be a multiple of n_head, got n_embd={self.n_embd} and n_head={self.n_head}")
        gated_width = 64 * math.ceil(self.n_embd / 24)  # 8/3 n_embd, rounded up to a multiple of 64
        defaults = {
            "n_kv_head": self.n_head,
            "head_dim": self.n_embd // self.n_head,
            "n_inner": gated_width if family in ("llama", "qwen3") else 4 * self.n_embd,
            "bias": family == "gpt2",
            "tied": family != "nanochat",
            "norm_eps": 1e-5 if family in ("gpt2", "llama") else 1e-6,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "norm_eps", float(self.norm_eps))  # YAML makes a text of 1e-05
        if self.bias and family != "gpt2":
            raise UserError(f"a {family} has no biases, got bias=True")
        if self.head_dim != self.n_embd // self.n_head and family in ("gpt2", "nanochat"):
            raise UserError(f"head_dim is n_embd / n_head in a {family}, got {self.head_dim}")
        if self.head_dim % 2 and family != "gpt2":
            raise UserError(f"rotary positions turn pairs of channels: head_dim must be even, got {self.head_dim}")
        if self.n_head % self.n_kv_head != 0:
            raise UserError(
                f"n_head must be a multiple of n_kv_head, got n_head={self.n_head} and n_kv_head={self.n_kv_head}"
            )

"""What a GPT may look like: the `[model]` table of a run, and the error that says why something is not one."""

from dataclasses import dataclass
from typing import Literal

# Larger than anything there is, and small enough to say no before memory is asked for.
LARGEST = {"n_layer": 2**10, "n_head": 2**16, "n_kv_head": 2**16, "n_embd": 2**20}
LARGEST |= {"context_length": 2**15, "vocab_size": 2**24}  # the mask has the square of the context in bytes


class ModelError(ValueError):
    """A configuration, checkpoint or request that no GPT can serve; the message is for the user."""

    exit_code = 2


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. The defaults are GPT-2 small."""

    family: Literal["gpt2"] = "gpt2"
    """Kind of transformer: gpt2 (LayerNorm, learned positions, GELU, dropout, tied head)."""
    n_layer: int = 12
    """Number of transformer blocks."""
    n_head: int = 12
    """Attention (query) heads per block."""
    n_kv_head: int | None = None
    """Key and value heads per block, each shared by a group of query heads. None: as many as n_head."""
    n_embd: int = 768
    """Width of the residual stream."""
    context_length: int = 1024
    """The most tokens the model can look at."""
    dropout: float = 0.0
    """Probability of dropping an activation in training; 0 is best unless the corpus is read many times."""
    bias: bool = True
    """Whether linear layers and layer norms have biases."""


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """A `ModelConfig` and the size of the vocabulary, which is the tokenizer's to say.

    Raises ModelError if no such model can be built.
    """

    vocab_size: int = 50257

    def __post_init__(self) -> None:
        if self.n_kv_head is None:
            object.__setattr__(self, "n_kv_head", self.n_head)
        for name, most in LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ModelError(f"{name} must be a whole number from 1 to {most:,}, got {value!r}")
        if type(self.bias) is not bool or type(self.dropout) not in (int, float):
            raise ModelError(f"bias is true or false and dropout a number, got {self.bias!r} and {self.dropout!r}")
        if not 0 <= self.dropout < 1:
            raise ModelError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if self.n_embd % self.n_head != 0:
            raise ModelError(f"n_embd must be a multiple of n_head, got n_embd={self.n_embd} and n_head={self.n_head}")
        if self.n_head % self.n_kv_head != 0:
            raise ModelError(
                f"n_head must be a multiple of n_kv_head, got n_head={self.n_head} and n_kv_head={self.n_kv_head}"
            )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

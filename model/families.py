"""The parts in which families of GPTs differ: norms, MLPs, positions, and which of them a family has.

    gpt2      LayerNorm, learned positions, GELU, dropout, a tied head    Radford et al. 2019
    llama     RMSNorm, rotary positions, SwiGLU, grouped heads            Touvron et al. 2023, Grattafiori et al. 2024
    qwen3     llama with normalised queries and keys                      Yang et al. 2025
    nanochat  norms without weights, ReLU^2, capped logits                Karpathy 2025

Each equals the model type of that name in `transformers`. Shapes are named as in model/attention.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import GPTConfig
from model.precision import autocast_dtype


class MLP(nn.Module):
    """What a block does to each token by itself: two linear layers around a GELU."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.down_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.residual_dropout(self.down_proj(self.activate(x)))

    def activate(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, n_inner)."""
        return F.gelu(self.up_proj(x), approximate="tanh")  # GPT-2's


class SwiGLU(MLP):
    """One more linear layer is the gate of the others (Shazeer 2020)."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)

    def activate(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, n_inner)."""
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class ReLUSquared(MLP):
    """max(0, x)^2 (So et al. 2021)."""

    def activate(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, n_inner)."""
        y = F.relu(self.up_proj(x))
        return y * y  # square() would be in float32 under CUDA's autocast


class Rotary(nn.Module):
    """Rotary positions: each pair of channels is turned by an angle that grows with the position (Su et al. 2021).

    A product of a query and a key then depends on how far apart they are. The layers of a model share one.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.fill()

    def fill(self, device: torch.device | None = None) -> None:
        """Compute the tables anew, (context_length, D / 2) float32, whatever the model has been turned into."""
        c = self.config
        frequencies = 1 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, device=device).float() / c.head_dim)
        if c.rope_scaling:  # Llama 3: slow waves, which do not end in the first context, are made slower
            factor, low, high, original = c.rope_scaling
            waves = original * frequencies / (2 * math.pi)  # in the first context
            kept = ((waves - low) / (high - low)).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / factor)
        if c.family == "nanochat":
            frequencies = -frequencies  # turns the other way
        angles = torch.arange(c.context_length, device=device).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        """(B, heads, T, D) at these positions, of all sequences or, (B, 1, 1), of each -> (B, heads, T, D)."""
        cos, sin = (table[positions].to(x.dtype) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)  # a pair is a channel of the first half and its fellow in the second
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.RMSNorm):
    """PyTorch's (Zhang and Sennrich 2019), with its output in the precision of its input, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        if autocast_dtype(x) is None:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        with torch.autocast(x.device.type, enabled=False):  # on CUDA it returns float32, from PyTorch 2.12 on
            if self.weight is None:
                return F.rms_norm(x, self.normalized_shape, eps=self.eps)
            # In bfloat16 a weight near one would be one.
            return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


def layer_norm(width: int, config: GPTConfig) -> nn.Module:
    return nn.LayerNorm(width, config.norm_eps, bias=config.bias)


def rms_norm(width: int, config: GPTConfig) -> nn.Module:
    return RMSNorm(width, config.norm_eps)


def plain_rms_norm(width: int, config: GPTConfig) -> nn.Module:
    return RMSNorm(width, config.norm_eps, elementwise_affine=False)


@dataclass(frozen=True)
class Family:
    """A choice of parts."""

    norm: Callable[[int, GPTConfig], nn.Module]
    mlp: type[nn.Module]
    rotary: bool = True  # else learned positions
    query_key_norm: bool = False
    embedding_norm: bool = False
    logit_cap: float | None = None  # logits stay between -cap and cap (Bello et al. 2016)


FAMILIES = {
    "gpt2": Family(layer_norm, MLP, rotary=False),
    "llama": Family(rms_norm, SwiGLU),
    "qwen3": Family(rms_norm, SwiGLU, query_key_norm=True),
    "nanochat": Family(plain_rms_norm, ReLUSquared, query_key_norm=True, embedding_norm=True, logit_cap=15.0),
}

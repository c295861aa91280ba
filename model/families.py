"""The parts of a GPT around its attention (norms, MLPs, positions, head), and the choice that each family makes.

    gpt2      LayerNorm, learned positions, GELU, dropout, a tied head    Radford et al. 2019
    llama     RMSNorm, rotary positions, SwiGLU, grouped heads            Touvron et al. 2023, Grattafiori et al. 2024
    qwen3     llama with normalised queries and keys                      Yang et al. 2025
    nanochat  norms without weights, ReLU^2, capped logits                Karpathy 2025

Each equals the model type of that name in `transformers`, which has nanochat since 2025. Shapes: model/attention.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import GPTConfig


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast on the device of x, or None if autocast is off."""
    device = x.device.type
    is_on = device != "meta" and torch.is_autocast_enabled(device)  # for meta, PyTorch raises
    return torch.get_autocast_dtype(device) if is_on else None


class MLP(nn.Module):
    """Two linear layers around a GELU. They read each token alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.down_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each token: (B, T, C) -> (B, T, C)."""
        return self.down_proj(self.activate(x))

    def activate(self, x: Tensor) -> Tensor:
        """Widen and activate: (B, T, C) -> (B, T, n_inner)."""
        return F.gelu(self.up_proj(x), approximate="tanh")  # the approximation of GPT-2


class SwiGLU(MLP):
    """An MLP with a third linear layer that gates the first (Shazeer 2020)."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)

    def activate(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class ReLUSquared(MLP):
    """An MLP around max(0, x)^2 (So et al. 2021)."""

    def activate(self, x: Tensor) -> Tensor:
        y = F.relu(self.up_proj(x))
        return y * y  # under autocast on CUDA, square() would compute in float32


class Rotary(nn.Module):
    """Rotary positions: rotate each pair of channels by an angle proportional to the position (Su et al. 2021).

    The product of a query and a key then depends on their distance alone. The layers of a model share one module.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.fill()

    def fill(self, device: torch.device | None = None) -> None:
        """Compute both tables, (context_length, D) in float32, also after the model has changed device or dtype."""
        c = self.config
        frequencies = 1 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, device=device).float() / c.head_dim)
        if c.rope_scaling:  # Llama 3 slows rotations that are not complete within the original context
            factor, low, high, original = c.rope_scaling
            waves = original * frequencies / (2 * math.pi)  # full rotations within the original context
            kept = ((waves - low) / (high - low)).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / factor)
        if c.family == "nanochat":
            frequencies = -frequencies  # nanochat rotates in the other direction
        angles = torch.arange(c.context_length, device=device).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), dim=-1), persistent=False)

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        """Rotate vectors at these T positions: (B, heads, T, D) -> (B, heads, T, D)."""
        cos = self.cos[positions].to(x.dtype)
        sin = self.sin[positions].to(x.dtype)
        x = x.contiguous()  # on a CPU, products with the tables are faster in this order
        return x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin  # channels i and i + D / 2 are a pair


class RMSNorm(nn.RMSNorm):
    """PyTorch's RMSNorm (Zhang and Sennrich 2019). Its output has the dtype of its input, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: (..., C) -> (..., C)."""
        if autocast_dtype(x) is None:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):  # under autocast, PyTorch 2.12 returns float32 on CUDA
            if self.weight is None:
                return super().forward(x)
            # In bfloat16, weights near one would all round to one.
            return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


def layer_norm(width: int, config: GPTConfig) -> nn.Module:
    """Return PyTorch's LayerNorm."""
    return nn.LayerNorm(width, config.norm_eps, bias=config.bias)


def rms_norm(width: int, config: GPTConfig) -> nn.Module:
    """Return an RMSNorm, of nanochat one without weights."""
    return RMSNorm(width, config.norm_eps, elementwise_affine=config.family != "nanochat")


class Head(nn.Linear):
    """The linear layer to the logits. On CUDA it multiplies by a multiple of 64 rows, which is faster."""

    pads_on = "cuda"

    def forward(self, x: Tensor) -> Tensor:
        """Apply: (..., C) -> (..., V). A compiler pads by itself; for single tokens the copy would cost more."""
        missing = -self.out_features % 64
        if missing and x.device.type == self.pads_on and x.dim() == 3 and not torch.compiler.is_compiling():
            return F.linear(x, F.pad(self.weight, (0, 0, 0, missing)))[..., : self.out_features]
        return super().forward(x)


class Dropout(nn.Dropout):
    """PyTorch's dropout, which a CPU draws faster: 16 bits an element (benchmarks/results/passes_cpu_2026-11-27.md)."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements with probability p, on a CPU to 1 / 65,536, and divide the others by 1 - p, in training."""
        if x.device.type != "cpu" or not self.training or self.p == 0:
            return super().forward(x) if self.training else x  # the call would take 1 % of a token
        words = torch.randint(-(2**63), 2**63 - 1, (x.numel() // 4 + 1,))
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
        kept = bits >= round(self.p * 2**16) - 2**15
        return x * kept.to(x.dtype).div_(1 - self.p)


@dataclass(frozen=True)
class Family:
    """A choice of parts."""

    norm: Callable[[int, GPTConfig], nn.Module]  # of vectors of this width
    mlp: type[nn.Module]
    rotary: bool = True  # else learned positions
    query_key_norm: bool = False
    embedding_norm: bool = False
    weight_dropout: bool = False  # dropout of attention weights as well, for which a CPU has no fused kernel
    logit_cap: float | None = None  # logits stay between -cap and cap (Bello et al. 2016)


LLAMA = Family(rms_norm, SwiGLU)
FAMILIES = {
    "gpt2": Family(layer_norm, MLP, rotary=False, weight_dropout=True),
    "llama": LLAMA,
    "qwen3": replace(LLAMA, query_key_norm=True),
    "nanochat": Family(rms_norm, ReLUSquared, query_key_norm=True, embedding_norm=True, logit_cap=15.0),
}

"""The GPT: token and position embeddings, a stack of blocks, and a head that predicts the next token.

What differs between families (gpt2, llama, qwen3, nanochat) is in model/families.py. Shapes are named as in
model/attention.py.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model import sampling
from model.attention import CausalSelfAttention, make_causal_mask
from model.cache import LayerCache, StaticCache
from model.config import GPTConfig, ModelError
from model.families import FAMILIES, Rotary
from model.precision import autocast_dtype


class Block(nn.Module):
    """Tokens talk (attention), then each thinks (MLP); both add to the residual stream of a pre-norm transformer."""

    def __init__(self, config: GPTConfig, mask: Tensor, rotary: nn.Module | None = None):
        super().__init__()
        c, family = config, FAMILIES[config.family]
        q_norm, k_norm = (family.norm(c.head_dim, c) if family.query_key_norm else None for _ in range(2))
        self.attention_norm = family.norm(c.n_embd, c)
        self.attention = CausalSelfAttention(
            c.n_embd, c.n_head, c.n_kv_head, c.head_dim, mask, c.dropout, c.bias, q_norm, k_norm, rotary
        )
        self.mlp_norm = family.norm(c.n_embd, c)
        self.mlp = family.mlp(c)

    def forward(self, x: Tensor, cache: LayerCache | StaticCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer: token ids in, a score for every possible next token out."""

    activation_checkpointing = False
    """Whether to forget what is inside the blocks, and compute it again for the gradients (Chen et al. 2016)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, self.family = config, FAMILIES[config.family]
        C, T = config.n_embd, config.context_length
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = None if self.family.rotary else nn.Embedding(T, C)
        self.embedding_norm = self.family.norm(C, config) if self.family.embedding_norm else None
        self.embedding_dropout = nn.Dropout(config.dropout)
        mask, self.rotary = make_causal_mask(T), Rotary(config) if self.family.rotary else None
        self.blocks = nn.ModuleList(Block(config, mask, self.rotary) for _ in range(config.n_layer))
        self.final_norm = self.family.norm(C, config)
        self.lm_head = nn.Linear(C, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.token_embedding.weight  # (Press and Wolf 2017)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's initialisation; what feeds the residual stream is scaled by its number of additions.

        Raises ModelError for a vector of which this does not know how it begins.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer))
            elif parameter.dim() < 2:
                raise ModelError(f"give {name} its first value in GPT.init_weights of model/gpt.py")
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: Tensor) -> Tensor:
        """Scores of the next token at every position: (B, T) int64 -> (B, T, V).

        Raises ModelError if T is more than the context length.
        """
        return GPT.logits(self, GPT.hidden(self, idx))  # by the class: fsdp puts its own in their places

    def hidden(self, idx: Tensor, caches: Sequence[LayerCache | StaticCache] = ()) -> Tensor:
        """The last hidden state: (B, T) -> (B, T, C). With caches, idx continues what they have stored."""
        T = idx.size(1)
        positions = caches[0].positions(T) if caches else slice(T)
        if isinstance(positions, slice) and positions.stop > self.config.context_length:
            raise ModelError(f"{positions.stop} tokens do not fit the context length of {self.config.context_length}")
        x = self.token_embedding(idx)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[positions].view(-1, T, x.size(-1))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.embedding_dropout(x)
        if autocast_dtype(x) == torch.bfloat16:  # the residual stream too; float16 it might outgrow
            x = x.bfloat16()  # what it costs: benchmarks/results/bfloat16_stream_cpu_2026-11-23.md
        again = self.activation_checkpointing and torch.is_grad_enabled() and not caches
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = checkpoint(block, x, use_reentrant=False) if again else block(x, cache)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: (..., C) -> (..., V). On a GPU the weight is padded for the length of the product only, because
        matrix kernels are slow at odd sizes: no parameter, logit or checkpoint ever has a token that does not exist.
        """
        logits = padded_linear(hidden, self.lm_head.weight) if hidden.is_cuda else self.lm_head(hidden)
        cap = self.family.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self, B: int, capacity: int) -> list[LayerCache]:
        """An empty key-value cache for B sequences of up to `capacity` tokens, one entry per layer."""
        weight, c = self.token_embedding.weight, self.config
        return [LayerCache(B, c.n_kv_head, capacity, c.head_dim, weight.dtype, weight.device) for _ in range(c.n_layer)]

    def generate(
        self,
        idx: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        use_cache: bool = True,
        seed: int | None = None,
        compile: bool = False,
    ) -> Tensor | list[Tensor]:
        """Continue each row of idx: (B, T), T >= 1 -> (B, T + max_new_tokens). Any length is allowed.

        A list of B prompts, (T,) each of its own length, becomes a list of B texts, (T + max_new_tokens,) each.
        temperature divides the logits, 0 takes the likeliest token; top_k, top_p and min_p forbid unlikely tokens;
        the same seed gives the same tokens; compile pays for long texts on a GPU; see model/sampling.py. Raises
        ModelError for impossible arguments.
        """
        new = sampling.stream(self, idx, max_new_tokens, temperature, top_k, top_p, min_p, use_cache, seed, compile)
        if isinstance(idx, Tensor):
            return torch.cat((idx, *new), dim=1)
        return [torch.cat(row) for row in zip(idx, *new, strict=True)]

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> "GPT":
        """Load a checkpoint directory, or the newest checkpoint of a run directory, in eval mode.

        path: ours, another of the four families, or a model OWNER/NAME of the Hugging Face hub. dtype None keeps the
        checkpoint's. Raises ModelError if the directory is not an intact checkpoint.
        """
        from model.load import load_model  # which needs this class

        return load_model(path, device, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPT":
        """Moving a module moves each registration of a tensor separately, and `to_empty` fills none: tie them anew."""
        super()._apply(fn, recurse)
        self.fill_buffers()
        return self

    def fill_buffers(self) -> None:
        """Put mask and rotary tables where the weights are, and tie what is shared."""
        if self.config.tied:
            self.lm_head.weight = self.token_embedding.weight
        device = self.lm_head.weight.device
        mask = make_causal_mask(self.config.context_length, device)
        for block in self.blocks:
            block.attention.causal_mask = mask
        if self.rotary is not None:
            self.rotary.fill(device)


def padded_linear(x: Tensor, weight: Tensor, multiple: int = 64) -> Tensor:
    """x @ weight.T, computed with rows of zeros that round the output size up to a multiple, and cropped again.

    For few rows of x, or if there is nothing to round up, they would cost more than they save.
    """
    rows = weight.size(0)
    missing = -rows % multiple
    if not missing or x.numel() <= multiple * x.size(-1):
        return F.linear(x, weight)
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)))[..., :rows]

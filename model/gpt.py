"""The GPT: token and position embeddings, a stack of blocks, and a head that predicts the next token.

model/families.py has the parts around attention. Shapes are named as in model/attention.py.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from model.attention import CausalSelfAttention, make_causal_mask
from model.cache import LayerCache
from model.config import GPTConfig
from model.families import FAMILIES, Dropout, Head, Rotary, autocast_dtype
from model.sampling import Sampler, stream


class Block(nn.Module):
    """A block of a pre-norm transformer: attention, then an MLP, each normed first and added to the residual stream."""

    def __init__(self, config: GPTConfig, mask: Tensor, rotary: nn.Module | None = None):
        super().__init__()
        family = FAMILIES[config.family]
        self.attention_norm = family.norm(config.n_embd, config)
        self.attention = CausalSelfAttention(
            n_embd=config.n_embd,
            n_head=config.n_head,
            n_kv_head=config.n_kv_head,
            head_dim=config.head_dim,
            mask=mask,
            bias=config.bias,
            q_norm=family.norm(config.head_dim, config) if family.query_key_norm else None,
            k_norm=family.norm(config.head_dim, config) if family.query_key_norm else None,
            rotary=rotary,
            weight_dropout=config.dropout if family.weight_dropout else 0.0,
        )
        self.mlp_norm = family.norm(config.n_embd, config)
        self.mlp = family.mlp(config)
        self.dropout = Dropout(config.dropout)  # of what each adds to the residual stream

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Attend, then apply the MLP: (B, T, C) -> (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer: token ids in, a score for every possible next token out.

    `GPT.from_pretrained`, set in model/__init__.py, is `load_model` of model/load.py.
    """

    receptive_field: Tensor | Callable[[Tensor], Tensor] | None = None
    """Which tokens a position may depend on, as `mask` of `check_causality`; None: itself and all before it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.family = FAMILIES[config.family]
        C = config.n_embd
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = None if self.family.rotary else nn.Embedding(config.context_length, C)
        self.embedding_norm = self.family.norm(C, config) if self.family.embedding_norm else None
        self.embedding_dropout = Dropout(config.dropout)
        self.rotary = Rotary(config) if self.family.rotary else None
        mask = make_causal_mask(config.context_length)  # the layers share it
        self.blocks = nn.ModuleList(Block(config, mask, self.rotary) for _ in range(config.n_layer))
        self.final_norm = self.family.norm(C, config)
        self.lm_head = Head(C, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.token_embedding.weight  # (Press and Wolf 2017)
        self.init_weights()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.lm_head.weight.device

    def init_weights(self) -> None:
        """Initialise as GPT-2: std 0.02, and less for the layers whose outputs are added to the residual stream.

        Parameters of other modules keep their values: norms begin with weights of one.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and (module is not self.lm_head or not self.config.tied):
                residual = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor) -> Tensor:
        """Return logits of all next tokens: (B, T) int64 -> (B, T, V). Raises ValueError beyond the context length."""
        return GPT.logits(self, GPT.hidden(self, idx))  # called on the class: FSDP2 replaces the bound methods

    def hidden(self, idx: Tensor, caches: Sequence[LayerCache] = ()) -> Tensor:
        """Return the last hidden state: (B, T) -> (B, T, C). With a cache per layer, idx continues its positions."""
        positions = caches[0].positions(idx.size(1)) if caches else slice(idx.size(1))
        if isinstance(positions, slice) and positions.stop > self.config.context_length:
            raise ValueError(f"{positions.stop} tokens do not fit the context length of {self.config.context_length}")
        x = self.token_embedding(idx)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[positions]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.embedding_dropout(x)
        if autocast_dtype(x) == torch.bfloat16:  # the residual stream as well; it might overflow float16
            x = x.bfloat16()  # its cost in loss: benchmarks/results/bfloat16_stream_cpu_2026-11-23.md
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head: (..., C) -> (..., V)."""
        logits, cap = self.lm_head(hidden), self.family.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self, B: int, capacity: int) -> list[LayerCache]:
        """Return an empty key-value cache per layer, for B sequences of up to `capacity` tokens."""
        c = self.config
        dtype = self.lm_head.weight.dtype
        if dtype == torch.bfloat16 and self.device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
            dtype = torch.float32  # the kernel is faster (benchmarks/results/decode_cpu_2026-11-26.md)
        shape = (B, c.n_kv_head, capacity, c.head_dim)
        return [LayerCache(torch.zeros(shape, dtype=dtype, device=self.device)) for _ in self.blocks]

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Continue each row of idx: (B, T), T >= 1 -> (B, T + max_new_tokens). Neither length is limited.

        temperature, top_k, top_p: those of `Sampler`. seed: of 32 bits; the same one gives the same tokens for the same
        idx, None draws from PyTorch's own generator. Raises UserError if idx is empty, or an option out of its range.
        `model.sampling.stream` yields the tokens one by one, and says what happens beyond the context length.
        """
        from model.packed import packed  # the model itself needs no packing

        with packed(self):
            new = stream(self, idx, max_new_tokens, Sampler(temperature, top_k, top_p), seed)
            return torch.cat((idx, *new), dim=1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPT":
        """Apply fn, as `to` and `to_empty` ask for: once to what layers share, and so that masks keep their values."""

        @functools.cache
        def apply(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if tensor.dtype != torch.bool:
                return applied
            return (make_causal_mask(len(tensor)) if tensor.is_meta else tensor).to(applied.device)

        super()._apply(apply, recurse)
        if self.config.tied:
            self.lm_head.weight = self.token_embedding.weight
        if self.rotary is not None:
            self.rotary.fill(self.device)
        return self

"""nanoGPT (Karpathy 2022), rewritten from its description as a baseline. Imports nothing of this project.

    python benchmarks/nanogpt.py input.txt --learning_rate 1e-3

trains the small model of its README for a CPU on the characters of a text, or with --gpu that for a GPU, and prints
JSON: the seconds of the loop, and the loss over all validation characters. The clock stops during evaluation.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Shape of the model. The defaults are those of nanoGPT's README for a CPU."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    context_length: int = 64
    vocab_size: int = 65
    dropout: float = 0.0


FOR_GPU = Config(n_layer=6, n_head=6, n_embd=384, context_length=256, dropout=0.2)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.n_head = c.n_head
        self.dropout = c.dropout
        self.qkv = nn.Linear(c.n_embd, 3 * c.n_embd, bias=False)
        self.residual = nn.Linear(c.n_embd, c.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = (part.unflatten(2, (self.n_head, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return F.dropout(self.residual(y.transpose(1, 2).flatten(2)), dropout)


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.norm_1 = nn.LayerNorm(c.n_embd, bias=False)
        self.attention = Attention(c)
        self.norm_2 = nn.LayerNorm(c.n_embd, bias=False)
        self.up = nn.Linear(c.n_embd, 4 * c.n_embd, bias=False)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(c.dropout)
        self.residual = nn.Linear(4 * c.n_embd, c.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.norm_1(x))
        return x + self.dropout(self.residual(self.gelu(self.up(self.norm_2(x)))))


class NanoGPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = c = config
        self.tokens = nn.Embedding(c.vocab_size, c.n_embd)
        self.positions = nn.Embedding(c.context_length, c.n_embd)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.LayerNorm(c.n_embd, bias=False)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * c.n_layer) if "residual" in name else 1))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss, a scalar, from idx and targets, (B, T) each."""
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(path: Path, batch_size: int, context_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Read random sequences and their next tokens, (B, T) int64 each, from a file of uint16 ids."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - context_length, (batch_size,)).tolist()
    x, y = (
        torch.stack([torch.from_numpy(tokens[i + ahead : i + ahead + context_length].astype(np.int64)) for i in starts])
        for ahead in (0, 1)
    )
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


def make_optimizer(model: nn.Module, learning_rate: float = 1e-3, beta2: float = 0.99) -> torch.optim.AdamW:
    """Make AdamW as nanoGPT does: fused on a GPU only, weight decay for matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, beta2), fused=fused or None)


def learning_rate_at(step: int, peak: float, max_steps: int, warmup_steps: int = 100) -> float:
    """Return the learning rate of a step: linear warmup, then cosine decay to a tenth of the peak."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def steps(
    model: NanoGPT, optimizer: torch.optim.Optimizer, path: Path, batch_size: int, learning_rate: float, max_steps: int
) -> Iterator[None]:
    """Train on a file of uint16 ids, one step per iteration; compiled on a GPU."""
    T = model.config.context_length
    device = next(model.parameters()).device
    forward = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    for step in range(max_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, learning_rate, max_steps)
        x, y = batch(path, batch_size, T, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


@torch.no_grad()
def exact_loss(model: NanoGPT, tokens: Tensor) -> float:
    """Return the mean loss in nats over all `tokens`, (n,), in sequences that do not overlap."""
    T = model.config.context_length
    device = next(model.parameters()).device
    whole = (len(tokens) - 1) // T * T  # the rest is a shorter sequence
    inputs = [*tokens[:whole].view(-1, T).split(256), tokens[None, whole:-1]]
    targets = [*tokens[1 : whole + 1].view(-1, T).split(256), tokens[None, whole + 1 :]]
    model.eval()
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        if y.numel():
            total += model(x.to(device), y.to(device)).item() * y.numel()
    model.train()
    return total / (len(tokens) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file whose last tenth validates")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="README: 1e-3; 4e-3 is better")
    parser.add_argument("--gpu", action="store_true", help="the model of its README for a GPU")
    parser.add_argument("--batch_size", type=int, default=12, help="64 in its README for a GPU")
    parser.add_argument("--max_steps", type=int, default=2000, help="5000 in its README for a GPU")
    parser.add_argument("--eval_every", type=int, default=2000, help="steps between evaluations")
    parser.add_argument("--until", type=float, default=0.0, help="validation loss at which to stop")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps")
    options = parser.parse_args()
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high" if options.device != "cpu" else "highest")

    text = options.text.read_text(encoding="utf-8")
    ids = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = np.array([ids[character] for character in text], dtype=np.uint16)
    split = int(0.9 * len(tokens))
    validation = torch.from_numpy(tokens[split:].astype(np.int64))
    shape = FOR_GPU if options.gpu else Config()
    model = NanoGPT(replace(shape, vocab_size=len(ids))).to(options.device)
    synchronize = torch.get_device_module(options.device).synchronize
    seconds = 0.0
    curve = []
    with TemporaryDirectory() as directory:
        path = Path(directory) / "train.bin"
        tokens[:split].tofile(path)
        optimizer = make_optimizer(model, options.learning_rate)
        training = steps(model, optimizer, path, options.batch_size, options.learning_rate, options.max_steps)
        next(training)  # compiles, and is not counted
        synchronize()
        began = time.perf_counter()
        for step, _ in enumerate(training, 2):
            if step % options.eval_every == 0 or step == options.max_steps:
                synchronize()
                seconds += time.perf_counter() - began
                curve.append((seconds, exact_loss(model, validation)))
                if curve[-1][1] <= options.until:
                    break
                began = time.perf_counter()
    print(json.dumps({"loop s": seconds, "loss": curve[-1][1], "curve": curve}))


if __name__ == "__main__":
    main()

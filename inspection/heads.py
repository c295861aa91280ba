"""What the heads of a model do: on a text, on tokens that repeat, and when one of them is taken away.

    scores = head_scores(model, text, probe=repeat_probe(...))
    scores.mean["induction"][5, 1], scores.error["induction"][5, 1]      # of head 5.1

The metrics are defined in inspection/metrics.py. Shapes are named as in model/attention.py; N is a number of sequences.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from inspection.patterns import Captured, capture, exact_products
from model import GPT
from model.attention import Attend, attention_weights

POSITIONS = 256  # whose logits are in memory at a time


@dataclass(frozen=True)
class Probe:
    """[start, r, r] and the control [start, r, r'], (N, 2L + 1) each: r is L random tokens, r' others."""

    repeated: Tensor
    control: Tensor

    @property
    def repeat(self) -> int:
        """L."""
        return self.repeated.size(1) // 2


def repeat_probe(tokens: Tensor, start: int, context_length: int, num: int = 8, seed: int = 0) -> Probe | None:
    """Random tokens, each once, and all of them again: only from the context can a model know what comes.

    tokens: (n,) ids to draw from, without replacement. L is 50, or what these tokens and the context allow; None if
    that is less than 2.
    """
    L = min(50, len(tokens) // 2, (context_length - 1) // 2)
    if L < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([tokens[torch.randperm(len(tokens), generator=generator)[: 2 * L]] for _ in range(num)])
    r, other, first = drawn[:, :L], drawn[:, L:], torch.full((num, 1), start)
    return Probe(torch.cat((first, r, r), dim=1), torch.cat((first, r, other), dim=1))


@dataclass(frozen=True)
class HeadScores:
    """Metrics of all heads, sequence by sequence."""

    samples: dict[str, Tensor]
    """Metric -> (N, L, H) float64; PICTURE -> (N, L, H, 10)."""
    losses: Tensor
    """(N,) how surprised the model is by the text: nats a token."""
    row_error: float
    """The largest error of a row of weights, measured against the kernel."""

    @property
    def mean(self) -> dict[str, Tensor]:
        """Metric -> (L, H)."""
        return {name: samples.mean(0) for name, samples in self.samples.items()}

    @property
    def error(self) -> dict[str, Tensor]:
        """Metric -> (L, H), the standard error of the mean; nan if there is one sequence."""
        return {name: standard_error(samples) for name, samples in self.samples.items()}


def standard_error(samples: Tensor) -> Tensor:
    """(N, ...) -> (...), nan if N is 1."""
    return samples.std(0) / len(samples) ** 0.5 if len(samples) > 1 else torch.full_like(samples[0], torch.nan)


@torch.no_grad()
def head_scores(model: GPT, text: Tensor, probe: Probe | None = None) -> HeadScores:
    """Measure every head on a text (N, T), and on a probe what is defined there, in eval mode.

    Raises NotTheKernels if the weights are not those that the kernel used.
    """
    was_training = model.training
    model.eval()
    errors = []

    def measured(sequences: Tensor, repeat: int | None = None) -> tuple[dict[str, Tensor], Tensor]:
        parts, losses = [], []
        for idx in sequences.to(model.lm_head.weight.device).split(1):
            with capture(model) as att:
                losses.append(next_token_losses(model, model.hidden(idx), idx).mean(1).cpu())
            errors.append(max(att.verify().values()))
            parts.append(att.measured(repeat))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, torch.cat(losses)

    try:
        samples, losses = measured(text)
        if probe is not None:
            repeated, control = (measured(sequences, probe.repeat)[0] for sequences in (probe.repeated, probe.control))
            for name in ("duplicate", "induction"):
                samples |= {name: repeated[name], f"{name}_control": control[name]}
    finally:
        model.train(was_training)
    return HeadScores(samples, losses, max(errors))


def next_token_losses(model: GPT, hidden: Tensor, idx: Tensor) -> Tensor:
    """Cross-entropy of each next token in nats, from the last hidden states: (B, T, C), (B, T) -> (B, T - 1)."""
    losses = []
    for start in range(0, idx.size(1) - 1, POSITIONS):
        targets = idx[:, start + 1 : start + 1 + POSITIONS]
        logits = model.logits(hidden[:, start : start + targets.size(1)]).float()
        # As rows: CUDA's kernel for (B, V, T) is not deterministic, and refuses where that is asked for.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view(targets.shape))
    return torch.cat(losses, dim=1) if losses else hidden.new_full((len(idx), 1), torch.nan)


@contextmanager
def replaced(attend: Attend, head: int, value: Tensor | float) -> Iterator[None]:
    """Inside, a head's output is this, before it is mixed with the others': (D,) or a number."""

    def hook(module: Attend, inputs: tuple, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, head] = value
        return output

    handle = attend.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def ablate(
    model: GPT, text: Tensor, heads: Iterable[tuple[int, int]], mode: Literal["zero", "mean"] = "zero"
) -> Iterator[Tensor]:
    """How much more surprised the model is without a head, one head after the other: (N,) nats a token, paired.

    The head's output becomes zero, or its mean over the (N, T) text (Michel, Levy and Neubig 2019). Neither is what the
    model was trained for, and other heads may step in: it is a measure of importance, not the one.
    """
    was_training = model.training
    model.eval()
    text = text.to(model.lm_head.weight.device)
    inputs, means = [], []
    hooks = [block.register_forward_pre_hook(lambda block, inside: inputs.append(inside[0])) for block in model.blocks]
    for block in model.blocks:
        attend = block.attention.attend
        hooks.append(attend.register_forward_hook(lambda attend, inside, output: means.append(output.mean((0, 2)))))
    try:
        hidden = model.hidden(text)  # what stands below a head is what it was: each ablation begins at its block
        for hook in hooks:
            hook.remove()
        losses = next_token_losses(model, hidden, text).mean(1)
        for layer, head in heads:
            x = inputs[layer]
            with replaced(model.blocks[layer].attention.attend, head, 0.0 if mode == "zero" else means[layer][head]):
                for block in model.blocks[layer:]:
                    x = block(x)
            yield (next_token_losses(model, model.final_norm(x), text).mean(1) - losses).cpu()
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)


def rollout(att: Captured) -> Tensor:
    """How much of each token is in each position after all layers, were attention everything: (B, T, T), rows of one.

    Each layer keeps half and mixes half by the mean of its heads (Abnar and Zuidema 2020).
    """
    T = att[0][1].size(2)
    rolled = torch.eye(T, device=att[0][1].device).expand(att[0][1].size(0), T, T)
    with exact_products(rolled.device), torch.no_grad():
        for layer in range(att.n_layer):
            mixed = []
            for start, block in att.blocks(layer):
                weights = attention_weights(*block).float().mean(1)
                rows = rolled[:, start : start + weights.size(1)]
                mixed.append(0.5 * weights @ rolled[:, : weights.size(2)] + 0.5 * rows)
            rolled = torch.cat(mixed, dim=1)
    return rolled


def influence(model: GPT, idx: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """What the prediction at a position depends on: how fast its log-probability changes with each token's embedding.

    idx is (1, T). Returns (rows, T), the norms of the gradients (Simonyan et al. 2014), each row as shares of its sum;
    and the predictions at all T positions, the likeliest next token and its probability.
    """
    embedded = []

    def hook(module: torch.nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    was_training, handle = model.training, model.token_embedding.register_forward_hook(hook)
    model.eval()
    try:
        with torch.enable_grad():
            hidden = model.hidden(idx.to(model.lm_head.weight.device))
            predicted = []
            with torch.no_grad():
                for part in hidden.split(POSITIONS, dim=1):
                    predicted.append(model.logits(part)[0].float().softmax(-1).max(-1))
            probabilities, tokens = (torch.cat(parts).cpu() for parts in zip(*predicted, strict=True))
            shares = []
            for row in rows:
                surprise = model.logits(hidden[0, row]).float().log_softmax(-1)[tokens[row]]
                (gradient,) = torch.autograd.grad(surprise, embedded, retain_graph=True)
                norms = gradient[0].float().norm(dim=-1)
                shares.append((norms / norms.sum()).cpu())
    finally:
        handle.remove()
        model.train(was_training)
    return torch.stack(shares) if shares else torch.empty(0, idx.size(1)), tokens, probabilities

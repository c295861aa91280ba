"""Measure the heads of a model: on a text, on tokens that repeat, and by taking a head away.

    scores = head_scores(model, text, probe=repeat_probe(...))
    scores.mean["induction"][5, 1], scores.error["induction"][5, 1]      # of head 5.1

The metrics are defined in inspection/metrics.py. Shapes are named as in model/attention.py; N is a number of sequences.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inspection.patterns import Captured, capture
from model import GPT
from model.attention import Attend

POSITIONS = 256  # logits are computed for so many positions of a sequence at a time: V numbers each
TOKENS_TOGETHER = 512  # short sequences are read together, up to so many tokens
INFLUENCE_FLOPS = 5e11  # spent on influence on a CPU: about five seconds


@dataclass(frozen=True)
class RepeatProbe:
    """Sequences [start, r, r] and the control [start, r, r'], each (N, 2L + 1): r is L random tokens, r' are others."""

    repeated: Tensor
    control: Tensor

    @property
    def repeat(self) -> int:
        """L."""
        return self.repeated.size(1) // 2


def repeat_probe(tokens: Tensor, start: int, context_length: int, num: int = 8, seed: int = 0) -> RepeatProbe | None:
    """Draw `num` sequences of random tokens that repeat: a model can predict the second copy from the context only.

    tokens: (n,) ids to draw from, without replacement; start: the id that begins each sequence. L is 50, or less if
    `tokens` or the context are too few. Returns None if L would be less than 2.
    """
    L = min(50, len(tokens) // 2, (context_length - 1) // 2)
    if L < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([tokens[torch.randperm(len(tokens), generator=generator)[: 2 * L]] for _ in range(num)])
    r, other, first = drawn[:, :L], drawn[:, L:], torch.full((num, 1), start)
    return RepeatProbe(torch.cat((first, r, r), dim=1), torch.cat((first, r, other), dim=1))


@dataclass(frozen=True)
class HeadScores:
    """Metrics of all heads, sequence by sequence."""

    samples: dict[str, Tensor]  # metric -> (N, L, H) float64
    losses: Tensor  # (N,) mean cross-entropy of each text, in nats a token
    row_error: float  # the largest error of a row of weights against the kernel; nan if that was not verified
    tokens: Tensor  # (L, H), the token that the metric "token" is about

    @property
    def mean(self) -> dict[str, Tensor]:
        """Metric -> (L, H)."""
        return {name: samples.mean(0) for name, samples in self.samples.items()}

    @property
    def error(self) -> dict[str, Tensor]:
        """Metric -> (L, H), the standard error of the mean; nan if there is one sequence."""
        return {name: (x.var(0, correction=0) / (len(x) - 1)).sqrt() for name, x in self.samples.items()}


@dataclass(frozen=True)
class Inspection:
    """Everything measured on one checkpoint."""

    name: str  # of the checkpoint, as "quickstart step-00000400"
    verified: str  # one line that says how the weights were verified
    scores: HeadScores
    att: Captured  # queries and keys of the text that is shown, (1, T)
    influence: Tensor | None = None  # (T, T), rows of nan were not computed; None: no row was
    predictions: Sequence[tuple[str, float]] = ()  # T times the likeliest next token and its probability, or empty
    labels: Sequence[Sequence[str]] = ()  # of `scores.tokens`

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the measured texts, in nats a token."""
        return self.scores.losses.mean().item()

    def pattern(self, head: tuple[int, int]) -> Tensor:
        """Weights of a head for its last T keys, (T, T) on the CPU: earlier ones, as a learned sink, are no tokens."""
        weights = self.att.pattern(*head)[0].cpu()
        return weights[:, -len(weights) :]


@contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """Put the model in eval mode for a while."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def head_scores(model: GPT, text: Tensor, probe: RepeatProbe | None = None, verify: bool = True) -> HeadScores:
    """Measure every head on a text (N, T) and on a probe, in eval mode.

    Without a probe, duplicate and induction are left out. Raises NotTheKernels if the weights are not those that the
    kernel used; verify=False skips that proof. All ranks of a sharded model have to call this together.
    """
    row_errors, losses = [], []

    def measured(sequences: Tensor, repeat: int | None = None) -> dict[str, Tensor]:
        samples = []
        for idx in sequences.to(model.lm_head.weight.device).split(max(1, TOKENS_TOGETHER // sequences.size(1))):
            with capture(model) as att:
                hidden = model.hidden(idx)
            if repeat is None:
                losses.append(next_token_losses(model, hidden, idx).mean(1).cpu())
            row_errors.append(max(att.verify().values()) if verify else math.nan)
            samples.append(att.measured(repeat))
        return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}

    with evaluating(model):
        samples = measured(text)
        tokens, samples["token"] = most_attended(text.cpu(), samples.pop("received"))
        if probe is not None:
            for sequences, suffix in ((probe.repeated, ""), (probe.control, "_control")):
                on_probe = measured(sequences, probe.repeat)
                samples |= {f"{name}{suffix}": on_probe[name] for name in ("duplicate", "induction")}
    return HeadScores(samples, torch.cat(losses), max(row_errors), tokens)


def most_attended(text: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token of a text (N, T) that gets most of each head's attention, (L, H), and its share, (N, L, H).

    received: the mean weight of each key, (N, L, H, T), or more in front that are no tokens.
    """
    received = received[..., -text.size(1) :]
    tokens, numbers = text.unique(return_inverse=True)
    shares = received.new_zeros(*received.shape[:3], len(tokens))
    shares.scatter_add_(3, numbers[:, None, None].expand_as(received), received)
    most = shares.mean(0).argmax(-1)
    return tokens[most], shares.gather(3, most[None, ..., None].expand(len(text), -1, -1, 1)).squeeze(3)


def as_json(scores: HeadScores) -> dict[str, list[list[float | None]]]:
    """Metric -> L rows of H numbers for JSON: means with four digits after the point, None for what is not finite."""
    rows = {name: mean.round(decimals=4).tolist() for name, mean in scores.mean.items()}
    return {name: [[x if math.isfinite(x) else None for x in row] for row in table] for name, table in rows.items()}


def next_token_losses(model: GPT, hidden: Tensor, idx: Tensor) -> Tensor:
    """Cross-entropy of each next token in nats, from the last hidden states: (B, T, C), (B, T) -> (B, T - 1).

    For T = 1 the result is (B, 1), nan.
    """
    losses = []
    for start in range(0, idx.size(1) - 1, POSITIONS):
        targets = idx[:, start + 1 : start + 1 + POSITIONS]
        logits = model.logits(hidden[:, start : start + targets.size(1)]).float()
        # As rows: CUDA's kernel for (B, V, T) is not deterministic, and refuses where that is asked for.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view(targets.shape))
    return torch.cat(losses, dim=1) if losses else hidden.new_full((len(idx), 1), torch.nan)


def replace_head(attend: Attend, inputs: tuple, output: Tensor, head: int, mode: str) -> Tensor:
    """Forward hook that replaces the output of one head, before the output projection, by zero or its mean."""
    output = output.clone()
    output[:, head] = 0.0 if mode == "zero" else output[:, head].mean((0, 1))
    return output


@torch.no_grad()
def ablate(
    model: GPT, text: Tensor, heads: Iterable[tuple[int, int]], mode: Literal["zero", "mean"] = "zero"
) -> Tensor:
    """Measure the rise of each sequence's loss without each head: (N, L, H) nats a token, nan for heads not asked for.

    The head's output becomes zero, or its mean over the text (N, T) (Michel, Levy and Neubig 2019). The model was
    trained for neither, and other heads can take over: this is one measure of importance among several.
    """
    text = text.to(model.lm_head.weight.device)
    rises = torch.full((len(text), model.config.n_layer, model.config.n_head), torch.nan, dtype=torch.float64)

    inputs: list[Tensor] = []  # of each block
    with evaluating(model):
        with ExitStack() as hooks:
            for block in model.blocks:
                hooks.enter_context(block.register_forward_pre_hook(lambda block, given: inputs.append(given[0])))
            before = next_token_losses(model, model.hidden(text), text).mean(1)
        for layer, head in heads:
            attend, x = model.blocks[layer].attention.attend, inputs[layer]
            with attend.register_forward_hook(partial(replace_head, head=head, mode=mode)):
                for block in model.blocks[layer:]:  # the blocks below are not affected
                    x = block(x)
            after = next_token_losses(model, model.final_norm(x), text).mean(1)
            rises[:, layer, head] = (after - before).cpu()
    return rises


def influence(model: GPT, idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Measure how much each token influences a prediction: the gradient of its log-probability by the embedding.

    idx is (1, T). Returns the norms of the gradients (Simonyan et al. 2014) as shares of their sum, (T, T), a row for
    each prediction; and for every position the likeliest next token, (T,), and its probability, (T,). On a CPU only as
    many rows are computed as INFLUENCE_FLOPS allow, evenly spread, the last among them; the others are nan.
    """
    T, on_gpu = idx.size(1), model.lm_head.weight.is_cuda
    flops_per_row = 2 * T * sum(parameter.numel() for parameter in model.blocks.parameters())  # of a backward pass
    num_rows = T if on_gpu else min(T, max(1, int(INFLUENCE_FLOPS // flops_per_row)))
    embedded = []

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    shares = torch.full((T, T), torch.nan)
    with evaluating(model), model.token_embedding.register_forward_hook(hook), torch.enable_grad():
        hidden = model.hidden(idx.to(model.lm_head.weight.device))[0]
        likeliest = []
        for part in hidden.detach().split(POSITIONS):  # the gradient by `hidden` first, which takes the head only once
            part.requires_grad_()
            probabilities, tokens = model.logits(part).float().softmax(-1).max(-1)
            likeliest.append((tokens, probabilities.detach(), *torch.autograd.grad(probabilities.log().sum(), part)))
        tokens, probabilities, gradients = (torch.cat(parts) for parts in zip(*likeliest, strict=True))
        for row in torch.linspace(T - 1, 0, num_rows).int().tolist():
            (gradient,) = torch.autograd.grad(hidden[row], embedded, gradients[row], retain_graph=True)
            norms = gradient[0].float().norm(dim=-1)
            shares[row] = (norms / norms.sum()).cpu()
    return shares, tokens.cpu(), probabilities.cpu()

"""Measure the heads of a model: on a text, on tokens that repeat, and by taking a head away.

    scores = head_scores(model, text, probe=repeat_probe(...))
    scores.mean["induction"][5, 1], scores.error["induction"][5, 1]      # of head 5.1

The metrics are defined in inspection/metrics.py. Shapes are named as in model/attention.py; N is a number of sequences.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from inspection.kinds import Head
from inspection.metrics import Metrics
from inspection.patterns import Captured, capture
from model import GPT
from model.attention import Attend
from model.causality import hooked

POSITIONS = 256  # logits are computed for so many positions of a sequence at a time: V numbers each
TOKENS_TOGETHER = 512  # short sequences are read together, up to so many tokens
INFLUENCE_FLOPS = 5e11  # spent on influence on a CPU: about five seconds
ON_REPEATS = ("duplicate", "induction")  # the metrics that need a probe


@dataclass(frozen=True)
class RepeatProbe:
    """Sequences [start, r, r] and the control [start, r, r'], each (N, 2L + 1): r is L random tokens, r' are others."""

    repeated: Tensor
    control: Tensor

    @property
    def repeat(self) -> int:
        """Length L of the part that repeats."""
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
    drawn = [tokens[torch.randperm(len(tokens), generator=generator)[: 2 * L]] for _ in range(num)]
    r, other = torch.stack(drawn).split(L, dim=1)
    first = torch.full((num, 1), start)
    return RepeatProbe(torch.cat((first, r, r), dim=1), torch.cat((first, r, other), dim=1))


@dataclass(frozen=True)
class HeadScores:
    """Metrics of all heads, sequence by sequence."""

    samples: Metrics  # metric -> (N, L, H) float64
    losses: Tensor  # (N,) mean cross-entropy of each text, in nats a token
    row_error: float  # the largest error of a row of weights against the kernel; nan if that was not verified
    tokens: Tensor  # (L, H), the token that the metric "token" is about

    @property
    def mean(self) -> Metrics:
        """Mean over the sequences: metric -> (L, H)."""
        return {name: samples.mean(0) for name, samples in self.samples.items()}

    @property
    def error(self) -> Metrics:
        """Standard error of the mean: metric -> (L, H). It is nan if there is one sequence."""
        return {name: (x.var(0, correction=0) / (len(x) - 1)).sqrt() for name, x in self.samples.items()}


@dataclass(frozen=True)
class Inspection:
    """Everything measured on one checkpoint."""

    name: str  # of the checkpoint, as "quickstart step-00000400"
    verified: str  # one line that says how the weights were verified
    scores: HeadScores
    att: Captured  # queries and keys of the text that is shown, (1, T)
    influence: Tensor | None = None  # (T, T), rows of nan were not computed; None: no row was
    predictions: Sequence[tuple[str, float]] = ()  # at each of the T tokens the likeliest next one and its probability
    labels: Sequence[Sequence[str]] = ()  # of `scores.tokens`

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the measured texts, in nats a token."""
        return self.scores.losses.mean().item()

    def pattern(self, head: Head) -> Tensor:
        """Return the weights of a head, (T, T) on the CPU. Keys before the text, as a learned sink, are left out."""
        weights = self.att.pattern(*head)[0].cpu()
        return weights[:, -len(weights) :]


@contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """Put the model in eval mode inside the `with` block, and back into its mode after it."""
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
    losses = []
    row_errors = []

    def measure_sequences(sequences: Tensor, repeat: int | None = None) -> Metrics:
        """Return metric -> (N, L, H), and store the errors of rows and, of a text, the losses."""
        parts = []
        num_together = max(1, TOKENS_TOGETHER // sequences.size(1))
        for idx in sequences.to(model.device).split(num_together):
            with capture(model) as att:
                hidden = model.hidden(idx)
            if repeat is None:
                losses.append(sequence_losses(model, hidden, idx).cpu())
            if verify:
                row_errors.extend(att.verify().values())
            parts.append(att.sequence_scores(repeat))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    with evaluating(model):
        samples = measure_sequences(text)
        tokens, samples["token"] = most_attended(text.cpu(), samples.pop("received"))
        if probe is not None:
            repeated = measure_sequences(probe.repeated, probe.repeat)
            control = measure_sequences(probe.control, probe.repeat)
            samples |= {name: repeated[name] for name in ON_REPEATS}
            samples |= {f"{name}_control": control[name] for name in ON_REPEATS}
    return HeadScores(samples, torch.cat(losses), max(row_errors, default=math.nan), tokens)


def most_attended(text: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token of a text (N, T) that gets most of each head's attention, (L, H), and its share, (N, L, H).

    received: the mean weight of each key, (N, L, H, T_key). The last T keys are the text.
    """
    received = received[..., -text.size(1) :]
    tokens, numbers = text.unique(return_inverse=True)
    shares = received.new_zeros(*received.shape[:3], len(tokens))
    shares.scatter_add_(3, numbers[:, None, None].expand_as(received), received)
    most = shares.mean(0).argmax(-1)
    return tokens[most], shares.take_along_dim(most[None, ..., None], dim=3).squeeze(3)


def as_json(scores: HeadScores) -> dict[str, list[list[float | None]]]:
    """Return the means for JSON: metric -> L rows of H numbers, with four decimals; None for what is not finite."""
    tables = {}
    for name, mean in scores.mean.items():
        rows = mean.round(decimals=4).tolist()
        tables[name] = [[x if math.isfinite(x) else None for x in row] for row in rows]
    return tables


def sequence_losses(model: GPT, hidden: Tensor, idx: Tensor) -> Tensor:
    """Return each sequence's mean cross-entropy in nats a token, (B,), from its last hidden states and its tokens.

    hidden: (B, T, C); idx: (B, T). For T = 1 the loss is nan.
    """
    losses = []
    parts = zip(hidden[:, :-1].split(POSITIONS, dim=1), idx[:, 1:].split(POSITIONS, dim=1), strict=True)
    for states, targets in parts:
        logits = model.logits(states).float()
        # As rows: CUDA's kernel for (B, V, T) is not deterministic, and refuses where that is asked for.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view(targets.shape))
    return torch.cat(losses, dim=1).mean(1)


def replace_head(attend: Attend, inputs: tuple, output: Tensor, head: int, mode: str) -> Tensor:
    """Replace the output of one head by zero or its mean. As a forward hook of `Attend` it acts before `o_proj`."""
    output = output.clone()
    output[:, head] = 0.0 if mode == "zero" else output[:, head].mean((0, 1))
    return output


@torch.no_grad()
def ablate(model: GPT, text: Tensor, heads: Iterable[Head], mode: Literal["zero", "mean"] = "zero") -> Tensor:
    """Measure how much each sequence's loss rises without a head: (N, L, H) nats a token, nan for heads not asked for.

    The head's output becomes zero, or its mean over the text (N, T) (Michel, Levy and Neubig 2019). The model was
    trained for neither, and other heads can take over: this is one measure of importance among several.
    """
    text = text.to(model.device)
    rises = torch.full((len(text), model.config.n_layer, model.config.n_head), torch.nan, dtype=torch.float64)
    inputs = []  # of each block
    with evaluating(model):
        with hooked(model.blocks, lambda block, given, output: inputs.append(given[0])):
            before = sequence_losses(model, model.hidden(text), text)
        for layer, head in heads:
            x = inputs[layer]
            attend = model.blocks[layer].attention.attend
            with attend.register_forward_hook(partial(replace_head, head=head, mode=mode)):
                for block in model.blocks[layer:]:  # the blocks below are not affected
                    x = block(x)
            after = sequence_losses(model, model.final_norm(x), text)
            rises[:, layer, head] = (after - before).cpu()
    return rises


def influence(model: GPT, idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Measure how much tokens influence a prediction: the gradient of its log-probability by their embeddings.

    idx is (1, T). Returns the norms of the gradients (Simonyan et al. 2014) as shares of their sum, (T, T), a row for
    each prediction; and for every position the likeliest next token, (T,), and its probability, (T,). On a CPU only as
    many rows are computed as INFLUENCE_FLOPS allow, evenly spread, the last among them; the others are nan.
    """
    device = model.device
    T = idx.size(1)
    flops_per_row = 2 * T * sum(parameter.numel() for parameter in model.blocks.parameters())  # of a backward pass
    num_rows = T if device.type == "cuda" else min(T, max(1, int(INFLUENCE_FLOPS // flops_per_row)))
    idx = idx.to(device)
    embedded = model.token_embedding(idx).detach().requires_grad_()
    shares = torch.full((T, T), torch.nan)
    with evaluating(model), model.token_embedding.register_forward_hook(lambda *_: embedded), torch.enable_grad():
        hidden = model.hidden(idx)[0]
        for row in torch.linspace(T - 1, 0, num_rows).int().tolist():
            probability = model.logits(hidden[row]).float().softmax(-1).max(-1).values
            (gradient,) = torch.autograd.grad(probability.log(), embedded, retain_graph=True)
            norms = gradient[0].float().norm(dim=-1)
            shares[row] = (norms / norms.sum()).cpu()
    with torch.no_grad():
        likeliest = [model.logits(part).float().softmax(-1).max(-1) for part in hidden.split(POSITIONS)]
    probabilities, tokens = (torch.cat(parts).cpu() for parts in zip(*likeliest, strict=True))
    return shares, tokens, probabilities

"""Measure the heads of a model: on a text, on tokens that repeat, and by taking a head away.

    scores = head_scores(model, text, probe=repeat_probe(...))
    scores.mean["induction"][5, 1]                                       # of head 5.1

The metrics are defined in inspection/metrics.py. Shapes are named as in model/attention.py; N is a number of sequences.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cli.bars import progress_bar
from data.encoding import Tokenizer
from tril.causality import watched
from tril.decoder import device_of, evaluating, predict, read
from tril.errors import UserError
from tril.kinds import LEAST, Fed, Head, Heads, kind_of, name_of
from tril.look import NotTheKernels, Replace, capture
from tril.metrics import HeadScores, Metrics
from tril.terminal import MOST_ROWS

CPU_FLOPS = 5e11  # spent on each extra of a page on a CPU: about five seconds
PROBE_LENGTH = 101  # tokens of a probe, if the context and its vocabulary allow: a start, and 50 twice
PROBE_TOKENS = "probe_tokens"  # in trainer.json: tokens to draw a probe from
ON_REPEATS = ("duplicate", "induction")  # the metrics that need a probe
MOST_FEEDERS = 2
Ablation = Literal["zero", "mean"]  # what takes the place of a head's output


class RepeatProbe(NamedTuple):
    """Sequences [start, r, r] and the control [start, r, r'], each (N, 2L + 1): r is L random tokens, r' are others."""

    repeated: Tensor
    control: Tensor


def repeat_probe(tokens: Tensor, start: int, context_length: int, num: int = 8) -> RepeatProbe | None:
    """Draw `num` sequences of random tokens that repeat: a model can predict the second copy from the context only.

    tokens: (n,) ids to draw from, without replacement; start: the id that begins each sequence. L is 50, or less if
    `tokens` or the context are too few. Returns None if L would be less than 2.
    """
    L = min(len(tokens), min(context_length, PROBE_LENGTH) - 1) // 2
    if L < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = [tokens[torch.randperm(len(tokens), generator=generator)[: 2 * L]] for _ in range(num)]
    r, other = torch.stack(drawn).split(L, dim=1)
    first = torch.full((num, 1), start)
    return RepeatProbe(torch.cat((first, r, r), dim=1), torch.cat((first, r, other), dim=1))


def make_probe(
    tokenizer: Tokenizer | None, vocab_size: int, tokens: np.ndarray, context_length: int
) -> RepeatProbe | None:
    """Draw the probe of a model, the same wherever it is shown: from these tokens, or from the vocabulary if none.

    A model may never have seen some tokens of its vocabulary. Special tokens are left out.
    """
    ordinary = np.arange(vocab_size)
    start = [0]
    if tokenizer:
        ordinary = np.setdiff1d(ordinary[: tokenizer.vocab_size], list(tokenizer.special_tokens.values()))
        start = tokenizer.document_start or ordinary
    drawn = np.intersect1d(tokens, ordinary) if len(tokens) else ordinary
    return repeat_probe(torch.from_numpy(drawn), start[-1], context_length)


@torch.no_grad()
def head_scores(
    model: nn.Module, text: Tensor, probe: RepeatProbe | None = None, replace: Replace | None = None
) -> HeadScores:
    """Measure every head on a text (N, T) and on a probe, in eval mode.

    Without a probe, duplicate and induction are left out. replace: as for `capture`, while the text is read.

    Raises NotTheKernels if the weights are not those that the kernel used, and UserError if the model cannot be read.
    All ranks of a sharded model have to call this together.
    """
    predicted = []
    proofs = []
    wrong = []

    def measure_each(texts: Tensor, repeat: int | None = None) -> list[Metrics]:
        """Return metric -> (N, L, H) of the heads and of even ones; store proofs and, of a text, predictions.

        Texts are read one by one, so that their order cannot be taken for that of the heads.
        """
        parts = []
        for idx in texts.split(1):
            with capture(model, replace if repeat is None else None) as att:
                if repeat is None:
                    predicted.append(predict(model, idx))
                else:
                    read(model, idx, slice(1))
            if (shown := att.shape[1::2]) != tuple(idx.shape):
                raise UserError(f"the model attends in {shown} texts and tokens, where {tuple(idx.shape)} were given")
            try:
                proofs.extend(att.verify().values())
            except NotTheKernels as error:
                wrong.append(error)
            parts.append(att.scores_and_chance(repeat))
        return [{name: torch.cat([part[name] for part in of]) for name in of[0]} for of in zip(*parts, strict=True)]

    N, T = text.shape
    rows = {"previous": N * (T - 2), "current": N * (T - 1), "sink": N * (T - 1)}
    with evaluating(model):
        samples, even = measure_each(text)
        if probe is not None:
            repeat = probe.repeated.size(1) // 2
            found, even_found = measure_each(torch.cat(probe), repeat)
            for name in ON_REPEATS:
                samples[name], samples[f"{name}_control"] = found[name].chunk(2)
                even[name] = even_found[name]
                rows[name] = len(probe.repeated) * repeat
    if wrong:  # not before: the ranks read all texts together
        raise wrong[0]
    chance = {name: values.mean(0) for name, values in even.items()}
    losses, predictions = zip(*predicted, strict=True)
    return HeadScores(samples, torch.stack(losses), predictions[0], proofs, chance, rows)


def replace_heads(
    layer: int, output: Tensor, modes: Mapping[Head, str], others: Mapping[int, Tensor] | None = None
) -> Tensor:
    """Replace the outputs of heads: by "zero", by its "mean", or by that in others (a "patch").

    output: of all heads of a layer, (B, H, T, D); others: layer -> the same of another text. Raises UserError for
    another mode, and for texts of different length.
    """
    output = output.clone()
    for (place, head), mode in modes.items():
        if place == layer:
            own = output[:, head]  # a view
            if mode == "mean":
                own[:] = own.mean((0, 1))
            elif mode == "zero":
                own.zero_()
            elif mode != "patch":
                raise UserError(f"a head becomes zero, mean or patch, not {mode!r}")
            elif (other := others[layer][:, head]).size(1) != own.size(1):
                raise UserError(f"a patch needs as many tokens: the text has {own.size(1)}, the other {other.size(1)}")
            else:
                own.copy_(other)
    return output


@torch.no_grad()
def ablate(model: nn.Module, text: Tensor, heads: Iterable[Head], mode: Ablation = "zero") -> Tensor:
    """Measure how much each sequence's loss rises without a head: (N, L, H) nats a token, nan for heads not asked for.

    text is (N, T). The head's output becomes zero, or its mean over a text (Michel, Levy and Neubig 2019). The model
    was trained for neither, and other heads can take over: this is one measure of importance among several.

    Raises UserError for another mode.
    """

    def losses() -> Tensor:
        """Return the loss of each text, (N,)."""
        return torch.stack([predict(model, idx)[0] for idx in text.split(1)])

    with evaluating(model):
        with capture(model) as att:
            before = losses()
        L, _, H, _ = att.shape
        needed = []  # rise of the loss, and name of the head
        rises = torch.full((len(text), L, H), torch.nan, dtype=torch.float64)
        bar = progress_bar(iterable=heads, unit=" heads", leave=False, delay=1)
        for head in bar:
            with capture(model, partial(replace_heads, modes={head: mode})):
                rises[:, *head] = losses() - before
            needed.append((rises[:, *head].mean().item(), name_of(head)))
            bar.set_postfix_str("most without {1}: {0:+.4f}".format(*max(needed)), refresh=False)
    return rises


@torch.no_grad()
def feeders(
    model: nn.Module, probe: RepeatProbe, scores: HeadScores, heads: Heads, mode: Ablation | None
) -> dict[Head, Fed]:
    """Measure what feeds those of these heads that look at copies: the heads of earlier layers that they need for it.

    Each earlier head is ablated alone, and the scores on the probe are measured again. Without a feeder a score falls
    by a fifth or more, in every sequence. Heads that can stand in for one another are not found so.

    mode: as of `ablate`. None takes the mean, and measures nothing if there are more than MOST_ROWS earlier heads; then
        two sequences have to do.
    """
    kinds = {head: name for head in heads if head[0] and (name := kind_of(scores, head).name) in ON_REPEATS}
    H = scores.chance["entropy"].size(1)
    earlier = [*np.ndindex(max(kinds, default=(0,))[0], H)]
    are_many = len(earlier) > MOST_ROWS
    if not kinds or (are_many and mode is None):
        return {}
    texts = probe.repeated[: 2 if are_many else None].split(1)
    found = []
    with evaluating(model):
        for ablated in progress_bar(iterable=earlier, unit=" heads", leave=False, delay=1):
            for idx in texts:
                with capture(model, partial(replace_heads, modes={ablated: mode or "mean"})) as att:
                    read(model, idx, slice(1))
                metrics = att.scores(idx.size(1) // 2)
                found.append([metrics[name][0, *head] for head, name in kinds.items()])
    left = torch.tensor(found).view(len(earlier), len(texts), -1)
    fed = {}
    for column, (head, name) in enumerate(kinds.items()):
        score = scores.samples[name][: len(texts), *head]
        without = left[: head[0] * H, :, column]
        is_fed = (without < (1 - LEAST) * score).all(1)
        means = without.mean(1)
        lowest = {earlier[i]: means[i].item() for i in means.argsort()[:MOST_FEEDERS].tolist() if is_fed[i]}
        fed[head] = Fed(score.mean().item(), lowest, means.quantile(0.5, interpolation="higher").item())
    return fed


def affordable_rows(T: int, flops_per_row: float, device: torch.device, effort: float) -> Tensor:
    """Return the rows of T to compute: all; on a CPU so many as CPU_FLOPS allow, evenly spread, the last among them.

    effort: the part of CPU_FLOPS to spend.
    """
    num_rows = T if device.type == "cuda" else min(T, max(1, int(effort * CPU_FLOPS // flops_per_row)))
    return torch.linspace(T - 1, 0, num_rows).long()


def influence(model: nn.Module, idx: Tensor, effort: float = 1.0) -> Tensor:
    """Measure how much tokens influence a prediction: the gradient of its log-probability by their embeddings.

    idx is (1, T). Returns the norms of the gradients (Simonyan et al. 2014) as shares of their sum, (T, T), a row for
    each of the `predictions`. Rows that are not of `affordable_rows` are nan. All are if there is no gradient, as in a
    model whose tokens no nn.Embedding reads, or one with a kernel that has no derivative.
    """
    idx = idx.to(device_of(model))
    T = idx.size(1)
    shares = torch.full((T, T), torch.nan)
    flops_per_row = 2 * T * sum(parameter.numel() for parameter in model.parameters())  # of a backward pass
    rows = affordable_rows(T, flops_per_row, idx.device, effort)
    with evaluating(model), torch.enable_grad(), watched(model, idx) as embedded:
        with suppress(NotImplementedError, UserError):  # a kernel without a derivative
            logits = read(model, idx, rows.to(idx.device))
            if not embedded or not logits.requires_grad:
                return shares
            likeliest = logits[0].float().log_softmax(-1).amax(-1)
            for row, log_probability in zip(rows.tolist(), likeliest, strict=True):
                gradients = torch.autograd.grad(log_probability, embedded, retain_graph=True)
                norms = sum(gradient[0].float().norm(dim=-1) for gradient in gradients)
                shares[row] = (norms / norms.sum()).cpu()
    return shares

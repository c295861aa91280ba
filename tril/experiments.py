"""Experiments on the heads of a model: measure them on a text and on tokens that repeat, and take them away.

    scores = head_scores(model, text, probe=repeat_probe(...))
    scores.mean["induction"][5, 1]                                       # of head 5.1

Each is a loop over `look`. The metrics are defined in tril/metrics.py. Shapes are named as in tril/weights.py; N is a
number of sequences.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tril.causality import watched
from tril.decoder import device_of, evaluating, logits_at
from tril.errors import UserError
from tril.kinds import LEAST, Upstream, kind_of
from tril.look import Captured, Edits, capture, look
from tril.metrics import Head, Heads, HeadScores, Metrics, Prediction, layer_metrics
from tril.weights import Computed, NotTheKernels

POSITIONS = 1024  # logits are computed for so many positions of a sequence at a time: V numbers each
CPU_FLOPS = 5e11  # spent on each extra of a page on a CPU: about five seconds
PROBE_LENGTH = 101  # tokens of a probe, if the context and its vocabulary allow: a start, and 50 twice
ON_REPEATS = ("duplicate", "induction")  # the metrics that need a probe
MOST_UPSTREAM = 2
MOST_EARLIER = 16  # heads of which each is taken away without being asked to
Ablation = Literal["zero", "mean"]  # what takes the place of a head's output
Change = Callable[[Tensor], Tensor]  # of a head's output: returns what takes its place
CHANGES: dict[str, Change] = {
    "zero": torch.zeros_like,
    "mean": lambda output: output.mean((0, 1)).expand_as(output),
}
progress = partial(tqdm, leave=False, delay=1, disable=None)  # a bar on a terminal, if it takes longer than a second


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
    first = F.pad(r, (1, 0), value=start)
    return RepeatProbe(torch.cat((first, r), dim=1), torch.cat((first, other), dim=1))


def make_probe(
    tokens: Iterable[int], special: Iterable[int], start: Sequence[int], context_length: int
) -> RepeatProbe | None:
    """Draw the probe of a model, the same wherever it is shown: from these tokens without special ones.

    It begins with the last of `start`; if that is empty, with the last token. See `repeat_probe`.
    """
    drawn = np.setdiff1d(tokens, list(special))
    return repeat_probe(torch.from_numpy(drawn).long(), int([0, *drawn[-1:], *start][-1]), context_length)


def predict(model: nn.Module, idx: Tensor, edits: Edits | None = None) -> tuple[Captured, Tensor, list[Prediction]]:
    """Return the attention of a model on a text (1, T), the loss at each token but the last, and all its predictions.

    A prediction is the likeliest next token, its probability, and the cross-entropy of the token that does follow, in
    nats; of the last token None. Losses are these, (T - 1,). For each part of the logits the model runs again.
    edits: those of `look`.
    """
    parts = []
    predictions = []
    for start in range(0, idx.size(1), POSITIONS):
        part = slice(start, start + POSITIONS)
        att, logits = look(model, idx, edits, part)
        logits = logits[0].float().log_softmax(-1)
        targets = idx[0, 1:][part].to(logits.device)  # the last position has no next token
        losses = F.nll_loss(logits[: len(targets)], targets, reduction="none")
        parts.append(losses.cpu())
        values, tokens = logits.max(-1)
        predictions += zip_longest(tokens.tolist(), values.exp().tolist(), losses.tolist())
    return att, torch.cat(parts), predictions


def head_scores(
    model: nn.Module,
    text: Tensor,
    probe: RepeatProbe | None = None,
    edits: Edits | None = None,
) -> HeadScores:
    """Measure every head on a text (N, T) and on a probe, in eval mode.

    Without a probe, duplicate and induction are left out. edits: as for `look`, while the text is read.

    Raises NotTheKernels if the weights are not those that the kernel used, and UserError if the model cannot be read.
    All ranks of a sharded model have to call this together.
    """
    N, T = text.shape
    rows = {"previous": N * (T - 2), "current": N * (T - 1), "sink": N * (T - 1)}
    repeated = torch.cat(probe).split(1) if probe else ()
    repeat = None  # on the text
    losses = []
    predictions = []
    proofs = []
    wrong = []
    parts = []
    # One by one, so that their order cannot be taken for that of the heads.
    for number, idx in enumerate(text.split(1) + repeated):
        if number < N:
            att, nats, predicted = predict(model, idx, edits)
            losses.append(nats.mean())
            predictions.append(predicted)
        else:
            att, _ = look(model, idx)
            repeat = idx.size(1) // 2
        try:
            proofs += att.verify().values()
        except NotTheKernels as error:
            wrong.append(error)
        parts.append(att.scores_and_chance(repeat))
    if wrong:  # not before: the ranks read all texts together
        raise wrong[0]
    of_heads, of_even = zip(*parts, strict=True)
    samples = joined(of_heads[:N], of_heads[0])
    even = joined(of_even[:N], of_even[0])
    if probe:
        even |= joined(of_even[N:], ON_REPEATS)
        for name, found in joined(of_heads[N:], ON_REPEATS).items():
            samples[name], samples[f"{name}_control"] = found.chunk(2)
            rows[name] = len(probe.repeated) * repeat
    chance = {name: values.mean(0) for name, values in even.items()}
    return HeadScores(samples, torch.stack(losses), predictions[0], proofs, chance, rows)


def joined(parts: Sequence[Metrics], names: Iterable[str]) -> Metrics:
    """Return these metrics of texts that were measured one by one: metric -> (N, L, H)."""
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def change_of(mode: str) -> Change:
    """Return the change of this name. Raises UserError for an unknown mode."""
    if mode not in CHANGES:
        raise UserError(f"a head's output becomes {' or '.join(CHANGES)}, got {mode!r}")
    return CHANGES[mode]


def token_losses(model: nn.Module, texts: Tensor, edits: Edits | None = None) -> Tensor:
    """Return the cross-entropy of each token of texts, (N, T), but the first of each: (N, T - 1) nats.

    edits: as for `look`.
    """
    return torch.stack([predict(model, idx, edits)[1] for idx in texts.split(1)])


def rises(model: nn.Module, texts: Tensor, heads: Iterable[Head], mode: Ablation) -> dict[Head, Tensor]:
    """Measure how much the loss at each token of texts, (N, T), rises without a head: head -> (N, T - 1) nats.

    The head's output becomes zero, or its mean over a text (Michel, Levy and Neubig 2019). The model was trained for
    neither, and other heads can take over: this is one measure of importance among several.

    Raises UserError for another mode.
    """
    change = change_of(mode)
    before = token_losses(model, texts)
    return {head: token_losses(model, texts, {head: change}) - before for head in progress(heads, unit=" heads")}


def ablate(model: nn.Module, text: Tensor, heads: Iterable[Head], mode: Ablation = "zero") -> Tensor:
    """Return the mean of `rises` over each text: (N, L, H) nats a token, nan for heads not asked for."""
    found = rises(model, text, heads, mode)
    L, _, H, _ = look(model, text[:1])[0].shape
    means = torch.full((len(text), L, H), torch.nan, dtype=torch.float64)
    for head, rise in found.items():
        means[:, *head] = rise.double().mean(1)
    return means


def upstream_heads(
    model: nn.Module, probe: RepeatProbe, scores: HeadScores, heads: Heads, mode: Ablation | None
) -> dict[Head, Upstream]:
    """Find the upstream heads of those of these heads that look at copies: the heads of earlier layers that they need.

    Each earlier head is ablated alone, and the scores on the probe are measured again. Without an upstream head a score
    falls by a fifth or more, in every sequence. Heads that can stand in for one another are not found so.

    mode: as of `ablate`. None takes the mean, and measures nothing if there are more than MOST_EARLIER earlier heads;
        then two sequences have to do.
    """
    kinds = {head: name for head in heads if head[0] and (name := kind_of(scores, head).name) in ON_REPEATS}
    H = scores.chance["entropy"].size(1)
    earlier = [*np.ndindex(max(kinds, default=(0,))[0], H)]
    are_many = len(earlier) > MOST_EARLIER
    if not kinds or (are_many and mode is None):
        return {}
    change = change_of(mode or "mean")
    texts = probe.repeated[: 2 if are_many else None].split(1)
    repeat = probe.repeated.size(1) // 2
    left = []  # the scores without each of the earlier heads
    for ablated in progress(earlier, unit=" heads"):
        found = [look(model, idx, {ablated: change})[0].scores(repeat) for idx in texts]
        left.append(joined(found, ON_REPEATS))
    found = {}
    for head, name in kinds.items():
        score = scores.samples[name][: len(texts), *head]
        without = torch.stack([metrics[name][:, *head] for metrics in left[: head[0] * H]])
        is_needed = (without < (1 - LEAST) * score).all(1)
        means = without.mean(1)
        lowest = {earlier[i]: means[i].item() for i in means.argsort()[:MOST_UPSTREAM].tolist() if is_needed[i]}
        sides = {other: by_sides(model, texts, {other: change}, head, name) for other in lowest}
        found[head] = Upstream(score.mean().item(), lowest, means.quantile(0.5, interpolation="higher").item(), sides)
    return found


def by_sides(model: nn.Module, texts: Sequence[Tensor], edits: Edits, head: Head, metric: str) -> dict[str, float]:
    """Return a metric of a head on repeated texts, (1, T) each, with its keys or its queries alone as edits make them.

    Its weights read no values. They are known of a kernel alone; of other heads there is none.
    """
    layer, number = head
    found = defaultdict(list)
    for idx in texts:
        plain, edited = (look(model, idx, each)[0].calls[layer].of_head(number) for each in (None, edits))
        for name, field in {"keys": "k", "queries": "q"}.items() if isinstance(plain, Computed) else ():
            changed = replace(plain, **{field: getattr(edited, field)})
            found[name].append(layer_metrics(changed.blocks(), idx.size(1) // 2)[metric][0, 0].item())
    return {name: sum(scores) / len(texts) for name, scores in found.items()}


def affordable_rows(T: int, flops_per_row: float, device: torch.device, effort: float) -> Tensor:
    """Return the rows of T to compute: all; on a CPU so many as CPU_FLOPS allow, evenly spread, the last among them.

    effort: the part of CPU_FLOPS to spend.
    """
    num_rows = T if device.type == "cuda" else min(T, max(1, int(effort * CPU_FLOPS // flops_per_row)))
    return torch.linspace(T - 1, 0, num_rows).long()


def influence(model: nn.Module, idx: Tensor, effort: float = 1.0, edits: Edits | None = None) -> Tensor:
    """Measure how much tokens influence a prediction: the gradient of its log-probability by their embeddings.

    idx is (1, T). Returns the norms of the gradients (Simonyan et al. 2014) as shares of their sum, (T, T), a row for
    each of the predictions. Rows that are not of `affordable_rows` are nan. All are if there is no gradient, as in a
    model whose tokens no nn.Embedding reads, or one with a kernel that has no derivative.
    """
    idx = idx.to(device_of(model))
    T = idx.size(1)
    shares = torch.full((T, T), torch.nan)
    flops_per_row = 2 * T * sum(parameter.numel() for parameter in model.parameters())  # of a backward pass
    rows = affordable_rows(T, flops_per_row, idx.device, effort)
    seen = capture(model, edits)
    no_derivative = suppress(RuntimeError, UserError)  # of a kernel, a reentrant checkpoint, a quantized layer
    with evaluating(model), torch.enable_grad(), watched(model, idx) as embedded, seen, no_derivative:
        logits = logits_at(model, idx, rows.to(idx.device))
        if not embedded or not logits.requires_grad:
            return shares
        likeliest = logits[0].float().log_softmax(-1).amax(-1)
        for row, log_probability in zip(rows.tolist(), likeliest, strict=True):
            gradients = torch.autograd.grad(log_probability, embedded, retain_graph=True)
            norms = sum(gradient[0].float().norm(dim=-1) for gradient in gradients)
            shares[row] = (norms / norms.sum()).cpu()
    return shares

"""Metrics of attention heads: means over the rows of a head's weights A, computed one block of rows at a time.

Row i of A is the query at position i; it can attend to the i + 1 keys 0..i. Entropy follows Zhai et al. 2023, but is
divided by each row's own maximum; distance follows Vig and Belinkov 2019; sink Xiao et al. 2023; induction Olsson et
al. 2022. Of a head that attends evenly, which is what chance is, entropy is 1, distance (T - 1) / 4, sink and current
(H_T - 1) / (T - 1), where H_n is the n-th harmonic number, and previous (H_T - 3 / 2) / (T - 2). Shapes are named as in
tril/weights.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.weights import Proof

Head = tuple[int, int]  # layer and head, both from zero
Heads = Sequence[Head]
Metrics = dict[str, Tensor]  # the name of a metric -> its values, one for each head and often for each sequence
Prediction = tuple[int, float, float | None]  # see `predict`
METRICS = {  # name -> title and format in a table, and definition; A_ij is the weight of query i for key j
    "entropy": ("entropy", ".2f", "evenness of a row: -sum_j A_ij ln A_ij over its maximum ln(i + 1), for i >= 1"),
    "distance": ("distance", ".1f", "mean distance in tokens: sum_j A_ij (i - j)"),
    "sink": ("sink", ".2f", "weight of the first token, A_i0, for i >= 1 (row 0 has no choice)"),
    "current": ("self", ".2f", "weight of the token itself, A_ii, for i >= 1"),
    "previous": ("prev", ".2f", "weight of the token before, A_i,i-1, for i >= 2 (before token 1 is the first token)"),
    "duplicate": ("dup", ".2f", "on [start, r_1..r_L, r_1..r_L]: weight of a token's first copy, from the second"),
    "induction": ("ind", ".2f", "on the same tokens: weight of the token after its first copy, the one to predict"),
    "induction_control": ("(ctrl)", ".2f", "the control: [start, r, r'], where nothing repeats; duplicate_control too"),
    "ablation": ("loss", "+.4f", "rise of the loss without the head, in nats a token"),
}


@dataclass(frozen=True)
class HeadScores:
    """Metrics of all heads, sequence by sequence."""

    samples: Metrics  # metric -> (N, L, H) float64
    losses: Tensor  # (N,) mean cross-entropy of each text, in nats a token
    predictions: Sequence[Prediction]  # of the first text
    proofs: list[Proof]  # of the layers, for each text and probe
    chance: Metrics  # metric -> (L, H), the score of a head that attends evenly to all it may see
    rows: dict[str, int]  # metric -> the number of queries that it is a mean over

    @cached_property
    def mean(self) -> Metrics:
        """Mean over the sequences: metric -> (L, H)."""
        return {name: samples.mean(0) for name, samples in self.samples.items()}


def layer_metrics(blocks: Iterable[tuple[Tensor, Tensor]], repeat: int | None = None) -> Metrics:
    """Return the metrics of one layer, float64 on the CPU: metric -> (B, H + 1 or 2H).

    Behind its heads are those that attend evenly to what they may see: one, or one for each. A metric without any row
    is nan.

    blocks: weights (B, H, queries, keys up to the last of these queries), in the order of the queries, and which keys
        may be seen, bool, (1 or B, 1 or H, queries, keys).
    repeat: the length L for duplicate and induction; None leaves these two out.
    """
    rows = defaultdict(list)  # metric -> (B, H, queries of a block that count)
    for weights, visible in blocks:
        even = F.normalize(visible.to(weights), p=1, dim=-1)
        weights = torch.cat((weights, even.expand(len(weights), -1, -1, -1)), dim=1)
        keys = torch.arange(weights.size(3), device=weights.device)
        queries = keys[-weights.size(2) :]
        entropy = torch.special.entr(weights).sum(-1) / (queries + 1).log()
        rows["entropy"].append(entropy[..., queries >= 1])
        rows["distance"].append((weights * (queries[:, None] - keys)).sum(-1))
        key_of = {"sink": (0 * queries, 1), "current": (queries, 1), "previous": (queries - 1, 2)}
        if repeat is not None:
            key_of["duplicate"] = (queries - repeat, repeat + 1)
            key_of["induction"] = (queries - repeat + 1, repeat + 1)
        for name, (key, first) in key_of.items():  # the key of each query, and the first query that counts
            counts = queries >= first
            rows[name].append(weights[:, :, counts, key[counts]])
    return {name: torch.cat(values, -1).cpu().double().mean(-1) for name, values in rows.items()}

"""Metrics of attention heads: means over the rows of a head's weights A, computed one block of rows at a time.

Row i of A is the query at position i; it can attend to the i + 1 keys 0..i. Entropy follows Zhai et al. 2023, but is
divided by each row's own maximum; distance follows Vig and Belinkov 2019; sink Xiao et al. 2023; induction Olsson et
al. 2022. A head that attends evenly has entropy 1, distance (T - 1) / 4, sink and current of (H_T - 1) / (T - 1), where
H_n is the n-th harmonic number, and previous of (H_T - 3 / 2) / (T - 2). Shapes are named as in model/attention.py.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

METRICS = {  # name -> title and format in a table, and definition; A_ij is the weight of query i for key j
    "entropy": ("entropy", ".2f", "evenness of a row: -sum_j A_ij ln A_ij over its maximum ln(i + 1), for i >= 1"),
    "distance": ("distance", ".1f", "mean distance in tokens: the sum of A_ij (i - j) over the sum of A_ij"),
    "sink": ("sink", ".2f", "weight of the first token, A_i0, for i >= 1 (row 0 has no choice)"),
    "current": ("self", ".2f", "weight of the token itself, A_ii, for i >= 1"),
    "previous": ("prev", ".2f", "weight of the token before, A_i,i-1, for i >= 2 (before token 1 is the first token)"),
    "token": ("token", ".2f", "weight of the one token of the text that gets most, wherever it stands, for i >= 1"),
    "duplicate": ("dup", ".2f", "on [start, r_1..r_L, r_1..r_L]: weight of a token's first copy, from the second"),
    "induction": ("ind", ".2f", "on the same tokens: weight of the token after its first copy, the one to predict"),
    "induction_control": ("(ctrl)", ".2f", "induction on [start, r, r'], where nothing repeats; duplicate_control too"),
    "ablation": ("loss", "+.4f", "rise of the loss without the head, in nats a token"),
}


def measure(blocks: Iterable[tuple[int, Tensor]], repeat: int | None = None) -> dict[str, Tensor]:
    """Metric -> (B, H) of one layer in float64 on the CPU; "received", the mean weight of each key, is (B, H, T).

    A block is the position of its first query, then weights (B, H, rows, keys up to the last query).
    repeat: the length L for duplicate and induction; None leaves these two out. A metric without any row is nan.
    """
    sums: dict[str, Tensor | float] = defaultdict(float)
    num_rows: dict[str, int] = defaultdict(int)
    received = None

    def add(name: str, rows: Tensor) -> None:
        """Add rows of (B, H, rows)."""
        exact = torch.float32 if rows.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        sums[name] = sums[name] + rows.sum(2, dtype=exact)
        num_rows[name] += rows.size(2)

    for start, weights in blocks:
        positions = torch.arange(start, weights.size(3), device=weights.device)  # of the queries
        keys = torch.arange(weights.size(3), device=weights.device)
        add("distance", (weights * (positions[:, None] - keys)).sum(-1))
        add("mass", weights.sum(-1))
        first = max(0, 1 - start)  # leaves out query 0
        later_weights, later_positions = weights[:, :, first:], positions[first:]
        add("entropy", torch.special.entr(later_weights).sum(-1) / (later_positions + 1).log())
        add("sink", later_weights[..., 0])
        here = later_weights.sum(2)
        received = here if received is None else here + F.pad(received, (0, here.size(2) - received.size(2)))
        add("current", at_distance(weights, start, 0, 1))
        add("previous", at_distance(weights, start, 1, 2))
        if repeat is not None:
            add("duplicate", at_distance(weights, start, repeat, repeat + 1))
            add("induction", at_distance(weights, start, repeat - 1, repeat + 1))
    means = {name: total.cpu().double() / num_rows[name] for name, total in sums.items()}
    means["distance"] = means["distance"] / means.pop("mass")
    means["received"] = received.cpu().double() / num_rows["sink"]
    return means


def at_distance(weights: Tensor, start: int, distance: int, first: int) -> Tensor:
    """Weights of the keys `distance` tokens back, of queries from `first` on: (B, H, rows, keys) -> (B, H, queries)."""
    diagonal = weights.diagonal(start - distance, -2, -1)  # begins with the first query that has such a key
    return diagonal[..., max(0, first - max(start, distance)) :]

"""What a head does, in numbers: each is a mean over rows of its weights A, computed while the rows pass by.

Row i of A is the query at position i, and sees the i + 1 keys 0..i. Entropy is as in Zhai et al. 2023, but for each
row's own maximum; distance as in Vig and Belinkov 2019; sink as in Xiao et al. 2023; induction as in Olsson et al.
2022. A head that looks evenly has entropy 1, distance (T - 1) / 4, and (H_T - 1) / (T - 1), H_n the n-th harmonic
number, for sink, current and previous. Shapes are named as in model/attention.py.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

DEFINITIONS = {
    "entropy": "how evenly it looks: -sum_j A_ij ln A_ij, as a share of ln(i + 1), the most there can be; from row 1",
    "distance": "how far back it looks, in tokens: the sum of A_ij (i - j) over that of A_ij",
    "sink": "how much of it goes to the first token, A_i0; from row 1, as row 0 has no choice",
    "current": "to the token itself, A_ii; from row 1",
    "previous": "to the token before, A_i,i-1; from row 1",
    "duplicate": "on [start, r_1..r_L, r_1..r_L]: from a token of the second copy to the same token of the first",
    "induction": "there: to the token that came after it, the one that comes next",
    "induction_control": "induction on [start, r, r'], where nothing repeats; as for duplicate_control",
    "max_logit": "the largest score before the softmax",
    "ablation": "how much the loss rises without the head, in nats a token",
}

# The picture of a head: where its attention goes, by distance from these on, and to the first token (which is in none
# of them).
DISTANCES = (0, 1, 2, 3, 5, 9, 17, 33, 65)
PICTURE = "picture"


def measure(
    blocks: Iterable[tuple[int, Tensor, Tensor]], repeat: int | None = None, picture: bool = True
) -> dict[str, Tensor]:
    """{metric: (B, H)} of one layer in float64 on the CPU, and PICTURE: (B, H, 10) if that is wanted.

    A block has the position of its first query, and weights and scores (B, H, rows, keys until the last query).
    repeat: the L of duplicate and induction, which are left out without it. A metric that has no row is nan.
    """
    sums: dict[str, Tensor | float] = defaultdict(float)
    num_rows: dict[str, int] = defaultdict(int)
    largest = []

    def add(name: str, rows: Tensor) -> None:
        """Rows (B, H, rows), or (B, H, rows, fields)."""
        exact = torch.float32 if rows.device.type == "mps" else torch.float64  # which Apple's GPUs do not have
        sums[name] = sums[name] + rows.sum(2, dtype=exact)
        num_rows[name] += rows.size(2)

    for start, weights, scores in blocks:
        positions = torch.arange(start, weights.size(3), device=weights.device)  # of the queries
        keys = torch.arange(weights.size(3), device=weights.device)
        add("distance", (weights * (positions[:, None] - keys)).sum(-1))
        add("mass", weights.sum(-1))
        first = max(0, 1 - start)  # the block's row that is query 1 or later
        later, at = weights[:, :, first:], positions[first:]
        add("entropy", torch.special.entr(later).sum(-1) / (at + 1).log())
        add("sink", later[..., 0])
        add("current", at_distance(weights, start, 0, 1))
        add("previous", at_distance(weights, start, 1, 1))
        if repeat is not None:
            add("duplicate", at_distance(weights, start, repeat, repeat + 1))
            add("induction", at_distance(weights, start, repeat - 1, repeat + 1))
        if picture:
            add(PICTURE, fields(later, at))
        largest.append(scores.amax((2, 3)))
    means = {name: total.cpu().double() / num_rows[name] for name, total in sums.items()}
    means["distance"] = means["distance"] / means.pop("mass")
    return means | {"max_logit": torch.stack(largest).amax(0).cpu().double()}


def at_distance(weights: Tensor, start: int, distance: int, first: int) -> Tensor:
    """The weights of keys so many tokens back, for the queries from `first` on: (B, H, rows, keys) -> (B, H, some)."""
    diagonal = weights.diagonal(start - distance, -2, -1)  # begins with the first query that is so far from the start
    return diagonal[..., max(0, first - max(start, distance)) :]


def fields(weights: Tensor, positions: Tensor) -> Tensor:
    """The picture of each row: (B, H, rows, keys) of queries at these positions -> (B, H, rows, 10)."""
    until = weights.cumsum(-1)
    back = (positions[:, None] - torch.tensor((*DISTANCES, weights.size(3)), device=weights.device)).clamp(min=0)
    reached = until.gather(-1, back.expand(*weights.shape[:2], -1, -1))  # by the keys that are at least so far away
    return torch.cat((reached[..., :-1] - reached[..., 1:], weights[..., :1]), dim=-1)

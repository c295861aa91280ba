"""Write inspections to files for further work: scores as csv, queries and keys as npz.

Nothing is pickled. docs/inspect.md has the three lines that make an npz file the weights of every head again.
"""

import csv
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from inspection.heads import Inspection
from inspection.kinds import Head, name_of


def write_scores(path: Path, inspections: Sequence[Inspection], heads: Sequence[Head]) -> None:
    """Write a line of a csv for each checkpoint, head and metric. A score that is not finite is left empty."""
    rows = []
    for each in inspections:
        mean, error = each.scores.mean, each.scores.error
        for head, metric in itertools.product(heads, mean):
            numbers = {"mean": mean[metric][head].item(), "standard_error": error[metric][head].item()}
            finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
            rows.append(each.about | {"head": name_of(head), "metric": metric} | finite)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_tensors(path: Path, inspection: Inspection, tokens: torch.Tensor, labels: Sequence[str]) -> None:
    """Write an npz file with the arrays

    q.LAYER (B, H, T_query, D), k.LAYER (B, n_kv_head, T_key, D), tokens (T,), score.METRIC (L, H),

    and "about", which is JSON: checkpoint, step, loss, verified and labels of the tokens. bfloat16 becomes float32.
    """
    tensors = {"tokens": tokens} | {f"score.{name}": mean.float() for name, mean in inspection.scores.mean.items()}
    for layer in range(len(inspection.att.layers)):
        q, k, _ = inspection.att[layer]
        tensors |= {f"q.{layer}": q.cpu().contiguous(), f"k.{layer}": k.cpu().contiguous()}
    about = json.dumps(inspection.about | {"labels": list(labels)})
    arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
    np.savez_compressed(path, about=np.array(about), **arrays)

"""Write inspections to files for further work: scores as csv or json, queries and keys as npz or safetensors.

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
from safetensors.torch import save

from inspection.heads import Inspection
from inspection.kinds import Head, name_of


def write_scores(path: Path, inspections: Sequence[Inspection], heads: Sequence[Head], about: dict) -> None:
    """Write a row for each checkpoint, head and metric: as lines of a csv, or as "scores" of a json besides `about`.

    A number that is not finite becomes null, or nothing in a csv.
    """
    rows = []
    for each in inspections:
        mean, error = each.scores.mean, each.scores.error
        for head, metric in itertools.product(heads, mean):
            numbers = {"mean": mean[metric][head].item(), "standard_error": error[metric][head].item()}
            row = each.about | {"head": name_of(head), "metric": metric} | numbers
            finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
            rows.append(finite)
    if path.suffix == ".json":
        path.write_text(json.dumps({**about, "scores": rows}, indent=1, allow_nan=False) + "\n")
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def write_tensors(path: Path, inspection: Inspection, tokens: torch.Tensor, labels: Sequence[str]) -> None:
    """Write an npz or safetensors file with the tensors

    q.LAYER (B, H, T_query, D), k.LAYER (B, n_kv_head, T_key, D), tokens (T,), score.METRIC (L, H),

    and "about", which is JSON: checkpoint, step, loss, verified and labels of the tokens. In an npz, which has no
    bfloat16, such tensors are float32.
    """
    tensors = {"tokens": tokens} | {f"score.{name}": mean.float() for name, mean in inspection.scores.mean.items()}
    for layer in range(len(inspection.att.layers)):
        q, k, _ = inspection.att[layer]
        tensors |= {f"q.{layer}": q.cpu().contiguous(), f"k.{layer}": k.cpu().contiguous()}
    about = json.dumps(inspection.about | {"labels": list(labels)})
    if path.suffix == ".safetensors":
        path.write_bytes(save(tensors, metadata={"about": about}))
    else:
        arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
        np.savez_compressed(path, about=np.array(about), **arrays)

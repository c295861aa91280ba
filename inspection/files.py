"""What was seen, for further work: scores as csv or json, queries and keys as npz or safetensors. Nothing is pickled.

saved = load("attention.npz")
saved.att.pattern(5, 1)          # any head of what was captured: (B, T, T)
saved.about["labels"]            # of its tokens
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from inspection.heads import HeadScores
from inspection.metrics import PICTURE
from inspection.patterns import Captured, Layer
from inspection.terminal import name_of
from model import disk
from model.attention import Attend

Head = tuple[int, int]


def score_table(names: Sequence[dict], scores: Sequence[HeadScores], heads: Sequence[Head]) -> list[dict]:
    """A row for each checkpoint, head and metric: what names[i] says of the checkpoint, head, metric, mean, error.

    What was not measured is None.
    """
    rows = []
    for about, score in zip(names, scores, strict=True):
        mean, error = score.mean, score.error
        for head in heads:
            for metric in mean:
                if metric != PICTURE:
                    values = {"mean": mean[metric][head].item(), "standard_error": error[metric][head].item()}
                    values = {name: None if math.isnan(value) else value for name, value in values.items()}
                    rows.append({**about, "head": name_of(head), "metric": metric, **values})
    return rows


def write_scores(path: Path, rows: list[dict], about: dict) -> None:
    """Write the rows of `score_table`: a csv with one line each, or a json with {**about, "scores": rows}."""
    if path.suffix.lower() == ".json":
        text = json.dumps({**about, "scores": rows}, indent=1, ensure_ascii=False) + "\n"
        disk.replace(path, text.encode())
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    disk.replace(path, text.getvalue().encode())


@dataclass(frozen=True)
class Saved:
    """What `write_tensors` wrote."""

    att: Captured
    """Queries and keys: `pattern`, `scores` and `verify` work as on the day."""
    tokens: Tensor
    """(T,) the ids of the text."""
    scores: dict[str, Tensor]
    """Metric -> (L, H) float32."""
    about: dict
    """labels, step, config and what else was given."""


def write_tensors(path: Path, att: Captured, tokens: Tensor, scores: dict[str, Tensor], about: dict) -> None:
    """Write an npz or safetensors file, whose tensors are

    q.LAYER (B, H, T_query, D), k.LAYER (B, n_kv_head, T_key, D), tokens (T,), score.METRIC (L, H); and "about", JSON.
    """
    tensors = {"tokens": tokens.cpu()} | {f"score.{name}": values.float() for name, values in scores.items()}
    for layer in att.layers:
        q, k, _ = att[layer]
        tensors |= {f"q.{layer}": q.cpu().contiguous(), f"k.{layer}": k.cpu().contiguous()}
    text = json.dumps({**about, "n_layer": att.n_layer, "dtype": str(q.dtype).removeprefix("torch.")})
    if path.suffix.lower() == ".safetensors":
        disk.replace(path, save(tensors, metadata={"about": text}))
        return
    arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
    content = io.BytesIO()
    np.savez_compressed(content, about=np.array(text), **arrays)
    disk.replace(path, content.getvalue())


def load(path: str | Path) -> Saved:
    """Read what `write_tensors` wrote."""
    path = Path(path)
    if path.suffix.lower() == ".safetensors":
        with safe_open(path, "pt") as file:
            text, tensors = file.metadata()["about"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    else:
        with np.load(path) as file:
            text, tensors = str(file["about"]), {name: torch.from_numpy(file[name]) for name in file if name != "about"}
    about, layers = json.loads(text), {}
    for name in sorted(name for name in tensors if name.startswith("q.")):
        number = int(name[2:])
        q, k = (tensors[f"{which}.{number}"].to(getattr(torch, about["dtype"])) for which in "qk")
        layers[number] = Layer(Attend())
        layers[number].calls = [(q, k, torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2)))]
    scores = {name.removeprefix("score."): tensor for name, tensor in tensors.items() if name.startswith("score.")}
    return Saved(Captured(dict(sorted(layers.items())), about["n_layer"]), tensors["tokens"], scores, about)

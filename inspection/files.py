"""What was seen, for further work: scores as csv or json, queries and keys as npz or safetensors. Nothing is pickled.

saved = load("attention.npz")
saved.att.pattern(5, 1)          # any head of what was captured: (B, T, T)
saved.about["labels"]            # of its tokens
"""

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from inspection.heads import HeadScores
from inspection.metrics import PICTURE
from inspection.patterns import TOLERANCE, Captured, Layer
from inspection.terminal import Head, name_of
from model import ModelError
from model.attention import Attend


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
                    row = {**about, "head": name_of(head), "metric": metric, **values}
                    rows.append({name: None if is_no_number(value) else value for name, value in row.items()})
    return rows


def is_no_number(value: object) -> bool:
    """Whether JSON cannot hold it."""
    return isinstance(value, float) and not math.isfinite(value)


def write_scores(path: Path, rows: list[dict], about: dict) -> None:
    """Write the rows of `score_table`: a csv with one line each, or a json with {**about, "scores": rows}."""
    if path.suffix.lower() == ".json":
        text = json.dumps({**about, "scores": rows}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(path, [text.encode()])
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, [text.getvalue().encode()])


@dataclass(frozen=True)
class Saved:
    """What `write_tensors` wrote."""

    att: Captured
    """Queries and keys, for `pattern` and `scores`. (`verify` asks the kernel of this machine, about what is here.)"""
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
    tensors = {"tokens": tokens.cpu()} | {
        f"score.{name}": values.float() for name, values in scores.items() if name != PICTURE
    }
    for layer in att.layers:
        q, k, _ = att[layer]
        tensors |= {f"q.{layer}": q.cpu().contiguous(), f"k.{layer}": k.cpu().contiguous()}
    text = json.dumps({**about, "n_layer": att.n_layer, "dtype": str(q.dtype).removeprefix("torch.")})
    if path.suffix.lower() == ".safetensors":
        write_whole(path, [save(tensors, metadata={"about": text})])
        return
    arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
    content = io.BytesIO()
    np.savez_compressed(content, about=np.array(text), **arrays)
    write_whole(path, [content.getvalue()])


def load(path: str | Path) -> Saved:
    """Read what `write_tensors` wrote. Raises ModelError if the file is something else."""
    try:
        return read_saved(Path(path))
    except Exception as error:  # whatever a damaged archive is to numpy and zipfile
        raise ModelError(f"{path} is not what inspect_attention.py writes: {error!r:.200}") from error


def read_saved(path: Path) -> Saved:
    if path.suffix.lower() == ".safetensors":
        with safe_open(path, "pt") as file:
            text, tensors = file.metadata()["about"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    else:
        with open(path, "rb") as opened, np.load(opened) as file:
            text, tensors = str(file["about"]), {name: torch.from_numpy(file[name]) for name in file if name != "about"}
    about, layers = json.loads(text), {}
    dtype = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}[about["dtype"]]
    for name in sorted(name for name in tensors if name.startswith("q.")):
        number = int(name[2:])
        q, k = (tensors[f"{which}.{number}"].to(dtype) for which in "qk")
        layers[number] = Layer(Attend())
        layers[number].calls = [(q, k, torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2)))]
    scores = {name.removeprefix("score."): tensor for name, tensor in tensors.items() if name.startswith("score.")}
    return Saved(Captured(dict(sorted(layers.items())), about["n_layer"]), tensors["tokens"], scores, about)


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file where the user wants it: it is there whole or not at all, and nothing else is touched."""
    path = path.resolve()  # behind a link, the file that it names
    descriptor, partial = tempfile.mkstemp(prefix=".tril-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        os.chmod(partial, 0o666 & ~current_umask())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def current_umask() -> int:
    """What a new file of this process is not allowed; it can only be read by setting it."""
    umask = os.umask(0)
    os.umask(umask)
    return umask

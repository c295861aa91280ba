"""One HTML file that shows what attention heads do, and that needs nothing else: no server, no library, no network.

The policy in its head lets a browser run the page's own script and forbids every request. Whatever comes from outside,
tokens and names, enters as JSON and leaves as text; page.html has the rest.

A pattern is stored as its lower triangle, row by row, in 65535ths: all low bytes, then all high bytes (a tenth to a
fifth smaller than in turns), deflated, in base64. The page inflates what it shows.
"""

import base64
import hashlib
import json
import math
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from inspection.files import write_whole
from inspection.metrics import DEFINITIONS
from inspection.terminal import COLUMNS, KINDS, MUCH
from model import ModelError

TEMPLATE = Path(__file__).with_name("page.html")
THUMBNAIL = 64  # rows of the small pictures, at most
UNSAFE = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&=("})  # none of these is JSON's own


@dataclass(frozen=True)
class Snapshot:
    """One checkpoint, looking at the text."""

    name: str  # as "step-00000400"
    step: int | None  # None: unknown (a model from elsewhere)
    loss: float | None  # validation loss in nats a token, if known
    note: str  # how the weights were verified
    scores: dict[str, Tensor]  # metric -> (L, H); nan is not measured
    errors: dict[str, Tensor]  # their standard errors, (L, H)
    pattern: Callable[[str], Tensor]  # "5.1" -> (T, T), lower triangle, row = query; asked once a head, and not kept
    rollout: Tensor | None  # (T, T)
    influence: Tensor | None  # (T, T), a row sums to 1; rows of nan were not computed
    predictions: list[tuple[str, float]]  # for each position the likeliest next token and its probability


def write_page(
    path: Path,
    title: str,
    text_note: str,
    labels: list[str],
    heads: list[str],
    snapshots: Iterable[Snapshot],
    limit: int = 32 * 2**20,
) -> list[str]:
    """Write the page and return what must be said about it, which the page says too.

    Only one pattern is in memory at a time, and `snapshots` may be a generator: all of them pass through a file beside
    `path`. Beyond `limit` bytes the patterns are pooled, by the smallest factor that fits; ModelError if none does.
    """
    assert heads and len(set(heads)) == len(heads), "which heads to show"
    T = len(labels)
    with tempfile.TemporaryFile(dir=path.parent) as spool:
        stored = [store(snapshot, heads, T, spool) for snapshot in snapshots]
        assert stored, "a page of no snapshots"
        names = [names for _, names in stored]
        data = {"title": title, "labels": labels, "heads": heads, "snapshots": [described for described, _ in stored]}
        data["metrics"] = list(dict.fromkeys(metric for described, _ in stored for metric in described["scores"]))
        data |= {"definitions": DEFINITIONS, "kinds": {name: COLUMNS[name][0] for name in KINDS}, "much": MUCH}
        for factor in range(1, T + 1):
            notes = pooling_notes(factor, T, limit)
            data |= {"notes": [text_note, *notes], "factor": factor, "small": -(-T // small_factor(factor, T))}
            before, after = fill(data)
            room = limit - len(before) - len(after)
            if blocks := encode_all(spool, names, len(heads), T, factor, room):
                break
        else:
            raise ModelError(
                f"the page does not fit into {limit:,} bytes even with every pattern pooled to a point: "
                "show fewer heads or checkpoints, or a shorter text"
            )
    write_whole(path, [before, *blocks, after])
    return notes


def pooling_notes(factor: int, T: int, limit: int) -> list[str]:
    if factor == 1:
        return []
    return [
        f"Pooled: in full, the patterns would make this page larger than {limit / 2**20:.4g} MiB. A cell is the "
        f"maximum of {factor} x {factor} weights, {T} tokens make {-(-T // factor)} rows. Fewer heads or checkpoints, "
        "or a shorter text, need less."
    ]


def store(snapshot: Snapshot, heads: list[str], T: int, spool: BinaryIO) -> tuple[dict, list[str]]:
    """Append the triangles of a snapshot to the spool; what the page says of it, and the triangles' names in order."""
    names = [*heads]
    for head in heads:
        spool.write(triangle(snapshot.pattern(head), T, f"head {head} of {snapshot.name}"))
    if snapshot.rollout is not None:
        names.append("rollout")
        spool.write(triangle(snapshot.rollout, T, f"the rollout of {snapshot.name}"))
    computed = None
    if snapshot.influence is not None:
        names.append("influence")
        computed = (~snapshot.influence.isnan().any(dim=1)).nonzero().flatten().tolist()
        influence = snapshot.influence.nan_to_num(0.0)
        spool.write(triangle(influence, T, f"the influence of {snapshot.name}"))
    assert len(snapshot.predictions) == T
    described = {"name": snapshot.name, "step": snapshot.step, "loss": known(snapshot.loss), "note": snapshot.note}
    described |= {"scores": numbers(snapshot.scores), "errors": numbers(snapshot.errors)}
    described |= {"rollout": snapshot.rollout is not None, "influence": computed}
    described["predictions"] = [(label, known(float(chance))) for label, chance in snapshot.predictions]
    return described, names


def numbers(tables: dict[str, Tensor]) -> dict[str, list[list[float | None]]]:
    return {metric: [[known(x) for x in row] for row in table.tolist()] for metric, table in tables.items()}


def known(x: float | None) -> float | None:
    """Six digits of a number, and None for one that JSON does not have."""
    return float(f"{x:.6g}") if x is not None and math.isfinite(x) else None


def triangle(pattern: Tensor, T: int, what: str) -> np.ndarray:
    """The lower triangle of (T, T), row by row, in 65535ths: (T (T + 1) / 2,)."""
    values = pattern.detach().float().cpu().numpy()
    assert values.shape == (T, T), f"{what} is {values.shape}, for {T} tokens"
    values = values[np.tri(T, dtype=bool)]
    if not np.isfinite(values).all():
        raise ValueError(f"{what} has weights that are not numbers")
    return np.round(values.clip(0, 1) * 65535).astype("<u2")


def read_triangle(spool: BinaryIO, T: int) -> np.ndarray:
    return np.frombuffer(spool.read(T * (T + 1)), dtype="<u2")


def pool(values: np.ndarray, T: int, factor: int) -> np.ndarray:
    """A triangle of T rows to one of ceil(T / factor): the maximum of each block, a mean would hide sharp heads."""
    if factor == 1:
        return values
    n = -(-T // factor)
    square = np.zeros((n * factor, n * factor), dtype=values.dtype)
    square[:T, :T][np.tri(T, dtype=bool)] = values
    blocks = square.reshape(n, factor, n, factor).max(axis=(1, 3))
    return blocks[np.tri(n, dtype=bool)]


def small_factor(factor: int, T: int) -> int:
    """By what the small pictures are pooled."""
    return max(factor, -(-T // THUMBNAIL))


def encode(values: np.ndarray) -> bytes:
    planes = values.view(np.uint8).reshape(-1, 2).T.tobytes()  # low bytes, high bytes
    return base64.b64encode(zlib.compress(planes)).rstrip(b"=")


def encode_all(
    spool: BinaryIO, names: list[list[str]], num_heads: int, T: int, factor: int, room: int
) -> list[bytes] | None:
    """The script elements that hold all patterns, the small pictures first, or None if they are larger than `room`."""
    small, large, size = [], [], 0
    spool.seek(0)
    for number, of_snapshot in enumerate(names):
        thumbnails = []
        for position, name in enumerate(of_snapshot):
            values = read_triangle(spool, T)
            if position < num_heads:
                thumbnails.append(pool(values, T, small_factor(factor, T)))
            large.append(element(f"{number}/{name}", encode(pool(values, T, factor))))
            size += len(large[-1])
            if size > room:
                return None
        small.append(element(f"{number}/small", encode(np.concatenate(thumbnails))))
        size += len(small[-1])
    return small + large if size <= room else None


def element(name: str, content: bytes) -> bytes:
    return b'<script type="text/plain" id="%s">%s</script>\n' % (name.encode(), content)


def fill(data: dict) -> tuple[bytes, bytes]:
    """The page up to its patterns, and what follows them."""
    template = TEMPLATE.read_text(encoding="utf-8")
    policy = "; ".join(["default-src 'none'", *allowed(template), "base-uri 'none'", "form-action 'none'"])
    before, after = template.split("{{patterns}}\n")
    return before.replace("{{policy}}", policy).replace("{{page}}", to_json(data)).encode(), after.encode()


def allowed(template: str) -> Iterator[str]:
    """What the policy lets run: the one script and the one style in the template, by their hashes."""
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        yield f"{tag}-src 'sha256-{digest}'"


def to_json(data: dict) -> str:
    """JSON in ASCII that can stand in HTML, and in which no text looks like an address or like markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(UNSAFE)
    return re.sub("h(?=ttp)", lambda letter: f"\\u{ord(letter[0]):04x}", text, flags=re.IGNORECASE)

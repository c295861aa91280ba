"""Write one HTML file that shows attention heads and needs nothing else: no server, no library, no network.

The policy in its head lets a browser run the page's own script and style and forbids every request. Tokens and names
enter as JSON and are displayed as text only. The rest is in page.html.

A pattern is stored as its lower triangle, row by row, in multiples of 1/65535: first the low bytes of all weights, then
the high bytes (a tenth to a fifth smaller than in turns), deflated, in base64.
"""

import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from inspection.files import write_whole
from inspection.heads import Inspection
from inspection.metrics import DEFINITIONS
from inspection.terminal import COLUMNS, Head, grid_columns, kind, name_of
from model import ModelError

TEMPLATE = Path(__file__).with_name("page.html")
LIMIT = 32 * 2**20  # bytes of a page
UNSAFE = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&=("})  # JSON itself uses none of these


def write_page(
    path: Path,
    note: str,
    labels: Sequence[str],
    heads: Sequence[Head],
    inspections: Sequence[Inspection],
    limit: int = LIMIT,
) -> None:
    """Write the page.

    note: says what was measured; labels: the T tokens; heads: those with a picture; inspections: in order, not empty.
    Raises ModelError if the page would have more than `limit` bytes.
    """
    data = {
        "title": "Heads of " + " to ".join(dict.fromkeys((inspections[0].name, inspections[-1].name))),
        "note": note,
        "labels": labels,
        "heads": [name_of(head) for head in heads],
        "metrics": [name for name in COLUMNS if name in inspections[0].scores.samples],
        "definitions": DEFINITIONS,
        "columns": grid_columns(heads),
        "checkpoints": [describe(each, heads) for each in inspections],
    }
    before, after = fill(data)
    parts, size = [before, after], len(before) + len(after)
    for number, inspection in enumerate(inspections):
        for name, pattern in patterns(inspection, heads):
            parts.insert(-1, b'<script type="text/plain" id="%d/%s">%s</script>\n' % (number, name, encode(pattern)))
            size += len(parts[-2])
            if size > limit:
                raise ModelError(
                    f"{path} would be larger than {limit / 2**20:.4g} MiB: choose fewer heads (--heads), fewer "
                    "checkpoints, or a shorter text (--text)"
                )
    write_whole(path, b"".join(parts))


def describe(inspection: Inspection, heads: Sequence[Head]) -> dict:
    """Collect what the page says of one checkpoint, except its patterns."""
    mean, error, explained = inspection.scores.mean, inspection.scores.error, None
    if inspection.influence is not None:
        explained = (~inspection.influence.isnan().any(dim=1)).nonzero().flatten().tolist()
    return {
        "name": inspection.name,
        "step": inspection.step,
        "loss": round_number(inspection.loss),
        "note": inspection.verified,
        "scores": {name: numbers(mean[name]) for name in COLUMNS if name in mean},
        "errors": {name: numbers(error[name]) for name in COLUMNS if name in error},
        "kinds": [kind(mean, head) for head in heads],
        "explained": explained,  # the rows whose influence was computed
        "predictions": [(label, round_number(chance)) for label, chance in inspection.predictions],
    }


def numbers(table: Tensor) -> list[list[float | None]]:
    return [[round_number(x) for x in row] for row in table.tolist()]


def round_number(x: float) -> float | None:
    """Six digits of a number; None if it is not finite, which JSON cannot hold."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def patterns(inspection: Inspection, heads: Sequence[Head]) -> Iterator[tuple[bytes, Tensor]]:
    """Yield the name of each triangle on the page, and the triangle as (T, T)."""
    for head in heads:
        yield name_of(head).encode(), inspection.att.pattern(*head)[0]
    if inspection.influence is not None:
        yield b"influence", inspection.influence.nan_to_num(0.0)


def encode(pattern: Tensor) -> bytes:
    """Encode the lower triangle of (T, T)."""
    values = pattern.float().cpu().numpy()[np.tri(len(pattern), dtype=bool)]
    units = np.round(values.clip(0, 1) * 65535).astype("<u2")
    planes = units.view(np.uint8).reshape(-1, 2).T.tobytes()  # low bytes, high bytes
    return base64.b64encode(zlib.compress(planes)).rstrip(b"=")  # a browser needs no padding


def fill(data: dict) -> tuple[bytes, bytes]:
    """Return the page up to its patterns, and its end. The policy allows its one script and style by their hashes."""
    template = TEMPLATE.read_text(encoding="utf-8")
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'"
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    before, after = template.split("{{patterns}}\n")
    return before.replace("{{policy}}", policy).replace("{{page}}", to_json(data)).encode(), after.encode()


def to_json(data: dict) -> str:
    """JSON in ASCII that can stand in HTML: no text in it looks like markup or like an address."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(UNSAFE)
    return re.sub("h(?=ttp)", lambda letter: f"\\u{ord(letter[0]):04x}", text, flags=re.IGNORECASE)

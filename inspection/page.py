"""Write one HTML file that shows attention heads and needs nothing else: no server, no library, no network.

The policy in its head lets a browser run the page's own script and style and forbids every request. Jinja escapes
markup in tokens and names. The rest is in page.html.

A pattern is stored as its lower triangle, row by row, in multiples of 1/65535 of two bytes, deflated, in base64.
"""

import base64
import hashlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from torch import Tensor

from inspection.heads import Inspection
from inspection.metrics import METRICS
from inspection.terminal import Head, grid_columns, kind, name_of, number
from model import ModelError

TEMPLATE = Path(__file__).with_name("page.html")
LIMIT = 32 * 2**20  # bytes of all triangles of a page
MOST_NAMED = 48  # the most tokens that are named beside the large picture


def write_page(
    path: Path, note: str, labels: Sequence[str], heads: Sequence[Head], inspections: Sequence[Inspection]
) -> None:
    """Write the page.

    note: says what was measured; labels: the T tokens; heads: those that are shown; inspections: in order, not empty,
    with influence and predictions. Raises ModelError if the weights would have more than LIMIT bytes.
    """
    triangles, size = {}, 0
    for checkpoint, inspection in enumerate(inspections):
        patterns = {name_of(head): inspection.att.pattern(*head)[0] for head in heads}
        patterns["influence"] = inspection.influence.nan_to_num(0.0)  # 0: this row was not computed
        for name, pattern in patterns.items():
            triangles[f"{checkpoint}/{name}"] = encode(pattern)
            size += len(triangles[f"{checkpoint}/{name}"])
            if size > LIMIT:
                raise ModelError(
                    f"{path} would be larger than {LIMIT / 2**20:.4g} MiB: choose fewer heads (--heads), fewer "
                    "checkpoints, or a shorter text (--text)"
                )
    source = TEMPLATE.read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    html = page.render(
        policy=f"script-src {own_hash(source, 'script')}; style-src {own_hash(source, 'style')}",
        title="Heads of " + " to ".join(dict.fromkeys((inspections[0].name, inspections[-1].name))),
        note=note,
        labels=labels,
        most_named=MOST_NAMED,
        heads=[name_of(head) for head in heads],
        columns=grid_columns(heads),
        checkpoints=[describe(inspection, heads) for inspection in inspections],
        triangles=triangles,
    )
    path.write_text(html, encoding="utf-8")


def encode(pattern: Tensor) -> str:
    """Encode the lower triangle of (T, T)."""
    values = pattern.float().cpu().numpy()[np.tri(len(pattern), dtype=bool)]
    units = np.round(values.clip(0, 1) * 65535).astype("<u2")
    return base64.b64encode(zlib.compress(units.tobytes())).decode()


def own_hash(source: str, tag: str) -> str:
    """Return the source expression by which a policy allows the content of the page's only <script> or <style>."""
    content = re.search(rf"<{tag}>(.*?)</{tag}>", source, re.DOTALL)[1]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def describe(inspection: Inspection, heads: Sequence[Head]) -> dict:
    """Return the texts about one checkpoint: about all of it, each head, and each token's prediction."""
    mean = inspection.scores.mean
    columns = [(name, title, form) for name, (title, form, _) in METRICS.items() if name in mean]
    return {
        "summary": f"{inspection.name} · loss {inspection.loss:.4f} · {inspection.verified}",
        "kinds": [kind(mean, head) for head in heads],
        "scores": [
            " · ".join(f"{title} {number(mean[name][head], form) or '–'}" for name, title, form in columns)
            for head in heads
        ],
        "predictions": [(label, f"{probability:.1%}") for label, probability in inspection.predictions],
    }

"""Write one HTML file that shows attention heads and needs nothing else: no server, no library, no network.

The policy in its head lets a browser run the page's own script and style and forbids every request. Jinja escapes
markup in tokens and names. The rest is in page.html.

A pattern is stored as its lower triangle, row by row, in multiples of 1/65535 of two bytes, deflated, in base64: one to
two bytes a weight.
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

from errors import UserError
from inspection.heads import Inspection
from inspection.kinds import KINDS, Head, by_kind, kind_of, name_of, tag
from inspection.metrics import METRICS
from inspection.terminal import grid_columns, number

TEMPLATE = Path(__file__).with_name("page.html")
MOST_WEIGHTS = 40_000_000  # of all heads, checkpoints, and the influence
MOST_NAMED = 48  # the most tokens that are named beside the large picture


def check_room(T: int, num_heads: int, num_checkpoints: int) -> None:
    """Raise UserError if a page has no room for these heads."""
    most = MOST_WEIGHTS // (T * (T + 1) // 2 * num_checkpoints) - 1  # besides the influence
    if num_heads > most:
        room = f"a page has room for {max(0, most)} heads of {T} tokens in each of {num_checkpoints} checkpoints"
        raise UserError(f"{room}, not {num_heads}: give fewer --heads, a shorter --text or fewer checkpoints")


def write_page(
    path: Path, note: str, labels: Sequence[str], heads: Sequence[Head], inspections: Sequence[Inspection]
) -> None:
    """Write the page.

    note: says what was measured; labels: the T tokens; heads: those to show; inspections: in order, not empty, with
    influence and predictions.
    """
    triangles = {}
    for checkpoint, inspection in enumerate(inspections):
        triangles |= {f"{checkpoint}/{name_of(head)}": encode(inspection.pattern(head)) for head in heads}
        triangles[f"{checkpoint}/influence"] = encode(inspection.influence.nan_to_num(0.0))  # 0: not computed
    source = TEMPLATE.read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    html = page.render(
        policy=f"script-src {own_hash(source, 'script')}; style-src {own_hash(source, 'style')}",
        title="Heads of " + " to ".join(dict.fromkeys((inspections[0].name, inspections[-1].name))),
        note=note,
        labels=labels,
        metrics=[(title, meaning) for title, _, meaning in METRICS.values()],
        most_named=MOST_NAMED,
        heads=[name_of(head) for head in heads],
        columns=grid_columns(heads),
        checkpoints=[describe(inspection, heads) for inspection in inspections],
        triangles=triangles,
    )
    path.write_text(html, encoding="utf-8")


def encode(pattern: Tensor) -> str:
    """Encode the lower triangle of (T, T)."""
    values = pattern.float().numpy()[np.tri(len(pattern), dtype=bool)]
    units = np.round(values.clip(0, 1) * 65535).astype("<u2")
    return base64.b64encode(zlib.compress(units.tobytes(), level=1)).decode()


def own_hash(source: str, tag: str) -> str:
    """Return the source expression by which a policy allows the content of the page's only <script> or <style>."""
    content = re.search(rf"<{tag}>(.*?)</{tag}>", source, re.DOTALL)[1]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def describe(inspection: Inspection, heads: Sequence[Head]) -> dict:
    """Return the texts about one checkpoint: about all of it, each head, and each token's prediction."""
    mean = inspection.scores.mean
    columns = [(name, title, form) for name, (title, form, _) in METRICS.items() if name in mean]

    def words(head: Head) -> str:
        kind, _ = kind_of(mean, head)
        return "" if kind == "other" else f"looks at {KINDS[kind]} · "

    def score(name: str, title: str, form: str, head: Head) -> str:
        named = f"{title} {inspection.labels[head[0]][head[1]]}" if name == "token" else title
        return f"{named} {number(mean[name][head], form) or '–'}"

    best = next(iter(by_kind(mean, heads).values()))[0][0]
    largest = inspection.pattern(best).amax(-1).masked_fill(inspection.influence[:, -1].isnan(), 0.0)
    later = len(largest) // 2  # the first queries have few keys to choose among
    return {
        "summary": f"{inspection.name} · loss {inspection.loss:.4f} · {inspection.verified}",
        "tags": [tag(*kind_of(mean, head)) for head in heads],
        "best": heads.index(best),
        "row": later + largest[later:].argmax().item(),  # a query that shows much
        "scores": [words(head) + " · ".join(score(*column, head) for column in columns) for head in heads],
        "predictions": [(label, f"{probability:.1%}") for label, probability in inspection.predictions],
    }

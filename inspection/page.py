"""Make one HTML page that shows attention heads and needs nothing else: no server, no library, no network.

The policy in its head lets a browser run the page's own script and style and forbids every request. Jinja escapes
markup in tokens and names. The template is inspection/page.html.

A pattern is stored as its lower triangle, row by row. Each weight is a multiple of 1/65535 in two bytes. The bytes are
deflated and written in base64, which takes one to two bytes a weight.
"""

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from torch import Tensor

from cli.html import own_hash
from errors import UserError
from inspection.inputs import Inputs
from inspection.inspection import Inspection
from inspection.kinds import KINDS, Head, by_kind, kind_of, name_of, tag
from inspection.metrics import METRICS, Metrics
from inspection.terminal import grid_columns, number

TEMPLATE = Path(__file__).with_name("page.html")
MOST_WEIGHTS = 40_000_000  # of all heads, checkpoints, and the influence


def check_room(inputs: Inputs, num_checkpoints: int) -> None:
    """Raise UserError if a file has no room for the heads to show in each of the checkpoints."""
    T = len(inputs.labels)
    weights = T * (T + 1) // 2
    most = MOST_WEIGHTS // (weights * num_checkpoints) - 1  # besides the influence
    if len(inputs.heads) > most:
        room = f"a file has room for {max(0, most)} heads of {T} tokens in each of {num_checkpoints} checkpoints"
        raise UserError(f"{room}, not {len(inputs.heads)}: give fewer --heads, a shorter --text or fewer checkpoints")


def render(inspections: Sequence[Inspection]) -> str:
    """Return the page of one or more checkpoints, in order, of which the last gives the text.

    Raises UserError if there is no room.
    """
    last = inspections[-1]
    heads = last.inputs.heads
    check_room(last.inputs, len(inspections))
    triangles = {}
    for checkpoint, inspection in enumerate(inspections):
        for head in heads:
            triangles[f"{checkpoint}/{name_of(head)}"] = encode(inspection.pattern(*head))
        triangles[f"{checkpoint}/influence"] = encode(inspection.influence.nan_to_num(0.0))  # 0: not computed
    source = TEMPLATE.read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    names = dict.fromkeys((inspections[0].name, last.name))  # one if they are the same
    return page.render(
        policy=f"script-src {own_hash(source, 'script')}; style-src {own_hash(source, 'style')}",
        title=f"Heads of {' to '.join(names)}",
        inputs=last.inputs,
        metrics=METRICS.values(),
        heads=[name_of(head) for head in heads],
        columns=grid_columns(heads),
        checkpoints=[describe(inspection) for inspection in inspections],
        triangles=triangles,
    )


def encode(pattern: Tensor) -> str:
    """Return the lower triangle of (T, T) as the page stores it."""
    weights = pattern.float().numpy()[np.tril_indices(len(pattern))]
    units = np.round(weights.clip(0, 1) * 65535).astype("<u2")
    return base64.b64encode(zlib.compress(units.tobytes(), level=1)).decode()


def describe(inspection: Inspection) -> dict:
    """Return the texts about one checkpoint, its heads and its predictions, and the head and the row to open at."""
    heads = inspection.inputs.heads
    mean = inspection.scores.mean
    first_kind = next(iter(by_kind(mean, heads).values()))
    best, _ = first_kind[0]
    is_computed = ~inspection.influence[:, -1].isnan()
    largest = inspection.pattern(*best).amax(-1) * is_computed
    later = len(largest) // 2  # the first queries have few keys to choose among
    return {
        "summary": f"{inspection.name} · loss {inspection.loss:.4f} · {inspection.verified}",
        "tags": [tag(*kind_of(mean, head)) for head in heads],
        "best": heads.index(best),
        "row": later + largest[later:].argmax().item(),  # a query that shows much
        "scores": [describe_head(inspection, mean, head) for head in heads],
        "predictions": [(label, f"{probability:.1%}") for label, probability in inspection.predictions],
    }


def describe_head(inspection: Inspection, mean: Metrics, head: Head) -> str:
    """Format the kind and the scores of one head as one line.

    mean: metric -> (L, H), that of the inspection's scores.
    """
    kind, _ = kind_of(mean, head)
    words = [] if kind == "other" else [f"looks at {KINDS[kind]}"]
    for name, (title, form, _) in METRICS.items():
        if name in mean:
            token = f" {inspection.inputs.label(inspection.scores.tokens[head].item())}" if name == "token" else ""
            words.append(f"{title}{token} {number(mean[name][head], form) or '–'}")
    return " · ".join(words)

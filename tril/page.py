"""Make one HTML page that shows attention heads and needs nothing else: no server, no library, no network.

The policy in its head lets a browser run the page's own script and style and forbids every request. Jinja escapes
markup in tokens and names. The template is inspection/page.html.

A pattern is stored as its lower triangle, row by row. Each weight is a multiple of 1/65535 in two bytes. Lengths and
what heads say are numbers of four bytes, and places are JSON. All are deflated and written in base64, which takes one
to two bytes a weight.
"""

import base64
import json
import math
import secrets
import zlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
import torch
from torch import Tensor

from errors import UserError
from inspection.inputs import Inputs
from tril.inspection import Inspection
from tril.kinds import KINDS, Head, kind_of, name_of
from tril.metrics import METRICS
from tril.terminal import number

LOADER = jinja2.FileSystemLoader(Path(__file__).parent)
ENVIRONMENT = jinja2.Environment(loader=LOADER, autoescape=True, trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.policies["json.dumps_kwargs"] = {}  # names keep their order
TEMPLATE = ENVIRONMENT.get_template("page.html")  # with page.css and page.js in it
MOST_WEIGHTS = 40_000_000  # of all heads, checkpoints, and the influence


def check_room(inputs: Inputs, num_checkpoints: int) -> None:
    """Raise UserError if a file has no room for the heads to show in each of the checkpoints."""
    T = len(inputs.labels)
    weights = T * (T + 1) // 2
    most = MOST_WEIGHTS // (weights * num_checkpoints) - 1  # besides the influence
    if len(inputs.heads) > most:
        raise UserError(
            f"a file has room for {max(0, most)} heads of {T} tokens in each of {num_checkpoints} checkpoints, "
            f"not {len(inputs.heads)}: give fewer --heads, a shorter --text or fewer checkpoints"
        )


def render(inspections: Sequence[Inspection], live: str | None = None) -> str:
    """Return the page of one or more checkpoints, in order, of which the last gives the text.

    live: of a page that is served, the text to begin with. It has a form to ask for another.

    Raises UserError if there is no room.
    """
    last = inspections[-1]
    check_room(last, len(inspections))
    checkpoints = [describe(inspection) for inspection in inspections]
    stored = {}
    for place, inspection in enumerate(inspections):
        for head in last.heads:
            stored[f"{place}/{name_of(head)}"] = encode(inspection.pattern(*head))
        stored[f"{place}/influence"] = encode(inspection.influence.nan_to_num())  # 0: not computed
        if inspection.lengths:
            stored[f"{place}/values"] = pack(torch.stack([inspection.lengths[head] for head in last.heads]), "<f4")
        if inspection.said:
            said = [inspection.said[head] for head in last.heads]
            tokens, logits = map(torch.stack, zip(*said, strict=True))
            checkpoints[place]["said"] = {token: inspection.label(token) for token in tokens.unique().tolist()}
            stored[f"{place}/says"] = pack(tokens, "<i4")
            stored[f"{place}/logits"] = pack(logits, "<f4")
    if last.strongest:
        found = last.strongest.values()
        texts = {place.start: place.labels for places in found for place in places.strongest}
        shown = [([place[:4] for place in strongest], *rest) for strongest, *rest in found]
        stored[f"{len(checkpoints) - 1}/places"] = deflate(json.dumps([texts, shown]).encode())
    return TEMPLATE.render(
        nonce=secrets.token_urlsafe(),
        inputs=last,
        kinds=KINDS,
        metrics=METRICS,
        heads=[name_of(head) for head in last.heads],
        checkpoints=checkpoints,
        stored=stored,
        live=live,
    )


def deflate(content: bytes) -> str:
    """Return bytes as the page stores them."""
    return base64.b64encode(zlib.compress(content, level=1)).decode()


def pack(numbers: Tensor, dtype: str) -> str:
    """Return numbers as the page stores them."""
    return deflate(numbers.numpy().astype(dtype).tobytes())


def encode(pattern: Tensor) -> str:
    """Return the lower triangle of (T, T) as the page stores it."""
    weights = pattern[*torch.tril_indices(*pattern.shape)]
    return pack((weights.clip(0, 1) * 65535).round(), "<u2")


def describe(inspection: Inspection) -> dict:
    """Return the texts about one checkpoint, its heads and its predictions."""
    predictions = inspection.scores.predictions[: len(inspection.labels)]  # the first text may be shown in part
    return {
        "name": inspection.name,
        "summary": f"{inspection.name} · loss {inspection.loss:.4f} · {inspection.verified}",
        "heads": [describe_head(inspection, head) for head in inspection.heads],
        # JSON has no infinity, and no nan. The last token is followed by none.
        "predictions": [
            (inspection.label(token), f"{chance:.1%}", loss if loss is not None and math.isfinite(loss) else None)
            for token, chance, loss in predictions
        ],
    }


def describe_head(inspection: Inspection, head: Head) -> dict:
    """Return the texts about one head: its kind, its feeders, metric -> its score and that of an even head, if any."""
    scores = inspection.scores
    return {
        "kind": kind_of(scores, head),
        "fed": str(inspection.fed.get(head, "")),
        "scores": {name: [number(of, name, head) for of in (scores.mean, scores.chance)] for name in METRICS},
    }

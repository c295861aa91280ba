"""Make one HTML page that shows attention heads and needs nothing else: no server, no library, no network.

The policy in its head lets a browser run the page's own script and style and forbids every request. Jinja escapes
markup in tokens and names. The template is tril/page.html.

A pattern is stored as its lower triangle, row by row. Each weight is a multiple of 1/65535 in two bytes. Lengths and
logits are numbers of four bytes, and places are JSON. All are deflated and written in base64, which takes one
to two bytes a weight.
"""

import base64
import html
import json
import secrets
import zlib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tril.errors import UserError
from tril.kinds import KINDS
from tril.metrics import METRICS
from tril.places import Places

MOST_WEIGHTS = 40_000_000  # of all heads, checkpoints, and the influence


class PageData(NamedTuple):
    """What a page shows of one model, as texts and as packed numbers."""

    note: str  # says what text was read, and in a second line what probe, if there was one
    labels: Sequence[str]  # of the tokens
    num_generated: int  # of the tokens, so many of the last are the model's own
    heads: Sequence[str]  # their names
    texts: dict  # of the model, its heads and its predictions, for JSON
    stored: dict[str, str]  # name -> packed numbers


def check_room(num_heads: int, T: int, num_checkpoints: int = 1) -> None:
    """Raise UserError if a file has no room for so many heads of T tokens in each of the checkpoints."""
    weights = T * (T + 1) // 2
    most = MOST_WEIGHTS // (weights * num_checkpoints) - 1  # besides the influence
    if num_heads > most:
        raise UserError(
            f"a file has room for {max(0, most)} heads of {T} tokens in each of {num_checkpoints} checkpoints, "
            f"not {num_heads}: give fewer --heads, a shorter --text or fewer checkpoints"
        )


@cache
def environment() -> object:
    """Return what reads the template page.html, with page.css and page.js in it."""
    import jinja2  # comes with torch

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    found = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.policies["json.dumps_kwargs"] = {}  # names keep their order
    return found


def render(checkpoints: Sequence[PageData], live: str | None = None) -> str:
    """Return the page of one or more checkpoints, in order. The first names the heads, the last gives the text.

    live: of a page that is served, the text to begin with. It has a form to ask for another.

    Raises UserError if there is no room.
    """
    last = checkpoints[-1]
    check_room(len(last.heads), len(last.labels), len(checkpoints))
    template = environment().get_template("page.html")
    return template.render(
        inputs=last,
        heads=checkpoints[0].heads,
        checkpoints=[each.texts for each in checkpoints],
        stored={f"{place}/{name}": each.stored[name] for place, each in enumerate(checkpoints) for name in each.stored},
        kinds=KINDS,
        metrics=METRICS,
        live=live,
        nonce=secrets.token_urlsafe(),
    )


def in_frame(checkpoints: Sequence[PageData]) -> str:
    """Return the page in a frame, for a notebook."""
    content = html.escape(render(checkpoints))
    return f'<iframe srcdoc="{content}" style="width: 100%; height: 50rem; border: 0"></iframe>'


def pack_places(found: Collection[Places]) -> str:
    """Return the places of each head, and the texts that they come from, as the page stores them."""
    texts = {place.start: place.labels for _, groups in found for _, some in groups for place in some}
    shown = [(note, [(title, [place[:5] for place in some]) for title, some in groups]) for note, groups in found]
    return deflate(json.dumps([texts, shown]).encode())


def deflate(content: bytes) -> str:
    """Return bytes as the page stores them."""
    return base64.b64encode(zlib.compress(content, level=1)).decode()


def pack(numbers: Tensor, dtype: str) -> str:
    """Return numbers as the page stores them."""
    return deflate(numbers.numpy().astype(dtype).tobytes())


def pack_pattern(pattern: Tensor) -> str:
    """Return the lower triangle of (T, T) as the page stores it."""
    weights = pattern[*torch.tril_indices(*pattern.shape)]
    return pack((weights.clip(0, 1) * 65535).round(), "<u2")

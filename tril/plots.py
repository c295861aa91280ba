"""Draw heads as PNG or SVG with matplotlib.

All heads share one colour scale from 0 to 1, in which equal steps are equal square roots of weights. Cells above the
diagonal, which a query cannot see, stay blank.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import torch
import torch.nn.functional as F
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

DPI = 100  # pixels an inch
LABEL_HEIGHT = 0.14  # inches that the name of a token needs


def pool(pattern: Tensor, step: int) -> Tensor:
    """Reduce (T, T) to the largest weight of each square of `step`, because a mean would hide sharp heads.

    Cells above the diagonal become nan, which is not drawn.
    """
    pooled = F.max_pool2d(pattern[None], step, ceil_mode=True)[0]
    return pooled + torch.full_like(pooled, math.nan).triu(1)


def draw_heads(
    file: BinaryIO, form: str, title: str, labels: Sequence[str], tiles: Mapping[str, Tensor], columns: int
) -> None:
    """Draw heads as tiles of one image, in rows of so many. form: png or svg; tiles: name -> weights (T, T).

    One image for all, because hundreds of axes would take a minute. Tokens are named along the outer edges, as many as
    fit. The name of a head stands in its tile above the diagonal.
    """
    T = len(labels)
    rows = math.ceil(len(tiles) / columns)
    side = min(8.0, max(1.2, 16 / columns))  # inches of a tile
    step = math.ceil(T / (0.8 * DPI * side))  # tokens that share a pixel
    size = math.ceil(T / step)  # pixels of a tile
    pitch = size + max(1, size // 16)  # from one tile to the next
    mosaic = torch.full((rows, pitch, columns, pitch), math.nan)
    figure = Figure(figsize=(columns * side + 1.5, rows * side + 1.5), dpi=DPI, layout="constrained")
    ax = figure.subplots()
    for number, (name, weights) in enumerate(tiles.items()):
        row, column = divmod(number, columns)
        mosaic[row, :size, column, :size] = pool(weights, step)
        ax.text(column * pitch + size, row * pitch, name, ha="right", va="top", fontsize=8)
    pixels = mosaic.flatten(2).flatten(0, 1)
    image = ax.imshow(pixels, norm=PowerNorm(0.5, vmin=0, vmax=1), cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=ax, shrink=0.6, label="weight")
    named = range(0, T, math.ceil(T * LABEL_HEIGHT / side))
    names = [f"{labels[i]} {i}" for i in named]
    for axis, count in ((ax.xaxis, columns), (ax.yaxis, rows)):
        places = [start * pitch + (i + 0.5) / step - 0.5 for start in range(count) for i in named]
        axis.set_ticks(places, names * count, fontsize=7, parse_math=False)
    ax.tick_params(axis="x", rotation=90)
    ax.spines[:].set_visible(False)
    note = f"\na point is the largest of {step} x {step} weights" if step > 1 else ""
    figure.suptitle(
        f"{title}\na row is a query, the token that looks; a column is a key, a token it can look at{note}",
        fontsize=9,
        parse_math=False,  # a name may hold any character
    )
    with warnings.catch_warnings(action="ignore"):  # the font lacks some characters, and draws boxes
        figure.savefig(file, format=form)

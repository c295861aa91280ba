"""Draw heads as PNG or SVG with matplotlib.

All heads share one colour scale from 0 to 1, in which equal steps are equal square roots of weights. Cells above the
diagonal, which a query cannot see, stay blank.
"""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from inspection.heads import Inspection
from inspection.terminal import COLUMNS, Head, grid_columns, kind, name_of
from model import ModelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100  # pixels an inch
LABEL_HEIGHT = 0.14  # inches that the name of a token needs
UNBOUNDED = ("distance", "max_logit", "ablation")  # metrics that are not shares from 0 to 1


def check_installed() -> None:
    """Raise ModelError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModelError("pictures are drawn by matplotlib: pip install -c constraints.txt -e '.[plot]'")


def new_figure(width: float, height: float) -> "Figure":
    """Return a figure of this size in inches, without opening a window."""
    from matplotlib.figure import Figure  # imported here because it is slow, and optional

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def pool(pattern: Tensor, step: int) -> Tensor:
    """Reduce (T, T) to the largest weight of each square of `step`, because a mean would hide sharp heads.

    Cells above the diagonal become nan, which is not drawn.
    """
    pooled = F.max_pool2d(pattern[None], step, ceil_mode=True)[0]
    return pooled.masked_fill(torch.ones_like(pooled, dtype=torch.bool).triu(1), math.nan)


def drawable(text: str) -> str:
    """Replace characters that the font does not have by their code points, instead of empty boxes."""
    from matplotlib import font_manager

    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(character if ord(character) in known else f"⟨u+{ord(character):04x}⟩" for character in text)


def draw_heads(path: Path, inspection: Inspection, heads: Sequence[Head], labels: Sequence[str]) -> None:
    """Draw heads as tiles of one image, a row for each layer if all layers have the same heads.

    One image for all, because hundreds of axes would take a minute. Tokens are named along the outer edges, as many as
    fit. The name of a head stands in its tile above the diagonal.
    """
    from matplotlib.colors import PowerNorm

    T, columns = len(labels), grid_columns(heads)
    rows = math.ceil(len(heads) / columns)
    side = min(8.0, max(1.2, 16 / columns))  # inches of a tile
    step = math.ceil(T / (0.8 * DPI * side))  # tokens that share a pixel
    tiles = [pool(inspection.att.pattern(*head)[0].cpu(), step) for head in heads]
    gap = max(1, len(tiles[0]) // 16)
    tile = len(tiles[0]) + gap
    mosaic = torch.full((rows * tile - gap, columns * tile - gap), math.nan)
    figure = new_figure(columns * side + 1.5, rows * side + 1.5)
    ax = figure.subplots()
    for number, (head, weights) in enumerate(zip(heads, tiles, strict=True)):
        top, left = number // columns * tile, number % columns * tile
        mosaic[top : top + len(weights), left : left + len(weights)] = weights
        name = f"{name_of(head)} {kind(inspection.scores.mean, head)}"
        ax.text(left + len(weights), top, name, ha="right", va="top", fontsize=7 if side < 2 else 10)
    image = ax.imshow(mosaic.numpy(), norm=PowerNorm(0.5, vmin=0, vmax=1), cmap="viridis")
    figure.colorbar(image, ax=ax, shrink=0.6, fraction=0.05, pad=0.02, label="weight")
    every = math.ceil(T * LABEL_HEIGHT / side)
    for axis, count in ((ax.xaxis, columns), (ax.yaxis, rows)):
        places = [start * tile + i / step for start in range(count) for i in range(0, T, every)]
        names = [f"{drawable(labels[i])} {i}" for i in range(0, T, every)] * count
        axis.set_ticks(places, names, fontsize=7, parse_math=False)
    ax.tick_params(axis="x", rotation=90)
    ax.spines[:].set_visible(False)
    note = f"\na point is the largest of {step} x {step} weights" if step > 1 else ""
    save(figure, path, f"{inspection.name}\na row is a query, a column is a key{note}")


def draw_timeline(path: Path, inspections: Sequence[Inspection], heads: Sequence[Head]) -> None:
    """Draw the loss on the text and every metric of these heads against the training step.

    The head that ends highest has its name beside it.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    steps = [each.step for each in inspections]
    means = [each.scores.mean for each in inspections]
    metrics = [name for name in COLUMNS if name in means[0]]
    rows = math.ceil((1 + len(metrics)) / 2)
    figure = new_figure(11, 2.9 * rows)
    axes = figure.subplots(rows, 2).flatten()
    for ax in axes[1 + len(metrics) :]:
        ax.set_visible(False)
    layers = sorted({layer for layer, _ in heads})
    colours = {layer: colormaps["turbo"]((number + 0.5) / len(layers)) for number, layer in enumerate(layers)}
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    figure.legend(lines, [f"layer {layer}" for layer in layers], loc="outside lower center", ncols=12, fontsize=8)
    axes[0].plot(steps, [each.loss for each in inspections], color="grey")
    axes[0].set_title("loss on the text", fontsize=10)
    for ax, name in zip(axes[1:], metrics, strict=False):
        for head in heads:
            ax.plot(steps, [mean[name][head].item() for mean in means], lw=1, color=colours[head[0]])
        if name not in UNBOUNDED:
            ax.set_ylim(-0.02, 1.02)  # the same scale for all, so that small values look small
        highest = max(heads, key=lambda head: means[-1][name][head].nan_to_num(-math.inf))
        end = (steps[-1], means[-1][name][highest].item())
        ax.annotate(name_of(highest), end, (3, 0), fontsize=8, textcoords="offset points")
        ax.margins(x=0.08)  # room for the name
        ax.set_title(name, fontsize=10)
    save(figure, path, f"{inspections[0].name} to {inspections[-1].name}, by training step\na line is a head")


def save(figure: "Figure", path: Path, title: str) -> None:
    """Write the file with a title; the name of a run may hold any character."""
    figure.suptitle("\n".join(map(drawable, title.split("\n"))), fontsize=9, parse_math=False)
    figure.savefig(path)

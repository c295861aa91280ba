"""Draw heads as PNG or SVG with matplotlib.

All heads share one colour scale from 0 to 1, in which equal steps are equal square roots of weights. Cells above the
diagonal, which a query cannot see, stay blank.
"""

import importlib.util
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from inspection.files import write_whole
from inspection.heads import Inspection
from inspection.terminal import COLUMNS, Head, grid_columns, kind, name_of
from model import ModelError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ANNOTATED = 32  # the most tokens for which each weight is also written as a number
UNBOUNDED = ("distance", "max_logit", "ablation")  # metrics that are not shares from 0 to 1


def check_installed() -> None:
    """Raise ModelError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModelError("pictures are drawn by matplotlib: pip install -c constraints.txt -e '.[plot]'")


def new_figure(width: float, height: float, layout: str | None = "constrained") -> "Figure":
    """Return a figure of this size in inches, without opening a window."""
    from matplotlib.figure import Figure  # imported here because it is slow, and optional

    return Figure(figsize=(width, height), dpi=100, layout=layout)


def pool(pattern: Tensor, size: int) -> Tensor:
    """(T, T) -> at most (size, size): the largest weight of each square, because a mean would hide sharp heads."""
    side = math.ceil(len(pattern) / size)
    return F.max_pool2d(pattern[None], side, ceil_mode=True)[0]


def blank(pattern: Tensor) -> Tensor:
    """Set cells above the diagonal to nan, which is not drawn."""
    return pattern.masked_fill(torch.ones_like(pattern, dtype=torch.bool).triu(1), math.nan)


def drawable(text: str) -> str:
    """Replace characters that the font does not have by their code points, instead of empty boxes."""
    from matplotlib import font_manager

    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(character if ord(character) in known else f"⟨u+{ord(character):04x}⟩" for character in text)


def draw_heads(path: Path, inspection: Inspection, heads: Sequence[Head], labels: Sequence[str]) -> None:
    """Draw heads to a file: few heads large, with tokens (and numbers, if these are few), many heads small.

    Small pictures of whole layers stand in one row for each layer.
    """
    from matplotlib.colors import PowerNorm

    T = len(labels)
    large = len(heads) <= (32 if T <= ANNOTATED else 4)
    columns = math.ceil(len(heads) ** 0.5) if large else grid_columns(heads)
    rows = math.ceil(len(heads) / columns)
    side = min(15.0, max(4.0, 0.36 * T + 1.5)) if large else 1.9 if columns <= 6 else 1.15  # inches
    size = int(80 * side)  # pixels, at 100 an inch and with some room
    pooled = math.ceil(T / size)
    width, height = max(5.0, columns * side + 0.8), rows * side + 0.9
    figure = new_figure(width, height, "constrained" if large else None)  # hundreds of axes would take a minute
    if not large:
        figure.subplots_adjust(0.02, 0.02, 0.98, 0.98 - 0.7 / height, 0.05, 0.15)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[len(heads) :]:
        ax.set_visible(False)
    for ax, head in zip(axes, heads, strict=False):
        weights = blank(pool(inspection.att.pattern(*head)[0].cpu(), size))
        end = len(weights) * pooled - 0.5  # the last cell may reach beyond the text
        image = ax.imshow(
            weights.numpy(), norm=PowerNorm(0.5, vmin=0, vmax=1), cmap="viridis", extent=(-0.5, end, end, -0.5)
        )
        title = f"{name_of(head)} {kind(inspection.scores.mean, head)}"
        if large:
            ax.set_title(title, fontsize=10)
            annotate(ax, weights, labels)
        else:
            ax.set_title(title, fontsize=6.5, pad=2)
            ax.set_axis_off()
    figure.colorbar(image, ax=list(axes), shrink=0.6, fraction=0.05, pad=0.02, label="weight")
    note = f"\na point is the largest of {pooled} x {pooled} weights" if pooled > 1 else ""
    save_titled(figure, path, f"{inspection.name}\na row is a query, a column is a key{note}")


def annotate(ax: "Axes", weights: Tensor, labels: Sequence[str]) -> None:
    """Write the tokens on both axes, and the weights into the cells if they are few."""
    T = len(labels)
    ticks = range(0, T, math.ceil(T / 64))
    names = [f"{drawable(labels[i])} {i}" for i in ticks]
    ax.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5), xlabel="key", ylabel="query")
    ax.set_xticks(ticks, names, rotation=90, fontsize=8, parse_math=False)
    ax.set_yticks(ticks, names, fontsize=8, parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    for i in range(T if T <= ANNOTATED else 0):
        for j in range(i + 1):
            value = weights[i, j].item()
            colour = "black" if value > 0.4 else "white"  # on a light or a dark cell
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)


def draw_timeline(path: Path, inspections: Sequence[Inspection], heads: Sequence[Head]) -> None:
    """Draw every metric of these heads against the training step, with the loss in grey.

    The head that ends highest has its name beside it.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    steps = [number if each.step is None else each.step for number, each in enumerate(inspections)]
    means = [each.scores.mean for each in inspections]
    metrics = [name for name in COLUMNS if name in means[0]]
    rows = math.ceil(len(metrics) / 2)
    figure = new_figure(11, 2.9 * rows)
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for ax in axes[len(metrics) :]:
        ax.set_visible(False)
    layers = sorted({layer for layer, _ in heads})
    colours = {layer: colormaps["turbo"]((number + 0.5) / len(layers)) for number, layer in enumerate(layers)}
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    figure.legend(lines, [f"layer {layer}" for layer in layers], loc="outside lower center", ncols=12, fontsize=8)
    for ax, name in zip(axes, metrics, strict=False):
        behind = ax.twinx()
        behind.plot(steps, [each.loss for each in inspections], color="0.75", lw=3)
        behind.set_ylabel("loss", color="0.5", fontsize=8)
        for head in heads:
            ax.plot(steps, [mean[name][head].item() for mean in means], lw=1, color=colours[head[0]])
        if name not in UNBOUNDED:
            ax.set_ylim(-0.02, 1.02)  # the same scale for all, so that small values look small
        highest = max(heads, key=lambda head: means[-1][name][head].nan_to_num(-math.inf))
        end = (steps[-1], means[-1][name][highest].item())
        ax.annotate(name_of(highest), end, (3, 0), fontsize=8, textcoords="offset points")
        ax.margins(x=0.08)  # room for the name
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("step", fontsize=8)
        ax.set_zorder(behind.get_zorder() + 1)
        ax.patch.set_visible(False)
    title = f"{inspections[0].name} to {inspections[-1].name}"
    save_titled(figure, path, f"{title}\na line is a head, grey is the loss on the text")


def save_titled(figure: "Figure", path: Path, title: str) -> None:
    """Write the file with a title; the name of a run may hold any character."""
    figure.suptitle("\n".join(map(drawable, title.split("\n"))), fontsize=9, parse_math=False)
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write the file, completely or not at all. The same picture gives the same bytes."""
    import matplotlib

    content, kind = io.BytesIO(), path.suffix[1:].lower()
    with matplotlib.rc_context({"svg.hashsalt": "tril"}):
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else {})
    write_whole(path, content.getvalue())

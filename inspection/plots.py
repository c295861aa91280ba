"""Pictures of heads for papers and pages: PNG or SVG, by matplotlib.

All heads of a picture have one colour scale, from 0 to 1, and what a query may not see is left blank.
"""

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from inspection.files import write_whole
from inspection.terminal import COLUMNS, Head, kind, name_of
from model import ModelError

if TYPE_CHECKING:
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

ANNOTATED = 32  # the most tokens whose weights are written into the cells
PIXELS = 1500  # of a picture: more weights than that are pooled
BEYOND_ONE = ("distance", "max_logit", "ablation")  # metrics that are not shares, from 0 to 1
Pattern = Callable[[Head], Tensor]
Scores = dict[str, Tensor]


def check_installed() -> None:
    """Raises ModelError where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModelError("pictures are drawn by matplotlib: pip install -c constraints.txt -e '.[plot]'")


def new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches, without a window."""
    from matplotlib.figure import Figure  # slow to import, and not installed everywhere

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def shades(T: int) -> "Normalize":
    """The scale of colours, from 0 to 1: even, or for many tokens, whose weights are small, that of their roots."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(1 if T <= ANNOTATED else 0.5, vmin=0, vmax=1)


def pool(pattern: Tensor, size: int) -> Tensor:
    """(T, T) with the largest weight of each square, so that no sharp head disappears: at most (size, size)."""
    side = math.ceil(len(pattern) / size)
    return F.max_pool2d(pattern[None], side, ceil_mode=True)[0]


def blank(pattern: Tensor) -> Tensor:
    """nan, which is not drawn, above the diagonal."""
    return pattern.masked_fill(torch.ones_like(pattern, dtype=torch.bool).triu(1), math.nan)


def draw_heads(
    path: Path, title: str, labels: Sequence[str], heads: Sequence[Head], pattern: Pattern, scores: Scores
) -> None:
    """Draw these heads to a file: large and with numbers if they and the text are few, else as a grid of small ones.

    pattern: head -> (T, T); scores: metric -> (L, H), for the titles.
    """
    T = len(labels)
    if len(heads) <= (32 if T <= ANNOTATED else 4):
        figure, side = large(labels, heads, pattern, scores)
    else:
        figure, side = grid(heads, pattern, scores, T)
    pooled = f"\na point is the largest of {side} x {side} weights" if side > 1 else ""
    headline(figure, f"{title}\na line is a query, a column is a key{pooled}")
    save(figure, path)


def drawable(text: str) -> str:
    """The text with the code points of what the font does not have, instead of empty boxes."""
    from matplotlib import font_manager

    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(character if ord(character) in known else f"⟨u+{ord(character):04x}⟩" for character in text)


def headline(figure: "Figure", text: str) -> None:
    """What stands above a figure; names of runs may hold anything."""
    figure.suptitle("\n".join(map(drawable, text.split("\n"))), fontsize=9, parse_math=False)


def title_of(head: Head, scores: Scores) -> str:
    """5.1, and what it is known by."""
    return f"{name_of(head)} {kind(scores, head)}".strip()


def large(labels: Sequence[str], heads: Sequence[Head], pattern: Pattern, scores: Scores) -> tuple["Figure", int]:
    """A heatmap for each head, with tokens on both axes, and the weights in the cells if there are few."""
    T, columns = len(labels), min(len(heads), 4 if len(heads) <= 16 else 6)
    rows = math.ceil(len(heads) / columns)
    side = min(15.0, max(4.0, 0.36 * T + 1.5))
    figure = new_figure(columns * side + 0.8, rows * side + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    step = math.ceil(T / 64)  # of the labels
    for ax, head in zip(axes, heads, strict=False):
        weights, pooled = blank(pool(pattern(head), PIXELS)), math.ceil(T / PIXELS)
        end = len(weights) * pooled - 0.5  # the last point may reach beyond the text
        image = ax.imshow(weights.numpy(), norm=shades(T), cmap="viridis", extent=(-0.5, end, end, -0.5))
        ax.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
        ax.set_title(title_of(head, scores), fontsize=10)
        ticks = range(0, T, step)
        names = [f"{drawable(labels[i])} {i}" for i in ticks]
        ax.set_xticks(ticks, names, rotation=90, fontsize=8, parse_math=False)
        ax.set_yticks(ticks, names, fontsize=8, parse_math=False)
        ax.set_xlabel("key: the token looked at" if ax in axes[-columns:] else "")
        ax.set_ylabel("query: the token that looks" if ax in axes[::columns] else "")
        ax.spines[["top", "right"]].set_visible(False)
        for i in range(T if T <= ANNOTATED else 0):
            for j in range(i + 1):
                value = weights[i, j].item()
                colour = "black" if value > 0.6 else "white"  # on yellow, on blue
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)
    for ax in axes[len(heads) :]:
        ax.set_visible(False)
    figure.colorbar(image, ax=list(axes[: len(heads)]), shrink=0.6, label="weight")
    return figure, math.ceil(T / PIXELS)


def grid(heads: Sequence[Head], pattern: Pattern, scores: Scores, T: int) -> tuple["Figure", int]:
    """Small pictures of all these heads, a line for each layer."""
    canvas, places, side = mosaic(heads, pattern, T)
    num_columns = len({left for _, left in places.values()})
    width = num_columns * (1.15 if num_columns > 6 else 1.9)  # inches
    figure = new_figure(max(width + 1.1, 5.0), width * canvas.size(0) / canvas.size(1) + 0.5)
    ax = figure.subplots()
    for head, (top, left) in places.items():
        ax.text(left, top - 1, title_of(head, scores), fontsize=6.5, va="bottom")
    image = ax.imshow(canvas.numpy(), norm=shades(T), cmap="viridis", interpolation="nearest")
    ax.set_axis_off()
    figure.colorbar(image, ax=ax, shrink=min(1.0, 3 / figure.get_figheight()), label="weight")
    return figure, side


def mosaic(heads: Sequence[Head], pattern: Pattern, T: int) -> tuple[Tensor, dict[Head, tuple[int, int]], int]:
    """All these heads in one array, nan between and above them; where each begins; and how many weights a side pool."""
    rows, columns = sorted({layer for layer, _ in heads}), sorted({head for _, head in heads})
    cells = {head: (rows.index(head[0]), columns.index(head[1])) for head in heads}
    if len(heads) < len(rows) * len(columns):  # some were chosen: without holes
        cells = {head: divmod(number, math.ceil(len(heads) ** 0.5)) for number, head in enumerate(heads)}
    num_rows, num_columns = (max(cell[axis] for cell in cells.values()) + 1 for axis in (0, 1))
    size = max(24, PIXELS // num_columns)  # of a head's picture, at most
    side = math.ceil(T / size)
    shown = math.ceil(T / side)
    height, width = shown + max(5, shown // 5), shown + max(2, shown // 12)
    canvas = torch.full((num_rows * height, num_columns * width), math.nan)
    places = {head: (row * height + height - shown, column * width) for head, (row, column) in cells.items()}
    for head, (top, left) in places.items():
        canvas[top : top + shown, left : left + shown] = blank(pool(pattern(head), size))
    return canvas, places, side


def draw_timeline(
    path: Path,
    title: str,
    steps: Sequence[int],
    losses: Sequence[float],
    scores: Sequence[Scores],
    heads: Sequence[Head],
) -> None:
    """When each head became what it is: metrics of all heads against the training step, with the loss behind.

    scores: for each step metric -> (L, H). The highest at the end have their names beside them.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    shown = [name for name in COLUMNS if name in scores[0]]
    figure = new_figure(11, 2.9 * math.ceil(len(shown) / 2))
    axes = figure.subplots(math.ceil(len(shown) / 2), 2, squeeze=False).flatten()
    layers = sorted({layer for layer, _ in heads})
    colours = {layer: colormaps["turbo"]((number + 0.5) / len(layers)) for number, layer in enumerate(layers)}
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    figure.legend(lines, [f"layer {layer}" for layer in layers], loc="outside lower center", ncols=12, fontsize=8)
    for ax, name in zip(axes, shown, strict=False):
        behind = ax.twinx()
        behind.plot(steps, losses, color="0.75", lw=3)
        behind.set_ylabel("loss", color="0.5", fontsize=8)
        ax.margins(x=0.08)  # for the names
        for head in heads:
            ax.plot(steps, [score[name][head].item() for score in scores], lw=1, color=colours[head[0]])
        if name not in BEYOND_ONE:
            ax.set_ylim(-0.02, 1.02)  # one scale for all: what is small looks small
        last = {head: scores[-1][name][head].item() for head in heads}
        named, apart = [], 0.06 * (ax.get_ylim()[1] - ax.get_ylim()[0])  # names do not cover one another
        for head in sorted(last, key=last.get, reverse=True)[:3]:
            if all(abs(last[head] - last[other]) > apart for other in named):
                named.append(head)
                ax.annotate(name_of(head), (steps[-1], last[head]), (3, 0), fontsize=8, textcoords="offset points")
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("step", fontsize=8)
        ax.set_zorder(behind.get_zorder() + 1)
        ax.patch.set_visible(False)
    for ax in axes[len(shown) :]:
        ax.set_visible(False)
    headline(figure, f"{title}\na line is a head, grey is the loss on the text")
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write the file, complete or not at all; the same picture has the same bytes."""
    import matplotlib

    content, kind = io.BytesIO(), path.suffix[1:].lower()
    with matplotlib.rc_context({"svg.hashsalt": "tril"}):
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else {})
    write_whole(path, [content.getvalue()])

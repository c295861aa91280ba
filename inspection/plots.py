"""Pictures of heads for papers and pages: PNG or SVG, by matplotlib.

All heads of a picture have one colour scale, from 0 to 1, and what a query may not see is left blank.
"""

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inspection.patterns import Captured
from inspection.terminal import name_of
from model import ModelError, disk

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANNOTATED = 32  # the most tokens whose weights are written into the cells
PIXELS = 1500  # of a picture: more weights than that are pooled
SHARES = ("previous", "duplicate", "induction", "sink", "entropy")  # metrics from 0 to 1
Head = tuple[int, int]
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


def pool(pattern: Tensor, size: int) -> Tensor:
    """(T, T) with the largest weight of each square, so that no sharp head disappears: at most (size, size)."""
    side = math.ceil(len(pattern) / size)
    return F.max_pool2d(pattern[None], side, ceil_mode=True)[0]


def blank(pattern: Tensor) -> Tensor:
    """nan, which is not drawn, above the diagonal."""
    return pattern.masked_fill(torch.ones_like(pattern, dtype=torch.bool).triu(1), math.nan)


def draw_heads(
    path: Path,
    title: str,
    labels: Sequence[str],
    heads: Sequence[Head],
    pattern: Callable[[Head], Tensor],
    scores: dict,
) -> None:
    """Draw these heads to a file: large and with numbers if they and the text are few, else as a grid of small ones.

    pattern: head -> (T, T); scores: metric -> (L, H), of which "induction" stands in the titles.
    """
    T = len(labels)
    if (T <= ANNOTATED and len(heads) <= 32) or len(heads) == 1:
        figure, side = large(labels, heads, pattern, scores)
    else:
        figure, side = grid(heads, pattern, scores, T)
    pooled = f"\n(a point is the largest of {side} x {side} weights)" if side > 1 else ""
    figure.suptitle(f"{title}{pooled}", fontsize=9)
    save(figure, path)


def drawable(text: str) -> str:
    """The text with the code points of what the font does not have, instead of empty boxes."""
    from matplotlib import font_manager

    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(character if ord(character) in known else f"⟨u+{ord(character):04x}⟩" for character in text)


def title_of(head: Head, scores: Scores) -> str:
    """5.1, and its induction score if that is known."""
    score = scores["induction"][head].item() if "induction" in scores else math.nan
    return name_of(head) if math.isnan(score) else f"{name_of(head)} ind {f'{score:.2f}'.removeprefix('0')}"


def large(labels: Sequence[str], heads: Sequence[Head], pattern: Pattern, scores: Scores) -> tuple["Figure", int]:
    """A heatmap for each head, with tokens on both axes, and the weights in the cells if there are few."""
    T, columns = len(labels), min(len(heads), 4 if len(heads) <= 16 else 6)
    rows = math.ceil(len(heads) / columns)
    side = min(15.0, max(4.0, 0.36 * T + 1.5))
    figure = new_figure(columns * side + 0.8, rows * side + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    step = math.ceil(T / 64)  # of the labels
    for ax, head in zip(axes, heads, strict=False):
        weights = blank(pool(pattern(head), PIXELS))
        image = ax.imshow(weights.numpy(), vmin=0, vmax=1, cmap="viridis", extent=(-0.5, T - 0.5, T - 0.5, -0.5))
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
                colour = "black" if value > 0.6 else "white"
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)
    for ax in axes[len(heads) :]:
        ax.set_visible(False)
    figure.colorbar(image, ax=list(axes[: len(heads)]), shrink=0.6, label="weight")
    return figure, math.ceil(T / PIXELS)


def grid(heads: Sequence[Head], pattern: Pattern, scores: Scores, T: int) -> tuple["Figure", int]:
    """Small pictures of all these heads, a line for each layer."""
    num_columns = len({head for _, head in heads})
    canvas, places, side = mosaic(heads, pattern, T)
    width = num_columns * (1.15 if num_columns > 6 else 1.9)  # inches
    figure = new_figure(width + 1.1, width * canvas.size(0) / canvas.size(1) + 0.5)
    ax = figure.subplots()
    for head, (top, left) in places.items():
        ax.text(left, top - 1, title_of(head, scores), fontsize=6.5, va="bottom")
    image = ax.imshow(canvas.numpy(), vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    ax.set_axis_off()
    figure.colorbar(image, ax=ax, shrink=min(1.0, 3 / figure.get_figheight()), label="weight")
    return figure, side


def mosaic(heads: Sequence[Head], pattern: Pattern, T: int) -> tuple[Tensor, dict[Head, tuple[int, int]], int]:
    """All these heads in one array, nan between and above them; where each begins; and how many weights a side pool."""
    rows, columns = sorted({layer for layer, _ in heads}), sorted({head for _, head in heads})
    size = max(24, PIXELS // max(len(rows), len(columns)))  # of a head's picture, at most
    side = math.ceil(T / size)
    shown = math.ceil(T / side)
    height, width = shown + max(5, shown // 5), shown + max(2, shown // 12)
    canvas = torch.full((len(rows) * height, len(columns) * width), math.nan)
    places = {head: (rows.index(head[0]) * height + height - shown, columns.index(head[1]) * width) for head in heads}
    for head, (top, left) in places.items():
        canvas[top : top + shown, left : left + shown] = blank(pool(pattern(head), size))
    return canvas, places, side


def mosaic_of_all(att: Captured) -> np.ndarray:
    """Every head, (height, width) uint8: white for a weight of 0, black for 1. Needs no matplotlib."""
    q = att[0][0]
    heads = [(layer, head) for layer in range(att.n_layer) for head in range(q.size(1))]
    canvas, _, _ = mosaic(heads, lambda head: att.pattern(*head)[0].cpu(), q.size(2))
    return (255 * (1 - canvas.nan_to_num(0))).byte().numpy()


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
    shown = [name for name in SHARES if name in scores[0]] + ["distance"]
    figure = new_figure(11, 2.9 * math.ceil(len(shown) / 2))
    axes = figure.subplots(math.ceil(len(shown) / 2), 2, squeeze=False).flatten()
    for ax, name in zip(axes, shown, strict=False):
        behind = ax.twinx()
        behind.plot(steps, losses, color="0.75", lw=3)
        behind.set_ylabel("loss", color="0.5", fontsize=8)
        for head in heads:
            ax.plot(steps, [score[name][head].item() for score in scores], lw=1, color=f"C{head[0] % 10}")
        if name in SHARES:
            ax.set_ylim(-0.02, 1.02)  # one scale for all: what is small looks small
        last = {head: scores[-1][name][head].item() for head in heads}
        named: list[float] = []
        for head in sorted(last, key=last.get, reverse=True)[:3]:
            if all(abs(last[head] - other) > 0.06 * (ax.get_ylim()[1] - ax.get_ylim()[0]) for other in named):
                ax.annotate(
                    name_of(head), (steps[-1], last[head]), fontsize=8, xytext=(3, 0), textcoords="offset points"
                )
                named.append(last[head])
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("step", fontsize=8)
        ax.set_zorder(behind.get_zorder() + 1)
        ax.patch.set_visible(False)
    for ax in axes[len(shown) :]:
        ax.set_visible(False)
    figure.suptitle(f"{title}\n(a line is a head, a colour is a layer, grey is the loss on the text)", fontsize=9)
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write the file, complete or not at all; the same picture has the same bytes."""
    import matplotlib

    content, kind = io.BytesIO(), path.suffix[1:].lower()
    with matplotlib.rc_context({"svg.hashsalt": "tril"}):
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else {})
    disk.replace(path, content.getvalue())

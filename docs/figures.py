"""Draw the figures of attention.md, from the values that its code computes, and of the README, from a finished run.

    python docs/figures.py
    python docs/figures.py out/quickstart

The figure of docs/inspect.md is drawn by the command that stands below it.
"""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from data.tokenizer import load_tokenizer
from inspection import inspect_heads
from model.checkpoint import find_checkpoint
from training.report import read_metrics
from tril.kinds import KINDS, kind_of, name_of
from tril.look import look
from tril.plots import pool

DOCS = Path(__file__).parent
TEXT = 2 * "def get_name(self):\n    return self.name\n\n"  # repeats, as a head may notice


def draw_attention() -> None:
    """Draw scale.svg and learned.svg."""
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    values = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), values)

    figure, ax = plt.subplots(figsize=(6, 3))
    widths = list(values["largest"])
    for column, name in enumerate(("scores as they are", "scores divided by √D")):
        ax.plot(widths, [values["largest"][D][column] for D in widths], marker="o", label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(widths, widths)
    ax.set(xlabel="D, the width of a head", ylabel="mean of the largest weight", ylim=(0, 1))
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    figure.savefig(DOCS / "scale.svg", metadata={"Date": None})

    figure, axes = plt.subplots(1, 2, figsize=(7, 3.2))
    for ax, title in zip(axes, ("before", "after"), strict=True):
        future = ~values["make_causal_mask"](12)
        image = ax.imshow(values[title].masked_fill(future, float("nan")), vmin=0, vmax=1, cmap="viridis")
        ax.set_title(f"{title} training", fontsize=10)
        ax.set(xlabel="key", ylabel="query", xticks=range(0, 12, 2), yticks=range(0, 12, 2))
        ax.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=list(axes), shrink=0.8, label="weight")
    figure.savefig(DOCS / "learned.svg", metadata={"Date": None})


def draw_run(run: Path) -> None:
    """Draw first_run.png: the losses of a run, and the attention of its heads in TEXT."""
    inspection = inspect_heads(run, device="cpu")
    scores = inspection.scores
    tokenizer = load_tokenizer(find_checkpoint(run).directory)
    att, _ = look(inspection.model, torch.tensor([tokenizer.document_start + tokenizer.encode(TEXT).tolist()]))
    num_layers, num_heads = scores.mean["entropy"].shape

    figure = plt.figure(figsize=(12, 5.6))
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2))
    ax = left.subplots()
    lines = read_metrics(run)
    for name, key, style in (("training", "train_loss", {"alpha": 0.6}), ("validation", "val_loss", {"marker": "o"})):
        points = [(line["step"], line[key]) for line in lines if key in line]
        ax.plot(*zip(*points, strict=True), label=name, **style)
    ax.set(xlabel="step", ylabel="loss, nats a token")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    for number, ax in enumerate(right.subplots(num_layers, num_heads).flat):
        head = divmod(number, num_heads)
        ax.imshow(pool(att.pattern(*head)[0], 1) ** 0.5, vmin=0, vmax=1, cmap="viridis")
        kind = kind_of(scores, head).name
        where = "" if kind == "other" else f": {KINDS[kind][0].replace('the same', f'{chr(10)}the same')}"
        ax.set_title(f"{name_of(head)}{where}", fontsize=9)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    figure.savefig(DOCS / "first_run.png", dpi=100)


if __name__ == "__main__":
    plt.rcParams |= {"svg.hashsalt": "tril", "figure.constrained_layout.use": True}  # the same figure, the same bytes
    if sys.argv[1:]:
        draw_run(Path(sys.argv[1]))
    else:
        draw_attention()

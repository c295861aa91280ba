"""Draw the figures of attention.md, from the values that its code computes.

    python docs/figures.py

Two more figures are of trained models. These commands draw them from finished runs, which the README names:

    python inspect_attention.py out/shakespeare_char_cpu --ablate zero -o docs/heads.png
    python benchmarks/loss.py out/quickstart out/shakespeare_char_cpu out/shakespeare_char_cpu_nanogpt_rate \
        out/shakespeare_char_fast docs/loss_curve.svg
"""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
plt.rcParams |= {"svg.hashsalt": "tril", "figure.constrained_layout.use": True}  # the same figure has the same bytes
page = (DOCS / "attention.md").read_text(encoding="utf-8")
values = {}
exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), values)

figure, ax = plt.subplots(figsize=(6, 3))
widths = list(values["largest"])
for column, label in enumerate(("scores as they are", "scores divided by √D")):
    ax.plot(widths, [values["largest"][D][column] for D in widths], marker="o", label=label)
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

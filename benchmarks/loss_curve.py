"""Draw the validation loss of runs over their training time.

As in:
    python benchmarks/loss_curve.py out/quickstart out/shakespeare_char_cpu curve.svg
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    out: tyro.conf.Positional[Path]
    """The picture to write; its suffix decides the format."""


def main(options: Options) -> None:
    plt.rcParams["svg.hashsalt"] = "tril"  # the same runs give the same file
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for run in options.runs:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if "val_loss" in line]
        seconds = [line["train_seconds"] for line in lines]
        axes.plot(seconds, [line["val_bits_per_byte"] for line in lines], marker="o", markersize=3, label=run.name)
    axes.set(xlabel="seconds of training", ylabel="validation loss, bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None)


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Train the quickstart with several seeds: does the first run come out well with each of them?

    python benchmarks/first_run.py --seeds 21 22 23
    python benchmarks/first_run.py --seeds 21 22 23 --options="--train.dtype float32"

"induction" and "before" are the best scores of a head for what followed the same token before (above its control), and
for the token before; "entropy" is the mean of all heads. The curves are of bits per byte and of the induction score.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ROOT, evaluations, train
from cli.options import parse
from cli.script import run_script

COLUMNS = ("bits/byte", "induction", "before", "entropy", "seconds")


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    seeds: tuple[int, ...] = (1, 2, 3)
    """The seeds, one run each."""
    config: Path = ROOT / "configs" / "quickstart.toml"
    """The configuration."""
    options: str = ""
    """More options of train.py, as one text."""


def scores(line: dict) -> tuple[float, float, float]:
    """Return the best induction above its control, the best score for the token before, and the mean entropy."""
    heads = {kind: np.array(values, dtype=float) for kind, values in line["heads"].items()}
    return (
        np.nanmax(heads["induction"] - heads["induction_control"]),
        np.nanmax(heads["previous"]),
        np.nanmean(heads["entropy"]),
    )


def main() -> None:
    options = parse(Options, sys.argv[1:])
    print(f"{'seed':>8}" + "".join(f"{name:>11}" for name in COLUMNS))
    rows = []
    curves = []
    for seed in options.seeds:
        lines = train(ROOT / "train.py", options.config, "--train.seed", seed, *shlex.split(options.options))
        evaluated = evaluations(lines)
        last = evaluated[-1]
        rows.append((last["val_bits_per_byte"], *scores(last), last["train_seconds"]))
        print(f"{seed:8}" + "".join(f"{number:11.3f}" for number in rows[-1]), flush=True)
        points = [f"{line['step']}: {line['val_bits_per_byte']:.3f} {scores(line)[0]:.2f}" for line in evaluated]
        curves.append(f"{seed:8} {', '.join(points)}")
        samples = [line["sample"] for line in lines if "sample" in line]
        curves += [f"{'':8} {text!r}" for text in samples[-1:]]
    for name, summary in {"median": median, "least": min, "most": max}.items():
        print(f"{name:>8}" + "".join(f"{summary(column):11.3f}" for column in zip(*rows, strict=True)))
    print("\nstep: bits per byte, induction; and the last sample", *curves, sep="\n")


if __name__ == "__main__":
    run_script(main)

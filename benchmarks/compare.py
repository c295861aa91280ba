"""Compare two ways to train over several seeds: final loss with a confidence interval, time to a loss, and speed.

    python benchmarks/compare.py configs/quickstart.toml "configs/quickstart.toml --train.learning_rate 0.01" --seeds 5
    python benchmarks/compare.py ../before:configs/quickstart.toml configs/quickstart.toml

    python benchmarks/compare.py configs/tinystories.toml configs/tinystories.toml --ranks 0 2

A way to train is a configuration with options, perhaps of another checkout: "[CHECKOUT:]CONFIG.toml [OPTION ...]".
Each run is a process of its own; A and B take turns. Losses are validation losses in bits per byte, which do not depend
on the tokenizer. Tokens and seconds to a loss are interpolated between the evaluations of the mean over all seeds.
"""

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ROOT, evaluations, train
from cli.options import parse
from cli.script import run_script
from errors import UserError

# Student's t for a two-sided confidence of 95 %, by degrees of freedom: 1, 2, 3, ...
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T_95 += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    a: tyro.conf.Positional[str]
    """The first way."""
    b: tyro.conf.Positional[str]
    """The second way."""
    seeds: int = 3
    """Runs of each way, with consecutive seeds."""
    first_seed: int = 1
    """The first of them. A choice that was made with some seeds is confirmed with others."""
    ranks: tuple[int, int] = (0, 0)
    """Processes of each way, under torchrun; 0 is train.py alone."""
    out: Path | None = None
    """New directory for the runs. None: they are deleted at the end."""

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= len(T_95) + 1:
            raise UserError(f"seeds must be from 1 to {len(T_95) + 1}, got {self.seeds}")


@dataclass(frozen=True)
class Curve:
    """The evaluations of a run, each list in the order of the steps."""

    losses: list[float]
    """Bits per byte."""
    tokens: list[float]
    """Tokens trained on until then."""
    seconds: list[float]
    """Seconds of training until then."""
    tokens_per_second: float


def command_of(way: str) -> list[str]:
    """Return the script that trains this way, and its arguments. Raises UserError if one of the files is missing."""
    place, *options = shlex.split(way) or [""]
    checkout, _, config = place.rpartition(":")
    script = Path(checkout or ROOT) / "train.py"
    file = Path(checkout) / config
    for path in (script, file):
        if not path.is_file():
            raise UserError(f"{way!r}: there is no {path}")
    return [str(script), str(file), *options]


def curve_of(way: str, seed: int, ranks: int, out: Path | None) -> Curve:
    """Train once, in a new process. Raises UserError if that fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    lines = train(*torchrun, *command_of(way), "--train.seed", seed, out=out)
    for before, line in pairwise([{"tokens": 0}, *lines]):
        line.setdefault("tokens", before["tokens"])  # until version 3.1 an evaluation did not say
    evaluated = evaluations(lines)
    return Curve(
        losses=[line["val_bits_per_byte"] for line in evaluated],
        tokens=[line["tokens"] for line in evaluated],
        seconds=[line["train_seconds"] for line in evaluated],
        tokens_per_second=median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line),
    )


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of two or more paired differences, by Student's t."""
    half = T_95[len(differences) - 2] * stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) - half, fmean(differences) + half


def amount_until(loss: float, losses: Sequence[float], amounts: Sequence[float]) -> float:
    """Return the amount (tokens, seconds) at which the losses reach this one, interpolated linearly; inf if never."""
    if losses[0] <= loss:
        return amounts[0]
    for (before, least), (after, most) in pairwise(zip(losses, amounts, strict=True)):
        if after <= loss:
            return least + (before - loss) / (before - after) * (most - least)
    return math.inf


def mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the means of the columns."""
    return [fmean(column) for column in zip(*rows, strict=True)]


def table(a: Sequence[Curve], b: Sequence[Curve], first_seed: int = 1) -> str:
    """Format the comparison in lines of at most 80 columns. Runs of the same seed are at the same index."""
    lines = ["final loss, bits per byte", f"{'seed':>20} {'A':>12} {'B':>12} {'B - A':>12}"]
    pairs = [(first.losses[-1], second.losses[-1]) for first, second in zip(a, b, strict=True)]
    means = mean(pairs)
    for name, (first, second) in [*enumerate(pairs, start=first_seed), ("mean", means)]:
        lines.append(f"{name:>20} {first:12.4f} {second:12.4f} {second - first:+12.4f}")
    if len(pairs) > 1:
        low, high = interval([second - first for first, second in pairs])
        verdict = "no difference is seen" if low <= 0 <= high else f"{'B' if high < 0 else 'A'} is better"
        lines.append(f"with 95 % confidence B - A is between {low:+.4f} and {high:+.4f}: {verdict}")
    else:
        lines.append("one seed says nothing about chance: use --seeds 2 or more")
    rows = {}
    for name in ("tokens", "seconds"):
        rows[f"{name} to {max(means):.4f}"] = [
            amount_until(max(means), mean([run.losses for run in way]), mean([getattr(run, name) for run in way]))
            for way in (a, b)
        ]
    rows["tokens per second"] = [median(run.tokens_per_second for run in way) for way in (a, b)]
    lines += ["", f"{'':32} {'A':>12} {'B':>12}"]
    lines += [f"{name:32} {first:12,.1f} {second:12,.1f}" for name, (first, second) in rows.items()]
    return "\n".join(lines)


def main() -> None:
    options = parse(Options, sys.argv[1:])
    ways = {"A": options.a, "B": options.b}
    for name, way in ways.items():
        command_of(way)
        print(f"{name}  {way}")
    curves = {"A": [], "B": []}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for (name, way), ranks in zip(ways.items(), options.ranks, strict=True):
            out = options.out and options.out / f"{name}{seed}"
            curves[name].append(curve_of(way, seed, ranks, out))
            print(f"{name}, seed {seed}: {curves[name][-1].losses[-1]:.4f}", file=sys.stderr, flush=True)
    print(f"\n{table(curves['A'], curves['B'], options.first_seed)}")


if __name__ == "__main__":
    run_script(main)

"""Measure the cost of sharing a run: train.py alone, and under torchrun with ddp and fsdp.

    python benchmarks/distributed.py                         the quickstart on one and two ranks
    python benchmarks/distributed.py --nproc 1 8             on eight GPUs
    python benchmarks/distributed.py --out results.jsonl     one JSON object per run

The ways take turns, so that a machine that slows down slows all of them. Speeds are medians over all log lines but one.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench import append, describe_machine
from benchmarks.loss import ROOT, run
from cli.options import parse
from cli.script import run_script
from training.directory import read_metrics


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    config: Path = ROOT / "configs" / "quickstart.toml"
    """The configuration to train."""
    nproc: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    steps: int = 60
    """Steps of a run."""
    turns: int = 3
    """Runs of each way."""
    out: Path | None = None
    """File to append the measurements to."""


def tokens_per_second(launcher: list, options: Options) -> float:
    """Train once, and return the median speed of the log lines but the first."""
    with TemporaryDirectory() as directory:
        rare = options.steps + 1  # neither evaluation nor checkpoint falls between two log lines
        settings = {"out_dir": directory, "max_steps": options.steps, "log_every": max(1, options.steps // 6)}
        settings |= {"eval_every": rare, "checkpoint_every": rare, "grad_accum_steps": max(options.nproc)}
        run(*launcher, options.config, *(f"--train.{name}={value}" for name, value in settings.items()))
        speeds = [line["tokens_per_second"] for line in read_metrics(Path(directory)) if "train_loss" in line]
    return statistics.median(speeds[1:])


def main(options: Options) -> None:
    ways = {"alone": [ROOT / "train.py"]}
    for number in options.nproc:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
        for parallel in ("ddp", "fsdp"):
            ways[f"{parallel}, {number} ranks"] = [*torchrun, ROOT / "train.py", f"--train.parallel={parallel}"]
    machine = describe_machine("cuda" if torch.cuda.is_available() else "cpu")
    for _ in range(options.turns):
        for way, launcher in ways.items():
            speed = tokens_per_second(launcher, options)
            print(f"{way:16} {speed:12,.0f} tokens/s", flush=True)
            append(options.out, {"way": way, "tokens/s": speed} | machine)


if __name__ == "__main__":
    run_script(lambda: main(parse(Options, sys.argv[1:])))

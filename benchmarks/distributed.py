"""What sharing a run costs and gives: train.py alone, and under torchrun on so many ranks with ddp and fsdp.

Ways to run:
    python benchmarks/distributed.py                         the quickstart model on one and two ranks
    python benchmarks/distributed.py --nproc 1 8             on eight GPUs
    python benchmarks/distributed.py --out results.jsonl     one JSON object a way
    python benchmarks/distributed.py --tiny                  everything small, to see that it works

The ways take turns, so that a machine that slows down slows all of them. A figure is the median over the turns of the
median over the lines of metrics.jsonl, without the first of them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import Record, describe_machine

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TINY = ["--model.n_layer", "1", "--model.n_embd", "32", "--model.context_length", "32", "--data.tokenizer", "bytes"]


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    config: Path = ROOT / "configs" / "quickstart.toml"
    """What to train."""
    nproc: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    steps: int = 60
    """Steps of a run, logged every ten."""
    turns: int = 3
    """How often each way is run."""
    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, to see that the script works."""
    out: Path | None = None
    """A file to append the measurements to."""


def tokens_per_second(launcher: list[str], options: Options, more: list[str]) -> float:
    """The speed of one run."""
    with tempfile.TemporaryDirectory() as directory:
        every = max(1, options.steps // 6)
        arguments = [str(options.config), "--train.out_dir", directory, "--train.max_steps", str(options.steps)]
        arguments += ["--train.eval_every", "999999", "--train.checkpoint_every", "999999"]
        arguments += ["--train.eval_tokens", "1000", "--train.log_every", str(every), *more]
        done = subprocess.run([*launcher, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["tokens_per_second"] for line in lines if "train_loss" in line][1:])


def main(options: Options) -> None:
    shared = TINY if options.tiny else []
    shared = [*shared, "--train.grad_accum_steps", str(max(options.nproc))]
    ways = {"alone": ([sys.executable], shared)}
    for number in options.nproc:
        for parallel in ("ddp", "fsdp"):
            launcher = [*TORCHRUN, f"--nproc_per_node={number}"]
            ways[f"{parallel}, {number} ranks"] = (launcher, [*shared, "--train.parallel", parallel])
    speeds = {way: [] for way in ways}
    for _ in range(options.turns):
        for way, (launcher, more) in ways.items():
            speeds[way].append(tokens_per_second(launcher, options, more))
    record = Record(options.out, describe_machine("cuda" if torch.cuda.is_available() else "cpu"))
    for way, values in speeds.items():
        result = {"way": way, "tokens_per_second": statistics.median(values), "least": min(values), "most": max(values)}
        print(f"{way:16s} {result['tokens_per_second']:12,.0f} tokens/s ({min(values):,.0f} to {max(values):,.0f})")
        record(result)


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Two ways to train, over several seeds: which one ends lower, and whether that is more than chance.

    python benchmarks/compare.py A B --seeds 5
    python benchmarks/compare.py configs/quickstart.toml "configs/quickstart.toml --train.learning_rate 0.01"
    python benchmarks/compare.py ../before:configs/quickstart.toml configs/quickstart.toml --steps 200

A way to train is a configuration, perhaps of another checkout and with options: "[CHECKOUT:]CONFIG.toml [OPTION ...]".
A checkout alone is its quickstart. Each run is a process of its own, A and B in turns. Losses are those of the last
evaluation. What it takes to come to a loss is read off the mean loss over the seeds, between two evaluations as on a
straight line. Memory is the most that was resident.
"""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

from configs import ConfigError, parse, run_script

ROOT = Path(__file__).parent.parent
MEASURES = {"val_loss": "nats a token", "val_bits_per_byte": "bits a byte"}
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    a: tyro.conf.Positional[str]
    """The one."""
    b: tyro.conf.Positional[str]
    """The other."""
    seeds: int = 3
    """Runs of each, with the seeds 1, 2, 3, ..."""
    steps: int | None = None
    """Train for so many steps. None: as configured."""
    measure: Literal["val_loss", "val_bits_per_byte"] = "val_loss"
    """What to compare; val_bits_per_byte if the tokenizers differ."""
    loss: float | None = None
    """The loss to come to. None: the worse of the two means at the end."""
    out: Path | None = None
    """An empty directory for the runs. None: they are deleted at the end."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object a run, and one of the comparison, instead of tables."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds must be at least 1, got {self.seeds}")
        if self.out and self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ConfigError(f"{self.out} is there already: choose a new directory")


@dataclass(frozen=True)
class Result:
    """What one run tells."""

    way: str
    seed: int
    fingerprint: str
    """Of the tokens it learned from."""
    losses: dict[int, float]
    """At each evaluated step."""
    seconds: dict[int, float]
    """Of training, until then."""
    tokens_per_step: int
    tokens_per_second: float
    peak_memory: int
    """Bytes."""
    peak_gpu_memory: float | None
    """GiB."""

    @property
    def loss(self) -> float:
        """At the end."""
        return self.losses[max(self.losses)]


def command_of(way: str) -> list[str]:
    """The command that trains this way. Raises ConfigError if there is no such script or configuration."""
    place, *options = shlex.split(way) or [""]
    if Path(place).is_dir():
        place += ":configs/quickstart.toml"
    checkout, _, config = place.rpartition(":")
    script, file = Path(checkout or ROOT) / "train.py", Path(checkout) / config
    for path in (script, file):
        if not path.is_file():
            raise ConfigError(f"{way!r}: there is no {path}")
    return [sys.executable, str(script), str(file), *options]


def train(name: str, way: str, seed: int, options: Options, directory: Path) -> Result:
    """Train once, in a new process. Raises ConfigError with its own sentence if it fails."""
    out, log = directory / f"{name}{seed}", directory / f"{name}{seed}.log"
    steps = [] if options.steps is None else ["--train.max_steps", str(options.steps)]
    command = [*command_of(way), *steps, "--train.seed", str(seed), "--train.out_dir", str(out)]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines() or [f"exit code {process.returncode}"]
        raise ConfigError(f"{name} with seed {seed} failed: {said[-1].removeprefix('train.py: ')}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return read_run(name, seed, out, options.measure, peak)


def read_run(name: str, seed: int, run: Path, measure: str, peak_memory: int) -> Result:
    """What a finished run has logged."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluated = {line["step"]: line for line in lines if measure in line}
    logged = [line for line in lines if "tokens_per_second" in line]
    if any(line[measure] is None for line in evaluated.values()):
        raise ConfigError(f"{name}, seed {seed}: a loss is not finite")
    newest = max((run / "checkpoints").glob("step-*"))
    return Result(
        way=name,
        seed=seed,
        fingerprint=json.loads((newest / "trainer.json").read_text(encoding="utf-8"))["fingerprint"],
        losses={step: line[measure] for step, line in evaluated.items()},
        seconds={step: line["train_seconds"] for step, line in evaluated.items()},
        tokens_per_step=logged[-1]["tokens"] // logged[-1]["step"],
        tokens_per_second=median(line["tokens_per_second"] for line in logged),
        peak_memory=peak_memory,
        peak_gpu_memory=max((line["memory_gib"] for line in logged if "memory_gib" in line), default=None),
    )


def student_t(t: float, freedom: int) -> float:
    """The probability that Student's t, with so many degrees of freedom, is between -t and t (t >= 0).

    Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: a finite sum for whole degrees of freedom.
    """
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(1, freedom // 2 + 1):
        total += term
        term *= math.cos(angle) ** 2 * (2 * number - 1 + odd) / (2 * number + odd)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def student_t_quantile(confidence: float, freedom: int) -> float:
    """The t with `student_t(t, freedom) == confidence`, by halving."""
    low, high = 0.0, 1.0
    while student_t(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t(middle, freedom) < confidence else (low, middle)
    return high


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Where the mean of all such differences lies with a confidence of 95 %: the paired t interval; None for one."""
    if len(differences) < 2:
        return None
    half = student_t_quantile(CONFIDENCE, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) - half, fmean(differences) + half


def until(loss: float, losses: dict[int, float], amounts: dict[int, float]) -> float | None:
    """How much (steps, seconds) it took until the loss was reached, between two evaluations on a straight line."""
    steps = sorted(losses)
    if losses[steps[0]] <= loss:
        return amounts[steps[0]]
    for before, after in pairwise(steps):
        if losses[after] <= loss:
            share = (losses[before] - loss) / (losses[before] - losses[after])
            return amounts[before] + share * (amounts[after] - amounts[before])
    return None


def mean_curve(curves: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over runs, at each step."""
    return {step: fmean(curve[step] for curve in curves) for step in curves[0]}


def compare(a: Sequence[Result], b: Sequence[Result], measure: str, loss: float | None = None) -> dict:
    """The figures of a comparison, runs of the same seeds in the same order.

    Raises ConfigError if the two have learned from different tokens and are compared by the token.
    """
    if measure == "val_loss" and len({result.fingerprint for result in (*a, *b)}) > 1:
        raise ConfigError("A and B learned from different tokens: compare them by --measure val_bits_per_byte")
    differences = [theirs.loss - ours.loss for ours, theirs in zip(a, b, strict=True)]
    target = max(fmean(result.loss for result in way) for way in (a, b)) if loss is None else loss
    figures = {"measure": measure, "mean_difference": fmean(differences), "interval": interval(differences)}
    figures |= {"confidence": CONFIDENCE, "target": target}
    for way in (a, b):
        losses = mean_curve([result.losses for result in way])
        tokens = {step: step * way[0].tokens_per_step for step in losses}
        figures[way[0].way] = {
            "mean_loss": fmean(result.loss for result in way),
            "tokens_to_target": until(target, losses, tokens),
            "seconds_to_target": until(target, losses, mean_curve([result.seconds for result in way])),
            "tokens_per_second": median(result.tokens_per_second for result in way),
            "peak_memory": max(result.peak_memory for result in way),
            "peak_gpu_memory": max((r.peak_gpu_memory for r in way if r.peak_gpu_memory is not None), default=None),
        }
    return figures


def table(a: Sequence[Result], b: Sequence[Result], figures: dict) -> str:
    """The comparison in lines of at most 80 columns."""
    unit, found = MEASURES[figures["measure"]], figures["interval"]
    lines = [f"loss at the end, {unit}", f"{'seed':>20} {'A':>12} {'B':>12} {'B - A':>12}"]
    for ours, theirs in zip(a, b, strict=True):
        lines.append(f"{ours.seed:20} {ours.loss:12.4f} {theirs.loss:12.4f} {theirs.loss - ours.loss:+12.4f}")
    means = [figures[name]["mean_loss"] for name in ("A", "B")]
    lines.append(f"{'mean':>20} {means[0]:12.4f} {means[1]:12.4f} {figures['mean_difference']:+12.4f}")
    if found:
        low, high = found
        verdict = "no difference is seen" if low <= 0 <= high else f"{'B' if high < 0 else 'A'} is better"
        lines.append(f"with {CONFIDENCE:.0%} confidence B - A is between {low:+.4f} and {high:+.4f}: {verdict}")
    else:
        lines.append("one seed tells nothing about chance: --seeds 2 or more")
    lines += ["", f"{'':32} {'A':>12} {'B':>12}"]
    rows = {
        f"tokens to {figures['target']:.4f}": ("tokens_to_target", 1, ",.0f"),
        f"seconds to {figures['target']:.4f}": ("seconds_to_target", 1, ",.1f"),
        "tokens a second": ("tokens_per_second", 1, ",.0f"),
        "peak memory, MB": ("peak_memory", 1e6, ",.0f"),
        "peak GPU memory, GiB": ("peak_gpu_memory", 1, ".2f"),
    }
    for title, (key, size, form) in rows.items():
        values = [figures[name][key] for name in ("A", "B")]
        missing = "-" if key == "peak_gpu_memory" else "never"
        if key != "peak_gpu_memory" or any(value is not None for value in values):
            cells = [missing if value is None else format(value / size, form) for value in values]
            lines.append(f"{title:32} {cells[0]:>12} {cells[1]:>12}")
    return "\n".join(lines)


def main() -> None:
    options = parse(Options, sys.argv[1:])
    ways = {"A": options.a, "B": options.b}
    for way in ways.values():
        command_of(way)
    results: dict[str, list[Result]] = {"A": [], "B": []}
    with TemporaryDirectory(prefix="tril-") as temporary:
        directory = options.out or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for seed in range(1, options.seeds + 1):
            for name in ("AB", "BA")[seed % 2 == 0]:  # a machine that slows down does so for both
                result = train(name, ways[name], seed, options, directory)
                results[name].append(result)
                print(f"{name}, seed {seed}: {result.loss:.4f}", file=sys.stderr, flush=True)
    figures = compare(results["A"], results["B"], options.measure, options.loss)
    if options.json:
        for result in (*results["A"], *results["B"]):
            print(json.dumps(asdict(result) | {"command": ways[result.way]}))
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name}  {way}" for name, way in ways.items()))
        print(f"\n{table(results['A'], results['B'], figures)}")


if __name__ == "__main__":
    run_script(main)

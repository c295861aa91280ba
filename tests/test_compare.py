"""benchmarks/compare.py: its statistics against known values, and a comparison of a tiny configuration with itself."""

import importlib.util
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from configs import ConfigError, parse
from tests.conftest import tiny_run
from tests.test_house import documented_commands

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "compare.py"
CURVES = [{0: 4.0, 10: 3.0, 20: 2.0}, {0: 4.0, 10: 2.0, 20: 1.5}]


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_that_compares", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "confidence, freedom, expected",
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 7, 2.365),
        (0.95, 30, 2.042),
        (0.95, 1000, 1.962),
        (0.99, 5, 4.032),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(
    compare: ModuleType, confidence: float, freedom: int, expected: float
) -> None:
    assert compare.student_t_quantile(confidence, freedom) == pytest.approx(expected, abs=6e-4)


def test_t_is_a_distribution(compare: ModuleType) -> None:
    for freedom in (1, 2, 5, 8, 101):
        shares = [compare.student_t(t, freedom) for t in (0.0, 0.5, 1.0, 4.0, 1e9)]
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == pytest.approx(1)
    assert compare.student_t(1.0, 1) == pytest.approx(0.5)  # Cauchy's quartiles
    assert compare.student_t(1.0, 10**4 + 1) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=1e-4)


def test_the_interval_is_the_paired_one(compare: ModuleType) -> None:
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t of two degrees of freedom 4.30265.
    low, high = compare.interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), abs=1e-5)
    assert compare.interval([0.0, 0.0]) == (0.0, 0.0)
    assert compare.interval([1.0]) is None


def test_what_it_takes_to_a_loss_lies_between_two_evaluations(compare: ModuleType) -> None:
    tokens = {0: 0.0, 10: 100.0, 20: 400.0}
    assert compare.until(3.5, CURVES[0], tokens) == 50
    assert compare.until(3.0, CURVES[0], tokens) == 100
    assert compare.until(2.5, CURVES[0], tokens) == 250
    assert compare.until(2.0, CURVES[0], tokens) == 400
    assert compare.until(5.0, CURVES[0], tokens) == 0
    assert compare.until(1.9, CURVES[0], tokens) is None
    assert compare.mean_curve(CURVES) == {0: 4.0, 10: 2.5, 20: 1.75}


def results(compare: ModuleType, way: str, shifts: list[float], **changes: object) -> list:
    seconds = {0: 0.0, 10: 1.0, 20: 2.0}
    about = {"fingerprint": "same", "seconds": seconds, "tokens_per_step": 7, "tokens_per_second": 70.0}
    about |= {"peak_memory": 3 * 10**8, "peak_gpu_memory": None, **changes}
    losses = [{step: loss + shift for step, loss in CURVES[0].items()} for shift in shifts]
    return [compare.Result(way=way, seed=seed, losses=curve, **about) for seed, curve in enumerate(losses, start=1)]


def test_figures_and_table(compare: ModuleType) -> None:
    a, b = results(compare, "A", [0.0, 0.2]), results(compare, "B", [1.0, 1.3], peak_gpu_memory=1.5)
    figures = compare.compare(a, b, "val_loss")
    assert figures["mean_difference"] == pytest.approx(1.05)
    assert figures["target"] == pytest.approx(3.15)  # B's mean at the end, of 3.0 and 3.3
    assert figures["B"]["tokens_to_target"] == pytest.approx(20 * 7)
    assert figures["A"]["tokens_to_target"] == pytest.approx(9.5 * 7)  # A's mean curve: 4.1, 3.1, 2.1
    assert figures["A"]["seconds_to_target"] == pytest.approx(0.95)
    lines = compare.table(a, b, figures).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[4].split() == ["mean", "2.1000", "3.1500", "+1.0500"]
    assert lines[5] == "with 95% confidence B - A is between +0.4147 and +1.6853: A is better"
    assert lines[-1].split() == ["peak", "GPU", "memory,", "GiB", "-", "1.50"]
    swapped = compare.compare(results(compare, "A", [1.0, 1.3]), results(compare, "B", [0.0, 0.2]), "val_loss", 0.5)
    text = compare.table(a, b, swapped)
    assert "B is better" in text and "tokens to 0.5000                        never        never" in text
    doubtful = compare.compare(a, results(compare, "B", [-0.4, 0.7]), "val_loss")
    assert "no difference is seen" in compare.table(a, b, doubtful)
    alone = compare.compare(a[:1], b[:1], "val_loss")
    assert alone["interval"] is None and "one seed" in compare.table(a[:1], b[:1], alone)


def test_losses_a_token_of_different_tokens_are_not_compared(compare: ModuleType) -> None:
    a, b = results(compare, "A", [0.0, 0.2]), results(compare, "B", [0.0, 0.2], fingerprint="other")
    with pytest.raises(ConfigError, match="val_bits_per_byte"):
        compare.compare(a, b, "val_loss")
    assert compare.compare(a, b, "val_bits_per_byte")["mean_difference"] == 0


def test_ways_that_are_not_there_are_refused(compare: ModuleType, tmp_path: Path) -> None:
    for way in ("no.toml", f"{tmp_path}:configs/quickstart.toml", str(tmp_path)):
        with pytest.raises(ConfigError, match="there is no"):
            compare.command_of(way)
    with pytest.raises(ConfigError, match="at least 1"):
        compare.Options("a", "b", seeds=0)
    with pytest.raises(ConfigError, match="new directory"):
        compare.Options("a", "b", out=SCRIPT.parent)
    root = SCRIPT.parent.parent
    asked = f"{root}:configs/quickstart.toml --train.learning_rate 0.01"
    script, config = root / "train.py", root / "configs" / "quickstart.toml"
    assert compare.command_of(asked)[1:] == [str(script), str(config), "--train.learning_rate", "0.01"]
    assert compare.command_of(str(root))[1:] == [str(script), str(config)]


def test_documented_comparisons_can_be_made(compare: ModuleType) -> None:
    commands = [shlex.split(command) for command in documented_commands() if "compare.py" in command]
    assert commands
    for _, _, *arguments in commands:
        options = parse(compare.Options, arguments)
        for way in (options.a, options.b):
            compare.command_of(way.removeprefix("../before:"))


def compared(corpus: Path, tmp_path: Path, other: str, *options: str) -> list[str]:
    """The lines that the script prints, comparing a tiny configuration with itself and these options."""
    words = tiny_run(corpus, tmp_path / "unused", train__max_steps=4, train__grad_accum_steps=1)
    (tmp_path / "tiny.toml").touch()
    way = f"{tmp_path / 'tiny.toml'} {' '.join(words)}"
    command = [sys.executable, str(SCRIPT), way, f"{way} {other}", "--steps", "8", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_configuration_is_no_better_than_itself(corpus_file: Path, tmp_path: Path) -> None:
    *runs, figures = map(json.loads, compared(corpus_file, tmp_path, "", "--seeds", "1", "--json"))
    assert [(run["way"], run["seed"]) for run in runs] == [("A", 1), ("B", 1)]
    assert figures["mean_difference"] == 0 and figures["interval"] is None
    assert runs[0]["losses"] == runs[1]["losses"] and list(runs[0]["losses"]) == ["0", "4", "8"]
    assert all(run["tokens_per_step"] == 3 * 11 and 1e8 < run["peak_memory"] < 1e10 for run in runs)
    assert figures["A"]["tokens_to_target"] == figures["B"]["tokens_to_target"] == 8 * 33


@pytest.mark.long
def test_a_rate_of_nothing_learns_nothing(corpus_file: Path, tmp_path: Path) -> None:
    lines = compared(corpus_file, tmp_path, "--train.learning_rate 1e-9", "--out", str(tmp_path / "runs"))
    assert all(len(line) <= 80 for line in lines if not line.startswith(("A  ", "B  ")))
    assert any(line.endswith(": A is better") for line in lines), lines
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()) == "A1 A2 A3 B1 B2 B3".split()

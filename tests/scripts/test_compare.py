"""benchmarks/compare.py: its statistics against known values, and a comparison of two tiny configurations."""

import math
import sys
from pathlib import Path

import pytest

from benchmarks import compare
from errors import UserError
from tests.conftest import tiny_run

ROOT = Path(__file__).parents[2]


def test_the_interval_is_the_paired_one_of_student() -> None:
    for freedom, quantile in enumerate(compare.T_95, start=1):
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(math.pi * freedom)
        width = quantile / 1000
        middles = ((i + 0.5) * width for i in range(1000))  # the midpoint rule, over Student's density
        inside = 2 * width * sum(scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2) for t in middles)
        assert inside == pytest.approx(0.95, abs=1e-4), freedom
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t of two degrees of freedom 4.303.
    assert compare.interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))


def curves(*shifts: float) -> list[compare.Curve]:
    return [compare.Curve([4 + s, 3 + s, 2 + s], [0.0, 70.0, 140.0], [0.0, 1.0, 2.0], 70.0) for s in shifts]


def test_the_table() -> None:
    for loss, expected in {3.5: 50, 3.0: 100, 2.5: 250, 2.0: 400, 5.0: 0, 1.9: math.inf}.items():
        assert compare.amount_until(loss, [4.0, 3.0, 2.0], [0.0, 100.0, 400.0]) == expected
    lines = compare.table(curves(0.0, 0.2), curves(1.0, 1.3)).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    of_others = compare.table(curves(0.0, 0.2), curves(1.0, 1.3), first_seed=71).splitlines()
    assert [line.split()[0] for line in of_others[2:4]] == ["71", "72"]
    assert lines[4].split() == ["mean", "2.1000", "3.1500", "+1.0500"]
    assert lines[5] == "with 95 % confidence B - A is between +0.4147 and +1.6853: A is better"
    assert lines[-3].split() == ["tokens", "to", "3.1500", "66.5", "140.0"]  # A's mean curve: 4.1, 3.1, 2.1
    assert "B is better" in compare.table(curves(1.0, 1.3), curves(0.0, 0.2))
    assert "no difference is seen" in compare.table(curves(0.0, 0.2), curves(-0.4, 0.7))


def test_commands(tmp_path: Path) -> None:
    expected = [f"{ROOT}/train.py", f"{ROOT}/configs/quickstart.toml", "--train.learning_rate", "0.01"]
    assert compare.command_of(f"{ROOT}:configs/quickstart.toml --train.learning_rate 0.01") == expected
    for way in ("no.toml", f"{tmp_path}:configs/quickstart.toml", ""):
        with pytest.raises(UserError, match="there is no"):
            compare.command_of(way)


@pytest.mark.long
def test_a_rate_of_nothing_learns_nothing(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "tiny.toml").write_text("[train]\nseed = 1\n")
    way = f"{tmp_path / 'tiny.toml'} {' '.join(tiny_run(corpus_file, tmp_path / 'unused', train__max_steps=8))}"
    monkeypatch.setattr(sys, "argv", ["compare.py", way, f"{way} --train.learning_rate 1e-9", "--ranks", "0", "2"])
    compare.main()
    assert capsys.readouterr().out.count(": A is better") == 1

"""Every mistake in tests/mutants.py is noticed, by the tests named there and, if it leaks, by the certificate."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import source_mutants
from tests.mutants import CHECKS, MUTANTS, kills, matrix, mutated, run
from tests.test_causality import certify_tiny
from training.config import TrainError

MISTAKES = [name for name in MUTANTS if name != "the correct formula"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mutant_is_killed(name: str) -> None:
    killers = MUTANTS[name].killers.split()
    assert killers
    for check in killers + ["certificate"] * MUTANTS[name].leaks:
        assert kills(check, name), f"{check} does not notice: {name}"


@pytest.mark.long
@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name in MISTAKES
        for dtype in (torch.bfloat16, torch.float16)
        if MUTANTS[name].leaks and not ("bfloat16" in name and dtype == torch.float16)
    ],
    ids=str,
)
def test_the_certificate_refuses_every_leak_under_autocast(name: str, dtype: torch.dtype) -> None:
    error = RuntimeError if "-1e9" in name and dtype == torch.float16 else TrainError  # which half precision lacks
    with mutated(name), pytest.raises(error, match="refusing to train|overflow"):
        certify_tiny(dtype, n_kv_head=1, context_length=131)


def test_every_explanation_is_of_a_mutant() -> None:
    sources = [(source_mutants.ROOT / file).read_bytes() for file in source_mutants.FILES]
    explained = {mutant.becomes for source in sources for mutant in source_mutants.mutants(source) if mutant.reason}
    assert explained == {becomes for reasons in source_mutants.EQUIVALENT.values() for becomes in reasons}


@pytest.mark.long
@pytest.mark.parametrize("file", source_mutants.FILES[:2])  # the layer and its cache; the rest takes too long for CI
def test_every_change_of_a_token_is_noticed_or_explained(file: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.source_mutants", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_correct_is_not_killed(check: str) -> None:
    assert not kills(check, "the correct formula")
    run(check)


@pytest.mark.long
def test_the_published_matrix_is_this_one() -> None:
    assert matrix() in (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

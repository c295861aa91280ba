"""Every mistake in tests/mutants.py is noticed, by the tests named there and, if it leaks, by the certificate."""

from pathlib import Path

import pytest

from tests.mutants import CHECKS, MUTANTS, kills, matrix, run

MISTAKES = [name for name in MUTANTS if name != "the correct formula"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mutant_is_killed(name: str) -> None:
    killers = MUTANTS[name].killers.split()
    assert killers
    for check in killers[:1] + ["certificate"] * MUTANTS[name].leaks:
        assert kills(check, name), f"{check} does not notice: {name}"


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mutant_is_killed_by_every_test_that_is_named(name: str) -> None:
    assert [check for check in MUTANTS[name].killers.split() if not kills(check, name)] == []


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_correct_is_not_killed(check: str) -> None:
    assert not kills(check, "the correct formula")
    run(check)


@pytest.mark.long
def test_the_published_matrix_is_this_one() -> None:
    assert matrix() in (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

"""Every mistake in tests/mutants.py is noticed as the table in tests/README.md says."""

import re
from pathlib import Path

import pytest
import torch

from errors import UserError
from tests.model.test_causality import certify_tiny
from tests.mutants import CHECKS, MUTANTS, kills, mutated, run, table

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| (.*) \| (refuses|-) \| (.*) \|$", README, re.MULTILINE)}
LEAKS = [mistake for mistake, (certificate, _) in ROWS.items() if certificate == "refuses"]


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake: str) -> None:
    _, others = ROWS[mistake]
    assert kills(others.split(", ")[0], mistake)
    assert mistake not in LEAKS or kills("certificate", mistake)


@pytest.mark.long
def test_the_table_is_this_one_and_correct_code_passes() -> None:
    for check in CHECKS:
        run(check)
    assert table() in README


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mistake", LEAKS)
def test_the_certificate_refuses_every_leak_under_autocast(mistake: str, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and ("bfloat16" in mistake or "weights are asked for" in mistake):
        return  # there it is no mistake, or not trained with
    error = RuntimeError if "-1e9" in mistake and dtype == torch.float16 else UserError  # float16 has no 1e9
    with mutated(mistake), pytest.raises(error, match="refusing to train|overflow"):
        certify_tiny(dtype, n_kv_head=1, context_length=131)

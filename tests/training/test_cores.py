"""cores.py: threads spin for a short time where other programs work, unless the user has decided."""

import cores
import importlib
import os
from pathlib import Path

import pytest

BUSY = "1.26 0.40 0.13 3/512 4711\n"


@pytest.mark.parametrize(
    "load, setting, spins",
    [
        (BUSY, None, "1000"),
        (BUSY, ("GOMP_SPINCOUNT", "7"), "7"),
        (BUSY, ("OMP_WAIT_POLICY", "active"), None),
        ("1.26 0.40 0.13 1/512 4711\n", None, None),  # a program that has ended since
        ("0.26 0.40 0.13 3/512 4711\n", None, None),
    ],
)
def test_threads_spin_for_a_short_time_beside_others_unless_the_user_decides(
    load: str, setting: tuple[str, str] | None, spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cores.SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is put back in the end
        monkeypatch.delenv(name)
    if setting:
        monkeypatch.setenv(*setting)
    monkeypatch.setattr(Path, "read_text", lambda path: load)
    importlib.reload(cores)
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_load_that_cannot_be_read_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cores.SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def hidden(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", hidden)
    importlib.reload(cores)
    assert not cores.SETTINGS & os.environ.keys()

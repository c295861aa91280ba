"""wandb gets what metrics.jsonl gets, and nothing about the machine; its failures are none of the training's."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from tests.conftest import metrics, tiny_run
from training.report import Tracker, flat


def test_lines_are_sent_flat_until_the_first_failure_which_costs_a_line(monkeypatch, tmp_path: Path, capsys) -> None:
    sent, axes = [], []

    def log(values: dict) -> None:
        sent.append(values)
        if values["step"] > 3:
            raise ConnectionError("gone\nand a hint")

    run = SimpleNamespace(log=log, define_metric=lambda *name, **axis: axes.append((name, axis)), id="1", sync_dir="")
    asked = {}
    init = lambda **options: asked.update(options) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DATA_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert Tracker("disabled", None, tmp_path, {}).run is None
    tracker = Tracker("online", None, tmp_path, {})
    assert (asked["project"], asked["name"], asked["mode"]) == ("mine", tmp_path.name, "offline")
    assert tracker.run_id == "1" and axes == [(("*",), {"step_metric": "step"})]
    tracker.call("log", flat({"step": 3, "val_loss": 2.5, "heads": {"sink": [[0.1, 0.2], [None, 0.4]]}}))
    capsys.readouterr()
    for step in (4, 5):
        tracker.call("log", {"step": step})
    tracker.call("finish", 0)  # the fake has no such method
    heads = {"sink/0.0": 0.1, "sink/0.1": 0.2, "sink/1.0": None, "sink/1.1": 0.4}
    assert sent == [{"step": 3, "val_loss": 2.5, **heads}, {"step": 4}]
    said = "wandb is off, metrics.jsonl has everything: ConnectionError('gone\\nand a hint')\n"
    assert capsys.readouterr().out == said


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The real one, in a home of its own and without settings from outside; it ends after the test."""
    import wandb

    for name in ("exit", "excepthook"):  # wandb replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    for name in {"WANDB_DATA_DIR", *(name for name in os.environ if name.startswith("WANDB_"))}:
        monkeypatch.setenv(name, "")  # so that the end of the test also unsets what the tracker sets
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-host")
    yield
    wandb.teardown(1)


@pytest.mark.long
def test_a_run_and_its_resumption_are_one_run(wandb, run, corpus_file: Path, tmp_path: Path) -> None:
    out, quiet = tmp_path / "run", {"train__eval_every": 100, "train__wandb": "offline"}
    assert run(train, *tiny_run(corpus_file, out, **quiet, train__max_steps=7)).exit_code == 0
    time.sleep(1.01 - time.time() % 1)  # wandb names a session by its second
    result = run(train, "--resume", out, "--train.max_steps", 12)
    assert result.exit_code == 0 and "wandb is off" not in result.out
    first, second = (path.read_bytes() for path in sorted(out.glob("wandb/offline-run-*/*.wandb")))
    trainer = json.loads((out / "checkpoints" / "step-00000012" / "trainer.json").read_text())
    assert trainer["wandb_id"].encode() in first and trainer["wandb_id"].encode() in second
    assert b"previous/1.2" in second
    for step, loss in metrics(out, "train_loss").items():
        assert repr(loss).encode() in (first if step <= 7 else second)
    for private in (sys.executable, "train.py", "name-of-host"):
        assert private.encode() not in first + second
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.parent.name != "logs"]

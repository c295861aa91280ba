"""What comes from a stranger opens no more than was asked for."""

import json
import os
import re
from pathlib import Path

import pytest

import inspect_attention
import train
from data.config import DataConfig
from data.prepare import prepare
from tests.conftest import tiny_run
from training.directory import read_metrics


def strange(run: Path, **wishes: str) -> Path:
    """Give a run the config.toml of another copy, with other values of some options."""
    content = "# not ours\n" + (run / "config.toml").read_text()
    for name, value in wishes.items():
        content = re.sub(f"^{name} = .*$", f"{name} = {json.dumps(value)}", content, flags=re.MULTILINE)
    (run / "config.toml").write_text(content)
    return run


def test_a_strange_checkpoint_names_no_folder_to_open(run, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    prepare(DataConfig(source=str(corpus_file), tokenizer="bytes"), tmp_path / "ids")
    assert run(train, *tiny_run(tmp_path / "ids", tmp_path / "run", train__max_steps=4)).exit_code == 0
    assert "tokens of its validation text" in run(inspect_attention, tmp_path / "run").out
    known = sorted((tmp_path / "prepared").rglob("*"))
    strange(tmp_path / "run")
    assert "is not here: give a text with --text" in run(inspect_attention, tmp_path / "run").err
    assert sorted((tmp_path / "prepared").rglob("*")) == known  # to look writes nothing
    (tmp_path / "run" / "config.toml").unlink()
    os.mkfifo(tmp_path / "run" / "config.toml")
    assert "is not here: give a text with --text" in run(inspect_attention, tmp_path / "run").err
    monkeypatch.setattr(Path, "resolve", lambda path: Path("/model"))  # a folder with one parent
    assert "is not here: give a text with --text" in run(inspect_attention, tmp_path / "run").err


@pytest.mark.parametrize("loss", ['"1"', "[1]", "NaN", "1e999", "1" + 400 * "0"])
def test_losses_are_numbers(tmp_path: Path, loss: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 3, "val_loss": {loss}}}\n')
    assert read_metrics(tmp_path) == []

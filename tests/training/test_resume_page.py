"""The lines of docs/resume.md: a run that is killed by its lines and resumed has the weights of an unbroken one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data.prepare import DataConfig, prepare

ROOT = Path(__file__).parents[2]
SMALL = {  # lines of configs/quickstart.toml, and what they become so that a step takes some hundredths of a second
    "context_length = 256": "context_length = 16",
    "n_embd = 128": "n_embd = 32",
    'source = "stdlib"': 'source = "corpus"',
    'tokenizer = "bpe:512"': 'tokenizer = "bytes"',
}


@pytest.mark.long
def test_the_lines_kill_resume_and_find_the_same_bits(corpus_file: Path, tmp_path: Path) -> None:
    (lines,) = re.findall(r"```shell\n(.*?)```", (ROOT / "docs" / "resume.md").read_text(encoding="utf-8"), re.DOTALL)
    config = (ROOT / "configs" / "quickstart.toml").read_text(encoding="utf-8")
    for line, small in SMALL.items():
        assert line in config
        config = config.replace(line, small)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").write_text(config, encoding="utf-8")
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    prepare(DataConfig(str(corpus_file), "bytes"), tmp_path / "corpus")

    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the same bits\n")
    assert "resumed from out/killed/checkpoints/step-00000020" in done.stdout

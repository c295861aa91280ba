"""The configuration that is chosen for a text when none is given."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from cli.options import parse
from data.prepare import DataConfig, prepare
from errors import UserError
from model import GPT, GPTConfig
from training.options import EPOCHS, FEWEST_STEPS, SIZES, TOKENS_PER_PARAMETER, Config, read_config, tokens_for
from training.options import QUICKSTART as QUICKSTART_FILE

QUICKSTART = parse(Config, [], QUICKSTART_FILE)


def text_of(megabytes: float, directory: Path) -> Path:
    """A file of that size without content."""
    path = directory / "text.txt"
    path.touch()
    os.truncate(path, round(megabytes * 1e6))
    return path


def read(*arguments: object) -> Config:
    return read_config([*map(str, arguments)])


def test_a_cpu_gets_the_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert read() == QUICKSTART
    path = text_of(100, tmp_path)
    config = read("--data.source", path, "--train.device", "cpu")
    assert config.model == QUICKSTART.model
    own = {"device": "cpu", "out_dir": "out/text", "eval_tokens": 100_000, "eval_every": 175, "checkpoint_every": 175}
    assert config.train == replace(QUICKSTART.train, sample_prompt="", **own)
    assert config.data == DataConfig(str(path), "bpe:512", val_fraction=QUICKSTART.data.val_fraction)
    line = "config: for about 100,000,000 bytes of text: 2 layers of 128, bpe:512, 1,400 steps\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    "megabytes, name, tokenizer, steps, every",
    [(0.01, "a.txt", "bytes", FEWEST_STEPS, FEWEST_STEPS), (0.1, "a.txt.gz", "bpe:512", 279, 140)],
)
def test_a_small_text_is_not_read_for_ever(
    tmp_path: Path, megabytes: float, name: str, tokenizer: str, steps: int, every: int
) -> None:
    config = read("--data.source", text_of(megabytes, tmp_path).rename(tmp_path / name), "--train.device", "cpu")
    assert (config.data.tokenizer, config.train.max_steps, config.train.eval_every) == (tokenizer, steps, every)


@pytest.mark.parametrize("megabytes, depth", [(3, 2), (100, 6), (20_000, 12)])
def test_a_gpu_gets_as_many_layers_as_the_text_can_fill(tmp_path, monkeypatch, megabytes: float, depth: int) -> None:
    monkeypatch.setattr("training.options.find_device", torch.device)  # as if there were one
    config = read("--data.source", text_of(megabytes, tmp_path), "--train.device", "cuda")
    assert config.model.n_layer == depth and not config.train.sharp_first_layer
    wanted = {size[0]: tokens_for(*size) for size in SIZES}
    with torch.device("meta"):
        model = GPT(GPTConfig(**asdict(config.model), vocab_size=17))
    num_parameters = sum(p.numel() for p in model.blocks.parameters())
    assert wanted[depth] == pytest.approx(TOKENS_PER_PARAMETER * num_parameters, rel=0.1)
    readable = EPOCHS * megabytes * 1e6 / 3.5
    c = config.train
    tokens = c.batch_size * c.grad_accum_steps * config.model.context_length * c.max_steps
    assert tokens == pytest.approx(min(wanted[depth], readable), rel=0.01)
    assert all(wanted[larger] > readable for larger in wanted if larger > depth)


def test_the_size_of_a_hub_data_set_is_unknown(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("training.options.find_device", torch.device)
    config = read("--data.source", "hf:some/where:part@main", "--train.device", "cuda")
    assert (config.train.out_dir, config.model.n_layer) == ("out/where-part-main", 2)
    assert capsys.readouterr().out.startswith("config: for a text of unknown size: 2 layers")
    config = read("--data.source", "hf:some/where", "--train.device", "cuda", "--data.max_tokens", 30_000_000)
    assert config.model.n_layer == 6


def test_options_win_and_the_rest_fits_them(tmp_path: Path, corpus_file: Path, capsys) -> None:
    path = text_of(0.6, tmp_path)
    config = read("--data.source", path, "--model.n_layer", 3, "--train.max_steps", 9, "--data.tokenizer", "chars")
    assert (config.model.n_layer, config.model.n_embd, config.train.max_steps) == (3, 128, 9)
    assert config.data.tokenizer == "chars"
    said = "config: for about 600,000 bytes of text: 3 layers of 128, chars, 9 steps\n"
    assert (
        capsys.readouterr().out
        == said + "note: a warmup of 20 steps is longer than the run of 9: it is shortened to 0\n"
    )
    prepare(DataConfig(str(corpus_file), "chars"), tmp_path / "prepared")
    assert read("--data.source", tmp_path / "prepared").data.tokenizer == "chars"


def test_a_text_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no text found"):
        read("--data.source", tmp_path / "nowhere")
    monkeypatch.setenv("RANK", "1")  # under torchrun nothing is chosen
    assert read("--data.source", tmp_path / "nowhere").model == QUICKSTART.model

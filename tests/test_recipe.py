"""What is chosen for a text when no configuration is given."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import data
import train
from configs import ConfigError, parse
from data.prepare import DataConfig, prepare
from model import GPT, GPTConfig
from training.config import TrainError
from training.recipe import EPOCHS, FEWEST_STEPS, SHAPES, TOKENS_PER_PARAMETER, tokens_for

QUICKSTART = parse(train.Config, [], train.QUICKSTART)


def text_of(megabytes: float, directory: Path) -> Path:
    """A file of that size, with nothing in it."""
    path = directory / "text.txt"
    path.touch()
    os.truncate(path, round(megabytes * 1e6))
    return path


def wanted(depth: int) -> int:
    return tokens_for(depth, SHAPES[depth].n_embd)


def read(*arguments: object) -> train.Config:
    return train.read_config([*map(str, arguments)])


def tokens(config: train.Config) -> int:
    c = config.train
    return c.batch_size * c.grad_accum_steps * config.model.context_length * c.max_steps


def test_without_a_text_it_is_the_quickstart() -> None:
    assert read() == QUICKSTART and read("--train.max_steps", 7).train.max_steps == 7


def test_a_cpu_gets_the_quickstart_for_a_large_text(tmp_path: Path) -> None:
    path = text_of(100, tmp_path)
    config = read("--data.source", path, "--train.device", "cpu")
    assert config.model == QUICKSTART.model
    own = {"device": "cpu", "out_dir": "out/text", "eval_tokens": 200_000, "eval_every": 100, "checkpoint_every": 100}
    assert config.train == replace(QUICKSTART.train, **own)
    assert config.data == DataConfig(str(path), "bpe:4096", val_fraction=QUICKSTART.data.val_fraction)
    assert config.why == "for a text of 100.0 MB: 4 layers of 128, bpe:4096, 480 steps, which read a part of it"


@pytest.mark.parametrize(
    "megabytes, tokenizer, steps",
    [(0.01, "bytes", FEWEST_STEPS), (0.3, "bpe:1024", 234), (0.6, "bpe:1024", 469), (1.1, "bpe:4096", 480)],
)
def test_a_small_text_is_not_read_for_ever(tmp_path: Path, megabytes: float, tokenizer: str, steps: int) -> None:
    config = read("--data.source", text_of(megabytes, tmp_path), "--train.device", "cpu")
    assert (config.data.tokenizer, config.train.max_steps) == (tokenizer, steps)


@pytest.mark.parametrize("megabytes, depth", [(1, 4), (100, 6), (1000, 8), (20_000, 12)])
def test_a_gpu_gets_as_many_layers_as_the_text_can_fill(tmp_path: Path, megabytes: float, depth: int) -> None:
    path = text_of(megabytes, tmp_path)
    config = read("--data.source", path, "--train.device", "cuda")
    assert config.model.n_layer == depth
    with torch.device("meta"):
        model = GPT(GPTConfig(**asdict(config.model), vocab_size=17))
    num_parameters = sum(p.numel() for block in model.blocks for p in block.parameters())
    assert wanted(depth) == TOKENS_PER_PARAMETER * num_parameters
    times_read = tokens(config) / (path.stat().st_size / 3.5)
    assert times_read < 1.01 * EPOCHS * 3.5 / 2.5
    assert megabytes == 1 or tokens(config) == pytest.approx(wanted(depth), rel=1e-3)
    larger = [d for d in SHAPES if d > depth]
    assert not larger or wanted(larger[0]) > EPOCHS * megabytes * 1e6 / 3.5


def test_nobody_knows_the_size_of_a_data_set_of_the_hub() -> None:
    config = read("--data.source", "hf:some/where:part@main", "--train.device", "cuda")
    assert config.train.out_dir == "out/where"
    assert (config.model.n_layer, tokens(config)) == (4, pytest.approx(wanted(4), rel=1e-3))
    assert config.why.startswith("for a text of an unknown size: 4 layers") and config.why.endswith(" steps")
    config = read("--data.source", "hf:some/where", "--train.device", "cuda", "--data.max_tokens", 30_000_000)
    assert config.model.n_layer == 6


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    config = read("--data.source", text_of(900, tmp_path), "--train.device", "cuda", "--data.max_tokens", 300_000)
    assert (config.model.n_layer, tokens(config)) == (4, pytest.approx(EPOCHS * 300_000, rel=1e-2))


@pytest.mark.parametrize(
    "source, name", [("..", "parent"), ("*.txt", "text"), ("a@b.txt", "a-b"), ("ü.tar.gz", "ü-tar")]
)
def test_a_run_has_the_name_of_its_text(tmp_path: Path, monkeypatch, source: str, name: str) -> None:
    (tmp_path / "parent" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "parent" / "here")
    for path in ("a@b.txt", "ü.tar.gz"):
        Path(path).write_text("text")
    assert read("--data.source", source).train.out_dir == f"out/{name}"


def test_a_depth_decides_on_any_device(tmp_path: Path) -> None:
    path = text_of(3000, tmp_path)
    for device in ("cpu", "cuda"):
        config = read("--data.source", path, "--depth", 8, "--train.device", device)
        assert (config.model.n_layer, config.model.n_embd) == (8, 512) and tokens(config) == wanted(8)
    assert read("--depth", 6, "--verify_resume").model.n_layer == 6  # of the standard library


def test_a_user_knows_better(tmp_path: Path) -> None:
    path = text_of(0.6, tmp_path)
    config = read("--data.source", path, "--model.n_layer", 3, "--train.max_steps", 9, "--data.tokenizer", "chars")
    assert (config.model.n_layer, config.model.n_embd, config.train.max_steps) == (3, 128, 9)
    assert config.data.tokenizer == "chars" and "3 layers of 128, chars, 9 steps" in config.why
    path, half = text_of(0.2, tmp_path), ("--train.batch_size", 8, "--model.context_length", 64)
    few, many = (read("--data.source", path, "--train.device", "cpu", *options) for options in ((), half))
    assert tokens(few) == pytest.approx(tokens(many), rel=1e-2)  # in more steps, as the batches are smaller


def test_a_prepared_text_keeps_its_tokenizer(tmp_path: Path, corpus_file: Path) -> None:
    prepare(DataConfig(str(corpus_file), "chars"), tmp_path / "there")
    assert read("--data.source", tmp_path / "there").data.tokenizer == "chars"


def test_what_was_chosen_is_said_and_kept(run, tmp_path: Path, corpus_file: Path) -> None:
    options = ("--data.source", corpus_file, "--train.out_dir", tmp_path / "run", "--train.max_steps", 3)
    result = run(train, *options, "--model.n_embd", 40, "--train.device", "cpu")
    said = "for a text of 3.9 kB: 4 layers of 40, bytes, 3 steps, which read it 1.6 times"
    assert result.out.startswith(f"config: {said}\n")
    again = parse(train.Config, [], tmp_path / "run" / "config.toml")
    assert (again.model.n_layer, again.model.n_embd, again.data.tokenizer) == (4, 40, "bytes") and not again.why


def test_ranks_choose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert read().model == QUICKSTART.model
    config = read("--data.source", tmp_path / "nowhere")
    assert config.model == QUICKSTART.model and config.why.startswith("quickstart.toml: several processes")
    with pytest.raises(ConfigError, match="not with another one, train.init_from or torchrun"):
        read("--depth", 4)


def test_what_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    for depth in (5, 0):
        with pytest.raises(TrainError, match=f"depth must be one of 4, 6, 8, 12, got {depth}"):
            read("--depth", depth)
    with pytest.raises(ConfigError, match="--depth chooses a configuration"):
        read("--depth", 4, train.QUICKSTART)
    with pytest.raises(data.DataError, match="no text found"):
        read("--data.source", tmp_path / "nowhere")

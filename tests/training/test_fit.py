"""What is chosen for a text, and that an option means the same wherever it is written."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tomli_w
import torch

import train
from cli.options import parse
from data.prepare import DataConfig, prepare
from errors import UserError
from model import GPT, GPTConfig
from tests.conftest import ROOT
from training.options import (
    EPOCHS,
    FEWEST_STEPS,
    SIZES,
    TOKENS_PER_PARAMETER,
    Config,
    fit_to_text,
    read_config,
    tables,
    tokens_for,
)
from training.options import QUICKSTART as QUICKSTART_FILE
from training.run import warn_of_logits

QUICKSTART = parse(Config, [], QUICKSTART_FILE)
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.toml")) if path.stem != "finetune"]


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
    assert capsys.readouterr().out == "config: configs/quickstart.toml\n"
    path = text_of(100, tmp_path)
    config = fit_to_text(read("--data.source", path, "--train.device", "cpu"), 50_000_003, on_gpu=False)
    assert config.model == QUICKSTART.model
    own = {"device": "cpu", "out_dir": "out/text", "eval_tokens": 100_000, "eval_every": 175, "checkpoint_every": 175}
    assert config.train == replace(QUICKSTART.train, sample_prompt="", **own)
    assert config.data == DataConfig(str(path), "bpe:512", val_fraction=QUICKSTART.data.val_fraction)
    line = "config: for 50,000,003 tokens to train on: 2 layers of 128, bpe:512, 1,400 steps\n"
    assert capsys.readouterr().out == "config: configs/quickstart.toml\n" + line


@pytest.mark.parametrize("tokens, steps, every", [(10_007, FEWEST_STEPS, FEWEST_STEPS), (142_857, 279, 140)])
def test_a_small_text_is_not_read_for_ever(tmp_path: Path, tokens: int, steps: int, every: int) -> None:
    config = fit_to_text(read("--data.source", text_of(1, tmp_path), "--train.device", "cpu"), tokens, on_gpu=False)
    assert (config.train.max_steps, config.train.eval_every) == (steps, every)


@pytest.mark.parametrize(
    "megabytes, name, tokenizer", [(0.01, "a.txt", "bytes"), (0.1, "a.txt.gz", "bpe:512"), (700, "a.txt", "bpe:512")]
)
def test_a_tokenizer_fits_the_size_of_the_files(tmp_path: Path, megabytes: float, name: str, tokenizer: str) -> None:
    path = text_of(megabytes, tmp_path).rename(tmp_path / name)
    assert read("--data.source", path, "--train.device", "cpu").data.tokenizer == tokenizer


@pytest.mark.parametrize("millions, depth", [(1, 2), (29, 6), (5714, 12)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gpu_gets_as_many_layers_as_the_text_can_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, millions: int, depth: int, ranks: int
) -> None:
    monkeypatch.setattr("training.options.find_device", torch.device)  # as if there were one
    config = read("--data.source", text_of(3, tmp_path), "--train.device", "cuda")
    config = fit_to_text(config, millions * 1_000_000, on_gpu=True, world=ranks)
    assert config.model.n_layer == depth and not config.train.sharp_first_layer
    wanted = {size[0]: tokens_for(*size) for size in SIZES}
    with torch.device("meta"):
        model = GPT(GPTConfig(**asdict(config.model), vocab_size=17))
    num_parameters = sum(p.numel() for p in model.blocks.parameters())
    assert wanted[depth] == pytest.approx(TOKENS_PER_PARAMETER * num_parameters, rel=0.1)
    readable = EPOCHS * millions * 1e6
    c = config.train
    assert c.grad_accum_steps % ranks == 0
    tokens = c.batch_size * c.grad_accum_steps * config.model.context_length * c.max_steps
    assert tokens == pytest.approx(min(wanted[depth], readable), rel=0.02)
    assert all(wanted[larger] > readable for larger in wanted if larger > depth)


def test_options_win_and_the_rest_fits_them(tmp_path: Path, corpus_file: Path, capsys) -> None:
    path = text_of(0.6, tmp_path)
    config = read("--data.source", path, "--model.n_layer", 3, "--train.max-steps=9", "--data.tokenizer", "chars")
    config = fit_to_text(config, 600_000, on_gpu=False)
    assert (config.model.n_layer, config.model.n_embd, config.train.max_steps) == (3, 128, 9)
    assert (config.data.tokenizer, config.train.eval_every) == ("chars", 9)
    said = "config: for 600,000 tokens to train on: 3 layers of 128, chars, 9 steps\n"
    said += "note: a warmup of 20 steps is longer than the run of 9: it is shortened to 0\n"
    assert capsys.readouterr().out == "config: configs/quickstart.toml\n" + said
    config = fit_to_text(read("--data.source", path, "--train.batch_size", 16), 10**9, on_gpu=False)
    assert (config.train.batch_size, config.train.max_steps) == (16, 700)
    prepare(DataConfig(str(corpus_file), "chars"), tmp_path / "prepared")
    assert read("--data.source", tmp_path / "prepared").data.tokenizer == "chars"
    assert read("--data.source", "hf:some/where:part@main").train.out_dir == "out/where-part-main"


def test_an_option_means_the_same_in_a_file_on_the_command_line_and_in_both(tmp_path: Path) -> None:
    options = {
        "model": {"n_layer": 3, "n_head": 4, "tied": True},
        "data": {"source": str(text_of(0.6, tmp_path))},
        "train": {"max_steps": 300, "learning_rate": 0.005},
    }
    words = [f"--{table}.{name}={value}" for table, values in options.items() for name, value in values.items()]
    words = [word.replace("=True", "=true") for word in words]
    found = []
    for split in (0, 3, len(words)):
        in_file = {word.partition("=")[0][2:] for word in words[split:]}
        kept = {
            table: {name: value for name, value in values.items() if f"{table}.{name}" in in_file}
            for table, values in options.items()
        }
        file = tmp_path / f"{split}.toml"
        file.write_text(tomli_w.dumps({table: values for table, values in kept.items() if values}) or "")
        arguments = [*([file] if in_file else []), *words[:split]]
        found.append(tables(fit_to_text(read(*arguments), 200_003, on_gpu=False)))
    assert found[0] == found[1] == found[2]
    assert found[0]["model"] | options["model"] | {"n_embd": 128, "family": "qwen3"} == found[0]["model"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_shipped_configuration_names_all_that_it_means(
    path: Path, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.options.find_device", lambda name: torch.device("cuda" if on_gpu else "cpu"))
    alone = parse(Config, [], path)  # over the defaults of the dataclasses
    for num_tokens in (100_003, 10**10):
        found = fit_to_text(read(path), num_tokens, on_gpu)
        without_meaning = {"decay_fraction": 0.4} if alone.train.schedule == "cosine" else {}
        if alone.model.family != "qwen3":
            without_meaning["sharp_first_layer"] = False
        rope = {"rope_theta": alone.model.rope_theta} if alone.model.family == "gpt2" else {}
        tied = alone.model.tied is None and alone.model.family != "nanochat"
        assert replace(found.train, **without_meaning) == alone.train and found.data == alone.data
        assert replace(found.model, **rope) == replace(alone.model, **({"tied": True} if tied else {}))


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text found"):
        read("--data.source", tmp_path / "nowhere")


def test_a_prompt_that_the_tokenizer_cannot_write_is_left_out(run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "text.txt").write_text("abc cab\n" * 999)
    monkeypatch.chdir(tmp_path)
    sizes = (
        "--train.max_steps=1 --train.out_dir=run --model.n_embd=32 --train.device=cpu --train.sample_tokens=5".split()
    )
    result = run(train, QUICKSTART_FILE, "--data.source=text.txt", "--data.tokenizer=chars", *sizes).ok()
    assert "note: samples begin a document, since train.sample_prompt cannot" in result.out


def test_logits_that_do_not_fit_are_said_before(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}.get)  # 4 GiB
    warn_of_logits(10, 256 * 50257)
    assert capsys.readouterr().out == ""
    warn_of_logits(32, 256 * 50257)
    assert "32 sequences take 6.6 GB in training; 10 fit: --train.batch_size 10" in capsys.readouterr().out

"""Options: the command line over a file over defaults, strict, and nothing wrong that would stay unseen."""

import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

import inspect_attention
import sample
import train
from cli.options import parse
from data.batches import seed_for
from data.prepare import prepare
from data.sources import DataConfig
from errors import UserError
from model import GPT, GPTConfig
from model.checkpoint import step_directories
from model.sampling import Sampler
from tests.conftest import ROOT
from training.config import TrainConfig
from training.options import Config, read_config, to_toml

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def test_command_line_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a b.txt").touch()
    file = tmp_path / "some.toml"
    file.write_text('[model]\nn_layer = 3\nbias = false\n[train]\nlearning_rate = 6e-4\n[data]\nsource = "a b.txt"\n')
    config = read_config([str(file), "--model.n_layer", "5", "--train.max-steps", "7"])
    assert (config.model.n_layer, config.model.bias, config.model.n_head) == (5, False, 4)
    assert (config.train.learning_rate, config.train.max_steps) == (6e-4, 7)
    before = read_config(["--local-rank=1", "--model.n_layer", "5", "--train.max_steps", "7", str(file)])
    prompt = "train.py --data.source a.txt --data.source b.txt"  # is a text, and gives no source twice
    assert read_config([f"--train.sample_prompt={prompt}"]).train.sample_prompt == prompt
    assert before == config  # wherever the file stands


def test_a_resolved_config_reads_back(tmp_path: Path) -> None:
    table = replace(TrainConfig(), compile="true", sample_prompt="".join(map(chr, range(0x3000))) + "\U0001f600")
    config = replace(Config(), train=table)
    (tmp_path / "config.toml").write_bytes(to_toml(config).encode())
    assert parse(Config, [], tmp_path / "config.toml") == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_builds(path: Path) -> None:
    config = parse(Config, [], path)
    assert config.train.out_dir == f"out/{path.stem}"
    if not config.train.init_from:  # else the shape is that model's
        with torch.device("meta"):
            GPT(GPTConfig(**vars(config.model), vocab_size=257))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--train.max_stesp", "5"], "Perhaps you meant: --train.max_steps INT"),
        (["--train.sample_prompt", "--x"], "Missing value for argument '--train.sample_prompt'"),
        (["--train.sample_prompt", "--it's"], "if a value begins with a dash, write = before it, as in --prompt="),
        (["--data.source", "a.txt", "--data.source=b.txt"], "--data.source was given twice: give a folder"),
        (["--data.source", "caf\udce9.txt"], "names and texts in UTF-8: rename the file or folder: UnicodeEncodeError"),
        (["--model.n_head", "5"], "n_embd must be a multiple of n_head, got n_embd=128 and n_head=5"),
        (["nowhere.toml"], "there is no file nowhere.toml; to train on a text: --data.source nowhere.toml"),
        (["README.md"], "to train on a text: --data.source README.md"),
        (["configs/quickstart.toml", "--resume", "out/x"], "--resume takes configuration and directory from the run"),
        (
            ["--resume", "out/x", "--train.out-dir", "out/run"],
            "--resume takes configuration and directory from the run",
        ),
        (["--resume", "nowhere"], "there is no run in nowhere: a run has"),
        (["--train.out_dir="], "--train.out_dir and --train.init_from must be paths"),  # not this folder
        (["--data.source="], "no text found at ''"),
        (["\u2013-train.max_steps", "5"], "\u2013-train.max_steps begins with a long dash, as copied from a web page"),
        (["\u2014\u2014data.source=a.txt"], "type -- instead"),
        ([""], "there is no file ."),
        (["--resume", "~somebody-else/run"], "there is no run in ~somebody-else/run: a run has"),
    ],
)
def test_a_wrong_option_is_said(run, monkeypatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(ROOT)
    result = run(train, *arguments)
    assert result.exit_code == 2 and not result.out and message in re.sub(r"[\s│─]+", " ", result.err)


@pytest.mark.parametrize(
    "content, message",
    [
        ("[train]\nmax_stesp = 5", "--train.max_steps INT"),
        ("[model]\nvocab_size = 5", "--model.vocab_size"),  # the tokenizer's
        ("max_steps = 5", "max_steps must be inside a table such as [train]"),
        ("[Prologue]\n", "no options"),  # a text, or the rest of a file that was lost
    ],
)
def test_a_wrong_file_is_named(run, tmp_path: Path, monkeypatch, content: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.toml").write_text(content)
    result = run(train, "some.toml", "--train.max_steps", "3")
    assert result.exit_code == 2 and "some.toml" in result.err and message in re.sub(r"[\s│]+", " ", result.err)


def test_a_file_of_another_editor_is_read_as_this_one(tmp_path: Path) -> None:
    file = tmp_path / "MY.conf"
    text = '[data]\r\nsource = "a"\r\n'
    file.write_bytes(text.encode("utf-8-sig"))
    assert parse(Config, [], file).data.source == "a"
    file.write_bytes(text.encode("utf-16"))
    with pytest.raises(UserError, match="MY.conf cannot be read as TOML in UTF-8"):
        parse(Config, [], file)


TABLES = {  # dataclass -> options without which it cannot be
    GPTConfig: {"family": "gpt2", "n_head": 1, "n_embd": 1},
    DataConfig: {},
    TrainConfig: {},
    sample.Options: {"checkpoint": "a"},
    Sampler: {},
}
HINTS = [(table, name, {hint, *get_args(hint)}) for table in TABLES for name, hint in get_type_hints(table).items()]
NUMBERS = [(table, name) for table, name, kinds in HINTS if {int, float} & kinds]
NOT_0 = "batch_size grad_accum_steps max_steps eval_every learning_rate n_layer n_head context_length".split()
OUTSIDE = dict.fromkeys(NOT_0, 0) | {"beta2": 1, "momentum": 1, "decay_fraction": 1.1, "final_lr_fraction": 1.1}


def test_all_bits_of_a_seed_count() -> None:
    """PyTorch's generator on a CPU keeps 32; a training hashes its seed."""
    for options in (partial(sample.Options, "a"), partial(inspect_attention.Options, ("a",))):
        assert options(seed=2**32 - 1)
        with pytest.raises(UserError, match="^seed must be a number from 0 to 4,294,967,295, got 4294967297$"):
            options(seed=2**32 + 1)
    assert TrainConfig(seed=2**32 + 1) and seed_for(1, "weights") % 2**32 != seed_for(2**32 + 1, "weights") % 2**32


@pytest.mark.parametrize("table, name", NUMBERS)
def test_no_number_is_negative_or_endless_or_out_of_its_range(table: type, name: str) -> None:
    for value in (-1, math.inf, math.nan, OUTSIDE.get(name, -1)):
        with pytest.raises(UserError, match=f"^{name} must be a number (from|of at least) .*, got {value}$"):
            table(**TABLES[table] | {name: value})


def test_a_path_may_begin_in_the_home_folder(run, straight: Path, corpus_file: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenizer = "~/straight/checkpoints/step-00000012/tokenizer.json"
    assert prepare(DataConfig("~/corpus.txt", tokenizer), "~/corpus").directory == tmp_path / "corpus"
    (tmp_path / "a.toml").write_text(
        "[data]\nsource = '~/corpus.txt'\ntokenizer = 'model'\n[train]\nout_dir = '~/run'\n"
    )
    tune = "--train.init_from=~/straight --train.max_steps=1 --train.batch_size=1 --train.eval_tokens=99".split()
    for words in ([tmp_path / "a.toml", *tune], ["--resume=~/run", "--train.max_steps=2"]):
        run(train, *words).ok()
    assert [path.name[-1] for path in step_directories(tmp_path / "run")] == ["2", "1"]


def test_none_is_a_text_for_a_text_and_nothing_for_a_number() -> None:
    options = parse(sample.Options, ["a", "--prompt", "\u2014so no", "--stop=None", "--top_k", "None", "--device=--x"])
    assert (options.prompt, options.stop, options.sampler.top_k) == (("\u2014so no",), ("None",), None)
    assert options.device == "--x"


@pytest.mark.parametrize("script", [train, sample, inspect_attention])
def test_help_explains_every_option(run, script) -> None:
    result = run(script, "--help").ok()
    assert "(default:" in result.out and script.__doc__.splitlines()[0] in result.out
    assert all(len(line) <= 80 for line in result.out.splitlines())


def test_who_wants_no_colours_gets_none(run, monkeypatch) -> None:
    for no_color, is_terminal, colours in (("", True, True), ("1", True, False), ("", False, False)):
        for name, value in (("TERM", "xterm"), ("NO_COLOR", no_color)):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", partial(bool, is_terminal), raising=False)
        assert ("\x1b" in run(train, "--help").out, "\x1b" in run(train, "--x").err) == (colours, colours)


def test_help_shows_the_defaults_that_would_apply(run) -> None:
    path = ROOT / "configs" / "shakespeare_char.toml"
    assert "Number of transformer blocks. (default: 6)" in run(train, path, "-h").out

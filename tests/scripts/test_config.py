"""Options: file under command line, strict, and wrong ones answered in one sentence."""

import errno
import io
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

import inspect_attention
import sample
import train
from cli.options import parse
from cli.script import run_script
from data.config import DataConfig
from errors import UserError
from inspection.inspection import save
from model import GPT, GPTConfig
from model.sampling import Sampler
from training.config import TrainConfig
from training.options import Config, read_config, to_toml

ROOT = Path(__file__).parents[2]
GOLDEN = "tests/model/golden/format-3"
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def test_a_wrong_option_is_one_sentence_on_a_terminal_too(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    result = run(sample, "out/x", "--propmt", "text")
    expected = "sample.py: Unrecognized options: --propmt, text; did you mean --prompt? (--help lists all)\n"
    assert result.exit_code == 2 and result.err == expected


def test_command_line_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(
        '[model]\nn_layer = 3\nbias = false\n[train]\nlearning_rate = 6e-4\n[data]\nsource = "my text.txt"\n'
    )
    config = read_config([str(file), "--model.n_layer", "5", "--train.max-steps", "7"])
    assert (config.model.n_layer, config.model.bias, config.model.n_head) == (5, False, 12)
    assert (config.train.learning_rate, config.train.max_steps) == (6e-4, 7)
    before = read_config(["--model.n_layer", "5", "--train.max_steps", "7", str(file)])
    assert before == config  # wherever the file stands


def test_a_resolved_config_reads_back(tmp_path: Path) -> None:
    table = replace(TrainConfig(), compile=True, sample_prompt="".join(map(chr, range(0x3000))) + "\U0001f600")
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
        (["--train.max_stesp", "5"], "--train.max_stesp, 5; did you mean --train.max_steps?"),
        (["--train.max_steps", "0"], "max_steps must be a whole number from 1 to 99,999,999, got 0"),
        (["--train.max_steps", "x" * 40_000], "--train.max_steps: expected INT, got 'xxxx"),
        (
            ["--train.dtype", "x" * 40_000],
            "--train.dtype: expected one of 'auto', 'float32', 'bfloat16', 'float16', got 'xxxx",
        ),
        (["--train." + "x" * 40_000, "5"], "Unrecognized options: --train.xxxx"),
        (["--train.sample_prompt", "--x"], "sample_prompt needs a value (see --help); with a dash first: --train."),
        (["--data.source", "\udcfc"], ": PYTHONUTF8=1 or LANG=C.UTF-8 set UTF-8"),
        (["nowhere.toml"], "nowhere.toml: cannot be read as TOML in UTF-8: No such file or directory\n"),
        (["nowhere.txt"], "No such file or directory; to train on a text: --data.source nowhere.txt"),
        (["tests"], "in UTF-8: Is a directory; to train on a text: --data.source tests"),
        (["README.md"], "README.md: cannot be read as TOML in UTF-8: Expected '=' after a key"),
        (["configs/quickstart.toml", "--resume", "out/x"], "--resume takes configuration and directory from the run"),
        (["--resume", "nowhere"], "nowhere is not the directory of a run: it has no config.toml"),
        (["--resume", f"{GOLDEN}/step-00000003"], "of a run with such a checkpoint, give the directory"),
    ],
)
def test_wrong_options_get_one_sentence(run, arguments: list[str], message: str) -> None:
    result = run(train, *arguments)
    assert result.exit_code == 2 and message in result.err
    assert result.err.count("\n") == 1 and not result.out and len(result.err) < 200


@pytest.mark.parametrize(
    "content, message",
    [
        ("[train]\nmax_stesp = 5", "--train.max_stesp=5; did you mean --train.max_steps"),
        ("[model]\nvocab_size = 5", "--model.vocab_size"),  # the tokenizer's
        ("max_steps = 5", "max_steps must be inside a table such as [train]"),
        ("max_steps == 5", "cannot be read as TOML"),
        ("# nothing", "no options in it"),
        ("[Prologue]\n", "no options in it"),  # a text
        (f"{'x' * 40_000} = 5", f"{'x' * 60} must be inside a table"),
        ("[data]\nsource = ['a', 'b']", "data.source must be a text, a number, true or false, got ['a', 'b']"),
        ("[data.source]\na = 2020-01-01", "data.source must be a text, a number, true or false, got {'a': datetime"),
        ("[train]\nbeta2 = nan", "beta2 must be a number from 0 to 0.9999999, got nan"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "some.toml").write_text(content)
    with pytest.raises(UserError, match=f"some.toml: .*{re.escape(message)}"):
        read_config([str(tmp_path / "some.toml"), "--train.max_steps", "3"])


def test_a_file_of_another_editor_is_read_as_this_one(tmp_path: Path) -> None:
    file = tmp_path / "MY.conf"
    text = '[data]\r\nsource = "a"\r\n'
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_bytes(text.encode(encoding))
        assert parse(Config, [], file).data.source == "a"
    file.write_bytes(text.encode("utf-16"))
    with pytest.raises(UserError, match="MY.conf: cannot be read as TOML in UTF-8"):
        parse(Config, [], file)


TABLES = {  # dataclass -> options without which it cannot be
    GPTConfig: ["--family=gpt2", "--n_head=1", "--n_embd=1"],
    DataConfig: [],
    TrainConfig: [],
    sample.Options: ["a"],
    inspect_attention.Options: ["a"],
}
HINTS = [(table, name, {hint, *get_args(hint)}) for table in TABLES for name, hint in get_type_hints(table).items()]
NUMBERS = [(table, name) for table, name, kinds in HINTS if {int, float} & kinds]
MAY_BE_0 = {
    "dropout",
    "norm_eps",
    "seed",
    "warmup_steps",
    "decay_fraction",
    "final_lr_fraction",
    "weight_decay",
    "beta2",
}
MAY_BE_0 |= {"grad_clip", "sample_tokens", "temperature", "min_p"}
BELOW_1 = {"dropout", "val_fraction", "beta2"}


@pytest.mark.parametrize("table, name", NUMBERS)
def test_every_number_has_a_range(table: type, name: str) -> None:
    taken = []
    for value in ("", "nan", "inf", "-inf", "1e99", "-1", "0", "1", str(10**40)):
        try:
            parse(table, [*TABLES[table], f"--{name}={value}"])
            taken.append(value)
        except UserError as error:
            number = f"{name} must be a (whole )?number from [\\d.e-]+ to [\\d.,e+]+, got "
            assert re.match(f"{number}|--{name}: expected (INT|FLOAT), got ('|an empty text)", str(error)), error
    assert taken == ["0"] * (name in MAY_BE_0) + ["1"] * (name not in BELOW_1)


PATHS = ["data.source", "data.val_source", "data.tokenizer", "train.out_dir", "train.init_from", "resume", "config"]


@pytest.mark.parametrize("option", PATHS)
def test_a_path_may_begin_in_the_home_folder_and_is_not_empty(option: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/some/home")
    table, _, name = option.partition(".")

    def given(value: str) -> Config:
        if name:
            (tmp_path / "a.toml").write_text(f"[{table}]\n{name} = '{value}'\n")
            assert parse(Config, [f"--{option}={value}"]) == parse(Config, [], tmp_path / "a.toml")
        return parse(Config, [value] if option == "config" else [f"--{option}={value}"])

    paths = {"~/a": "/some/home/a", "None": "None"}
    for value, path in (paths | ({"-a": os.path.abspath("-a")} if name else {})).items():
        found = getattr(given(value), table)
        assert str(getattr(found, name) if name else found) == path
    with pytest.raises(UserError, match=rf"(?i){option}.*: expected PATH, got an empty text"):
        given("")


@pytest.mark.parametrize("options, taken", [({"temperature": 0.8, "top_k": 3}, True), ({"top_k": 3.0}, False)])
def test_numbers_of_numpy_are_numbers(options: dict, taken: bool) -> None:
    with nullcontext() if taken else pytest.raises(UserError, match="top_k must be a whole number"):
        Sampler(**{name: np.array(value)[()] for name, value in options.items()})


def test_none_is_a_text_for_a_text_and_nothing_for_a_number() -> None:
    options = parse(sample.Options, ["a", "--prompt", "None", "--stop", "None", "--top_k", "None", "--device=--x"])
    assert (options.prompt, options.stop, options.top_k, options.device) == ("None", "None", None, "--x")


@pytest.mark.parametrize("script", [train, sample])
def test_help_explains_every_option(run, script) -> None:
    result = run(script, "--help")
    assert result.exit_code == 0
    assert "(default:" in result.out and script.__doc__.splitlines()[0] in result.out
    assert all(len(line) <= 80 for line in result.out.splitlines())


@pytest.mark.parametrize("file, layers", [([], 2), (["configs/shakespeare_char.toml"], 6)])
def test_help_shows_the_defaults_that_would_apply(run, monkeypatch, file: list[str], layers: int) -> None:
    monkeypatch.chdir(ROOT)
    assert f"Number of transformer blocks. (default: {layers})" in run(train, *file, "-h").out


def test_a_pipe_has_each_line_at_once_and_what_is_closed_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", None)
    run_script(lambda: print("a line") or print("a note", file=sys.stderr))
    assert pipe.buffer.getvalue() == b"a line\n"
    sys.stderr.close()
    monkeypatch.setattr(sys, "stdout", None)
    run_script(lambda: print("a line"))
    sys.stdout.close()


def test_what_is_full_closed_or_missing_is_one_sentence(run, monkeypatch, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from cli.script import run_script; run_script(lambda: print('a line'))"]
    if os.path.exists("/dev/full"):  # on Linux
        with open("/dev/full", "w") as full:
            ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == 2 and re.fullmatch(r"-c: .*No space left on device\n", ended.stderr)
    monkeypatch.setattr(sys, "stdin", None)
    assert "there is no standard input to read a text from" in run(sample, "out/x", "--prompt", "-").err
    assert "checkpoint needs a value (see --help); with a dash first: ./--x" in run(sample, "-run").err
    assert run(sample).err.startswith("sample.py: PATH is missing: A checkpoint, a run (its newest")
    assert run(sample).err.endswith("on their hub. (required)\n")

    def full(*inspections: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("inspection.page.render", full)
    with pytest.raises(UserError, match=re.escape(f"cannot write {tmp_path / 'a.html'}: the disk is full")):
        save(tmp_path / "a.html", [None])

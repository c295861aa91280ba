"""What comes from a stranger reads, sends and shows no more than was asked for."""

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import inspect_attention
import sample
import train
from cli.script import Screen, fail, read_prompt
from data.config import DataConfig
from data.prepare import prepare
from errors import UserError
from model.checkpoint import with_own_hash
from tests.conftest import tiny_run
from training.directory import read_metrics
from training.options import read_config


def strange(run: Path, **wishes: str) -> Path:
    """Give a run the config.toml of another copy, with other values of some options."""
    content = "# not ours\n" + (run / "config.toml").read_text()
    for name, value in wishes.items():
        content = re.sub(f"^{name} = .*$", f"{name} = {json.dumps(value)}", content, flags=re.MULTILINE)
    (run / "config.toml").write_text(content)
    return run


def resumed(run: Path, *options: str) -> str:
    """The source of the resumed run, or what is said in place of it."""
    try:
        return read_config(["--resume", str(run), *options]).data.source
    except UserError as error:
        return str(error)


def test_a_run_of_this_copy_goes_on_wherever_it_is(straight: Path, tmp_path: Path) -> None:
    source = resumed(straight)
    assert source.endswith("/corpus.txt")
    moved = shutil.move(straight, tmp_path / "moved")
    assert resumed(moved, "--train.wandb", "offline") == source
    shutil.rmtree(tmp_path / "prepared")
    said = resumed(moved)
    assert "an earlier version, another copy" in said and said.endswith(f"add this once: --data.source {source}")
    assert resumed(moved, "--data.source", source) == source


@pytest.mark.parametrize(
    "wishes, options",
    [
        ({"source": "hf:someone/letters"}, ["--data.source", "hf:someone/letters"]),
        ({"source": "bytes"}, ["--data.source", "bytes"]),  # no tokenizer
        ({"wandb": "online"}, ["--train.wandb", "online"]),
        ({"tokenizer": "/etc/hostname"}, ["--data.tokenizer", "/etc/hostname"]),
        ({"tokenizer": "bpe:512"}, []),
    ],
)
def test_a_strange_run_is_asked_about(straight: Path, wishes: dict[str, str], options: list[str]) -> None:
    wishes = {"source": "stdlib", **wishes}
    strange(straight, **wishes)
    assert resumed(straight, *options) == wishes["source"]
    assert not options or resumed(straight).endswith(f"add this once: {' '.join(options)}")


def test_what_was_allowed_is_not_asked_again(run, straight: Path) -> None:
    more, source = ("--resume", straight, "--train.max_steps", 13), resumed(straight)
    strange(straight)
    assert run(train, *more).exit_code == 2 and not (straight / "checkpoints" / "step-00000013").exists()
    assert run(train, *more, "--data.source", source).exit_code == 0
    assert resumed(straight) == source


def test_nothing_but_the_question_needs_a_folder_to_remember_in(run, straight: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "prepared" / ".known")
    (tmp_path / "prepared" / ".known").write_text("no folder")
    source = resumed(straight).split()[-1]
    more = ("--resume", straight, "--train.max_steps", 13, "--data.source", source)
    assert run(train, *more).exit_code == 0 and "add this once" in resumed(straight)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000012", "metrics.jsonl", "wandb"])
def test_a_strange_run_has_no_links(straight: Path, tmp_path: Path, name: str) -> None:
    if (straight / name).exists():
        shutil.move(straight / name, tmp_path / "target")
    (straight / name).symlink_to(tmp_path / "target")
    assert resumed(straight).endswith("/corpus.txt")  # those in a run of one's own are followed
    said = resumed(strange(straight, source="stdlib"))
    assert f"has {straight / name}, a link or no file: remove it, or if you made it, replace it" in said


def test_a_run_with_the_same_options_is_not_taken_for_ones_own(run, straight: Path) -> None:
    config = straight / "config.toml"
    began = config.read_bytes()
    assert run(train, "--resume", straight, "--train.max_steps", 13).exit_code == 0  # writes one of its own
    written = config.read_bytes()
    assert began != written.replace(b"max_steps = 13", b"max_steps = 12") and resumed(straight).endswith("/corpus.txt")
    config.write_bytes(written[: written.rindex(b"# ")])
    assert "add this once" in resumed(straight)


def test_a_large_configuration_is_not_parsed(straight: Path) -> None:
    with open(straight / "config.toml", "ab") as file:
        file.truncate(1 << 20)
    assert "config.toml cannot be read: it is not a file of at most 65,536 bytes" in resumed(straight)


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


def test_a_certificate_is_a_claim(run, straight: Path) -> None:
    path = straight / "checkpoints" / "step-00000012" / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("sha256")
    content["certificate"]["causal"] = "yes\ndevice: \u202eupc\x1b[8m" + 999 * "!"
    path.write_bytes(with_own_hash(content))
    line, _ = run(sample, straight, "--max_new_tokens", 3).err.splitlines()
    assert line.startswith("causal: yes device: \\u202eupc\\x1b[8m!!") and line.endswith(
        "!, says the manifest of its training"
    )
    assert len(line) < 260


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\ta猫 é🙂\n", "\ta猫 é🙂\n"),
        ("\x1b[2J\x07\x9b", "\\x1b[2J\\x07\\x9b"),
        ("a\u202eb\u2066c\u200d\u00ad\ufeff", "a\\u202eb\\u2066c\\u200d\\xad\\ufeff"),
        ("\U000e0041\u2028\u2029\udc80", "\\U000e0041\\u2028\\u2029\\udc80"),
        ("a\rb", "a\\rb"),
        ("\r 50%|\x1b[A", "\r 50%|\\x1b[A"),  # a progress bar goes on
        ("\x1b[A\x1b[A", "\x1b[A\x1b[A"),
        ("\x1b[Aa", "\\x1b[Aa"),
    ],
)
def test_nothing_that_is_printed_is_hidden(text: str, shown: str) -> None:
    stream = Screen(io.StringIO(), outlives_reader=False)
    print(text, end="", file=stream)
    assert stream.getvalue() == shown


def test_a_message_is_one_line_that_keeps_its_end(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        fail("no\n" + 10_000 * "\u200b" + ": give another", 2)
    said = capsys.readouterr().err
    assert len(said) < 500 and ": no\\n\\u200b" in said and said.endswith("\\u200b: give another\n")


@pytest.mark.parametrize(
    "content, prompt",
    [
        (b"\xef\xbb\xbfa\r\nb\r", "a\r\nb\r"),
        (b"\xff\xfea\0", "'@~/p.txt' cannot be read as text: 'utf-8'"),
        (None, "No such file"),
    ],
)
def test_a_prompt_is_read_as_a_text_to_train_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, prompt: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if content:
        (tmp_path / "p.txt").write_bytes(content)
    try:
        assert read_prompt("@~/p.txt") == prompt
    except UserError as error:
        assert prompt in str(error)

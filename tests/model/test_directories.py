"""Places that hold no model we open are named for what they are, and the hub is asked only for its own names."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

import inspect_attention
import sample
import train
from data.tokenizer import END_KEYS, make_tokenizer
from errors import UserError
from model.checkpoint import FETCHED, find_checkpoint
from tests.conftest import make_gpt, run_python, save_gpt

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "7" + "\nsize 1234567\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model as others publish it in `theirs`."""
    monkeypatch.chdir(tmp_path)
    checkpoint = save_gpt(tmp_path, 1, make_gpt(vocab_size=257), make_tokenizer("bytes", []).files)
    for name in ("manifest.json", "trainer.json", "optimizer.safetensors", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    checkpoint.rename(tmp_path / "theirs")
    return tmp_path


INDEX, SHARD = "model.safetensors.index.json", "model-00003-of-00005.safetensors"
MISSING = "theirs has no safetensors file "
BAD = [  # what takes the place of the weights or of another file
    ({"pytorch_model.bin": "{}"}, f"{MISSING}'model.safetensors': fetch all files of the model (a pickle can run code"),
    ({INDEX: json.dumps({"weight_map": {"a": SHARD}})}, f"{MISSING}'{SHARD}"),
    ({INDEX: '{"weight_map": {"a": "../b.safetensors"}}'}, f"{MISSING}'b.safetens"),
    ({INDEX: '{"weight_map": ["a"]}'}, "index.json does not say in which files the tensors are: AttributeError"),
    ({"model.safetensors": POINTER}, "theirs/model.safetensors is a pointer of Git LFS, not the file"),
    ({"config.json": None}, "theirs is no model, and no run with an intact checkpoint: it has no config.json"),
    ({"model.safetensors": None}, f"{MISSING}'model.safetensors'"),
]


@pytest.mark.parametrize("files, message", BAD)
def test_what_is_no_model_is_named(run, here: Path, monkeypatch, files: dict, message: str) -> None:
    """By every script, and before `transformers` is asked, which may be absent. None makes a pipe, which never ends."""
    if "config.json" not in files:
        (here / "theirs/model.safetensors").unlink()
    for name, content in files.items():
        path = here / "theirs" / name
        path.unlink(missing_ok=True)
        os.mkfifo(path) if content is None else path.write_text(content)
    monkeypatch.setitem(sys.modules, "transformers", None)
    (here / "text.txt").write_text("a text")
    tuned = ["--train.init_from", "theirs", "--data.source", "text.txt", "--train.out_dir", "out"]
    for script, arguments in ((sample, ["theirs"]), (inspect_attention, ["theirs", "--text", "ab"]), (train, tuned)):
        result = run(script, *arguments)
        assert result.exit_code == 2 and message in result.err and len(result.err) < 400, result.err
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    "place, asked",
    [
        ("a/b", ("a/b", None)),
        ("hf:a/b", ("a/b", None)),
        ("hf:theirs/b@v1/x", ("theirs/b", "v1/x")),
        ("a/b@v1", ("a/b", "v1")),
        *[
            (place, None)
            for place in ("./a/b", "a/b/", "/a/b", "~/a", "a\\b", "a/b/c", "hf:a", "theirs/b", "é/b", "out/b", "")
        ],
    ],
)
def test_the_hub_is_asked_only_for_its_names(here: Path, monkeypatch, place: str, asked: tuple | None) -> None:
    calls = []

    def download(*name: str | None) -> Path:
        calls.append(name)
        return here / "theirs"

    monkeypatch.setattr("model.checkpoint.download", download)
    if asked:
        assert find_checkpoint(place).directory == here / "theirs"
    else:
        with pytest.raises(UserError, match=f"there is no folder {re.escape(repr(place))} of a run or"):
            find_checkpoint(place)
    assert calls == [asked] * bool(asked)


def test_of_a_model_on_the_hub_all_is_fetched_that_is_read_or_kept_and_never_a_pickle() -> None:
    kept = {*END_KEYS, "tokenizer.json", "chat_template.jinja", "model.safetensors", INDEX, SHARD}
    fetched = filter_repo_objects([*kept, "pytorch_model.bin", "model.pt", "modeling.py"], allow_patterns=FETCHED)
    assert {*fetched} == kept


def ask(name: str, port: int, home: Path) -> subprocess.CompletedProcess:
    """Sample from a model in a process for which the hub is at this port."""
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    words = ("sample.py", name, "--prompt", "hey", "--max_new_tokens", "2")
    return run_python(*words, env=os.environ | hub, timeout=60)


@pytest.mark.long
def test_a_hub_that_cannot_be_reached_is_left_for_the_cache(here: Path) -> None:
    """At a port that is closed."""
    said = ask("somebody/theirs", 9, here / "home")
    assert said.returncode == 2 and said.stderr.count("\n") == 2, said.stderr
    assert "somebody/theirs is not here, and the Hugging Face hub did not give it" in said.stderr
    cached = here / "home/hub/models--somebody--theirs"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(40 * "a")
    shutil.copytree(here / "theirs", cached / "snapshots" / (40 * "a"))
    said = ask("somebody/theirs", 9, here / "home")
    assert said.returncode == 0 and said.stdout.startswith("hey"), said.stderr


@pytest.mark.long
def test_a_hub_that_accepts_and_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = ask("nobody/nothing", silent.getsockname()[1], tmp_path)
    assert said.returncode == 2 and said.stderr.count("\n") == 2
    assert said.stderr.startswith("there is no run nobody/nothing here: asking the Hugging Face hub\n")


@pytest.mark.parametrize("name", ["models/tiny.Q4_K_M.gguf", "trained"])
def test_what_is_near_a_model_has_a_way_to_one(run, here: Path, name: str) -> None:
    """A file of llama.cpp, and the folder of a Trainer."""
    (here / "models").mkdir()
    (here / "models/tiny.Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")
    (here / "theirs").rename(here / "trained")
    (here / "trained").rename(here / "checkpoint-100")
    (here / "trained").mkdir()
    (here / "checkpoint-100").rename(here / "trained/checkpoint-100")
    run(sample, name).refused("has no config.json (give the folder of a model, as checkpoint-500 of a Trainer; docs/")
    run(sample, "trained/checkpoint-100", "--max_new_tokens", 1).ok()

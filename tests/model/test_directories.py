"""Places that hold no model we open are named for what they are, and the hub is asked only for its own names."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

import inspect_attention
import sample
import train
from data.tokenizer import make_tokenizer, save_tokenizer
from errors import UserError
from model import GPT
from model.checkpoint import find_checkpoint
from tests.conftest import make_gpt, save_gpt

ROOT = Path(__file__).parents[2]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "7" + "\nsize 1234567\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model as others publish it in `theirs`."""
    monkeypatch.chdir(tmp_path)
    checkpoint = save_gpt(tmp_path, 1, make_gpt(vocab_size=257), {}).rename(tmp_path / "theirs")
    for name in ("manifest.json", "trainer.json", "optimizer.safetensors"):
        (checkpoint / name).unlink()
    save_tokenizer(make_tokenizer("bytes", []), checkpoint)
    (checkpoint / "tokenizer_config.json").unlink()
    return tmp_path


def advice(message: str) -> str:
    """The line of Python that a message advises to run."""
    return re.search(r'python -c "(.+?)"', message)[1]


def only(*names: str, content: str = "{}") -> Callable[[Path], None]:
    """These files in place of the weights."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        for name in names:
            (directory / name).write_text(content)

    return change


def nothing_but(*names: str) -> Callable[[Path], None]:
    """These directories in place of all files."""

    def change(directory: Path) -> None:
        for path in directory.iterdir():
            path.unlink()
        for name in names:
            (directory / name).mkdir()

    return change


def writes(name: str, content: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(content) and None


def renames(name: str, other: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).rename(directory / other) and None


def pipes(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return change


INDEX, SHARD = "model.safetensors.index.json", "model-00003-of-00005.safetensors"
PEFT = '{"base_model_name_or_path": "somebody/%s"}' % (100 * "x")
BAD = [
    (only("pytorch_model.bin"), "theirs", "theirs holds pytorch_model.bin, a pickle, which can run code: if you"),
    (only("pytorch_model-00001-of-00002.bin"), "theirs", "holds pytorch_model-00001-of-00002.bin, a pick"),
    (only("consolidated.00.pth"), "theirs", "theirs holds consolidated.00.pth, a pickle, which can run code: if"),
    (only("pytorch_model.bin"), "theirs/pytorch_model.bin", "[c.from_pretrained('DIRECTORY').save_pretrained('NEW')"),
    (only("ckpt.pt"), "theirs/ckpt.pt", "theirs holds ckpt.pt, a pickle"),
    (only("tf_model.h5"), "theirs", "theirs holds tf_model.h5, weights of TensorFlow or Flax: convert them by"),
    (only("flax_model.msgpack"), "theirs", "theirs holds flax_model.msgpack, weights of TensorFlow or Flax"),
    (only("a.Q4_0.gguf"), "theirs", "theirs holds a.Q4_0.gguf, a GGUF, for llama.cpp: docs/other_tools.md says"),
    (only("a.Q4_0.gguf"), "theirs/a.Q4_0.gguf", "theirs holds a.Q4_0.gguf, a GGUF, for llama.cpp"),
    (only("a.Q4_0.GGUF"), "theirs", "theirs holds a.Q4_0.GGUF, a GGUF, for llama.cpp"),
    (only("train.bin", "meta.json"), "theirs", "holds train.bin, so it is a prepared corpus, and no model\n"),
    (only("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"), "theirs", "has no model.safetensors, "
     "so it is no model: it holds config.json, optimizer.pt, rng_state.pth, scheduler.pt, ...\n"),
    (only("adapter_model.safetensors"), "theirs", "theirs holds adapter_model.safetensors, an adapter of peft: merge"),
    (only(), "theirs", "theirs has no model.safetensors, so it is no model: it holds config.json, tokenizer.json\n"),
    (only(SHARD), "theirs", f"theirs/{INDEX} is not a file, and theirs needs it"),
    (only(INDEX, content=json.dumps({"weight_map": {"a": SHARD}})), "theirs", f"theirs/{SHARD} is not a file"),
    (only(INDEX, content='{"weight_map": {"a": "../b.safetensors"}}'), "theirs", "names a file that is not a safetens"),
    (only("adapter_config.json", content=PEFT), "theirs", f"merge it into its model, 'somebody/{50 * 'x'}, by m"),
    (only("adapter_config.json"), "theirs/adapter_config.json", "is a file: give the directory of the model, which"),
    (writes("model.safetensors", POINTER), "theirs", "theirs/model.safetensors is a pointer of Git LFS, not the file"),
    (only("pytorch_model.bin", content=POINTER), "theirs", "theirs/pytorch_model.bin is a pointer of Git LFS"),
    (writes("tokenizer.json", POINTER), "theirs", "theirs/tokenizer.json is a pointer of Git LFS"),
    (writes("config.json", POINTER), "theirs", "theirs/config.json is a pointer of Git LFS"),
    (writes("a.json", "{}"), "theirs/config.json", "theirs/config.json is a file: give the directory of the model"),
    (renames("config.json", "pytorch_model.bin"), "theirs", "theirs has no config.json, so it is no model: it holds "),
    (nothing_but(), "theirs", "theirs has no model.safetensors, so it is no model: it holds nothing\n"),
    (nothing_but("checkpoint-7"), "theirs", "no model.safetensors, so it is no model: it holds checkpoint-7\n"),
    (nothing_but("step-00000007"), "theirs", "theirs holds step-00000007, part of a run: give a run with an intact"),
    (nothing_but("checkpoints"), "theirs", "theirs holds checkpoints, part of a run: give a run with an intact check"),
    (pipes("model.safetensors"), "theirs", "theirs/model.safetensors is not a file"),
    (pipes("config.json"), "theirs", "there is no file theirs/config.json of at most"),
]  # fmt: skip


@pytest.mark.parametrize("change, place, message", BAD)
def test_what_is_no_model_is_named(run, here: Path, monkeypatch, change, place: str, message: str) -> None:
    """By every script, and before `transformers` is asked, which may be absent."""
    change(here / "theirs")
    monkeypatch.setitem(sys.modules, "transformers", None)
    (here / "text.txt").write_text("a text")
    tuned = ["--train.init_from", place, "--data.source", "text.txt", "--train.out_dir", "out"]
    for script, arguments in ((sample, [place]), (inspect_attention, [place, "--text", "ab"]), (train, tuned)):
        result = run(script, *arguments)
        assert result.exit_code == 2 and message in result.err and len(result.err) < 400, result.err
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": 999 * "x"}, f"model_type '{59 * 'x'}, this version reads"),
        ({"hidden_act": 999 * "x", "model_type": "llama"}, f"hidden_act = '{59 * 'x'}, a llama of"),
        ({"quantization_config": {"quant_method": "awq"}}, "has quantized weights, {'quant_method': 'awq'}: give the"),
        ({"model_type": None, "_class_name": "UNet"}, "nanochat (inspect_attention.py asks transformers to open"),
        ({"n_layer": 10**9}, "n_layer must be a number from 1 to 512, got 1000000000\n"),
    ],
)
def test_a_configuration_is_shown_in_part(run, here: Path, change: dict, message: str) -> None:
    path = here / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in run(sample, "theirs").err
    path.write_text("\ufeff" + path.read_text())  # as Notepad saves it
    assert message in run(sample, "theirs").err


def test_the_ways_that_messages_advise_work(run, here: Path) -> None:
    """From a pickle to safetensors, and from vocab.json and merges.txt to a tokenizer.json."""
    theirs = here / "theirs"
    torch.save(load_file(theirs / "model.safetensors"), theirs / "pytorch_model.bin")
    (theirs / "model.safetensors").rename(here / "kept")
    exec(advice(run(sample, "theirs").err).replace("DIRECTORY", "theirs"), {})
    idx = torch.randint(257, (3, 7))
    (here / "kept").rename(theirs / "model.safetensors")
    assert torch.equal(GPT.from_pretrained("NEW")(idx), GPT.from_pretrained(theirs)(idx))
    vocabulary = json.loads((theirs / "tokenizer.json").read_text())["model"]["vocab"]
    (theirs / "tokenizer.json").unlink()
    (theirs / "vocab.json").write_text(json.dumps(vocabulary))
    (theirs / "merges.txt").write_text("#version: 0.2\n")
    exec(advice(run(sample, "theirs").err).replace("DIRECTORY", "theirs"), {})
    (theirs / "adapter_config.json").write_text(PEFT)  # left over: the model is whole
    result = run(sample, "theirs", "--prompt", "hey", "--max_new_tokens", "2")
    assert result.exit_code == 0 and result.out.startswith("hey"), result.err


@pytest.mark.parametrize(
    "place, asked",
    [
        ("a/b", ("a/b", None)),
        ("hf:a/b", ("a/b", None)),
        ("hf:theirs/b@v1/x", ("theirs/b", "v1/x")),
        *[(place, None) for place in ("./a/b", "a/b/", "../a/b", ".a/b", "/a/b", "~/a", "~nobody/a", "a\\b", "a/b/c")],
        (999 * "a" + "/b", (999 * "a" + "/b", None)),
        *[(place, None) for place in ("a", "", "hf:a", "hf:a/b/c", "a/b@v1", "theirs/b", "é/b", "a" * 5000)],
    ],
)
def test_the_hub_is_asked_only_for_its_names(here: Path, monkeypatch, place: str, asked: tuple | None) -> None:
    calls = []
    monkeypatch.setattr("model.checkpoint.download", lambda *name: calls.append(name))
    if asked:
        find_checkpoint(place)
    else:
        with pytest.raises(UserError, match=f"there is no {re.escape(repr(place))}: "):
            find_checkpoint(place)
    assert calls == [asked] * bool(asked)


def test_a_home_is_found_and_a_hidden_name_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert find_checkpoint("~/theirs").directory == here / "theirs"
    with pytest.raises(UserError, match="there is no 'gpt2': .* hub, as openai-community/gpt2"):
        find_checkpoint("gpt2")
    with pytest.raises(UserError, match="the directory theirs hides such a name .*, which hf:theirs/b asks for"):
        find_checkpoint("theirs/b")


class GatedRepoError(Exception):
    """Known by its name, as that of the library."""


@pytest.mark.parametrize(
    "name, names, cached, message",
    [
        ("a/0", None, False, "the download from the Hugging Face hub failed: no answer in 10 seconds"),
        ("a/1", [], False, "the download from the Hugging Face hub failed: no answer in 10 seconds"),
        ("a/2", [], True, "note: a/2 is the copy in the cache, because the hub failed: no answer in 10 seconds\n"),
        ("a/3", ["pytorch_model.bin"], True, "a/3 holds pytorch_model.bin, a pickle"),
        ("a/4", ["model.safetensors"], False, "failed: it is gated: accept its terms on its page, then hf auth login"),
    ],
)
def test_the_hub_may_be_silent_or_refuse(run, here, monkeypatch, name: str, names: list, cached: bool, message) -> None:
    """names: the files that the hub says it has; [] if it is silent after that, and None if it always is."""
    stop = Event()

    def list_files(repo_id: str, revision: str | None) -> list[str]:
        return stop.wait(60) if names is None else names

    def exists(repo_id: str, filename: str, revision: str | None) -> bool:
        return names != [] or stop.wait(60)

    def fetch(name: str, local_files_only: bool = False, **rest: object) -> str:
        assert local_files_only or names
        if not cached:
            raise GatedRepoError("401\nno")
        if names:
            (here / "theirs" / "model.safetensors").unlink(missing_ok=True)
        return "theirs"

    monkeypatch.setattr(huggingface_hub, "list_repo_files", list_files)
    monkeypatch.setattr(huggingface_hub, "file_exists", exists)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    if not names:
        monkeypatch.setattr("model.elsewhere.PATIENCE", 0.1)
    result = run(sample, name, "--max_new_tokens", "2")
    stop.set()
    assert result.err.startswith(f"asking the hub for {name}\n") and message in result.err
    assert result.exit_code == (0 if cached and not names else 2)


@pytest.mark.long
def test_a_hub_that_accepts_and_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, ROOT / "sample.py", "nobody/nothing"]
        said = subprocess.run(command, cwd=tmp_path, env=os.environ | hub, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2 and said.stderr.startswith("asking the hub for nobody/nothing\n")
    assert said.stderr.endswith("no answer in 10 seconds\n") and said.stderr.count("\n") == 2

"""Whatever is in an option, a text or a table: it is used or refused. No file of a stranger does harm."""

import json
import pickle
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sample
from cli.options import parse
from cli.script import run_script
from data.sources import COMPRESSED, TABLES, DataConfig, documents
from data.tokenizer import load_tokenizer
from model import GPT
from model.checkpoint import find_checkpoint
from model.load import load_model
from tests.conftest import often, sign
from training.options import Config, read_config


@contextmanager
def bounds() -> Iterator[None]:
    """Allow a GiB more than this process has already."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def used_or_refused(work: Callable[[], object]) -> None:
    """Run it as a script, which may end well or with one sentence for the user, and in no other way."""
    with bounds():
        try:
            run_script(work)
        except SystemExit as stop:
            assert stop.code == 2


def load(directory: Path) -> None:
    """Read what sample.py reads of a checkpoint."""
    model = load_model(find_checkpoint(directory))
    load_tokenizer(directory).encode("a b, c 12")
    model(torch.zeros(1, 1, dtype=torch.int64))


def with_inputs(number: int, test: Callable) -> None:
    """Let Hypothesis call a test with so many inputs, always the same."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings(max_examples=number, deadline=None, database=None, derandomize=True, suppress_health_check=quiet)(test)()


KEYS = [f"{table}.{name}" for table in ("model", "data", "train") for name in vars(getattr(Config(), table))]
plain = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=3))


@pytest.mark.parametrize("number", often(10, 1000))
def test_any_configuration_or_command_line(number: int, tmp_path: Path) -> None:
    content = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=10), plain | st.just("--train.seed"), max_size=4)

    @given(st.sampled_from(["toml", "text", "train", "sample"]), content)
    def test(kind: str, content: dict) -> None:
        lines = [f"{key} = {json.dumps(value) if kind == 'toml' else value}" for key, value in content.items()]
        (tmp_path / "some.toml").write_text("\n".join(lines), encoding="utf-8", errors="replace")
        arguments = [f"--{key}={value}".replace("\0", "") for key, value in content.items()]  # no system passes that
        if kind == "sample":
            used_or_refused(lambda: parse(sample.Options, ["out", *arguments]))
        else:
            used_or_refused(lambda: read_config(arguments if kind == "train" else [str(tmp_path / "some.toml")]))

    with_inputs(number, test)


@pytest.mark.parametrize("number", often(10, 1000))
def test_any_content_of_a_text_or_table(number: int, tmp_path: Path) -> None:
    bits = st.sampled_from(['{"text": "a"}', "text", "\n", ",", '"', "[", "]", "\t", "\\ud83d", "\0", "5", "null"])

    @given(st.sampled_from([*TABLES, ".txt"]), st.sampled_from(["", *COMPRESSED]), st.binary() | st.lists(bits))
    def test(kind: str, packed: str, content: bytes | list[str]) -> None:
        path = tmp_path / f"t{kind}{packed}"
        path.write_bytes(content if isinstance(content, bytes) else "".join(content).encode())
        used_or_refused(lambda: ["".join(document) for document in documents(DataConfig(str(path)))])

    with_inputs(number, test)


def claims(header: dict | None = None, length: int | None = None) -> bytes:
    """A safetensors file with this header and no tensors. length: the length of the header that it claims instead."""
    text = json.dumps(header or {}).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("canary"),)


LARGE = {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**62]}
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
HOSTILE = {
    "a pickle": pickle.dumps(Canary()),
    "a header of 2**63 bytes": claims(length=2**63),
    "a header of 90 MB, cut off": claims(length=90_000_000),
    "a tensor larger than any memory": claims({"transformer.wte.weight": LARGE}),
    "a tensor of negative size": claims({"transformer.wte.weight": {**LARGE, "shape": [-1, 2]}}),
    "ten thousand tensors of nothing": claims(dict.fromkeys(map(str, range(10_000)), EMPTY)),
    "a million brackets": b"[" * 1_000_000,
    "two megabytes of spaces": b" " * 2_000_000 + b"{}",
    "a number of five thousand digits": b'{"n_layer": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_does_no_harm(straight: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """It may be refused in any way."""
    monkeypatch.setattr(GPT, "init_weights", lambda model: None)  # slower than loading, which replaces them
    monkeypatch.chdir(straight)
    theirs = Path(shutil.move(straight / "checkpoints" / "step-00000012", straight / "theirs"))
    load(theirs)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        directory = shutil.copytree(theirs, theirs.with_name(f"with a hostile {name}"))
        (directory / name).write_bytes(content)
        sign(directory)
        with bounds(), suppress(Exception):
            load(directory)
    assert not Path("canary").exists()

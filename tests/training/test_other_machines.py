"""Machines that we do not have: a Windows, a Mac and GPUs that are pretended, as far as a program can see them."""

import ctypes
import errno
import os
import signal
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import files
import train
from data.prepare import prepare
from data.sources import DataConfig
from errors import UserError
from model.attention import Attend
from model.device import find_device
from tests.conftest import same_bits, tiny_run, weights
from training.progress import Interrupt


class OnWindows:
    """The calls of the system that Windows answers otherwise, as Python's documentation and its issues say."""

    def __init__(self) -> None:
        self.fsync, self.open, self.replace, self.stat = os.fsync, os.open, os.replace, os.stat
        self.read_only = set()
        self.synced = []

    def os_open(self, path: str, flags: int, *rest: object, **options: object) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "a directory cannot be opened", str(path))
        descriptor = self.open(path, flags, *rest, **options)
        (self.read_only.discard if flags & (os.O_RDWR | os.O_WRONLY) else self.read_only.add)(descriptor)
        return descriptor

    def os_fsync(self, descriptor: int) -> None:
        if descriptor in self.read_only:
            raise OSError(errno.EBADF, "what cannot be written to is not flushed")
        self.synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.fsync(descriptor)

    def os_replace(self, source: str, target: str) -> None:
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "a directory is not replaced, empty or not", str(target))
        self.replace(source, target)

    def os_stat(self, path: object, **options: object) -> SimpleNamespace:
        found = self.stat(path, **options)
        numbers = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**numbers | {"st_ctime_ns": 1})  # of the creation


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> OnWindows:
    found = OnWindows()
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(os, "open", found.os_open)
    monkeypatch.setattr(os, "fsync", found.os_fsync)
    monkeypatch.setattr(os, "replace", found.os_replace)
    monkeypatch.setattr(Path, "stat", lambda path, **options: found.os_stat(path, **options))

    def no_libc(name: str | None) -> None:
        raise TypeError("bad argument type for built-in operation")

    monkeypatch.setattr(ctypes, "CDLL", no_libc)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Windows is pretended on Linux only")
def test_a_run_on_a_pretended_windows_resumes_to_the_same_bits(
    windows: OnWindows, run, corpus_file: Path, tmp_path: Path
) -> None:
    out, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    prepare(DataConfig(str(corpus_file), tokenizer="bytes"), empty)
    run(train, *tiny_run(empty, out)).ok()
    synced = {os.path.basename(path) for path in windows.synced}
    assert {"model.safetensors", "manifest.json", "train.bin", "metrics.jsonl"} <= synced
    before = {name: tensor.clone() for name, tensor in weights(out).items()}
    (out / "checkpoints" / "step-00000012" / "model.safetensors").write_text("damaged")
    (out / "checkpoints" / "step-00000012" / "mine.gguf").write_text("mine")
    assert "resumed from " in run(train, "--resume", out).ok().out
    assert same_bits(before, weights(out))
    assert [path.read_text() for path in out.rglob("mine.gguf")] == ["mine"]
    tokens = empty / "train.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"\7\0")  # its "ctime" stays
    run(train, "--resume", out, "--train.max_steps", 13).refused("has changed since it was prepared")


def test_ctrl_break_is_heard_and_then_stops_at_once(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    number = signal.SIGUSR1  # another number there
    monkeypatch.setattr(signal, "Signals", IntEnum("Signals", {"SIGINT": 2, "SIGTERM": 15, "SIGBREAK": int(number)}))
    before = signal.getsignal(number)
    try:
        interrupt = Interrupt()
        assert not interrupt.received
        signal.raise_signal(number)
        assert interrupt.received and signal.getsignal(number) == signal.SIG_DFL
        assert capfd.readouterr().err == "\nSIGBREAK: saving after this step; Ctrl-Break stops at once\n"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("can", [True, False])
def test_a_mac_empties_the_cache_of_its_drive(can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fcntl(descriptor: int, command: int) -> None:
        asked.append(command)
        if not can:
            raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(files, "fcntl", SimpleNamespace(fcntl=fcntl, F_FULLFSYNC=51))
    files.replace_file(tmp_path / "file", b"content")
    assert asked == [51, 51] and (tmp_path / "file").read_bytes() == b"content"


class OnApple(torch.Tensor):
    """A tensor that says it is on an Apple GPU."""

    device = torch.device("mps")


@pytest.mark.parametrize("queries", [1, 7])
def test_no_view_reaches_the_kernel_of_an_apple_gpu(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    kernel = F.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        seen.extend(x.is_contiguous() for x in (q, k, v))
        return kernel(q, k, v, *rest, **options)

    q, k, v = torch.randn(2, queries, 6, 5), torch.randn(2, 7, 3, 5), torch.randn(2, 7, 3, 5)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    expected = Attend()(*views, None)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    found = Attend()(*(x.as_subclass(OnApple) for x in views), None)
    assert seen == [True] * 3 and torch.allclose(found.as_subclass(torch.Tensor), expected)


def test_a_gpu_without_kernels_is_refused_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(UserError, match="built for CUDA 12.6.*no kernel image is available"):
        find_device("cuda")

"""Ways to lose work: training in forked processes that are killed at a chosen moment, and every effect on the disk."""

import builtins
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import save
from tqdm import tqdm

import model.checkpoint

tqdm.monitor_interval = 0  # a thread of its own would not survive a fork

KILLED = 137
Before = Callable[[str, tuple], None]


def watch(patch: pytest.MonkeyPatch, top: Path, before: Before) -> None:
    """Call before(name, arguments) before each effect of Python on the disk below `top`; it may not return.

    The library that writes tensors is no Python: its bytes are written in its place.
    """

    def effect(name: str, real: Callable) -> Callable:
        def watched(*arguments: object, **options: object) -> object:
            if name == "fsync":
                paths = (path_of(arguments[0]),)
            else:
                inside = options.get("dir_fd")
                parent = Path.cwd() if inside is None else path_of(inside)
                paths = tuple(parent / part for part in arguments if isinstance(part, str | os.PathLike))
            if paths and paths[0].is_relative_to(top):
                before("rename" if name == "replace" else name, paths)
            return real(*arguments, **options)

        return watched

    def open_watched(file: object, mode: str = "r", *rest: object, **options: object) -> io.IOBase:
        if isinstance(file, int) or not {*mode} & {*"wax"} or not Path(file).absolute().is_relative_to(top):
            return open_really(file, mode, *rest, **options)
        path = Path(file).absolute()
        if "a" not in mode or not path.exists():
            before("open", (path,))
        writer = io.BufferedWriter(Watched(path, mode.strip("bt"), before))
        return writer if "b" in mode else io.TextIOWrapper(writer, encoding="utf-8")

    open_really = builtins.open
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        patch.setattr(os, name, effect(name, getattr(os, name)))
    for module in (builtins, io):
        patch.setattr(module, "open", open_watched)
    patch.setattr(model.checkpoint, "save_file", lambda tensors, path, data: path.write_bytes(save(tensors, data)))


class Watched(io.FileIO):
    """A file of which each write is an effect."""

    def __init__(self, path: Path, mode: str, before: Before):
        super().__init__(path, mode)
        self.path, self.before = path, before

    def write(self, data: bytes) -> int:
        self.before("write", (self.path, bytes(data)))
        return super().write(data)


def die_at(number: int) -> Before:
    """Die instead of the effect with this number, counted from 0. Half of the bytes of a write may have arrived."""
    number_of = count()

    def before(name: str, arguments: tuple) -> None:
        if next(number_of) == number:
            if name == "write":
                path, data = arguments
                os.write(os.open(path, os.O_WRONLY | os.O_APPEND), data[: len(data) // 2])
            os._exit(KILLED)

    return before


def path_of(descriptor: int) -> Path:
    """The path of an open file or directory, on Linux."""
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def fork(work: Callable[[], object], out: Path | str, err: Path | str) -> int:
    """Call `work` in a new process, which prints to these files and ends after 600 s; return the id of the process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        tqdm.set_lock(threading.RLock())  # its own is shared by all processes: a killed one would hold it for ever
        signal.alarm(600)  # what hangs fails; two ranks that compile take minutes on a slow machine
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def in_child(work: Callable[[], object], after: float | None = None, said: Path | str = os.devnull) -> int:
    """Call `work` in a forked process; return its exit code, 137 if a signal killed it.

    after: seconds until the process is killed. said: the file that gets what the process prints.
    """
    child = fork(work, said, said)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return KILLED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)

"""Ways to lose work: training in forked processes that are killed at a chosen moment, and a disk that forgets."""

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path

from tqdm import tqdm

tqdm.monitor_interval = 0  # a thread of its own would not survive a fork

EFFECTS = {"open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir"}
KILLED = 137


class Effects:
    """Stands in for `os` in data/disk.py. Each effect on the disk goes through `before`, which may not return."""

    def __init__(self, before: Callable[[str, tuple], None]):
        self.before = before

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in EFFECTS:
            return real

        def effect(*arguments: object) -> object:
            if name != "open" or arguments[1] & os.O_CREAT:
                self.before(name, arguments)
            return real(*arguments)

        return effect


def die_at(number: int) -> Callable[[str, tuple], None]:
    """Die instead of the effect with this number, counted from 0. Half of the bytes of a write may have arrived."""
    number_of = count()

    def before(name: str, arguments: tuple) -> None:
        if next(number_of) == number:
            if name == "write":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os._exit(KILLED)

    return before


def record_in(log: list[tuple], name: str, arguments: tuple) -> None:
    """Append an effect to a log for `Disk.apply`, with paths instead of descriptors."""
    if name == "write":
        arguments = (path_of(arguments[0]), bytes(arguments[1]))
    elif name == "fsync":
        arguments = (path_of(arguments[0]),)
    log.append((name, *arguments))


def path_of(descriptor: int) -> Path:
    """The path of an open file, on Linux."""
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


def in_child(
    work: Callable[[], object], after: float | None = None, number: int = signal.SIGKILL, said: Path | str = os.devnull
) -> int:
    """Call `work` in a forked process; return its exit code, 137 if a signal killed it.

    after: seconds until the process gets the signal `number`. said: the file that gets what the process prints.
    """
    child = fork(work, said, said)
    if after is not None:
        time.sleep(after)
        os.kill(child, number)
    status = os.waitpid(child, 0)[1]
    return KILLED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


class File:
    """A file on a disk that forgets what was not synced."""

    def __init__(self) -> None:
        self.content, self.synced = b"", b""

    def cut_power(self, choose: random.Random, path: Path) -> None:
        """Write to `path` a content after a power cut: an unsynced file is old, half new, full of zeros, or new."""
        half, zeros = self.content[: len(self.content) // 2], bytes(len(self.content))
        unsynced = [self.synced, half, zeros, self.content]
        path.write_bytes(self.content if self.content == self.synced else choose.choice(unsynced))


class Directory:
    """The names in a directory of such a disk: those that are synced, and later changes that are not."""

    def __init__(self) -> None:
        self.synced: dict[str, File | Directory] = {}
        self.changes: list[Callable[[dict], object]] = []

    def names(self, num_changes: int | None = None) -> dict:
        """The names after the first `num_changes` of the unsynced changes, or after all."""
        names = dict(self.synced)
        for change in self.changes[:num_changes]:
            change(names)
        return names

    def cut_power(self, choose: random.Random, path: Path) -> None:
        """Write to `path` a state after a power cut, in which only the first few unsynced changes have happened."""
        path.mkdir()
        for name, entry in self.names(choose.randrange(len(self.changes) + 1)).items():
            entry.cut_power(choose, path / name)


class Disk:
    """Such a disk with one directory, `top`. It ignores syncs of the class `ignored`."""

    def __init__(self, top: Path, ignored: type[File] | type[Directory] | None = None):
        self.top, self.root, self.ignored = top, Directory(), ignored

    def apply(self, effect: str, path: Path, more: Path | bytes | int | None = None, *rest: int) -> None:
        """Let one effect happen, from the log of `record_in`."""
        if effect == "write":
            self.find(path).content += more
        elif effect == "fsync":
            entry = self.find(path)
            if isinstance(entry, File) and self.ignored != File:
                entry.synced = entry.content
            elif isinstance(entry, Directory) and self.ignored != Directory:
                entry.synced, entry.changes = entry.names(), []
        else:
            new = File() if effect == "open" else Directory()
            changes = {
                "open": lambda names: names.update({path.name: new}),
                "mkdir": lambda names: names.update({path.name: new}),
                "unlink": lambda names: names.pop(path.name),
                "rmdir": lambda names: names.pop(path.name),
                "rename": lambda names: names.update({more.name: names.pop(path.name)}),
            }
            self.find(path.parent).changes.append(changes[effect])

    def find(self, path: Path) -> File | Directory:
        """The file or directory with this path."""
        entry = self.root
        for part in path.relative_to(self.top).parts:
            entry = entry.names()[part]
        return entry

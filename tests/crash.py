"""Ways to lose work: training runs in forked processes, killed at a moment of our choice, and a disk that forgets."""

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

import pytest
from tqdm import tqdm

import train
from configs import run_script
from model import disk
from training.run import Run

tqdm.monitor_interval = 0  # a thread of its own would not survive a fork

EFFECTS = {"open", "write", "fsync", "rename", "unlink", "rmdir", "mkdir"}
KILLED = 137


class Effects:
    """Stands in for `os` in model/disk.py: every effect on the disk goes through `before`, which may not return."""

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
    """Die instead of the effect with this number, from 0; half of what is to be written may have been."""
    number_of = count()

    def before(name: str, arguments: tuple) -> None:
        if next(number_of) == number:
            if name == "write":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os._exit(KILLED)

    return before


def in_child(
    work: Callable[[], object], after: float | None = None, number: int = signal.SIGKILL, said: Path | str = os.devnull
) -> int:
    """Run it in a forked process, perhaps with a signal after so many seconds; its exit code, 137 if that killed it.

    What it prints goes to the file `said`.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout = sys.stderr = open(file, "w", buffering=1)
            tqdm.set_lock(threading.RLock())  # its own is shared by all processes: a killed one would hold it for ever
            signal.alarm(60)  # what hangs fails
            work()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(child, number)
    status = os.waitpid(child, 0)[1]
    return KILLED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


class Runs:
    """Runs of train.py, each in a process of its own, and what they say they have saved and resumed."""

    def __init__(self, arguments: Callable[[Path], list[str]], log: Path):
        self.arguments, self.log, self.said = arguments, log, log.with_name("said")

    def __call__(self, out: Path, before: Callable[[str, tuple], None] | None = None, **kill: float) -> int:
        """Begin the run in `out`, or resume it if it has begun; see `in_child` for what may happen to it."""
        return in_child(lambda: self.here(out, before), said=self.said, **kill)

    def here(self, out: Path, before: Callable[[str, tuple], None] | None = None) -> None:
        """The same in this process. What is imported and made at first use is there for the children then."""
        begun = (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("step-*"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py", *(["--resume", str(out)] if begun else self.arguments(out))])
            self.watch(patch)
            if before:
                patch.setattr(disk, "os", Effects(before))
            run_script(train.main)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Let a run write down each step that it has saved, and the step from which it resumes."""
        save, restore = Run.save, Run.restore

        def note(word: str, step: int) -> None:
            with open(self.log, "a") as file:
                file.write(f"{word} {step}\n")

        patch.setattr(Run, "save", lambda run, *rest: (save(run, *rest), note("saved", run.state["step"])))
        patch.setattr(Run, "restore", lambda run, *rest: (restore(run, *rest), note("resumed", run.state["step"])))
        patch.setattr(train, "certify", lambda *rest: {"causal": "not asked"})  # both take time and change nothing
        patch.setattr(train, "sample", lambda *rest: "")

    def noted(self) -> list[tuple[str, int]]:
        """What was written down since last asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [(word, int(step)) for word, step in (line.split() for line in lines)]


class Recorder:
    """Stands in for `os` in model/disk.py and writes down what happens to the disk, for `states_after_a_power_cut`."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.paths: dict[int, Path] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def open(self, path: Path, flags: int, *mode: int) -> int:
        descriptor = os.open(path, flags, *mode)
        self.paths[descriptor] = path
        if flags & os.O_CREAT:
            self.log.append(("create", path))
        return descriptor

    def write(self, descriptor: int, content: bytes) -> int:
        written = os.write(descriptor, content)
        self.log.append(("write", self.paths[descriptor], bytes(content[:written])))
        return written

    def fsync(self, descriptor: int) -> None:
        self.log.append(("fsync", self.paths[descriptor]))

    def rename(self, path: Path, target: Path) -> None:
        os.rename(path, target)
        self.log.append(("rename", path, target))

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self.log.append(("mkdir", path))

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self.log.append(("delete", path))

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)
        self.log.append(("delete", path))


class File:
    """What a power cut may do to a file: what was not synced is there, half there, zeros, or not there at all."""

    def __init__(self) -> None:
        self.content, self.synced = b"", b""

    def after(self, choose: random.Random) -> bytes:
        if self.content == self.synced:
            return self.content
        kind = choose.randrange(4)
        return [self.synced, self.content[: len(self.content) // 2], bytes(len(self.content)), self.content][kind]


class Directory:
    """What a power cut may do to the names in a directory: of those not synced, the first few changes are there."""

    def __init__(self) -> None:
        self.synced: dict[str, File | Directory] = {}
        self.pending: list[Callable[[dict], object]] = []

    @property
    def now(self) -> dict:
        return self.with_pending(len(self.pending))

    def with_pending(self, count: int) -> dict:
        entries = dict(self.synced)
        for change in self.pending[:count]:
            change(entries)
        return entries

    def after(self, choose: random.Random) -> dict:
        entries = self.with_pending(choose.randrange(len(self.pending) + 1))
        return {name: entry.after(choose) for name, entry in entries.items()}


class Disk:
    """A disk that forgets what was not synced. The top directory was there before."""

    def __init__(self, top: Path):
        self.top, self.root = top, Directory()

    def find(self, path: Path) -> File | Directory:
        entry = self.root
        for part in path.relative_to(self.top).parts:
            entry = entry.now[part]
        return entry

    def apply(self, effect: str, path: Path, more: bytes | Path | None = None) -> None:
        """Let one effect of a log happen."""
        if effect == "fsync":
            entry = self.find(path)
            if isinstance(entry, File):
                entry.synced = entry.content
            else:
                entry.synced, entry.pending = entry.now, []
        elif effect == "write":
            self.find(path).content += more
        else:
            new = File() if effect == "create" else Directory()
            changes = {
                "create": lambda names: names.update({path.name: new}),
                "mkdir": lambda names: names.update({path.name: new}),
                "delete": lambda names: names.pop(path.name, None),
                "rename": lambda names: path.name in names and names.update({more.name: names.pop(path.name)}),
            }
            self.find(path.parent).pending.append(changes[effect])


def put(tree: dict, path: Path) -> None:
    """Write nested names and contents to a real directory."""
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            put(content, path / name)
        else:
            (path / name).write_bytes(content)

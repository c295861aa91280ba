"""A directory of ours to write in: for one process alone, and never over what is something else."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data import DataError
from data.tokenise import PROGRESS
from data.tokenizer import FILES

CORPUS_FILES = {"train.bin", "val.bin", "meta.json", PROGRESS, f"{PROGRESS}.tmp", *FILES}


def refuse_something_else(path: Path) -> None:
    """Raise DataError if there is something of this name that is not a corpus, or part of one."""
    try:
        is_ours = set(os.listdir(path)) <= CORPUS_FILES
    except FileNotFoundError:
        return
    except NotADirectoryError:
        is_ours = False
    if not is_ours:
        raise DataError(f"{path} exists and is not a prepared corpus: choose another directory")


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """A directory for this process alone; another one waits. What is in it at the end is kept only to go on with."""
    lock = take(directory)
    try:
        yield
    finally:
        if holds(lock, directory) and not (directory / PROGRESS).exists():
            shutil.rmtree(directory)
        os.close(lock)


def take(directory: Path) -> int:
    """Make a directory for this process alone, or wait until another process has finished with it; returns its lock."""
    while True:
        with suppress(FileExistsError):  # another process finishes with it at this moment
            directory.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:  # or at this one
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which writes {directory}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if holds(lock, directory):
            return lock
        os.close(lock)  # of a directory that has got another name meanwhile, as it was finished


def holds(lock: int, directory: Path) -> bool:
    """Whether a lock is that of the directory which has this name now."""
    try:
        return os.path.samestat(os.stat(directory), os.fstat(lock))
    except FileNotFoundError:
        return False

"""All that a run does to the disk, in one place, so that a test can stop the program at each effect, or let it fail.

What has been written here and returned is on the disk, not in a cache of the system: it survives a power cut. (Only
`append` does not wait for that.)
"""

import os
from pathlib import Path

WRITE_SIZE = 1 << 24  # bytes


def make_directory(path: Path) -> None:
    """Create a directory that was not there."""
    os.mkdir(path)


def make_directories(path: Path) -> None:
    """Create a directory, and those above it that were not there."""
    if not path.is_dir():
        make_directories(path.parent)
        make_directory(path)
        sync(path.parent)


def append(path: Path, content: bytes) -> None:
    """Write at the end of a file, which is there. Whoever needs it on the disk calls `sync`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Create a file that was not there. Raises OSError, and may leave a part of it then."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest[:WRITE_SIZE]) :]  # the system may take less than it is given
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Create a file or put another in its place: at any time there is the old one or the new one, as a whole."""
    temporary = path.with_name(path.name + ".tmp")
    remove(temporary)
    write(temporary, content)
    rename(temporary, path)


def rename(path: Path, target: Path) -> None:
    """Give a file or directory another name in the same directory."""
    os.rename(path, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, a directory and all in it, or nothing if it is not there. Links are deleted, never followed."""
    if path.is_symlink() or path.is_file():
        os.unlink(path)
    elif path.is_dir():
        for entry in path.iterdir():
            remove(entry)
        os.rmdir(path)

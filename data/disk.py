"""Every change that a run makes on the disk, in one place: a test can kill the program at each, or make each fail.

A file written here is on the disk when the function returns, not only in the system's cache: it survives a power cut.
(`append_to_file` alone does not wait for the disk.) A prepared corpus gets its name by these functions, too.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

WRITE_SIZE = 1 << 24  # bytes
JOINED_SIZE = 1 << 20  # bytes
Pieces = Iterable[bytes | memoryview]  # of the content of a file, each one made when it is written


def make_directory(path: Path) -> None:
    """Create a directory. Raises OSError if it exists."""
    os.mkdir(path)


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents."""
    if not path.is_dir():
        make_directories(path.parent)
        make_directory(path)
        sync(path.parent)


def append_to_file(path: Path, pieces: Pieces) -> str:
    """Append to an existing file, and return the SHA-256 of what was to be appended.

    The file may stay in the system's cache until `sync` is called.
    """
    digest = hashlib.sha256()  # of the memory: the hash of a file that is read back would vouch for a disk that errs
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        for piece in join_small(pieces):
            digest.update(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(descriptor, rest[:WRITE_SIZE]) :]  # may write less than asked
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def join_small(pieces: Pieces) -> Pieces:
    """Yield pieces with the same content, the small ones joined: a checkpoint has hundreds of small tensors."""
    small = bytearray()
    for piece in pieces:
        if len(small) + len(piece) > JOINED_SIZE:
            yield small
            small = bytearray()
        if len(piece) > JOINED_SIZE:
            yield piece
        else:
            small += piece
    yield small


def write_file(path: Path, pieces: Pieces) -> str:
    """Create a file, and return the SHA-256 of what was to be written.

    Raises OSError if it exists or cannot be written, and may leave a part of it then.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    digest = append_to_file(path, pieces)
    sync(path)
    return digest


def replace_file(path: Path, content: bytes) -> None:
    """Create or replace a file atomically: at any time either the old content is there or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    remove(temporary)
    write_file(temporary, [content])
    rename(temporary, path)


def rename(path: Path, target: Path) -> None:
    """Rename a file or directory within its directory, replacing a file of that name."""
    os.rename(path, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a directory with its content, if it exists. Links are deleted, never followed."""
    if path.is_symlink() or path.is_file():
        os.unlink(path)
    elif path.is_dir():
        for entry in path.iterdir():
            remove(entry)
        os.rmdir(path)

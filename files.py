"""Read small files whole, wherever they came from, and write what has to survive a power cut. Every room may do so."""

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock

from errors import UserError, errors_as_user_error

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

MOST = 1 << 26  # bytes of a small file
# What is taken for a text or for weights by mistake: how it begins, what it is, and what to do.
FORMATS = {
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: fetch that by git lfs pull",
    b"{\\rtf": "rich text (RTF): save it as plain text",
    b"%PDF": "a PDF: make it plain text, as by pdftotext",
    b"%!PS": "PostScript: make it plain text, as by ps2ascii",
    b"From: <Saved by": "a web page with its pictures (MHTML): save it as plain text",
    b"PK\3\4": "an archive, as .zip, .docx, .xlsx and .epub are: unpack it, or save it as plain text",
    b"\xd0\xcf\x11\xe0": "a document of an old Office, as .doc and .xls are: save it as plain text",
}


def expand(path: str | Path) -> Path:
    """Return a path with the home folder in place of ~, if there is such a folder."""
    return Path(os.path.expanduser(path))


def read_small(path: Path) -> bytes:
    """Return the content of a file. Raises UserError for one of FORMATS, what is no file, and more than MOST bytes."""
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"there is no file {path}")
    if path.stat().st_size > MOST:
        raise UserError(f"{path} has more than {MOST:,} bytes")
    refuse_formats(path)
    return path.read_bytes()


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, 1,024 at most."""
    with open(path, "rb") as file:
        return file.read(1024)


def refuse_formats(path: Path) -> None:
    """Raise UserError if a file begins as one of FORMATS."""
    content = first_bytes(path)
    for start, meaning in FORMATS.items():
        if content.startswith(start):
            raise UserError(f"{path} is {meaning}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a directory, is on the disk and not only in the system's cache.

    Windows, and some file systems, as SMB, cannot do so for a directory. Then nobody waits.
    """
    if fcntl is None and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if fcntl else os.O_RDWR)  # Windows syncs only what may be written
    try:
        os.fsync(descriptor)
        with suppress(AttributeError, OSError):  # on macOS, whose fsync leaves it in the cache of the drive
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Give a file or a directory of files its final name, in the same directory, once all of it is on the disk.

    A file of that name is replaced: at any time either the old content is there or the new, never a part.
    """
    for path in (*temporary.glob("*"), temporary):
        sync(path)
    os.replace(temporary, final)
    sync(final.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Create a file or replace its content, by way of a file NAME.tmp; see `publish`."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    publish(temporary, path)


def lock(path: Path, problem: str, seconds: float = -1) -> AcquireReturnProxy:
    """Lock a file, until the answer is released or the process ends, however.

    Never delete the file: a process that waits for the deleted one and another that locks a new one would both work.

    seconds: to wait for another process; -1 waits for ever.

    Raises UserError, which begins with the problem, if it cannot be locked.
    """
    with errors_as_user_error(problem):
        return FileLock(path).acquire(seconds)


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents, so that all of them survive a power cut."""
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir()
        sync(path.parent)

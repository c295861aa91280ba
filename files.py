"""Read small files whole, wherever they came from. Every room may do so."""

from pathlib import Path

from errors import UserError

POINTER = b"version https://git-lfs"


def read_small(path: Path, most: int = 1 << 26) -> bytes:
    """Return the content of a file. Raises UserError for a pointer, what is no file, and more than `most` bytes."""
    if not path.is_file() or path.stat().st_size > most:  # a pipe would be waited for
        raise UserError(f"{path} cannot be read: it is not a file of at most {most:,} bytes")
    refuse_pointer(path)
    return path.read_bytes()


def refuse_pointer(path: Path | str) -> None:
    """Raise UserError if Git LFS has left its pointer in place of a file."""
    with open(path, "rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise UserError(f"{path} is a pointer of Git LFS, not the file itself: fetch that by git lfs pull")

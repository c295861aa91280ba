"""The one exception for what a user can mend, and checks that every room needs: of numbers, and of files."""

from numbers import Integral, Real
from pathlib import Path

POINTER = b"version https://git-lfs"


class UserError(ValueError):
    """A mistake that the user can mend. The message is one sentence for the user: expected, got, what to do."""

    exit_code = 2


def check_ranges(options: object, ranges: dict[str, tuple[float, float]]) -> None:
    """Raise UserError unless each field has its default or a number in its range: whole if that ends with an int."""
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        kind, type_of = ("whole number", Integral) if isinstance(most, int) else ("number", Real)
        is_right = isinstance(value, type_of) and not isinstance(value, bool) and least <= value <= most
        if not is_right and value is not getattr(type(options), name):
            raise UserError(f"{name} must be a {kind} from {least:,} to {most:,}, got {value!r:.60}")


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

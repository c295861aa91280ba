"""Tell configurations that this copy of tril has written from those that came from elsewhere."""

import hashlib
from contextlib import suppress
from pathlib import Path

from data import disk, prepare


def record_of(content: bytes) -> Path:
    """Return the path of the empty file that exists if this copy of tril has written a config.toml of this content."""
    return prepare.PREPARED / ".known" / hashlib.sha256(content).hexdigest()


def remember(content: bytes) -> None:
    """Create the record of a content, where data/prepared can be written to."""
    record = record_of(content)
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()
        disk.sync(record.parent)  # a run is known after a power cut, too
        disk.sync(prepare.PREPARED)

"""Know the configurations that this copy of tril has written, from those that came from elsewhere or were changed."""

import hashlib
from contextlib import suppress

from data import prepare


def remember(content: bytes) -> None:
    """Remember the content of a config.toml, unless data/prepared cannot be written to."""
    with suppress(OSError):
        known = prepare.PREPARED / ".known"
        known.mkdir(parents=True, exist_ok=True)
        (known / hashlib.sha256(content).hexdigest()).touch()


def is_known(content: bytes) -> bool:
    """Return whether `remember` was called with this content."""
    return (prepare.PREPARED / ".known" / hashlib.sha256(content).hexdigest()).exists()

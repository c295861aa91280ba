"""Progress bars: redrawn in place on a terminal, a new line every ten seconds in a log file."""

import sys

from tqdm import tqdm

INTERVAL = 10  # seconds between two lines


def progress_bar(**options: object) -> tqdm:
    """Return a progress bar on stderr. The options are those of `tqdm`."""
    if not sys.stderr.isatty():
        options |= {"mininterval": INTERVAL, "file": Lines()}
    return tqdm(**options)


class Lines:
    """A stream that writes each state of a bar on a line of its own, on stderr."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

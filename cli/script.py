"""The front door of every script: exit codes, prompts, and text that is safe to print."""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from errors import UserError


def run_script(main: Callable[[], None]) -> None:
    """Run the main function of a script, and exit with the code that says how it ended.

        0     done
        1     a bug of ours
        2     a mistake that the user can mend
        3     the loss stopped being finite
        75    interrupted, with nothing lost
        130   interrupted

    An exception that has an `exit_code` prints its message, one sentence, without a traceback.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before Python started
            setattr(sys, name, open(os.devnull, "w"))
    # A character that the terminal cannot show becomes "?". Output to a file or a pipe is flushed after every line.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        main()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        discard(sys.stdout)
    except KeyboardInterrupt as stop:
        fail(str(stop) or "interrupted", getattr(stop, "exit_code", 130))
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
    except Exception as error:
        if hasattr(error, "exit_code"):
            fail(str(error), error.exit_code)
        # Python and PyTorch report in these ways that there is not enough memory.
        said = str(error).replace("Tried", "tried")
        if isinstance(error, MemoryError) or re.search("out of memory|DefaultCPUAllocator", said):
            numbers = re.findall(r"tried to allocate [\d.]+ [KMGT]i?B|GPU \d+ has .+? free", said)
            fail(f"{', '.join(['out of memory', *numbers])}: docs/train.md says what needs less", 2)
        raise


def fail(message: str, exit_code: int) -> None:
    """Print a message on stderr and exit."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"{Path(sys.argv[0]).name}: {visible(message)}", file=sys.stderr)
    sys.exit(exit_code)


def discard(stream: TextIO) -> None:
    """Discard from now on everything that is written to a stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class BrokenPipeGuard:
    """An output stream that can be written to after its reader has ended, such as a `tee` that Ctrl-C has killed."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            discard(self.stream)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            discard(self.stream)


def visible(text: str) -> str:
    """Return the text with its control characters as escapes, because a terminal would obey them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def read_prompt(prompt: str) -> str:
    """Return the prompt itself, the text in a file (@FILE), or standard input (-).

    Raises OSError if there is no such file, UserError if the text is not UTF-8.
    """
    try:
        if prompt == "-":
            if sys.stdin is None:
                raise UserError("there is no standard input to read a text from")
            return sys.stdin.buffer.read().decode()
        if prompt.startswith("@"):
            return Path(prompt[1:]).read_text(encoding="utf-8")
        if os.path.isfile(prompt):
            print(f"note: the text is {prompt!r} itself; @{prompt} reads the file", file=sys.stderr)
        return prompt
    except ValueError as error:  # not UTF-8, or a name that no file can have
        raise UserError(f"{prompt!r} cannot be read: {error}") from None

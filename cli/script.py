"""The front door of every script: exit codes, prompts, text that is safe to print, and progress bars."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from errors import errors_as_user_error, printable
from files import expand

INTERVAL = 10  # seconds between two lines of a progress bar in a log file


def run_script(main: Callable[[], None]) -> None:
    """Run the main function of a script, and exit with the code that says how it ended.

        0     done
        1     a bug of ours
        2     a mistake that the user can mend
        3     the loss stopped being finite
        75    interrupted, with nothing lost
        130   interrupted

    An exception that has an `exit_code` prints its message, one sentence, without a traceback. So do those of files and
    of memory.
    """
    for name in ("stdin", "stdout", "stderr"):  # None if it is closed, as in a service; a file would get its number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    # A character that the terminal cannot show becomes "?". Output to a file or a pipe is flushed after every line.
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is another
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        main()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        discard(sys.stdout)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except (OSError, UnicodeError) as error:
        discard(sys.stdout)  # or Python ends with a second error, if the disk is full
        fail(str(error), 2)
    except Exception as error:
        if hasattr(error, "exit_code"):
            fail(str(error), error.exit_code)
        if isinstance(error, MemoryError) or re.search("out of memory|ried to allocate", str(error)):  # of PyTorch
            fail(f"out of memory, docs/train.md says what needs less: {error}", 2)
        raise


def fail(message: str, exit_code: int) -> None:
    """Print a message on stderr, and exit. A long one loses its middle: the end has the advice."""
    text = re.sub("(?s)(.{400}).*(.{400})", r"\1 ... \2", printable(message))
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
    sys.exit(exit_code)


def discard(stream: TextIO) -> None:
    """Discard from now on everything that is written to a stream."""
    with contextlib.suppress(OSError):  # a notebook's has no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def outlives_readers() -> Iterator[None]:
    """Go on when the reader of the output, such as `head`, has ended: what is printed after that is lost."""
    with contextlib.redirect_stdout(Lasting(sys.stdout)), contextlib.redirect_stderr(Lasting(sys.stderr)):
        yield


class Lasting:
    """An output stream that can be written to after its reader has ended, such as a `tee` that Ctrl-C has killed."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            discard(self.stream)


def read_prompt(prompt: str) -> str:
    """Return the prompt itself, the text in a file (@FILE), or standard input (-). A text that begins with @ has two.

    It has no byte order mark, and keeps its line ends, as in training. Raises UserError if there is no such file, or if
    the text is not UTF-8.
    """
    if prompt.startswith("@@"):
        return prompt[1:]
    if prompt != "-" and not prompt.startswith("@"):
        return prompt
    with errors_as_user_error(f"cannot read {prompt} (- is standard input, @ a file, and @@ an @ in a text)"):
        content = sys.stdin.buffer.read() if prompt == "-" else expand(prompt[1:]).read_bytes()
        return content.decode("utf-8-sig")


def progress_bar(**options: object) -> tqdm:
    """Return a progress bar on stderr: redrawn in place on a terminal, a new line every ten seconds in a log file.

    The options are those of `tqdm`.
    """
    if not sys.stderr.isatty():
        options |= {"mininterval": INTERVAL, "file": Lines()}
    return tqdm(**options)


class Lines:
    """A stream that writes each state of a bar on a line of its own, on stderr."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(f"{text.strip()}\n")

"""The front door of every script: exit codes, prompts, and text that is safe to print."""

import contextlib
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from errors import UserError

# Unicode's categories of controls, formats (as writing from right to left), surrogates, ends of lines and paragraphs.
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def run_script(main: Callable[[], None], outlives_reader: bool = False) -> None:
    """Run the main function of a script, and exit with the code that says how it ended.

        0     done
        1     a bug of ours
        2     a mistake that the user can mend
        3     the loss stopped being finite
        75    interrupted, with nothing lost
        130   interrupted

    An exception that has an `exit_code` prints its message, one sentence, without a traceback. Whatever main prints is
    made `visible`. outlives_reader: whether main goes on when the reader of its output, such as `head`, has ended.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before Python started
            setattr(sys, name, open(os.devnull, "w"))
    # A character that the terminal cannot show becomes "?". Output to a file or a pipe is flushed after every line.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        with redirect_stdout(Screen(sys.stdout, outlives_reader)), redirect_stderr(Screen(sys.stderr, outlives_reader)):
            main()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        discard(sys.stdout)
    except KeyboardInterrupt as stop:
        fail(str(stop) or "interrupted", getattr(stop, "exit_code", 130))
    except OSError as error:
        discard(sys.stdout)  # or Python ends with a second error, if it is full
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
    """Print a message on stderr, on one line, and exit. A long one loses its middle: the end has the advice."""
    text = f"{Path(sys.argv[0]).name}: {visible(message)}".replace("\n", "\\n")
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(re.sub("(.{240}).*(.{240})", r"\1 ... \2", text), file=sys.stderr)
    sys.exit(exit_code)


def discard(stream: TextIO) -> None:
    """Discard from now on everything that is written to a stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Screen:
    """An output stream that shows text as `visible` returns it. `exact` is the stream itself.

    outlives_reader: whether it can be written to after its reader has ended, such as a `tee` that Ctrl-C has killed.
    """

    def __init__(self, exact: TextIO, outlives_reader: bool):
        self.exact = exact
        self.outlives_reader = outlives_reader

    def __getattr__(self, name: str) -> object:
        return getattr(self.exact, name)

    def write(self, text: str) -> int:
        moves = re.match(r"\r|(\x1b\[A)+$|", text)[0]  # progress bars, those of the hub too, move so
        self.attempt(self.exact.write, moves + visible(text.removeprefix(moves)))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.exact.flush)

    def attempt(self, method: Callable, *arguments: str) -> None:
        """Call a method of the stream. If its reader has ended, everything is discarded from now on."""
        try:
            method(*arguments)
        except OSError:
            if not self.outlives_reader:
                raise
            discard(self.exact)


def exact_stdout() -> TextIO:
    """Return standard output for text that has to stay as it is: a sample in a file, or the colours of --help."""
    return getattr(sys.stdout, "exact", sys.stdout)


def how_to_run(script: str, launcher: str = "") -> str:
    """Return the beginning of a command line that runs a script of this project from here.

    It also works where no environment is activated. launcher: options of Python in front of the script.
    """

    def from_here(path: str) -> str:
        return shlex.quote(min(path, os.path.relpath(path), key=len))

    is_on_path = Path(shutil.which("python") or "").parent == Path(sys.executable).parent
    python = "python" if is_on_path else from_here(sys.executable)
    return f"{python} {launcher}{from_here(str(Path(__file__).parent.parent / script))}"


def visible(text: str) -> str:
    """Return the text with escapes for characters that nobody sees, or that a terminal would obey."""

    def shown(match: re.Match) -> str:
        letter = match[0]
        return letter.encode("unicode_escape").decode() if unicodedata.category(letter) in HIDDEN else letter

    return re.sub(r"[^\n\t -~]", shown, text)


def read_prompt(prompt: str) -> str:
    """Return the prompt itself, the text in a file (@FILE), or standard input (-).

    Raises UserError if there is no such file, or if the text is not UTF-8.
    """
    try:
        if prompt == "-":
            if sys.stdin is None:
                raise UserError("there is no standard input to read a text from")
            content = sys.stdin.buffer.read()
        elif prompt.startswith("@"):
            content = Path(os.path.expanduser(prompt[1:])).read_bytes()
        else:
            if os.path.isfile(prompt):
                print(f"note: the text is {prompt!r:.60} itself; @ before it reads the file", file=sys.stderr)
            return prompt
        return content.decode("utf-8-sig")  # without a byte order mark, and with its line ends, as training reads it
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that no file can have
        raise UserError(f"{prompt!r:.60} cannot be read as text: {getattr(error, 'strerror', None) or error}") from None

"""The front door of the scripts: exit codes, prompts, text that is safe to print, and outputs that nobody reads."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.script import outlives_readers, printable, read_prompt, run_script
from errors import UserError
from tests.conftest import ROOT, run_python


class Stopped(Exception):
    exit_code = 75


@pytest.mark.parametrize(
    "error, code, said",
    [
        (UserError("n_head must be \x1b3"), 2, "n_head must be \\x1b3"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 2, "[Errno 2] No such file or directory: 'a.txt'"),
        (MemoryError("Unable to allocate 9 GiB"), 2, "out of memory, docs/train.md says what needs less: Unable"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Stopped("saved: go on"), 75, "saved: go on"),
        (RuntimeError("illegal memory access"), None, None),
    ],
)
def test_a_mistake_is_a_sentence_and_a_bug_a_traceback(
    capsys: pytest.CaptureFixture, error: BaseException, code: int | None, said: str | None
) -> None:
    def main() -> None:
        raise error

    expected = pytest.raises(type(error)) if code is None else pytest.raises(SystemExit)
    with expected as stopped:
        run_script(main)
    if code is not None:
        assert stopped.value.code == code and said in capsys.readouterr().err


def test_what_a_stranger_wrote_is_visible_and_commands_no_terminal() -> None:
    assert printable("\ta猫 é🙂\n") == "\ta猫 é🙂\n"
    for text in ("می\u200cخواهم", "क्\u200dष", "👩🏽\u200d🚀", "❤\ufe0f\u200d🔥"):  # joined letters and emoji
        assert printable(text) == text
        assert printable(text[:2] + "\u200c\u202e") == text[:2] + "\\u200c\\u202e"
    for hidden in "\x1b\x07\x9b\r\u202e\u2066\u200c\u200d\xad\u2028\u2029\udc80":
        assert printable(f"a{hidden}b") == f"a{ascii(hidden)[1:-1]}b"


def run_code(code: str, **options: object) -> subprocess.CompletedProcess:
    return run_python("-c", f"import sys; from cli.script import *; {code}", **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        ended = run_code("run_script(lambda: print('a line'))", stdout=full)
    assert ended.returncode == 2 and re.fullmatch(r"-c: .*No space left on device\n", ended.stderr)


SERVICE = """
import sys
from cli.script import outlives_readers, progress_bar, run_script

def main():
    with open("mine", "w") as mine, outlives_readers():
        assert mine.fileno() > 2  # or it would get what others print
        print("a")
        print("b", file=sys.stderr)
        progress_bar(total=3).close()

run_script(main)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_service_may_have_closed_the_streams(closed: str, tmp_path: Path) -> None:
    words = ["-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", SERVICE]
    ended = subprocess.run(
        ["sh", *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert ended.returncode == 0 and (tmp_path / "mine").read_bytes() == b"" and b"Traceback" not in ended.stderr


@pytest.mark.parametrize("lasts", [True, False])
def test_nobody_has_to_read_what_is_said(lasts: bool) -> None:
    """A training goes on; other scripts end."""
    code = "run_script(lambda: [print('a line') for _ in range(3)] and sys.exit(7))"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        ended = run_code(f"lasting = outlives_readers(); lasting.__enter__(); {code}" if lasts else code, stdout=pipe)
    assert ended.returncode == (7 if lasts else 0) and not ended.stderr


def test_a_pipe_has_each_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", pipe)
    with outlives_readers():
        assert not sys.stdout.isatty()
    run_script(lambda: print("a line"))
    assert pipe.buffer.getvalue() == b"a line\n"


def test_the_output_of_a_notebook_is_a_stream_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    run_script(lambda: print("a line"))
    assert sys.stdout.getvalue() == "a line\n"


def test_a_prompt_is_read_as_a_text_to_train_on(run: Callable, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    content = b"\xef\xbb\xbfa\r\nb\r"  # a byte order mark, and line ends of Windows and of old Macs
    (tmp_path / "p.txt").write_bytes(content)
    assert read_prompt("@~/p.txt") == "a\r\nb\r" and read_prompt("a\r\n") == "a\r\n"
    assert read_prompt("@@property") == "@property" and read_prompt("a@b") == "a@b"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert read_prompt("-") == "a\r\nb\r"
    (tmp_path / "p.txt").write_bytes(b"\xff\xfea\0")
    for prompt in ("@~/p.txt", "@alice how are you"):
        with pytest.raises(UserError, match=f"^cannot read {prompt} .- is standard input, @ a file, and @@ an @ in"):
            read_prompt(prompt)
    monkeypatch.setattr(sys, "stdin", open(os.devnull, "w"))  # as `run_script` leaves one that is closed
    with sys.stdin, pytest.raises(UserError, match="^cannot read - .- is standard input"):
        read_prompt("-")

"""Options of every script: the command line, over a TOML file, over defaults.

A script describes its options as frozen dataclasses with a docstring under each field. `tyro` checks types and names,
and writes --help. The tables of a TOML file become options, so that they pass the same checks. Their values are the
defaults of the command line.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from cli.script import exact_stdout
from errors import UserError

T = TypeVar("T")

MOST_LETTERS = 1 << 20  # of a TOML file
REGISTRY = ConstructorRegistry()


def rule(
    metavar: str, convert: Callable[[str], object], choices: tuple[str, ...] | None = None
) -> PrimitiveConstructorSpec:
    """Return a rule for one word of the command line. `convert` may raise ValueError."""

    def read(words: list[str]) -> object:
        try:
            return convert(words[0])
        except ValueError:
            given = repr(words[0]) if words[0] else "an empty text"
            raise ValueError(f"expected {metavar}, got {given:.60}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [as_word(value)],
        choices=choices,
    )


def as_word(value: object) -> str:
    """Return a value as the command line has it: true and false are spelled as in TOML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def expand(path: str) -> str:
    """Return a path with the home folder in place of ~, and absolute where a command would take it for an option.

    Raises ValueError if it is empty.
    """
    if not path:
        raise ValueError
    return os.path.abspath(path) if path[0] == "-" else os.path.expanduser(path)


PATH = rule("PATH", lambda text: Path(expand(text)))
PATH_TEXT = rule("PATH", expand)
PathText = Annotated[str, PATH_TEXT]
"""A path that is compared or written as text, or a text that may be a path, such as a source."""
# A path or text that is None by default is a word like any other when it is given: a folder may have the name None.
WORDS = {
    bool: rule("{true,false}", "true".__eq__, ("true", "false")),
    int: rule("INT", int),
    float: rule("FLOAT", float),
    Path: PATH,
    Path | None: PATH,
    PathText | None: PATH_TEXT,
    str | None: rule("STR", str),
}


@REGISTRY.primitive_rule
def words(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Return the rule for a type that tyro reads otherwise."""
    return WORDS.get(info.type)


REWORDED = {  # a part of a message of tyro -> ours
    "^Error parsing (-[^:]*/)?": "",
    r"^invalid choice (.{,60}).* for argument '(\S+)'\. Expected (.*)\((.*)\)\.$": r"\2: expected \3\4, got \1",
    r"^Missing value for argument '(?:-\w/)?(-\S+)'.*": r"\1 needs a value (see --help); with a dash first: \1=--x",
    r"^Missing value for argument '(\S+)'.*": r"\1 needs a value (see --help); with a dash first: ./--x",
    r"no type matching \{None\}\|(\S+) could be instantiated from \[['\"]([^'\"]{,60}).*": r"expected \1, got '\2'",
    r"^Missing from .*\.py: (\S+)": r"\1 is missing:",
}


def parse(options: type[T], argv: list[str], file: Path | None = None, defaults: T | None = None) -> T:
    """Return `options`, a dataclass, with the values of a TOML file and a command line. --help prints and exits.

    defaults: the values of options that neither gives. None: those of the dataclass.

    Raises UserError, in one sentence, for an unknown option, a value of the wrong type, or an unreadable file.
    """
    if file is not None:
        try:
            defaults = run_tyro(options, options_in(file), defaults)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error
    return run_tyro(options, argv, defaults)


def options_in(file: Path) -> list[str]:
    """Return the tables of a TOML file as command line options."""
    try:
        with open(file, encoding="utf-8-sig") as opened:  # perhaps a pipe, or gigabytes of text
            text = opened.read(MOST_LETTERS)
        if len(text) == MOST_LETTERS:
            raise ValueError("it is too long")
        tables = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        reason = f"cannot be read as TOML in UTF-8: {getattr(error, 'strerror', None) or error!s:.100}"
        if file.suffix.lower() != ".toml":
            reason += f"; to train on a text: --data.source {shlex.quote(str(file))}"
        raise UserError(reason) from None
    options = []
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise UserError(f"{table:.60} must be inside a table such as [train]")
        for key, value in content.items():
            if not isinstance(value, str | int | float):
                raise UserError(f"{table:.60}.{key:.60} must be a text, a number, true or false, got {value!r:.60}")
            options.append(f"--{table}.{key}={as_word(value)}")
    if not options:  # perhaps the rest of a file that was lost: the defaults would be a large model
        raise UserError("no options in it: leave it out, or give it a table such as [train]")
    return options


def run_tyro(options: type[T], argv: list[str], defaults: T | None) -> T:
    """Call tyro.cli. Raises UserError with one sentence where tyro prints a page."""
    if re.search("[\ud800-\udfff]", " ".join(argv)):
        raise UserError(f"an option is not valid {sys.getfilesystemencoding()}: PYTHONUTF8=1 or LANG=C.UTF-8 set UTF-8")
    page = io.StringIO()
    try:
        with contextlib.redirect_stderr(page), contextlib.redirect_stdout(exact_stdout()):  # --help may have colours
            name = Path(sys.argv[0]).name
            return tyro.cli(options, prog=name, args=argv, default=defaults, use_underscores=True, registry=REGISTRY)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        cause = stop.__context__
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__context__
        # A sentence of ours is taken as it is, because tyro's page folds it.
        raise cause or UserError(summarize(page.getvalue())) from None


def summarize(page: str) -> str:
    """Return the one sentence of a page of tyro: a frame with a message, and paragraphs that explain it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", page)  # on a terminal it has colours
    lines = "\n".join(line.strip("│| ") for line in plain.splitlines()[1:])  # without title and frame
    message = next(filter(str.strip, re.split(r"\n[^\w'\"]*\n", f"\n{lines}\n")))
    message = " ".join(message.split())
    for pattern, words in REWORDED.items():
        message = re.sub(pattern, words, message)
    meant = re.search(r"meant:\s+(-\S+)", lines)
    return f"{message:.160}" + (f"; did you mean {meant[1]}? (--help lists all)" if meant else "")

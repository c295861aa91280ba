"""Options of every script: the command line, over a TOML file, over defaults.

A script describes its options as frozen dataclasses with a docstring under each field. `tyro` checks types and names,
writes --help, and explains what is wrong. The tables of a TOML file become options, so that they pass the same checks.
Their values are the defaults of the command line.
"""

import os
import re
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from errors import UserError
from files import read_small

T = TypeVar("T")

REGISTRY = ConstructorRegistry()
LONG_DASH = re.compile(r"(?a)-?[\u2010-\u2015\u2212][-\u2010-\u2015]*[a-z][\w.-]*(=|$)")  # before an option


@REGISTRY.primitive_rule
def true_or_false(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Return the rule for true and false as TOML spells them; those of tyro itself begin with a capital letter."""
    if info.type is not bool:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        choices=("true", "false"),
        instance_from_str=lambda words: words == ["true"],
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    )


def parse(options: type[T], argv: list[str], *files: Path, defaults: T | None = None) -> T:
    """Return `options`, a dataclass, with the values of a command line, over those of TOML files, of which a later one
    is over an earlier one. --help prints and exits.

    defaults: the values of options that none of them gives. None: those of the dataclass.

    Exits with code 2 where tyro has printed what is wrong. Raises UserError if a file cannot be read, for an option
    whose -- a web page or a word processor has made a long dash, and where a value may have been taken for an option.
    """
    if word := next(filter(LONG_DASH.match, argv), None):
        raise UserError(f"{word} begins with a long dash, as copied from a web page: type -- instead")
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        os.environ["TERM"] = "dumb"  # tyro asks for this, and whether stdout is a terminal
    read = partial(tyro.cli, options, use_underscores=True, registry=REGISTRY)
    for file in files:  # which is in the last line of the message: see NAME FILE --help
        defaults = read(prog=f"{sys.argv[0]} {file}", args=options_in(file), default=defaults)
    try:
        return read(args=argv, default=defaults)
    except SystemExit as stop:
        if stop.code and re.search(r"--[^=']+', ['\"]-", str(argv)):
            raise UserError("if a value begins with a dash, write = before it, as in --prompt=--x") from stop
        raise


def options_in(file: Path) -> list[str]:
    """Return the tables of a TOML file as command line options. Raises UserError if it has other content."""
    try:
        tables = tomllib.loads(read_small(file).decode("utf-8-sig"))
    except (ValueError, UserError) as error:
        raise UserError(
            f"{file} cannot be read as TOML in UTF-8: {error}; to train on a text: --data.source {file}"
        ) from error
    options = []
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise UserError(f"{file}: {table} must be inside a table such as [train]")
        for key, value in content.items():
            word = value if isinstance(value, str) else str(value).lower()  # true, not True
            options.append(f"--{table}.{key}={word}")
    if not options:  # perhaps the rest of a file that was lost: the defaults would be a large model
        raise UserError(f"{file} has no options: leave it out, or give it a table such as [train]")
    return options


def names_in(words: list[str]) -> set[str]:
    """Return the options that a command line names, as "train.max_steps"."""
    return {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}

"""Options of every script: the command line, over a TOML file, over defaults.

A script describes its options as frozen dataclasses with a docstring under each field. `tyro` checks types and names,
and writes --help. A TOML file is turned into the same options, placed before the user's own: both pass the same checks,
and the last one wins.
"""

import contextlib
import io
import re
import sys
import tomllib
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import tyro

from errors import UserError

T = TypeVar("T")

REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def booleans_as_in_toml(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Accept true and false, as a TOML file spells them."""
    if info.type is not bool:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        instance_from_str=lambda values: {"true": True, "false": False}[values[0].lower()],
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
        choices=("true", "false"),
    )


def parse(options: type[T], argv: list[str], file: Path | None = None, defaults: T | None = None) -> T:
    """Build the dataclass `options` from a TOML file and a command line. --help prints and exits.

    defaults: values where neither says anything; None: those of the dataclass.

    Raises UserError, in one sentence, for an unknown or ill-typed option or an unreadable file.
    """
    if file is None:
        return run_tyro(options, argv, defaults)
    try:
        from_file = options_in(file)
        run_tyro(options, from_file, defaults)  # alone, so that its faults are not laid to the command line
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return run_tyro(options, from_file + argv, defaults)


def options_in(file: Path) -> list[str]:
    """Return the tables of a TOML file as command line options."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or a number of thousands of digits
        hint = "" if file.suffix == ".toml" else f"; if it is a text to train on: --data.source {file}"
        raise UserError(f"not a TOML file: {error}{hint}") from None
    options = []
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise UserError(f"{table} must be inside a table such as [train]")
        for key, value in content.items():
            options += [f"--{table}.{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return options


def run_tyro(options: type[T], argv: list[str], defaults: T | None) -> T:
    """Call tyro.cli. Raises UserError with one sentence in place of tyro's page of explanation."""
    page = io.StringIO()
    if any(re.search("[\ud800-\udfff]", word) for word in argv):
        raise UserError("an option is not valid UTF-8")
    try:
        with contextlib.redirect_stderr(page):
            name = Path(sys.argv[0]).name
            return tyro.cli(options, prog=name, args=argv, default=defaults, use_underscores=True, registry=REGISTRY)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        cause = stop.__context__
        while cause is not None and not hasattr(cause, "exit_code"):
            cause = cause.__context__
        if cause is not None:
            raise UserError(str(cause)) from None  # a sentence of ours, which tyro's page would fold
        plain = re.sub(r"\x1b\[[0-9;]*m", "", page.getvalue())  # on a terminal it has colours
        lines = "\n".join(line.strip("│| ") for line in plain.splitlines()[1:])  # without title and frame
        message, *more = filter(str.strip, re.split(r"\n\W*\n", f"\n{lines}\n"))
        message = re.sub(r"^Error parsing (\w+: )?", "", " ".join(message.split()))
        option = re.search(r"(?:meant|helptext):\s+(--\S+) ?(\S*)", " ".join(more))  # explained by tyro: name and type
        if option and message.startswith("Unrecognized"):
            message += f"; did you mean {option[1]}? (--help lists all)"
        elif option and message.startswith(option[1]):
            message += f"; expected {option[2]}"
        raise UserError(message) from None


def tables(config: Any) -> dict[str, dict]:
    """Return the tables of a configuration, such as [model], as plain values."""
    return {name: asdict(table) for name, table in vars(config).items() if is_dataclass(table)}


def to_toml(config: Any) -> str:
    """Return a dataclass of tables as TOML that `parse` reads back, without the options that are None."""
    known = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables(config).items()
    }
    return tomli_w.dumps(known)

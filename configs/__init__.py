"""The front door of every script: options from the command line over a TOML file over the defaults, and exit codes.

A script describes its options as frozen dataclasses with a docstring under each field; `tyro` checks types and names
and writes --help from them. A TOML file is turned into the same options, placed before the user's own, so that both
pass the same checks and the last one wins.
"""

import contextlib
import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import tyro

T = TypeVar("T")

REGISTRY = tyro.constructors.ConstructorRegistry()

# What others call options of ours.
SYNONYMS = {
    "block_size": "context_length",
    "d_model": "n_embd",
    "data": "source",
    "dataset": "source",
    "eval_interval": "eval_every",
    "lr": "learning_rate",
    "max_iters": "max_steps",
    "precision": "dtype",
    "save_every": "checkpoint_every",
    "start": "prompt",
    "text": "source",
}


class ConfigError(ValueError):
    """An option that does not exist or has a value it cannot have; the message is for the user."""

    exit_code = 2


@REGISTRY.primitive_rule
def booleans_as_in_toml(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """true and false, as a TOML file spells them."""
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


def parse(
    options: type[T],
    argv: list[str],
    file: Path | None = None,
    defaults: T | None = None,
    ignored: Collection[str] = (),
) -> T:
    """Build the dataclass `options` from a TOML file and a command line. --help prints and exits.

    defaults: values where neither says anything; None: those of the dataclass. ignored: options that the file may have
    and the dataclass has no more, such as train.seed.

    Raises ConfigError, in one sentence, for an unknown or ill-typed option or an unreadable file.
    """
    if file is None:
        return run_tyro(options, argv, defaults)
    try:
        from_file = options_in(file, ignored)
        run_tyro(options, from_file, defaults)  # alone, so that its faults are not laid to the command line
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return run_tyro(options, from_file + argv, defaults)


def options_in(file: Path, ignored: Collection[str] = ()) -> list[str]:
    """The tables of a TOML file as command line options."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "" if file.suffix == ".toml" else f"; if it is a text to train on: --data.source {file}"
        raise ConfigError(f"not a TOML file: {error}{hint}") from None
    options = []
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{table} must be inside a table such as [train]")
        for key, value in content.items():
            if f"{table}.{key}" in ignored:
                continue
            options += [f"--{table}.{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return options


def run_tyro(options: type[T], argv: list[str], defaults: T | None) -> T:
    """tyro.cli, with its page of explanation cut down to a ConfigError of one sentence."""
    page = io.StringIO()
    if any(re.search("[\ud800-\udfff]", word) for word in argv):
        raise ConfigError("an option is not valid UTF-8")
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
            raise ConfigError(str(cause)) from None  # a sentence of ours, which tyro's page would fold
        lines = "\n".join(line.strip("│| ") for line in page.getvalue().splitlines()[1:])  # without title and frame
        message, *more = filter(str.strip, re.split(r"\n\W*\n", f"\n{lines}\n"))
        message = re.sub(r"^Error parsing (\w+: )?", "", " ".join(message.split()))
        expected = re.search(r"(--\w\S+) ?(\S*)", " ".join(more))  # what tyro explains
        if message.startswith("Unrecognized"):
            message += nearest(options, message.split(": ")[1].split(",")[0])
        elif expected and message.startswith(expected[1]):
            message += f"; expected {expected[2]}"
        raise ConfigError(message) from None


def nearest(options: type, word: str) -> str:
    """What may have been meant by this word of a command line, as the end of a sentence; empty if nothing is near."""
    names = {name.split(".")[-1]: name for name in option_names(options)}
    word = word.partition("=")[0]
    last = word.lstrip("-").replace("-", "_").split(".")[-1]
    last = SYNONYMS.get(last, last)
    if any(field.name == last and has_mark(field, tyro.conf.Positional) for field in fields(options)):
        return f"; give it without {word}"
    near = get_close_matches(last, names, n=1, cutoff=0.65)  # vocab_size is not batch_size
    near += [name for name in names if name.startswith(last)]
    return f"; did you mean --{names[near[0]]}?" if near else ""


def option_names(options: type, table: str = "") -> Iterator[str]:
    """train.seed, for example: all that a command line may name."""
    for field in fields(options):
        if is_dataclass(field.default):
            yield from option_names(type(field.default), f"{field.name}.")
        elif not has_mark(field, tyro.conf.Positional) and not has_mark(field, tyro.conf.Suppress):
            yield table + field.name


def has_mark(field: Field, mark: object) -> bool:
    """Whether the type of an option has this mark of tyro."""
    return mark in getattr(field.type, "__metadata__", ())


def read_prompt(prompt: str) -> str:
    """The text itself, or what it names: @FILE, or - for standard input.

    Raises ConfigError if that is not there or not UTF-8.
    """
    if prompt.startswith("@") and (not Path(prompt[1:]).exists() or Path(prompt[1:]).is_dir()):
        raise ConfigError(f"what begins with @ names a file, and there is no file {prompt[1:]!r}; - is standard input")
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        return Path(prompt[1:]).read_text(encoding="utf-8") if prompt.startswith("@") else prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}") from None


def to_toml(config: Any) -> str:
    """A dataclass of tables as TOML that `parse` reads back; options that are None are left out."""
    lines = []
    for table in fields(config):
        content = getattr(config, table.name)
        if is_dataclass(content):
            lines += [f"[{table.name}]"]
            for field in fields(content):
                value = getattr(content, field.name)
                if isinstance(value, str | Path):  # a string of JSON is one of TOML, but for this character
                    value = json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
                if value is not None:
                    lines += [f"{field.name} = {str(value).lower() if isinstance(value, bool) else value}"]
            lines += [""]
    return "\n".join(lines)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main and exit as tril's scripts do.

    0 done; 2 something the user can fix; 3 the loss stopped being finite; 75 interrupted but nothing lost; 130
    interrupted; 1 a bug of ours.
    An exception that is for the user carries its code as `exit_code`, prints one sentence and no traceback.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed from the beginning
            setattr(sys, name, open(os.devnull, "w"))
    # A terminal that cannot show a character shows a question mark; a file or a pipe has each line at once.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        main()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as stop:
        fail(str(stop) or "interrupted", getattr(stop, "exit_code", 130))
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
    except Exception as error:
        if is_out_of_memory(error):
            fail(str(error) if hasattr(error, "exit_code") else "out of memory", 2)
        if not hasattr(error, "exit_code"):
            raise
        fail(str(error), error.exit_code)


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is how Python or PyTorch say that there is not enough memory."""
    return isinstance(error, MemoryError) or bool(re.search("out of memory|DefaultCPUAllocator", str(error)))


def fail(message: str, exit_code: int) -> None:
    """Say why in one sentence on stderr and exit."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"{Path(sys.argv[0]).name}: {visible(message)}", file=sys.stderr)
    sys.exit(exit_code)


def visible(text: str) -> str:
    """The text with control characters, which could command a terminal, as escapes."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)

"""Where text comes from: the options of data, and the standard library, files, folders, globs, tables, and data sets of
the Hugging Face hub, which they name.

A corpus is a stream of documents, and a document is a stream of pieces of bounded size, so that neither a large corpus
nor one long line ever has to fit in memory.

A source is local files, or PREFIX:NAME, where READERS has "PREFIX:". For a new kind of source write a function, and
enter it in READERS (docs/data.md).
"""

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import BinaryIO, TextIO

from errors import UserError, check_numbers, errors_as_user_error
from files import first_bytes, refuse_formats

PIECE = 1 << 17  # characters; on a million spaces the split pattern runs out of stack
# Text is cut in front of white space that follows a letter or digit: a place where every common split pattern cuts
# too, so that the pieces of a document have the tokens of the whole.
CUT = re.compile(r"(?<=[A-Za-z0-9])(?=\s)")
# Also what programs write beside texts: Python, PyTorch, Spark.
HIDDEN = re.compile(
    r"\..*|__pycache__|_(committed|started)_\d+|_delta_log|_(common_)?metadata|.*\.(safetensors|pth|pyc)"
)
NOT_STDLIB = re.compile(
    r"test|tests|idle_test|site-packages|dist-packages|__pycache__|config-.*"
    r"|(cp[0-8]|hp_|iso8859|koi8_|kz|mac_|palmos|ptcp|tis_).*|(aliases|entities|_casefix|stringprep|topics)\.py"
)  # tests, what was installed, and tables of codes
# By which a run and a prepared corpus are known.
OURS = ({"config.toml", "metrics.jsonl", "checkpoints"}, {"meta.json", "train.bin", "val.bin", "tokenizer.json"})
BATCH = 100  # rows of Parquet that are read at once
LONGEST = 1 << 26  # characters of a field of CSV, or a line or an array of JSON; what never ends is read no further
PATIENCE = 10  # seconds that the hub has for its first answer

Document = str | Iterable[str]  # the text, or its parts one after the other, each of any size


@dataclass(frozen=True)
class DataConfig:
    """The text to learn from."""

    source: str = "stdlib"
    """stdlib (the Python standard library); a file, folder or glob of text,
    JSON, CSV, TSV or Parquet; hf:NAME[:CONFIG][@REVISION][#SPLIT] on the
    hub of Hugging Face; a directory made by data.prepare; a folder or glob of
    datatrove's token files (.ds); or bin:PATH, one of llm.c's shards (.bin)."""
    tokenizer: str = "bpe:4096"
    """bytes, chars, bpe:SIZE (trained on the source), a tiktoken name such as gpt2 or o200k_base,
    the path of a tokenizer.json; or model: the tokenizer of train.init_from."""
    text_column: str = "text"
    """The column that holds the text, in tables and hub data sets."""
    max_tokens: int | None = None
    """Stop at this many tokens of both splits together, or a piece of text later. None: everything. chars and bpe may
    learn from text beyond them. With val_source, or llm.c's shards, which have their own validation, only tokens to
    train on count."""
    val_fraction: float = 0.1
    """Share of the documents that is kept for validation: with few documents, or token files, the end of the text.
    Shards of llm.c have their own validation."""
    val_source: str = ""
    """Another text to validate on, of any kind that source may be. Left out: val_fraction of the source."""

    def __post_init__(self) -> None:
        for name in ("source", "val_source"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        check_numbers(self, max_tokens=(1, 1e30), val_fraction=(1e-9, 0.999999))

    @cached_property
    def files(self) -> list[Path]:
        """Those of `find_files`: a folder is walked once, however often it is read."""
        return find_files(self.source)


def documents(config: DataConfig) -> Iterator[Iterator[str]]:
    """Yield the documents of a source in a fixed order, each in pieces. Read each one before asking for the next.

    A row without text, in a table or a hub data set, is an empty document.

    Raises UserError if there is no such source, or for a file or row that cannot be read or holds no text.
    """
    prefix, colon, name = config.source.partition(":")
    read = READERS.get(prefix + colon)
    for document in read(name, config.text_column) if read else read_files(config.files, config.text_column):
        yield in_pieces([document] if isinstance(document, str) else document)


def in_pieces(parts: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces of at most PIECE characters, cut at harmless places if there are any."""
    rest = ""
    for part in parts:
        rest += part
        start = 0
        while len(rest) - start > PIECE:
            place = CUT.search(rest, start + PIECE - PIECE // 16, start + PIECE)
            end = place.start() if place else start + PIECE
            yield rest[start:end]
            start = end
        rest = rest[start:]
    yield rest


def find_files(source: str) -> list[Path]:
    """Return the files of a local source, sorted, each once, however many links lead to it.

    [] for one of READERS. Raises UserError if there is no such source.
    """
    if source.startswith(tuple(READERS)):
        return []
    if source == "stdlib":
        found = (path for path in walk(sysconfig.get_path("stdlib"), NOT_STDLIB) if path.suffix == ".py")
    elif os.path.isdir(source):
        found = walk(source, HIDDEN)
    elif os.path.exists(source):  # its name may hold characters of a glob
        found = [Path(source)]
    elif "**" in Path(source).parts:  # `glob` would follow links in circles
        top, _, name = source.partition("**")
        name = name.strip("/") or "*"
        if "**" in name:
            raise UserError(f"{source!r} has ** twice: give the folder that holds all of it")
        found = (path for folder in glob.glob(top or ".") for path in walk(folder, HIDDEN) if path.match(name))
    else:
        found = map(Path, glob.glob(source))
    names = {
        path.resolve(): path
        for path in sorted(found, reverse=True)
        # Weights and compiled code are left out, but no texts in Portuguese or Somali.
        if path.is_file() and not (path.suffix in (".pt", ".so") and b"\0" in first_bytes(path))
    }
    if not names:
        raise UserError(
            f"no text found at {source!r}: give a file, a folder, a glob, bin:PATH, {'NAME, '.join(READERS)}NAME or "
            "stdlib; download a file of the web first"
        )
    return sorted(names.values())


def walk(folder: str, hidden: re.Pattern) -> Iterator[Path]:
    """Yield the files in a folder at any depth, but no hidden names, no run of ours and no prepared corpus.

    Links are followed, in circles only once.

    Raises OSError for a folder that may not be read.
    """
    seen = set()
    waiting = [Path(folder)]
    while waiting:
        parent = waiting.pop()
        names = sorted(os.listdir(parent))
        if parent.resolve() not in seen and not any(marks <= {*names} for marks in OURS):
            seen.add(parent.resolve())
            found = [parent / name for name in names if not hidden.fullmatch(name)]
            waiting += filter(Path.is_dir, found)
            yield from found


def read_files(files: list[Path], text_column: str) -> Iterator[Document]:
    """Yield the documents of local files. Raises as `read_file`."""
    for path in files:
        if path.stat().st_size:  # nothing can be read from an empty Parquet file
            refuse_formats(path)
            yield from read_file(str(path), partial(open, mode="rb"), text_column)


def read_file(path: str, open_file: Callable[[str], BinaryIO], text_column: str) -> Iterator[Document]:
    """Yield the documents of a file: each row of a table, and any other file as a whole.

    Its name says whether it is a table (TABLES) or compressed (COMPRESSED). Raises UserError if it cannot be read.
    """
    name, suffix = os.path.splitext(path.lower())
    unpack = COMPRESSED.get(suffix)
    kind = os.path.splitext(name)[1] if unpack else suffix
    problem = f"cannot read {path}{'' if kind in TABLES else ' as text in UTF-8 (convert or unpack it?)'}"

    def read() -> Iterator[str]:
        with errors_as_user_error(problem), open_file(path) as packed:
            with io.TextIOWrapper(unpack(packed) if unpack else packed, "utf-8-sig", newline="") as file:
                yield from TABLES.get(kind, read_text)(path, file, text_column)

    yield from read() if kind in TABLES else [read()]


def open_zstandard(packed: BinaryIO) -> BinaryIO:
    """Read what Zstandard has compressed."""
    import pyarrow  # slow to import; comes with `datasets`

    return pyarrow.CompressedInputStream(packed, "zstd")


def read_text(path: str, file: TextIO, text_column: str) -> Iterator[str]:
    """Yield a text in parts. Raises UserError for what is no text, though it happens to be valid UTF-8."""
    for part in iter(partial(file.read, PIECE), ""):
        if "\0" in part:
            raise UserError(
                f"{path} is no text: it has NUL characters, as UTF-16 and archives have: save it as UTF-8, or unpack it"
            )
        yield part


def read_json(path: str, file: TextIO, text_column: str) -> Iterator[str]:
    """Yield the texts of JSON: of an object a line, or an array of them, or of one such value on any lines.

    Raises UserError for a row that is no object or has no such column, and ValueError or RecursionError for one that is
    not JSON.
    """
    parse = json.JSONDecoder(parse_int=float).decode  # int refuses thousands of digits
    for number, line in enumerate(iter(partial(file.readline, LONGEST), ""), start=1):
        if line.isspace():
            continue
        try:
            value = parse(line)
        except ValueError:  # it goes on, up to the end of the file
            line += file.read(LONGEST - len(line))
            if len(line) == LONGEST:
                raise UserError(
                    f"{path}, line {number}: expected a row of JSON on this line, or on several in a file of less than "
                    f"{LONGEST:,} characters"
                ) from None
            value = parse("\n" * (number - 1) + line)  # so that an error names the line of the file
        is_array = isinstance(value, list)
        for place, row in enumerate(value if is_array else [value], start=number):
            where = f"{path}, {'row' if is_array else 'line'} {place}"
            check_column(where, text_column, list(row) if isinstance(row, dict) else [f"{row!r:.60}"])
            yield text_of(where, row[text_column])


def read_csv(path: str, file: TextIO, text_column: str, delimiters: str = ",;\t|") -> Iterator[str]:
    """Yield the texts of a CSV file, whose first row names the columns. Raises UserError for a row unlike it.

    Its delimiter is the one of these that the first line has most of.
    """
    csv.field_size_limit(LONGEST - 1)  # a line that is cut to be read is no row
    lines = iter(partial(file.readline, LONGEST), "")
    header = next(lines, "")
    rows = csv.reader(chain([header], lines), delimiter=max(delimiters, key=header.count), strict=True)
    line = 1
    try:
        names = next(rows, [])
        check_column(path, text_column, names)
        line = rows.line_num + 1
        for row in rows:
            if row:
                if len(row) != len(names):
                    raise csv.Error(f"{len(row)} fields instead of {len(names)}")
                yield row[names.index(text_column)]
            line = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: {error} (is there a quote that never closes?)") from None


def read_parquet(path: str, file: TextIO, text_column: str) -> Iterator[str]:
    """Yield the texts of a Parquet file."""
    import pyarrow.parquet  # slow to import

    # By default it keeps what it has read of a column.
    table = pyarrow.parquet.ParquetFile(file.buffer, pre_buffer=False, buffer_size=1 << 20)
    check_column(path, text_column, table.schema_arrow.names)
    batches = table.iter_batches(BATCH, columns=[text_column])
    for number, value in enumerate(chain.from_iterable(batch[0].to_pylist() for batch in batches), start=1):
        yield text_of(f"{path}, row {number}", value)


# The kinds of files that are tables: TABLES[SUFFIX](PATH, OPEN FILE, text_column) yields the text of each row.
TABLES = {
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".jsonlines": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiters="\t"),
    ".parquet": read_parquet,
    ".arrow": read_parquet,  # as save_to_disk writes it: refused, since it is no Parquet
}
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstandard}  # by suffix


def read_hub(name: str, text_column: str) -> Iterator[Document]:
    """Yield a split of a hub data set, NAME[:CONFIG][@REVISION][#SPLIT]: its files, read over the network.

    The hub has PATIENCE to say that it has the data set. If it falls silent later, the libraries try again for minutes.

    Raises UserError if the hub does not know the name, or does not answer.
    """
    import datasets  # slow to import
    import fsspec
    import huggingface_hub as hub

    # They would report each try, and an error a second time.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    hub.logging.set_verbosity_error()
    name, _, split = name.partition("#")
    name, _, revision = name.partition("@")
    name, _, config = name.partition(":")
    with errors_as_user_error(f"cannot read {name} from the hub"):
        print(f"asking the hub for {name}", file=sys.stderr)
        hub.dataset_info(name, timeout=PATIENCE)
        builder = datasets.load_dataset_builder(name, config or None, revision=revision or None)
        files = builder.config.data_files[split or "train"]
    for path in files:
        yield from read_file(path, lambda path: fsspec.open(path).open(), text_column)


def check_column(where: str, text_column: str, names: list[str]) -> None:
    """Raise UserError if the columns of a table have no such name, or two."""
    if names.count(text_column) != 1:
        raise UserError(
            f"{where}: expected a column {text_column!r}, got {shorten(', '.join(names), 60, placeholder='...')}: "
            "choose one by --data.text_column (of data.prepare: --text_column); the first line of a CSV names them"
        )


def text_of(where: str, value: object) -> str:
    """Return the text in a row, "" for null. Raises UserError if it is no text, or one that UTF-8 cannot hold."""
    if not isinstance(value, str | None):
        raise UserError(f"{where}: expected a text, got {value!r:.60}: mend the row, or choose another column")
    text = value or ""
    with errors_as_user_error(f"{where} has half a character"):
        text.encode()
    return text


# The kinds of source that are not files: READERS["PREFIX:"](NAME, text_column) yields those of PREFIX:NAME.
READERS = {
    "hf:": read_hub,
}

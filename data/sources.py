"""Where text comes from: the standard library, files, folders, globs, tables, and data sets of the Hugging Face hub.

A corpus is a stream of documents, and a document is a stream of pieces of bounded size, so that neither a large
corpus nor one long line ever has to fit in memory.
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data import DataError, errors_as_data_error

PIECE = 1 << 17  # characters; on a million spaces the split pattern runs out of stack
# Text is cut in front of white space that follows a letter or digit: a place where every common split pattern cuts
# too, so that the pieces of a document have the tokens of the whole.
CUT = re.compile(r"(?<=[A-Za-z0-9])(?=\s)")
BATCH = 100  # rows of a table that are read at once
TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # suffix -> builder of `datasets`

Document = Iterator[str]


class Shard(NamedTuple):
    """One file of a source, or one data set of the hub."""

    name: str
    size: int  # bytes; 0 on the hub, where it is not known
    read: Callable[[], Iterator[Document]]


def documents(shards: list[Shard]) -> Iterator[Document]:
    """Yield the documents of all shards. Read each one before asking for the next.

    Raises DataError for a file that holds no text.
    """
    for shard in shards:
        yield from shard.read()


def find_shards(source: str, text_column: str = "text") -> list[Shard]:
    """The shards of a source, in a fixed order.

    source: "stdlib"; a file, folder or glob of text or tables (JSON lines, Parquet, CSV); or a hub data set, as in
    hf:NAME[:CONFIG][@REVISION]. Raises DataError if there is nothing of this name.
    """
    if source.startswith("hf:"):
        return hub_shards(source, text_column)
    shards = []
    for file in files(source):
        path, kind = str(file), table_kind(file)
        if kind is None:
            read = partial(read_text, path)
        elif path.lower().endswith(".parquet"):
            read = partial(read_parquet, text_column, path)
        else:
            read = partial(read_table, text_column, kind, path)
        shards.append(Shard(path, file.stat().st_size, read))
    return shards


def hub_shards(source: str, text_column: str) -> list[Shard]:
    """The training split of a hub data set, read over the network: its Parquet files, or else one shard.

    Raises DataError for a name that cannot be one, or if the hub cannot be read.
    """
    parts = re.fullmatch(r"hf:([\w./-]+)(?::([^@]+))?(?:@(.+))?", source)
    if not parts:
        raise DataError(f"{source!r} does not name a data set of the Hugging Face hub, as hf:OWNER/NAME does")
    import datasets  # slow to import

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised below, once
    name, config, revision = parts.groups()
    with errors_as_data_error(f"cannot read {name}"):
        splits = datasets.load_dataset_builder(name, config, revision=revision).config.data_files or {}
        if splits and "train" not in splits:
            raise DataError(f"{name} has no split 'train'; it has {', '.join(map(str, splits))}")
        paths = list(map(str, splits.get("train", ())))
        if paths and all(path.endswith(".parquet") for path in paths):
            return [Shard(path, 0, partial(read_parquet, text_column, path)) for path in paths]
        table = datasets.load_dataset(name, config, revision=revision, split="train", streaming=True)
        return [Shard(name, 0, partial(read_rows, text_column, name, lambda: table))]


def files(source: str) -> list[Path]:
    """The files of a local source, sorted. Hidden files and Python's caches are left out, unless named themselves."""
    if source == "stdlib":
        return standard_library()
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        skip = re.compile(r"\..*|__pycache__")
        found = [p for p in path.rglob("*") if not any(map(skip.fullmatch, p.relative_to(path).parts))]
    else:
        found = [p for p in map(Path, glob.glob(str(path), recursive=True)) if "__pycache__" not in p.parts]
    found = sorted(p for p in found if p.is_file())
    if not found:
        raise DataError(f"no text found at {source!r}: give a file, a folder, a glob, hf:NAME or stdlib")
    return found


def standard_library() -> list[Path]:
    """The Python standard library on this machine, without its tests: real text, available everywhere and offline."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = re.compile(r"^(test|tests|idle_test|site-packages|dist-packages|__pycache__|config-.*)$")
    found = [p for p in root.rglob("*.py") if not any(skip.match(part) for part in p.relative_to(root).parts)]
    if not found:
        raise DataError(f"this Python has no standard library sources in {root}: name another data.source")
    return sorted(found)


def signature(source: str) -> str:
    """A cheap fingerprint that changes when a local source does: names, sizes and times of its files."""
    if source.startswith("hf:"):
        return source
    stats = [(path.resolve(), path.stat()) for path in files(source)]
    stamps = "\n".join(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats)
    return hashlib.sha256(stamps.encode(errors="surrogateescape")).hexdigest()


def table_kind(path: str | Path) -> str | None:
    """The kind of table that a file is by its name, None for plain text. Compressed tables count too."""
    return TABLES.get(Path(re.sub(r"\.(gz|bz2|xz|zst)$", "", str(path).lower())).suffix)


def read_parquet(text_column: str, path: str) -> Iterator[Document]:
    """Yield the text column of a Parquet file, local or on the hub, one document a row.

    With `pyarrow` itself, because `datasets` decodes the whole file into memory, even when it streams.
    """
    import fsspec  # slow to import, like the next one
    import pyarrow.parquet

    with (
        errors_as_data_error(f"cannot read {path}"),
        fsspec.open(path, "rb") if "://" in path else open(path, "rb") as file,
    ):
        table = pyarrow.parquet.ParquetFile(file)
        if text_column not in table.schema_arrow.names:
            found = ", ".join(f"{field.name} ({field.type})" for field in table.schema_arrow)
            raise DataError(f"{path} has no column {text_column!r}; it has {found}")
        for number, batch in enumerate(table.iter_batches(BATCH, columns=[text_column])):
            yield from as_documents(batch.column(0).to_pylist(), number, f"{path}, column {text_column!r}")


def read_table(text_column: str, kind: str, path: str) -> Iterator[Document]:
    """Yield the text column of a local table that is not Parquet, one document a row."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if os.path.getsize(path) == 0:
        return
    options = {"split": "train", "streaming": True, "data_files": [glob.escape(path)]}
    yield from read_rows(text_column, path, partial(datasets.load_dataset, kind, **options))


def read_rows(text_column: str, where: str, open_table: Callable[[], Any]) -> Iterator[Document]:
    """Yield the text column of a table that `datasets` streams, one document a row."""
    with errors_as_data_error(f"cannot read {where}"):
        for number, batch in enumerate(open_table().iter(BATCH)):
            if text_column not in batch:
                found = ", ".join(f"{name} ({type(values[0]).__name__})" for name, values in batch.items())
                raise DataError(f"{where} has no column {text_column!r}; it has {found}")
            yield from as_documents(batch[text_column], number, f"{where}, column {text_column!r}")


def as_documents(texts: list, number: int, where: str) -> Iterator[Document]:
    """Yield the rows of the batch with this number. A null is an empty document."""
    for row, text in enumerate(texts):
        if not isinstance(text, str | None):
            raise DataError(f"{where}, row {number * BATCH + row} is no text, but {type(text).__name__}")
        yield split(text or "")


def read_text(path: str) -> Iterator[Document]:
    """Yield a UTF-8 file as one document."""
    yield pieces_of(path)


def pieces_of(path: str) -> Document:
    """Yield a UTF-8 file in pieces. Raises DataError naming the byte that is not UTF-8."""
    rest = ""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            while block := file.read(PIECE):
                *pieces, rest = split(rest + block)
                yield from pieces
        except UnicodeDecodeError as error:
            # Python decodes block by block, and the bad block ends where the file was read to.
            byte, offset = error.object[error.start], file.buffer.tell() - len(error.object) + error.start
            raise DataError(
                f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset}; if it is no text, leave it out with a glob"
            ) from None
    yield rest


def split(text: str) -> Iterator[str]:
    """Cut text into pieces of about PIECE characters, at harmless places if there are any."""
    start = 0
    while len(text) - start > PIECE:
        cut = CUT.search(text, start + PIECE - PIECE // 16, start + PIECE)
        end = cut.start() if cut else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]

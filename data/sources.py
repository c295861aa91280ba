"""Where text comes from: the standard library, files, folders, globs, tables, and data sets of the Hugging Face hub.

A corpus is a stream of documents, and a document is a stream of pieces of bounded size, so that neither a large corpus
nor one long line ever has to fit in memory.

A source is local files, or PREFIX:NAME with a prefix in READERS. For a new kind of source write a function, and enter
it in READERS (docs/data.md).
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from data import errors_as_user_error
from errors import UserError

if TYPE_CHECKING:
    import pyarrow

PIECE = 1 << 17  # characters; on a million spaces the split pattern runs out of stack
# Text is cut in front of white space that follows a letter or digit: a place where every common split pattern cuts
# too, so that the pieces of a document have the tokens of the whole.
CUT = re.compile(r"(?<=[A-Za-z0-9])(?=\s)")
HIDDEN = re.compile(r"\..*|__pycache__")
NOT_STDLIB = re.compile(r"test|tests|idle_test|site-packages|dist-packages|__pycache__|config-.*")
GENERATED = re.compile(rb"(?i)auto-?generated")
CODES = re.compile(rb"(?:0x|\\[xuU]|U\+)[0-9a-fA-F]+|[0-9]+")
MOST_CODES = 0.08  # of a file; what people write has less
BATCH = 100  # rows of a table that are read at once
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # of `datasets`, by suffix
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

Document = str | Iterable[str]  # the text, or its parts one after the other, each of any size


def documents(source: str, text_column: str) -> Iterator[Iterator[str]]:
    """Yield the documents of a source in a fixed order, each in pieces. Read each one before asking for the next.

    source: "stdlib"; a file, folder or glob of text or tables (JSON lines, Parquet, CSV); or PREFIX:NAME.
    text_column: the column that holds the text, in tables and hub data sets.

    Raises UserError if there is no such source, or for a file that holds no text.
    """
    prefix, name = split_prefix(source)
    read = READERS.get(prefix, read_files)
    for document in read(name, text_column):
        yield cut([document] if isinstance(document, str) else document)


def cut(parts: Iterable[str]) -> Iterator[str]:
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


def split_prefix(source: str) -> tuple[str, str]:
    """Return the prefix and the name of a source: ("hf", NAME) for hf:NAME, ("", source) for local files."""
    prefix, colon, name = source.partition(":")
    return (prefix, name) if colon and prefix in READERS else ("", source)


def files(source: str) -> list[Path]:
    """Return the files of a local source, sorted, and none for a source with a prefix in READERS.

    Raises UserError if there is no such source.
    """
    if split_prefix(source)[0]:
        return []
    path = Path(source)
    if source == "stdlib":
        modules = walk(Path(sysconfig.get_path("stdlib")), NOT_STDLIB)
        found = [path for path in modules if path.suffix == ".py" and not is_table(path)]
    elif path.is_dir():
        found = walk(path, HIDDEN)
    elif path.is_file():  # its name may hold characters of a glob
        found = [path]
    else:
        found = map(Path, glob.glob(source, recursive=True))
    found = sorted(file for file in found if file.is_file())
    if not found:
        kinds = ", ".join(f"{prefix}:NAME" for prefix in READERS)
        raise UserError(f"no text found at {source!r}: give a file, a folder, a glob, {kinds} or stdlib")
    return found


def walk(root: Path, skip: re.Pattern) -> Iterator[Path]:
    """Yield all files below a folder, except those with a name to skip on the way."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip.fullmatch(name)]  # os.walk enters only these
        yield from (Path(folder, name) for name in names if not skip.fullmatch(name))


@cache
def is_table(path: Path) -> bool:
    """Return whether source code is a generated table: its head says so, or it is full of numbers in digits or hex."""
    content = path.read_bytes()
    codes = sum(map(len, CODES.findall(content)))
    return bool(GENERATED.search(content[:256])) or codes > MOST_CODES * len(content)


def signature(source: str) -> str:
    """Return a hash of the names, sizes and times of the files of a source, or the source itself if it has no files."""
    found = files(source)
    if not found:
        return source
    stamps = []
    for path in found:
        stat = path.stat()
        stamps.append(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(stamps).encode(errors="surrogateescape")).hexdigest()


def read_files(source: str, text_column: str) -> Iterator[Document]:
    """Yield the documents of local files: each row of a table, compressed or not, and each other file as a whole.

    The name of a file says whether it is a table.
    """
    for path in map(str, files(source)):
        name = Path(path.lower())
        builder = BUILDERS.get(Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix)
        if builder is None:
            yield read_text(path)
        elif name.suffix == ".parquet":
            yield from read_parquet(path, text_column)
        elif os.path.getsize(path):  # `datasets` cannot read an empty one
            yield from read_table(path, text_column, builder, data_files=[glob.escape(path)])


def read_text(path: str) -> Iterator[str]:
    """Yield a UTF-8 file in parts. Raises UserError if it is not UTF-8."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            while part := file.read(PIECE):
                yield part
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 ({error.reason}): convert or decompress it; if it is no text, leave it out by a "
                "glob in quotes, such as 'src/**/*.py'"
            ) from None


def read_hub(name: str, text_column: str) -> Iterator[str]:
    """Yield the training split of a hub data set, NAME[:CONFIG][@REVISION], read over the network.

    Raises UserError for a malformed name.
    """
    parts = re.fullmatch(r"([\w./-]+)(?::([^@]+))?(?:@(.+))?", name)
    if not parts:
        raise UserError(f"'hf:{name}' does not name a data set of the Hugging Face hub, as hf:OWNER/NAME does")
    import datasets  # slow to import

    name, config, revision = parts.groups()
    with errors_as_user_error(f"cannot read {name}"):
        splits = datasets.load_dataset_builder(name, config, revision=revision).config.data_files or {}
    paths = [str(path) for path in splits.get("train", ())]
    if paths and all(path.endswith(".parquet") for path in paths):
        for path in paths:
            yield from read_parquet(path, text_column)
    else:
        yield from read_table(name, text_column, name, name=config, revision=revision)


def read_parquet(path: str, text_column: str) -> Iterator[str]:
    """Yield the text column of a Parquet file, local or on the hub.

    It is read by `pyarrow`, because streaming by `datasets` may abort the process in the end (apache/arrow#45214).
    """
    import fsspec  # slow to import, like the next one
    import pyarrow.parquet

    with (
        errors_as_user_error(f"cannot read {path}"),
        fsspec.open(path, "rb") if "://" in path else open(path, "rb") as file,
    ):
        table = pyarrow.parquet.ParquetFile(file)
        for batch in table.iter_batches(BATCH, columns=[text_column]):
            yield from texts(path, text_column, table.schema_arrow.names, batch)


def read_table(where: str, text_column: str, table: str, **options: object) -> Iterator[str]:
    """Yield the text column of a table that `datasets` streams.

    where: the name of the table in messages. table, options: the arguments of `load_dataset`.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would report an error a second time
    with errors_as_user_error(f"cannot read {where}"):
        rows = datasets.load_dataset(table, split="train", streaming=True, **options)
        for batch in rows.with_format("arrow").iter(BATCH):
            yield from texts(where, text_column, batch.column_names, batch)


def texts(
    where: str, text_column: str, names: list[str], batch: "pyarrow.Table | pyarrow.RecordBatch"
) -> Iterator[str]:
    """Yield the texts of some rows of a table. A null is an empty text.

    names: the columns of the whole table. Raises UserError if the text column is not among them, or holds another type.
    """
    if text_column not in names:
        raise UserError(f"{where} has no column {text_column!r}; it has {', '.join(names)}")
    for text in batch.column(text_column).to_pylist():
        if not isinstance(text, str | None):
            raise UserError(f"{where}: the column {text_column!r} holds no text, but {type(text).__name__}")
        yield text or ""


# The kinds of source that are not files: READERS[PREFIX](NAME, text_column) yields the documents of PREFIX:NAME.
READERS = {
    "hf": read_hub,
}

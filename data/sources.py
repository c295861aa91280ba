"""Where text comes from: the standard library, files, folders, globs, tables, and data sets of the Hugging Face hub.

A corpus is a stream of documents, and a document is a stream of pieces of bounded size, so that neither a large
corpus nor one long line ever has to fit in memory.
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
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
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # of `datasets`, by suffix

Document = Iterator[str]


def documents(source: str, text_column: str) -> Iterator[Document]:
    """Yield the documents of a source, in a fixed order. Read each one before asking for the next.

    source: "stdlib"; a file, folder or glob of text or tables (JSON lines, Parquet, CSV); or a hub data set, as in
    hf:NAME[:CONFIG][@REVISION], of which the training split is read over the network. Raises UserError if there is
    nothing of this name, or for a file that holds no text.
    """
    if source.startswith("hf:"):
        yield from read_hub(source, text_column)
        return
    for file in files(source):
        yield from read_file(file, text_column)


def read_file(path: Path, text_column: str) -> Iterator[Document]:
    """Yield the rows of a table, compressed or not, by the name of the file; else the file as one document."""
    name = Path(path.name.lower())
    builder = BUILDERS.get(Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix)
    if builder is None:
        yield read_text(path)
    elif path.name.lower().endswith(".parquet"):
        yield from read_parquet(str(path), text_column)
    elif path.stat().st_size:  # `datasets` cannot read an empty one
        yield from read_table(str(path), text_column, builder, data_files=[glob.escape(str(path))])


def files(source: str) -> list[Path]:
    """Return the files of a local source, sorted. Raises UserError if there are none."""
    path = Path(source)
    if source == "stdlib":
        found = [path for path in walk(Path(sysconfig.get_path("stdlib")), ".py", NOT_STDLIB) if not is_table(path)]
    elif path.is_dir():
        found = walk(path, "", HIDDEN)
    elif path.is_file():  # its name may hold characters of a glob
        found = [path]
    else:
        found = map(Path, glob.glob(str(path), recursive=True))
    found = sorted(file for file in found if file.is_file())
    if not found:
        raise UserError(f"no text found at {source!r}: give a file, a folder, a glob, hf:NAME or stdlib")
    return found


def walk(root: Path, suffix: str, skip: re.Pattern) -> list[Path]:
    """Find all files of this suffix below a folder, except those with a name to skip on the way."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip.fullmatch(name)]  # os.walk enters these alone
        found += [Path(folder, name) for name in names if name.endswith(suffix) and not skip.fullmatch(name)]
    return found


@cache
def is_table(path: Path) -> bool:
    """Return whether source code is a generated table: its head says so, or it is full of numbers in digits or hex."""
    content = path.read_bytes()
    codes = sum(map(len, CODES.findall(content)))
    return bool(GENERATED.search(content[:256])) or codes > MOST_CODES * len(content)


def signature(source: str) -> str:
    """Return a hash that changes with a local source: of the names, sizes and times of its files."""
    if source.startswith("hf:"):
        return source
    stats = [(path.resolve(), path.stat()) for path in files(source)]
    stamps = "\n".join(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats)
    return hashlib.sha256(stamps.encode(errors="surrogateescape")).hexdigest()


def read_hub(source: str, text_column: str) -> Iterator[Document]:
    """Yield the training split of a hub data set, read over the network. Raises UserError for a malformed name."""
    parts = re.fullmatch(r"hf:([\w./-]+)(?::([^@]+))?(?:@(.+))?", source)
    if not parts:
        raise UserError(f"{source!r} does not name a data set of the Hugging Face hub, as hf:OWNER/NAME does")
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


def read_parquet(path: str, text_column: str) -> Iterator[Document]:
    """Yield the text column of a Parquet file, local or on the hub, one document a row.

    By `pyarrow` itself: streamed by `datasets`, it may abort the process in the end (apache/arrow#45214).
    """
    import fsspec  # slow to import, like the next one
    import pyarrow.parquet

    with (
        errors_as_user_error(f"cannot read {path}"),
        fsspec.open(path, "rb") if "://" in path else open(path, "rb") as file,
    ):
        table = pyarrow.parquet.ParquetFile(file)
        check_column(path, text_column, table.schema_arrow.names)
        for batch in table.iter_batches(BATCH, columns=[text_column]):
            yield from as_documents(path, text_column, batch)


def read_table(where: str, text_column: str, table: str, **options: object) -> Iterator[Document]:
    """Yield the text column of a table that `datasets` streams, one document a row.

    where: for messages. table, options: for `load_dataset`.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would report an error a second time
    with errors_as_user_error(f"cannot read {where}"):
        rows = datasets.load_dataset(table, split="train", streaming=True, **options)
        for batch in rows.with_format("arrow").iter(BATCH):
            check_column(where, text_column, batch.column_names)
            yield from as_documents(where, text_column, batch)


def check_column(where: str, text_column: str, names: list[str]) -> None:
    """Raise UserError if a table with these columns has no such column."""
    if text_column not in names:
        raise UserError(f"{where} has no column {text_column!r}; it has {', '.join(names)}")


def as_documents(where: str, text_column: str, batch: "pyarrow.Table | pyarrow.RecordBatch") -> Iterator[Document]:
    """Yield the rows of a batch as documents. A null is an empty document."""
    for text in batch.column(text_column).to_pylist():
        if not isinstance(text, str | None):
            raise UserError(f"{where}: the column {text_column!r} holds no text, but {type(text).__name__}")
        yield split(text or "")


def read_text(path: Path) -> Document:
    """Yield a UTF-8 file in pieces. Raises UserError if it is not UTF-8."""
    rest = ""
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            while block := file.read(PIECE):
                *pieces, rest = split(rest + block)
                yield from pieces
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 ({error.reason}): convert or decompress it; if it is no text, leave it out by a "
                "glob in quotes, such as 'src/**/*.py'"
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

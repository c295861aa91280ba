"""Where text comes from: the standard library, files, folders, globs, tables, and data sets of the Hugging Face hub.

A corpus is a stream of documents, and a document is a stream of pieces of bounded size, so that neither a large
corpus nor one long line ever has to fit in memory.
"""

import codecs
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from data import DataError

PIECE = 1 << 17  # characters; on a million spaces the split pattern runs out of stack
# Text is cut in front of white space that follows a letter or digit: a place where every common split pattern cuts
# too, so that the pieces of a document have the tokens of the whole.
CUT = re.compile(r"(?<=[A-Za-z0-9])(?=\s)")
BATCH = 100  # rows of a table that are read at once
TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # suffix -> builder of `datasets`

Document = Iterator[str]


def documents(source: str, text_column: str = "text", first_shard: int = 0) -> Iterator[tuple[int, Document]]:
    """The documents of a source, in a fixed order, each with the number of its shard: the file that it is in.

    source: "stdlib"; a file, folder or glob of text or tables (JSON lines, Parquet, CSV); or a hub data set, as in
    hf:NAME[:CONFIG][@REVISION]. Shards before `first_shard` are not read. Read each document before asking for the
    next. Raises DataError if the source does not exist or is not text.
    """
    start = 0
    for kind, group in groupby(hub_files(source) if source.startswith("hf:") else files(source), key=table_kind):
        paths = [str(path) for path in group]
        skipped = min(len(paths), max(0, first_shard - start))
        if kind in (None, "parquet"):
            read = read_text if kind is None else partial(read_parquet, text_column)
            shards = ((shard, document) for shard in range(skipped, len(paths)) for document in read(paths[shard]))
        else:
            shards = read_table(kind, text_column, paths, skipped) if skipped < len(paths) else ()
        yield from ((start + shard, document) for shard, document in shards)
        start += len(paths)


def hub_files(source: str) -> list[str]:
    """Where the files of a hub data set's training split are. Raises DataError if there are none that can be read."""
    parts = re.fullmatch(r"hf:([\w./-]+)(?::([^@]+))?(?:@(.+))?", source)
    if not parts:
        raise DataError(f"{source!r} does not name a data set of the Hugging Face hub, as hf:OWNER/NAME does")
    import datasets  # slow to import

    name, config, revision = parts.groups()
    try:
        found = datasets.load_dataset_builder(name, config, revision=revision).config.data_files["train"]
    except Exception as error:  # whatever the network or the hub make of it
        raise DataError(f"cannot read {name}: {type(error).__name__}: {error}".splitlines()[0]) from error
    unknown = [path for path in found if table_kind(path) is None]
    if unknown:
        raise DataError(f"cannot read {name}: {unknown[0]} is neither JSON lines, Parquet nor CSV")
    return found


def files(source: str) -> list[Path]:
    """The files of a local source, sorted. Hidden files and folders, and Python's caches, are left out."""
    if source == "stdlib":
        return standard_library()
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        skip = re.compile(r"\..*|__pycache__")
        found = [p for p in path.rglob("*") if not any(map(skip.fullmatch, p.relative_to(path).parts))]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
    found = sorted(p for p in found if p.is_file())
    if not found:
        raise DataError(f"no text found at {source!r}: give a file, a folder, a glob, hf:NAME or stdlib")
    return found


def standard_library() -> list[Path]:
    """The Python standard library on this machine, without its tests: real text that is everywhere, also offline."""
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
    digest = hashlib.sha256()
    for path in files(source):
        stat = path.stat()
        digest.update(os.fsencode(path.resolve()) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def table_kind(path: str | Path) -> str | None:
    """The kind of table that a file is, None for plain text; compressed tables count too."""
    return next((TABLES[suffix] for suffix in Path(path).suffixes[-2:] if suffix in TABLES), None)


def read_parquet(text_column: str, path: str) -> Iterator[Document]:
    """The text column of a Parquet file, here or on the hub, one document a row.

    By `pyarrow` itself: through `datasets` it decodes the whole file into memory, however slowly that is used.
    """
    import fsspec  # slow to import, as the next one
    import pyarrow.parquet

    try:
        with fsspec.open(path, "rb") as file:
            table = pyarrow.parquet.ParquetFile(file)
            if text_column not in table.schema_arrow.names:
                found = ", ".join(f"{field.name} ({field.type})" for field in table.schema_arrow)
                raise DataError(f"{path} has no column {text_column!r}; it has {found}")
            for number, batch in enumerate(table.iter_batches(BATCH, columns=[text_column])):
                yield from checked(batch.column(0).to_pylist(), number, f"{path}, column {text_column!r}")
    except DataError:
        raise
    except Exception as error:  # whatever a reader makes of a bad file or a missing network
        raise DataError(f"cannot read {path}: {type(error).__name__}: {error}".splitlines()[0]) from error


def read_table(kind: str, text_column: str, paths: list[str], first_shard: int) -> Iterator[tuple[int, Document]]:
    """The text column of other tables, one document a row, streamed by `datasets`."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below, once
    shard = first_shard
    try:
        table = datasets.load_dataset(kind, split="train", streaming=True, data_files=paths)
        for shard in range(first_shard, len(paths)):
            for number, batch in enumerate(table.shard(len(paths), shard).iter(BATCH)):
                if text_column not in batch:
                    found = ", ".join(f"{name} ({type(values[0]).__name__})" for name, values in batch.items())
                    raise DataError(f"{paths[shard]} has no column {text_column!r}; it has {found}")
                texts = checked(batch[text_column], number, f"{paths[shard]}, column {text_column!r}")
                yield from ((shard, text) for text in texts)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot read {paths[shard]}: {type(error).__name__}: {error}".splitlines()[0]) from error


def checked(texts: list, number: int, where: str) -> Iterator[Document]:
    """A batch of rows as documents; a null is an empty one."""
    for row, text in enumerate(texts):
        if not isinstance(text, str | None):
            raise DataError(f"{where}, row {number * BATCH + row} is no text, but {type(text).__name__}")
        yield split(text or "")


def read_text(path: str) -> Iterator[Document]:
    """A UTF-8 file, which is one document. Raises DataError naming the byte that is not UTF-8."""
    yield pieces_of(path)


def pieces_of(path: str) -> Document:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset, rest = 0, ""
    with open(path, "rb") as file:
        while True:
            block = file.read(PIECE)
            try:
                rest += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = offset + len(block) - len(error.object) + error.start  # what was decoded ends where the block does
                byte = error.object[error.start]
                raise DataError(
                    f"{path} is not UTF-8: byte 0x{byte:02x} at offset {at}; if it is no text, leave it out with a glob"
                ) from None
            offset += len(block)
            if not block:
                break
            if len(rest) >= PIECE:
                *pieces, rest = split(rest)
                yield from pieces
    yield rest


def split(text: str) -> Iterator[str]:
    """Cut text into pieces of about PIECE characters at harmless places."""
    start = 0
    while len(text) - start > PIECE:
        cut = CUT.search(text, start + PIECE - PIECE // 16, start + PIECE)
        end = cut.start() if cut else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]

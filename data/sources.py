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
    if source.startswith("hf:"):
        parts = re.fullmatch(r"hf:([\w./-]+)(?::([^@]+))?(?:@(.+))?", source)
        if not parts:
            raise DataError(f"{source!r} does not name a data set of the Hugging Face hub, as hf:OWNER/NAME does")
        name, config, revision = parts.groups()
        yield from rows(name, text_column, first_shard, name=config, revision=revision)
        return
    start = 0
    for suffix, paths in groupby(files(source), key=table_kind):
        group = [str(path) for path in paths]
        skipped = min(len(group), max(0, first_shard - start))
        if suffix is None:
            shards = enumerate(group[skipped:], start=skipped)
            numbered = ((shard, read_text(Path(path))) for shard, path in shards)
        else:
            numbered = rows(suffix, text_column, skipped, data_files=group) if skipped < len(group) else ()
        yield from ((start + shard, document) for shard, document in numbered)
        start += len(group)


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


def table_kind(path: Path) -> str | None:
    """The `datasets` builder that reads a file, None for plain text; compressed tables count too."""
    return next((TABLES[suffix] for suffix in path.suffixes[-2:] if suffix in TABLES), None)


def rows(builder: str, text_column: str, first_shard: int, **options: object) -> Iterator[tuple[int, Document]]:
    """The text column of tables or a hub data set, one document a row, streamed by `datasets`."""
    import datasets  # slow to import, and only tables need it

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below, once
    paths = options.get("data_files", [])
    where = paths[0] if paths else builder
    try:
        table = datasets.load_dataset(builder, split="train", streaming=True, **options)
        for shard in range(first_shard, table.num_shards):
            where = paths[shard] if paths else builder
            for number, batch in enumerate(table.shard(table.num_shards, shard).iter(BATCH)):
                for row, text in enumerate(batch.get(text_column, [0])):  # a null is an empty document
                    if not isinstance(text, str | None):
                        found = ", ".join(f"{name} ({type(values[row]).__name__})" for name, values in batch.items())
                        place = f"row {number * BATCH + row} of {where}"
                        raise DataError(f"{place} has no text in column {text_column!r}; it has {found}")
                    yield shard, split(text or "")
    except DataError:
        raise
    except Exception as error:  # whatever a reader makes of a bad file or a missing network
        raise DataError(f"cannot read {where}: {type(error).__name__}: {error}".splitlines()[0]) from error


def read_text(path: Path) -> Document:
    """A UTF-8 file in pieces. Raises DataError naming the byte that is not UTF-8."""
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

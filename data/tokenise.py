"""From a stream of documents to train.bin and val.bin, in bounded memory and on all cores.

What was written is noted from time to time with the place in the source that it came from, so that a preparation of
hours that is interrupted, however, goes on from there and ends in the same bytes.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

from data import DataError, sources
from data.corpus import SPLITS, read_blocks
from data.tokenizer import (
    FILES,
    document_start,
    encode,
    load_tokenizer,
    make_tokenizer,
    save_tokenizer,
    token_lengths,
)

if TYPE_CHECKING:
    from data.prepare import DataConfig

PROGRESS = "progress.json"
NOTE_EVERY = 1 << 26  # bytes of ids between two notes of the progress
GROUP = 1 << 20  # characters that are encoded in one go
BPE_SAMPLE = 1 << 28  # characters that a bpe tokenizer is trained on, at most


class Piece(NamedTuple):
    """Part of a document."""

    text: str
    split: str  # "train" or "val"
    is_start: bool  # of the document
    shard: int
    number: int  # in its shard, from one


@dataclass
class Progress:
    """How far a preparation has come; progress.json is one of these, as it was when the files were last synced."""

    recipe: dict
    shard: int = 0
    number: int = 0
    """Of the last piece that is in the files."""
    documents: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Of the files, in bytes."""


def write_corpus(config: "DataConfig", recipe: dict, directory: Path, model: Path | None = None) -> str:
    """Tokenise the source into a directory, or go on with that; meta.json is written last. Returns the fingerprint."""
    progress = read_progress(directory, recipe)
    if progress:
        print(f"going on after {sum(progress.sizes.values()):,} bytes of ids that were prepared before")
    else:
        progress = Progress(recipe)
        for path in directory.iterdir():  # of a process that was killed
            path.unlink()
        save_vocabulary(config, directory, model)
    tokenizer = load_tokenizer(directory)
    dtype = np.dtype("<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4")
    try:
        write_tokens(config, tokenizer, dtype, directory, progress)
    except DataError as error:
        if (directory / PROGRESS).exists():
            raise DataError(f"{error}; what was prepared is kept, and the same command goes on from there") from error
        raise
    (directory / PROGRESS).unlink(missing_ok=True)
    val_share = progress.sizes["val"] / max(1, sum(progress.sizes.values()))
    if not config.val_fraction / 2 <= val_share <= config.val_fraction * 2:
        cut_tail(config.val_fraction, dtype, directory)  # one document, or too few to share out fairly
    lengths = token_lengths(tokenizer)
    meta = recipe | {"vocab_size": tokenizer.n_vocab, "dtype": dtype.str, "documents": progress.documents}
    for split in SPLITS:
        with open(directory / f"{split}.bin", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_ctime_ns
        blocks = (block.astype(np.int64) for block in read_blocks(directory / f"{split}.bin", dtype))
        count = np.sum([np.bincount(block, minlength=len(lengths)) for block in blocks] or [lengths * 0], axis=0)
        meta[split] = {"tokens": int(count.sum()), "bytes": int(count @ lengths), "sha256": digest}
        meta[split] |= {"ctime_ns": written}
    if meta["train"]["tokens"] < 2 or meta["val"]["tokens"] < 2:
        raise DataError(f"{config.source} is too short to keep {config.val_fraction:.0%} of it for validation")
    content = (directory / FILES[0]).read_bytes() + (meta["train"]["sha256"] + meta["val"]["sha256"]).encode()
    meta["fingerprint"] = hashlib.sha256(content).hexdigest()
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta["fingerprint"]


def save_vocabulary(config: "DataConfig", directory: Path, model: Path | None) -> None:
    """Put the tokenizer's files into the directory: learned, known, or those of a model."""
    if config.tokenizer == "model":
        for name in FILES:
            shutil.copyfile(model / name, directory / name)
        return
    texts = (piece.text for piece in pieces(config))
    if config.tokenizer.startswith("bpe:"):
        texts = at_most(texts, BPE_SAMPLE)
    with tqdm(texts, desc=f"learning {config.tokenizer}", unit=" pieces", leave=False, delay=1) as progress:
        save_tokenizer(make_tokenizer(config.tokenizer, progress), directory)


def read_progress(directory: Path, recipe: dict) -> Progress | None:
    """The progress of a preparation by the same recipe that was interrupted, unless it is damaged."""
    try:
        progress = Progress(**json.loads((directory / PROGRESS).read_text(encoding="utf-8")))
        there = all((directory / f"{split}.bin").stat().st_size >= progress.sizes[split] for split in SPLITS)
        return progress if there and progress.recipe == recipe else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def write_tokens(
    config: "DataConfig", tokenizer: tiktoken.Encoding, dtype: np.dtype, directory: Path, progress: Progress
) -> None:
    """Append to train.bin and val.bin what `progress` lacks, and note there what they have.

    A document goes to validation by a hash of its beginning, so equal documents are never on both sides.
    """
    start = np.array(document_start(tokenizer), dtype)
    files = {split: open(directory / f"{split}.bin", "ab") for split in SPLITS}
    try:
        for split, file in files.items():
            file.truncate(progress.sizes[split])  # what came after the last note
        noted = sum(progress.sizes.values())
        with make_bar(config) as bar:
            for piece, ids in encode_in_parallel(tokenizer, pieces(config, progress.shard, progress.number)):
                ids = ids.astype(dtype)
                if piece.is_start:
                    progress.documents += 1
                    ids = np.concatenate((start, ids))
                files[piece.split].write(ids.data)
                progress.sizes[piece.split] += ids.nbytes
                progress.shard, progress.number = piece.shard, piece.number
                bar.update(len(piece.text.encode()))
                size = sum(progress.sizes.values())
                if config.max_tokens and size >= config.max_tokens * dtype.itemsize:
                    break
                if size - noted >= NOTE_EVERY:
                    note(progress, directory, files.values())
                    noted = size
    finally:
        for file in files.values():
            file.close()


def make_bar(config: "DataConfig") -> tqdm:
    """A progress bar in bytes of text, with an end if that is known."""
    total = None if config.max_tokens else text_size(config.source)
    return tqdm(desc="tokenising", total=total, unit="B", unit_scale=True, leave=False, delay=1)


def note(progress: Progress, directory: Path, files: Iterable[BinaryIO]) -> None:
    """Write down the progress, once what it says is on the disk."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    temporary = directory / f"{PROGRESS}.tmp"
    temporary.write_text(json.dumps(asdict(progress)), encoding="utf-8")
    temporary.replace(directory / PROGRESS)


def pieces(config: "DataConfig", first_shard: int = 0, first_number: int = 0) -> Iterator[Piece]:
    """The source piece by piece, without empty ones, after that number of the first shard to be read.

    Raises DataError at the end if all was white space.
    """
    blank, last_shard, number = True, None, 0
    for shard, document in sources.documents(config.source, config.text_column, first_shard):
        number = number if shard == last_shard else 0
        last_shard, split = shard, None
        for text in filter(None, document):
            is_start = split is None
            if is_start:
                hashed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
                split = "val" if hashed < config.val_fraction * 2**64 else "train"
            blank = blank and text.isspace()
            number += 1
            if shard > first_shard or number > first_number:
                yield Piece(text, split, is_start, shard, number)
    if blank:
        raise DataError(f"{config.source} is empty: there is no text in it")


def encode_in_parallel(tokenizer: tiktoken.Encoding, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
    """The pieces with their ids, in order.

    In threads: tiktoken leaves Python's lock, so that processes are no faster (benchmarks/tokenise.py).
    """

    def encode_all(group: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        return [(piece, encode(tokenizer, piece.text)) for piece in group]

    workers = os.cpu_count() or 1
    running = deque()
    with ThreadPoolExecutor(workers) as pool:
        for group in grouped(pieces, GROUP):
            running.append(pool.submit(encode_all, group))
            if len(running) > 2 * workers:  # enough to keep everyone busy, and no more in memory
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def grouped(pieces: Iterator[Piece], size: int) -> Iterator[list[Piece]]:
    """Lists of pieces of about `size` characters: small documents share a task."""
    group, filled = [], 0
    for piece in pieces:
        group.append(piece)
        filled += len(piece.text)
        if filled >= size:
            yield group
            group, filled = [], 0
    yield group


def cut_tail(val_fraction: float, dtype: np.dtype, directory: Path) -> None:
    """Make the last `val_fraction` of all tokens the validation split."""
    with open(directory / "train.bin", "ab") as train, open(directory / "val.bin", "rb") as val:
        shutil.copyfileobj(val, train)
        num_train = int(train.tell() // dtype.itemsize * (1 - val_fraction))
    with open(directory / "train.bin", "r+b") as train, open(directory / "val.bin", "wb") as val:
        train.seek(num_train * dtype.itemsize)
        shutil.copyfileobj(train, val)
        train.truncate(num_train * dtype.itemsize)


def at_most(texts: Iterator[str], size: int) -> Iterator[str]:
    """The first texts, until they have `size` characters."""
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def text_size(source: str) -> int | None:
    """The bytes of a source that is plain text, None for any other."""
    if source.startswith("hf:"):
        return None
    paths = sources.files(source)
    return None if any(map(sources.table_kind, paths)) else sum(path.stat().st_size for path in paths)

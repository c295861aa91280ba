"""From a stream of documents to train.bin and val.bin, in bounded memory and on all cores.

What was written is noted from time to time with the place in the source that it came from, so that a preparation of
hours, however it is interrupted, goes on from there and ends in the same bytes.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from data import DataError
from data.corpus import SPLITS, read_blocks
from data.sources import Shard, documents, find_shards, table_kind
from data.tokenizer import (
    FILES,
    Tokenizer,
    cuts_anywhere,
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
NOTE_EVERY = 10  # seconds between two notes of the progress
GROUP = 1 << 20  # characters that are encoded in one go
BPE_SAMPLE = 1 << 28  # characters that a bpe tokenizer is trained on, at most
GOES_ON = "what was prepared is kept, and the same command goes on from there"


class Piece(NamedTuple):
    """Part of a document; one that has no text is one piece that has none."""

    text: str
    split: str  # "train" or "val"
    is_start: bool  # of the document
    shard: int
    number: int  # in its shard, from one


@dataclass
class Progress:
    """How far a preparation has come; progress.json is one of these, as it was when the files were last synced."""

    recipe: dict
    first: int = 0
    """The shard it began with."""
    shards: str = ""
    """A digest of the shards that were opened so far."""
    shard: int = 0
    number: int = 0
    """Of the last piece that is in the files; 0 if none of this shard is."""
    blank: bool = True
    """Whether all was white space so far."""
    documents: int = 0
    without_text: int = 0
    bytes_of_text: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Of the files, in bytes."""


def write_corpus(config: "DataConfig", recipe: dict, directory: Path, model: Path | None = None) -> str:
    """Tokenise the source into a directory, or go on with that; meta.json is written last. Returns the fingerprint."""
    shards = find_shards(config.source, config.text_column)
    progress, tokenizer = write_shards(config, Progress(unsigned(recipe)), shards, directory, model)
    dtype = id_type(tokenizer)
    if progress.blank:
        (directory / PROGRESS).unlink()
        raise DataError(f"{config.source} is empty: there is no text in it")
    if progress.without_text:
        rows = progress.documents + progress.without_text
        print(f"{progress.without_text:,} of {rows:,} documents have no text")
    val_share = progress.sizes["val"] / max(1, sum(progress.sizes.values()))
    if not config.val_fraction / 2 <= val_share <= config.val_fraction * 2:
        (directory / PROGRESS).unlink()
        cut_tail(config.val_fraction, dtype, directory)  # one document, or too few to share out fairly
    lengths = token_lengths(tokenizer)
    meta = recipe | {"vocab_size": tokenizer.n_vocab, "dtype": dtype.str}
    meta |= {"documents": progress.documents, "without_text": progress.without_text}
    for split in SPLITS:
        path, content, count = directory / f"{split}.bin", hashlib.sha256(), np.zeros_like(lengths)
        for block in read_blocks(path, dtype):
            content.update(block)
            count += np.bincount(block, minlength=len(lengths))
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_ctime_ns
        meta[split] = {"tokens": int(count.sum()), "bytes": int(count @ lengths), "sha256": content.hexdigest()}
        meta[split] |= {"ctime_ns": written}
    if meta["train"]["tokens"] < 2 or meta["val"]["tokens"] < 2:
        (directory / PROGRESS).unlink(missing_ok=True)
        raise DataError(f"{config.source} is too short to keep {config.val_fraction:.0%} of it for validation")
    content = (directory / FILES[0]).read_bytes() + (meta["train"]["sha256"] + meta["val"]["sha256"]).encode()
    meta["fingerprint"] = hashlib.sha256(content).hexdigest()
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    (directory / PROGRESS).unlink(missing_ok=True)
    return meta["fingerprint"]


def write_shards(
    config: "DataConfig", begin: Progress, shards: list[Shard], directory: Path, model: Path | None = None
) -> tuple[Progress, Tokenizer]:
    """Tokenise the shards from where `begin` is to the last, or go on where a directory says that this had come."""
    began = time.monotonic()
    progress = read_progress(directory, begin, shards)
    if progress and progress.documents:
        print(f"going on after {progress.documents:,} documents, {progress.bytes_of_text / 1e6:,.1f} MB")
    if not progress:
        progress = begin
        for path in directory.iterdir():  # of a process that was killed
            path.unlink()
        save_vocabulary(config, shards, directory, model)
    tokenizer = load_tokenizer(directory)
    try:
        write_tokens(config, shards, tokenizer, id_type(tokenizer), directory, progress, began)
    except BaseException as error:
        if (directory / PROGRESS).exists() and isinstance(error, DataError):
            raise DataError(f"{error}; {GOES_ON}") from error
        if (directory / PROGRESS).exists():
            print(GOES_ON)
        raise
    return progress, tokenizer


def id_type(tokenizer: Tokenizer) -> np.dtype:
    """The narrowest type that has room for every id."""
    return np.dtype("<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4")


def save_vocabulary(config: "DataConfig", shards: list[Shard], directory: Path, model: Path | None) -> None:
    """Put the tokenizer's files into the directory: learned, known, or those of a model."""
    if config.tokenizer == "model":
        for name in FILES:
            shutil.copyfile(model / name, directory / name)
    else:
        texts = (piece.text for piece in pieces(config, shards))
        if config.tokenizer.startswith("bpe:"):
            texts = at_most(texts, BPE_SAMPLE)
        with tqdm(texts, desc=f"learning {config.tokenizer}", unit=" pieces", leave=False, delay=1) as bar:
            save_tokenizer(make_tokenizer(config.tokenizer, bar), directory)
    for name in FILES:
        with open(directory / name, "rb") as file:
            os.fsync(file.fileno())


def digest(files: list[bytes]) -> str:
    """Of the files of a tokenizer."""
    return hashlib.sha256(b"\0".join(files)).hexdigest()


def unsigned(recipe: dict) -> dict:
    """A recipe without the state of the source: that of each shard is looked at by itself."""
    return {key: value for key, value in recipe.items() if key != "signature"}


def digest_of(shards: list[Shard], progress: Progress) -> str:
    """Of the shards that were opened."""
    opened = shards[progress.first : progress.shard + (progress.number > 0)]
    text = "\n".join(f"{shard.name}\0{shard.stamp}" for shard in opened)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def read_progress(directory: Path, begin: Progress, shards: list[Shard]) -> Progress | None:
    """The progress of an interrupted preparation that began so, unless it is damaged, or what was read has changed."""
    try:
        load_tokenizer(directory)
        progress = Progress(**json.loads((directory / PROGRESS).read_text(encoding="utf-8")))
        there = all((directory / f"{split}.bin").stat().st_size >= progress.sizes[split] >= 0 for split in SPLITS)
        same = (progress.recipe, progress.first) == (begin.recipe, begin.first)
        same &= begin.shard <= progress.shard and (progress.shard, progress.number) <= (len(shards), 0)
        return progress if there and same and progress.shards == digest_of(shards, progress) else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def write_tokens(
    config: "DataConfig",
    shards: list[Shard],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    directory: Path,
    progress: Progress,
    began: float,
) -> None:
    """Append to train.bin and val.bin what `progress` lacks, and note there what they have, last noted when it began.

    A document goes to validation by a hash of its beginning, so equal documents are never on both sides.
    """
    start = np.array(document_start(tokenizer), dtype)
    files = {split: open(directory / f"{split}.bin", "ab") for split in SPLITS}
    try:
        for split, file in files.items():
            file.truncate(progress.sizes[split])  # what came after the last note
        most = config.max_tokens * dtype.itemsize if config.max_tokens else math.inf  # bytes
        enough = sum(progress.sizes.values()) >= most  # it was interrupted after the last piece
        place = (progress.shard, progress.number)
        remaining = iter(()) if enough else pieces(config, shards, *place, whole=not cuts_anywhere(tokenizer))
        with make_bar(config, shards, progress) as bar:
            for piece, ids in encode_in_parallel(tokenizer, remaining):
                ids = ids.astype(dtype)
                progress.without_text += not piece.text
                progress.blank = progress.blank and not piece.text.strip()
                if piece.is_start:
                    progress.documents += 1
                    ids = np.concatenate((start, ids))
                files[piece.split].write(ids.data)
                progress.sizes[piece.split] += ids.nbytes
                progress.shard, progress.number = piece.shard, piece.number
                num_bytes = len(piece.text.encode())
                progress.bytes_of_text += num_bytes
                bar.update(num_bytes)
                if sum(progress.sizes.values()) >= most:
                    break
                if time.monotonic() - began >= NOTE_EVERY:
                    note(progress, shards, directory, files.values())
                    began = time.monotonic()
        if sum(progress.sizes.values()) < most:  # all was read
            progress.shard, progress.number = len(shards), 0
        note(progress, shards, directory, files.values())
    finally:
        for file in files.values():
            file.close()


def make_bar(config: "DataConfig", shards: list[Shard], progress: Progress) -> tqdm:
    """A progress bar in bytes of text, with an end if that is known."""
    total = None if config.max_tokens else text_size(shards[progress.first :])
    done = progress.bytes_of_text
    return tqdm(desc="tokenising", initial=done, total=total, unit="B", unit_scale=True, leave=False, delay=1)


def note(progress: Progress, shards: list[Shard], directory: Path, files: Iterable[BinaryIO]) -> None:
    """Write down the progress, once what it says is on the disk."""
    progress.shards = digest_of(shards, progress)
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    temporary = directory / f"{PROGRESS}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(asdict(progress), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / PROGRESS)


def pieces(
    config: "DataConfig", shards: list[Shard], first_shard: int = 0, first_number: int = 0, whole: bool = False
) -> Iterator[Piece]:
    """The source piece by piece, after that number of the first shard to be read; whole: a document is one piece."""
    last_shard, number = None, 0
    for shard, document in documents(shards, first_shard):
        number = number if shard == last_shard else 0
        last_shard, split = shard, None
        for text in filter(None, ["".join(document)] if whole else document):
            is_start = split is None
            if is_start:
                hashed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
                split = "val" if hashed < config.val_fraction * 2**64 else "train"
            number += 1
            if shard > first_shard or number > first_number:
                yield Piece(text, split, is_start, shard, number)
        if split is None:
            number += 1
            if shard > first_shard or number > first_number:
                yield Piece("", "train", False, shard, number)


def encode_in_parallel(tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
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


def text_size(shards: list[Shard]) -> int | None:
    """The bytes of shards that are plain text, None for any other."""
    return None if any(table_kind(shard.name) for shard in shards) else sum(shard.size for shard in shards) or None

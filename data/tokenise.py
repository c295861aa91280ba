"""From a stream of documents to the files of a prepared corpus, in bounded memory and on all cores."""

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data import DataError
from data.config import DataConfig
from data.corpus import SPLITS, read_blocks
from data.encoding import HubTokenizer, Tokenizer
from data.sources import Shard, documents, find_shards
from data.tokenizer import FILES, load_tokenizer, make_tokenizer, read_files, save_tokenizer

GROUP = 1 << 20  # characters that one thread encodes at a time
BPE_SAMPLE = 1 << 28  # characters that a bpe tokenizer is trained on, at most


class Piece(NamedTuple):
    """Part of a document. A document without text is one piece without text."""

    text: str
    split: str  # "train" or "val"
    is_start: bool  # of the document


@dataclass
class Counts:
    """Totals of what was read and written."""

    documents: int = 0
    without_text: int = 0
    is_blank: bool = True
    """True while there was nothing but white space."""
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    """Of text, in UTF-8."""
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


def write_corpus(config: DataConfig, recipe: dict, directory: Path, model: Path | None = None) -> str:
    """Tokenise a source into an empty directory and write meta.json last. Returns the fingerprint of the corpus.

    model: the directory whose tokenizer the name "model" stands for. Raises DataError if there is not enough text.
    """
    shards = find_shards(config.source, config.text_column)
    write_tokenizer(config, shards, directory, model)
    tokenizer = load_tokenizer(directory)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counts = write_tokens(config, shards, tokenizer, dtype, directory)
    if counts.is_blank:
        raise DataError(f"{config.source} is empty: there is no text in it")
    if counts.without_text:
        rows = counts.documents + counts.without_text
        print(f"{counts.without_text:,} of {rows:,} documents have no text")
    val_share = counts.tokens["val"] / max(1, sum(counts.tokens.values()))
    if not config.val_fraction / 2 <= val_share <= config.val_fraction * 2:
        cut_tail(config.val_fraction, tokenizer, dtype, directory, counts)  # one document, or too few to share out
    if min(counts.tokens.values()) < 2 or min(counts.bytes.values()) < 1:
        raise DataError(f"{config.source} is too short to keep {config.val_fraction:.0%} of it for validation")
    meta = recipe | {"vocab_size": tokenizer.vocab_size, "dtype": dtype.str}
    meta |= {"documents": counts.documents, "without_text": counts.without_text}
    for split in SPLITS:
        with open(directory / f"{split}.bin", "rb") as file:
            digest, written = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_ctime_ns
        meta[split] = {"tokens": counts.tokens[split], "bytes": counts.bytes[split], "sha256": digest}
        meta[split]["ctime_ns"] = written
    content = (directory / FILES[0]).read_bytes() + (meta["train"]["sha256"] + meta["val"]["sha256"]).encode()
    meta["fingerprint"] = hashlib.sha256(content).hexdigest()
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta["fingerprint"]


def write_tokenizer(config: DataConfig, shards: list[Shard], directory: Path, model: Path | None) -> None:
    """Write the tokenizer's files: trained on the source, known by name, or those of a model."""
    if config.tokenizer == "model":
        for name, content in read_files(model).items():
            (directory / name).write_bytes(content)
        return
    texts = (piece.text for piece in pieces(config, shards))
    if config.tokenizer.startswith("bpe:"):
        texts = at_most(texts, BPE_SAMPLE)
    with tqdm(texts, desc=f"learning {config.tokenizer}", unit=" pieces", leave=False, delay=1) as bar:
        save_tokenizer(make_tokenizer(config.tokenizer, bar), directory)


def write_tokens(
    config: DataConfig, shards: list[Shard], tokenizer: Tokenizer, dtype: np.dtype, directory: Path
) -> Counts:
    """Write the ids of all documents to train.bin and val.bin, each document after the tokens that start one."""
    counts, start = Counts(), np.array(tokenizer.document_start, dtype)
    most = config.max_tokens or math.inf
    total = None if config.max_tokens else sum(shard.size for shard in shards) or None  # about, where these are tables
    bar = tqdm(desc="tokenising", total=total, unit="B", unit_scale=True, leave=False, delay=1)
    with open(directory / "train.bin", "wb") as train, open(directory / "val.bin", "wb") as val, bar:
        files = {"train": train, "val": val}
        all_pieces = pieces(config, shards, whole=isinstance(tokenizer, HubTokenizer))
        for piece, ids in encode_in_parallel(tokenizer, all_pieces):
            ids = ids.astype(dtype)
            if piece.is_start:
                counts.documents += 1
                ids = np.concatenate((start, ids))
            num_bytes = len(piece.text.encode())
            files[piece.split].write(ids.data)
            counts.tokens[piece.split] += len(ids)
            counts.bytes[piece.split] += num_bytes
            counts.without_text += not piece.text
            counts.is_blank = counts.is_blank and not piece.text.strip()
            bar.update(num_bytes)
            if sum(counts.tokens.values()) >= most:
                break
    return counts


def pieces(config: DataConfig, shards: list[Shard], whole: bool = False) -> Iterator[Piece]:
    """Yield the source piece by piece; whole: document by document.

    A document goes to validation by a hash of its first piece, so equal documents are never in both splits.
    """
    for document in documents(shards):
        split = None
        for text in filter(None, ["".join(document)] if whole else document):
            is_start = split is None
            if is_start:
                hashed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
                split = "val" if hashed < config.val_fraction * 2**64 else "train"
            yield Piece(text, split, is_start)
        if split is None:
            yield Piece("", "train", False)


def encode_in_parallel(tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield the pieces with their ids, in order.

    Threads are enough: tiktoken releases Python's global lock while it encodes (benchmarks/tokenise.py).
    """

    def encode_all(group: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        return [(piece, tokenizer.encode(piece.text)) for piece in group]

    workers = os.cpu_count() or 1
    running = deque()
    with ThreadPoolExecutor(workers) as pool:
        for group in grouped(pieces, GROUP):
            running.append(pool.submit(encode_all, group))
            if len(running) > 2 * workers:  # enough to keep all threads busy, and little enough to fit in memory
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def grouped(pieces: Iterator[Piece], size: int) -> Iterator[list[Piece]]:
    """Collect pieces into lists of about `size` characters, so that small documents share a task."""
    group, filled = [], 0
    for piece in pieces:
        group.append(piece)
        filled += len(piece.text)
        if filled >= size:
            yield group
            group, filled = [], 0
    yield group


def cut_tail(val_fraction: float, tokenizer: Tokenizer, dtype: np.dtype, directory: Path, counts: Counts) -> None:
    """Make the last `val_fraction` of all tokens the validation split, and count again.

    The bytes of that split are those of its decoded text, a few millions of tokens at a time. At the cut they may be
    wrong by part of a character.
    """
    with open(directory / "train.bin", "ab") as train, open(directory / "val.bin", "rb") as val:
        shutil.copyfileobj(val, train)
        num_tokens = train.tell() // dtype.itemsize
        num_train = int(num_tokens * (1 - val_fraction))
    with open(directory / "train.bin", "r+b") as train, open(directory / "val.bin", "wb") as val:
        train.seek(num_train * dtype.itemsize)
        shutil.copyfileobj(train, val)
        train.truncate(num_train * dtype.itemsize)
    blocks = read_blocks(directory / "val.bin", dtype)
    num_bytes, total = (
        sum(len(tokenizer.decode(block.tolist()).encode()) for block in blocks),
        sum(counts.bytes.values()),
    )
    counts.tokens = {"train": num_train, "val": num_tokens - num_train}
    counts.bytes = {"train": total - num_bytes, "val": num_bytes}


def at_most(texts: Iterator[str], size: int) -> Iterator[str]:
    """Yield texts until they have `size` characters."""
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return

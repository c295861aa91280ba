"""From a stream of documents to the files of a prepared corpus, in bounded memory and on all cores."""

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cli.bars import progress_bar
from data.config import DataConfig
from data.corpus import SPLITS, dtype_of, fingerprint
from data.encoding import HubTokenizer, Tokenizer
from data.sources import documents
from data.tokenizer import find_tokenizer, load_tokenizer, make_tokenizer, read_files, save_tokenizer
from errors import UserError

GROUP = 16  # pieces that a thread encodes at a time, since documents may be small
CHUNK = 1 << 22  # ids that are decoded at a time


class Piece(NamedTuple):
    """Part of a document."""

    text: str
    split: str  # "train" or "val"
    is_start: bool  # of the document


def write_corpus(config: DataConfig, recipe: dict, directory: Path, model: Path | None = None) -> None:
    """Tokenise a source into an empty directory and write meta.json last.

    model: the directory whose tokenizer the name "model" stands for. Raises UserError if there is not enough text.
    """
    write_tokenizer(config, directory, model)
    tokenizer = load_tokenizer(directory)
    counts = write_tokens(config, tokenizer, directory)
    num_tokens = sum(count["tokens"] for count in counts.values())
    share = counts["val"]["tokens"] / max(1, num_tokens)
    if num_tokens and (share == 1 or not config.val_fraction / 2 <= share <= config.val_fraction * 2):
        cut_tail(config.val_fraction, tokenizer, directory, counts)  # one document, or too few to share out
    if any(count["tokens"] < 2 or count["bytes"] < 1 for count in counts.values()):
        raise UserError(f"{config.source} has too little text to keep {config.val_fraction:g} of it for validation")
    meta = recipe | {"vocab_size": tokenizer.vocab_size, "dtype": dtype_of(tokenizer).str} | counts
    for split in SPLITS:
        with open(directory / f"{split}.bin", "rb") as file:
            meta[split]["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
            meta[split]["ctime_ns"] = os.fstat(file.fileno()).st_ctime_ns
    meta["fingerprint"] = fingerprint(read_files(directory), meta)
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(config: DataConfig, directory: Path, model: Path | None) -> None:
    """Write the tokenizer's files: trained on the source, known by name, or copied."""
    if place := find_tokenizer(config.tokenizer, model):
        for name, content in read_files(place).items():
            (directory / name).write_bytes(content)
        return
    texts = (piece.text for piece in pieces(config))
    with progress_bar(texts, desc=f"learning {config.tokenizer}", unit=" pieces", leave=False, delay=1) as shown:
        save_tokenizer(make_tokenizer(config.tokenizer, shown), directory)


def write_tokens(config: DataConfig, tokenizer: Tokenizer, directory: Path) -> dict[str, dict[str, int]]:
    """Write the ids of all documents to train.bin and val.bin, each document after the tokens that start one.

    Returns how many "tokens" and "bytes" of text, in UTF-8, each split has.
    """
    counts = {split: {"tokens": 0, "bytes": 0} for split in SPLITS}
    dtype, most = dtype_of(tokenizer), config.max_tokens or math.inf
    start = np.array(tokenizer.document_start, dtype)
    progress = progress_bar(desc="tokenising", unit="B", unit_scale=True, leave=False, delay=1)
    with open(directory / "train.bin", "wb") as train, open(directory / "val.bin", "wb") as val, progress:
        files = {"train": train, "val": val}
        for piece, ids in encode_in_parallel(tokenizer, pieces(config, whole=isinstance(tokenizer, HubTokenizer))):
            ids = ids.astype(dtype)
            if piece.is_start:
                ids = np.concatenate((start, ids))
            num_bytes = len(piece.text.encode())
            files[piece.split].write(ids.data)
            counts[piece.split]["tokens"] += len(ids)
            counts[piece.split]["bytes"] += num_bytes
            progress.update(num_bytes)
            if sum(count["tokens"] for count in counts.values()) >= most:
                break
    return counts


def pieces(config: DataConfig, whole: bool = False) -> Iterator[Piece]:
    """Yield the source piece by piece; whole: document by document.

    A document goes to validation by a hash of its first piece, so equal documents are never in both splits, unless
    `cut_tail` makes another validation split.
    """
    for document in documents(config.source, config.text_column):
        for number, text in enumerate(filter(None, ["".join(document)] if whole else document)):
            if number == 0:
                hashed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
                split = "val" if hashed < config.val_fraction * 2**64 else "train"
            yield Piece(text, split, number == 0)


def encode_in_parallel(tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield the pieces with their ids, in order.

    Threads are enough: tiktoken releases Python's global lock while it encodes (benchmarks/bench.py).
    """

    def encode_all(group: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        return [(piece, tokenizer.encode(piece.text)) for piece in group]

    workers = os.cpu_count() or 1
    running = deque()
    with ThreadPoolExecutor(workers) as pool:
        while group := list(islice(pieces, GROUP)):
            running.append(pool.submit(encode_all, group))
            if len(running) > 2 * workers:  # enough to keep all threads busy, and little enough to fit in memory
                yield from running.popleft().result()
        for future in running:
            yield from future.result()


def cut_tail(val_fraction: float, tokenizer: Tokenizer, directory: Path, counts: dict) -> None:
    """Make the last `val_fraction` of all tokens the validation split, and count again.

    The bytes of that split are those of its decoded text. They may be wrong by part of a character at the cut, and
    at the end of each CHUNK.
    """
    dtype = dtype_of(tokenizer)
    train, val = (directory / f"{split}.bin" for split in SPLITS)
    with open(train, "ab") as file, open(val, "rb") as rest:
        shutil.copyfileobj(rest, file)
    tokens = np.memmap(train, dtype, mode="r")
    num_train, num_bytes = int(len(tokens) * (1 - val_fraction)), 0
    tokens[num_train:].tofile(val)
    for first in range(num_train, len(tokens), CHUNK):
        num_bytes += len(tokenizer.decode(tokens[first : first + CHUNK].tolist()).encode())
    os.truncate(train, num_train * dtype.itemsize)
    counts["train"] = {"tokens": num_train, "bytes": counts["train"]["bytes"] + counts["val"]["bytes"] - num_bytes}
    counts["val"] = {"tokens": len(tokens) - num_train, "bytes": num_bytes}

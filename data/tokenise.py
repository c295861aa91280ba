"""From a stream of documents to the files of a prepared corpus, in bounded memory and on all cores."""

import hashlib
import json
import math
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cli.bars import progress_bar
from data.config import DataConfig
from data.corpus import SPLITS, dtype_of, fingerprint, sha256
from data.encoding import END_OF_TEXT, HubTokenizer, Tokenizer
from data.sources import documents
from data.tokenizer import make_tokenizer, save_tokenizer
from errors import UserError

GROUP = 16  # pieces that a thread encodes at a time, since documents may be small
CHUNK = 1 << 22  # ids that are decoded at a time


class Piece(NamedTuple):
    """Part of a document."""

    text: str
    split: str  # "train" or "val"
    is_start: bool  # of the document


def write_corpus(config: DataConfig, key: dict, directory: Path, tokenizer: Tokenizer | None) -> None:
    """Tokenise a source into an empty directory and write meta.json last.

    Args:
        key: everything that the corpus depends on, for meta.json.
        tokenizer: None for one that is made by its name, and may learn the source.

    Raises UserError if there is not enough text.
    """
    if tokenizer is None:
        texts = (piece.text for piece in pieces(config, Counter()))
        desc = f"learning {config.tokenizer}"
        with progress_bar(iterable=texts, desc=desc, unit=" pieces", leave=False, delay=1) as shown:
            tokenizer = make_tokenizer(config.tokenizer, shown)
    save_tokenizer(tokenizer, directory)
    num_bytes = write_tokens(config, tokenizer, directory)
    train, val = (directory / f"{split}.bin" for split in SPLITS)
    val_size = val.stat().st_size
    size = train.stat().st_size + val_size
    share = val_size / max(1, size)
    if size and (share == 1 or not config.val_fraction / 2 <= share <= config.val_fraction * 2):
        # There is one document, or there are too few for the shares that were wanted.
        val_bytes = cut_tail(config.val_fraction, tokenizer, train, val)
        num_bytes = {"train": num_bytes.total() - val_bytes, "val": val_bytes}
    dtype = dtype_of(tokenizer)
    meta = key | {"vocab_size": tokenizer.vocab_size, "dtype": dtype.str}
    for split in SPLITS:
        path = directory / f"{split}.bin"
        stat = path.stat()
        num_tokens = stat.st_size // dtype.itemsize
        if num_tokens < 2 or num_bytes[split] < 1:
            raise UserError(
                f"{config.source} has too little text to keep {config.val_fraction:g} of it for validation: give more "
                "text, or a larger val_fraction"
            )
        meta[split] = {
            "tokens": num_tokens,
            "bytes": num_bytes[split],
            "sha256": sha256(path),
            "ctime_ns": stat.st_ctime_ns,
        }
    meta["fingerprint"] = fingerprint(tokenizer, meta)
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def write_tokens(config: DataConfig, tokenizer: Tokenizer, directory: Path) -> Counter:
    """Write the ids of all documents to train.bin and val.bin, each document after the tokens that start one.

    Notes rows and files without text, ends of texts that are written in the text, and documents without a start.

    Returns how many bytes of text, in UTF-8, each split has. Where max_tokens cuts a text, they are those of its
    decoded tokens, and may be wrong by part of a character.
    """
    room = config.max_tokens or math.inf
    num_bytes, seen = Counter(), Counter()
    ends = {END_OF_TEXT, *(name for name, token in tokenizer.special_tokens.items() if token in tokenizer.ends)}
    written = set()  # of the ends
    start = np.array(tokenizer.document_start, dtype_of(tokenizer))
    found = pieces(config, seen, whole=isinstance(tokenizer, HubTokenizer))
    progress = progress_bar(desc="tokenising", unit="B", unit_scale=True, leave=False, delay=1)
    with open(directory / "train.bin", "wb") as train, open(directory / "val.bin", "wb") as val, progress:
        files = {"train": train, "val": val}
        for piece, ids in encode_in_parallel(tokenizer, found):
            written |= {end for end in ends if end in piece.text}
            ids = ids.astype(start.dtype)
            if piece.is_start:
                ids = np.concatenate((start, ids))
            text = piece.text
            if len(ids) > room:
                ids = ids[:room]
                text = tokenizer.decode(ids.tolist())
            files[piece.split].write(ids.data)
            size = len(text.encode())
            num_bytes[piece.split] += size
            progress.update(size)
            room -= len(ids)
            if not room:
                break
    no_mark = "documents follow each other without a mark, because the tokenizer has no end of a text"
    notes = {
        f"{seen['empty']} of {seen['all']} rows or files have no text": seen["empty"],
        f"{', '.join(sorted(written))} in it is ordinary text; in a table each document has a row": written,
        no_mark: seen["all"] > 1 and not start.size,
    }
    for note in filter(notes.get, notes):
        print(f"note: {config.source}: {note}", file=sys.stderr)
    return num_bytes


def pieces(config: DataConfig, seen: Counter, whole: bool = False) -> Iterator[Piece]:
    """Yield the source piece by piece, or document by document if they are to be whole.

    seen: counts documents, and those without text.

    A document goes to validation by a hash of its first piece, so that equal documents are in the same split, unless
    `cut_tail` makes another validation split.
    """
    for document in documents(config.source, config.text_column):
        texts = ["".join(document)] if whole else document
        split = ""
        seen["all"] += 1
        for text in filter(None, texts):
            is_start = not split
            if is_start:
                hashed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
                split = "val" if hashed < config.val_fraction * 2**64 else "train"
            yield Piece(text, split, is_start)
        seen["empty"] += not split


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


def cut_tail(val_fraction: float, tokenizer: Tokenizer, train: Path, val: Path) -> int:
    """Make the last `val_fraction` of all tokens the validation split, by moving tokens between its file and the other.

    Returns how many bytes of text the validation split has: those of its decoded tokens. They may be wrong by part of a
    character at the cut, and at the end of each CHUNK.
    """
    dtype = dtype_of(tokenizer)
    with open(train, "ab") as file, open(val, "rb") as rest:
        shutil.copyfileobj(rest, file)
    tokens = np.memmap(train, dtype, mode="r")
    num_train = int(len(tokens) * (1 - val_fraction))
    tokens[num_train:].tofile(val)
    val_bytes = 0
    for first in range(num_train, len(tokens), CHUNK):
        val_bytes += len(tokenizer.decode(tokens[first : first + CHUNK].tolist()).encode())
    os.truncate(train, num_train * dtype.itemsize)
    return val_bytes

"""A prepared corpus: train.bin and val.bin (flat token ids), the tokenizer's files, and meta.json, a description.

Ids are little-endian, of 16 bits where the vocabulary allows. A corpus is checked against meta.json when it is opened.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import DataError, errors_as_data_error
from data.encoding import Tokenizer
from data.tokenizer import load_tokenizer, read_files

SPLITS, DTYPES = ("train", "val"), ("<u2", "<u4")
ENTRIES = {"source": str, "tokenizer": str, "fingerprint": str, "train": dict, "val": dict}


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, opened. Later changes to its directory do not affect it."""

    directory: Path
    meta: dict
    tokenizer: Tokenizer
    tokenizer_files: dict[str, bytes]
    tokens: dict[str, np.ndarray]
    """The ids of "train" and "val", memory-mapped: (n,) uint16 or uint32."""

    def __str__(self) -> str:
        train, val = self.meta["train"], self.meta["val"]
        return (
            f"{self.meta['source']}, {train['tokens']:,} tokens to train on, {val['tokens']:,} to validate "
            f"({self.meta['tokenizer']}, {train['bytes'] / train['tokens']:.2f} bytes a token)"
        )


def open_corpus(directory: Path) -> Corpus:
    """Open a prepared corpus. Raises DataError if it is incomplete, or has changed since it was prepared."""
    with errors_as_data_error(f"{directory} is not a complete prepared corpus"):
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        if not all(isinstance(meta[name], kind) for name, kind in ENTRIES.items()) or meta["dtype"] not in DTYPES:
            raise DataError(f"{directory / 'meta.json'} does not describe a prepared corpus")
        tokenizer, tokens = load_tokenizer(directory), {}
        for split in SPLITS:
            path = directory / f"{split}.bin"
            check(path, meta[split], np.dtype(meta["dtype"]), tokenizer.vocab_size)
            tokens[split] = np.memmap(path, dtype=meta["dtype"], mode="r")
        return Corpus(directory, meta, tokenizer, read_files(directory), tokens)


def check(path: Path, expected: dict, dtype: np.dtype, vocab_size: int) -> None:
    """Compare a file of ids with its entry in meta.json: its size, and its content if it was touched since.

    Raises DataError for a file that has changed, or an id that the vocabulary does not have.
    """
    stat, size = path.stat(), expected["tokens"] * dtype.itemsize
    if stat.st_size != size or expected["tokens"] < 2 or not expected["bytes"] > 0:
        raise DataError(f"{path} has {stat.st_size} bytes instead of {size}")
    if stat.st_ctime_ns == expected.get("ctime_ns"):  # no program can set this time
        return
    digest, read = hashlib.sha256(), 0
    for block in read_blocks(path, dtype):
        if block.max() >= vocab_size:
            at = int((block >= vocab_size).argmax())
            raise DataError(f"{path} holds id {block[at]} at position {read + at}, but vocab_size is {vocab_size}")
        digest.update(block)
        read += len(block)
    if digest.hexdigest() != expected["sha256"]:
        was = f"SHA-256 {expected['sha256'][:12]}, now {digest.hexdigest()[:12]}"
        raise DataError(f"{path} has changed since it was prepared ({was})")


def read_blocks(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield a file of ids, four million at a time."""
    with open(path, "rb") as file:
        while len(block := np.fromfile(file, dtype, count=1 << 22)):
            yield block

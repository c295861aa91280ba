"""A prepared corpus: train.bin and val.bin (flat token ids), the tokenizer's files, and meta.json, a description.

Ids are little-endian, of 16 bits where the vocabulary allows. A corpus is checked against meta.json when it is opened.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import errors_as_user_error
from data.encoding import Tokenizer
from data.tokenizer import FILES, MOST_JSON, load_tokenizer, read_files
from errors import UserError

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Corpus:
    """A corpus, opened: a prepared one, or token files."""

    directory: Path
    meta: dict
    tokenizer: Tokenizer
    tokenizer_files: dict[str, bytes]
    tokens: dict[str, np.ndarray]
    """The ids of "train" and "val", memory-mapped: (n,) uint16 or uint32; or `Shards`, which are read like an array."""

    def __str__(self) -> str:
        train, val = self.meta["train"], self.meta["val"]
        return (
            f"{self.meta['source']}, {train['tokens']:,} tokens, {val['tokens']:,} to validate "
            f"({self.tokenizer.name}, {val['bytes'] / val['tokens']:.2f} bytes each)"
        )


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Return the type of the ids in a file: as narrow as the vocabulary allows."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def fingerprint(tokenizer_files: dict[str, bytes], meta: dict) -> str:
    """Return the SHA-256 of tokenizer.json and of the SHA-256 of both splits, which tells corpora apart."""
    hashes = "".join(meta[split]["sha256"] for split in SPLITS)
    return hashlib.sha256(tokenizer_files[FILES[0]] + hashes.encode()).hexdigest()


def is_prepared(directory: str | Path) -> bool:
    """Return whether a directory is a prepared corpus, intact or not."""
    return (Path(directory) / "train.bin").is_file()


def open_corpus(directory: Path) -> Corpus:
    """Open a prepared corpus. Raises UserError if it is incomplete, or has changed since it was prepared."""
    with errors_as_user_error(f"{directory} is not a complete prepared corpus"):
        if (directory / "meta.json").stat().st_size > MOST_JSON:
            raise UserError(f"{directory / 'meta.json'} has more than {MOST_JSON} bytes")
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        tokenizer, files = load_tokenizer(directory), read_files(directory)
        if not isinstance(meta["source"], str) or not isinstance(meta["tokenizer"], str):
            raise UserError(f"{directory / 'meta.json'} does not describe a prepared corpus")
        if meta["fingerprint"] != fingerprint(files, meta):
            raise UserError(f"{directory} has changed since it was prepared: its fingerprint is not that of its files")
        tokens = {split: check(directory / f"{split}.bin", meta[split], tokenizer) for split in SPLITS}
        return Corpus(directory, meta, tokenizer, files, tokens)


def check(path: Path, expected: dict, tokenizer: Tokenizer) -> np.ndarray:
    """Map a file of ids, and compare it with its entry in meta.json: its size, and its content if it was touched since.

    Raises UserError for a file that has changed, or an id that the vocabulary does not have.
    """
    dtype = dtype_of(tokenizer)
    stat, size = path.stat(), expected["tokens"] * dtype.itemsize
    if stat.st_size != size or expected["tokens"] < 2 or not expected["bytes"] > 0:
        raise UserError(f"{path} has {stat.st_size} bytes instead of {size}")
    if stat.st_ctime_ns == expected["ctime_ns"]:  # no program can set this time
        return np.memmap(path, dtype, mode="r")
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise UserError(f"{path} has changed since it was prepared: its SHA-256 is another")
    tokens = np.memmap(path, dtype, mode="r")
    if tokens.max() >= tokenizer.vocab_size:
        raise UserError(f"{path} holds id {tokens.max()}, and the vocabulary has {tokenizer.vocab_size}")
    return tokens

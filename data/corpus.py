"""A prepared corpus: train.bin and val.bin (flat token ids), the tokenizer's files, and meta.json, a description.

Ids are little-endian, of 16 bits where the vocabulary allows. Opening a corpus compares its files with meta.json.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.encoding import Tokenizer
from data.tokenizer import TOKENIZER_JSON, load_tokenizer
from errors import UserError, errors_as_user_error
from files import read_small, sha256

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Corpus:
    """An open corpus: a prepared one, or token files."""

    directory: Path
    meta: dict
    tokenizer: Tokenizer
    tokens: dict[str, np.ndarray]
    """The ids of "train" and "val", memory-mapped: (n,) uint16 or uint32, or a `TokenArray`, which is indexed alike."""

    def __str__(self) -> str:
        val = self.meta["val"]
        return (
            f"{self.meta['source']!s:.200}, {self.meta['train']['tokens']:,} tokens, {val['tokens']:,} to validate "
            f"({self.tokenizer.name:.60}, {val['bytes'] / val['tokens']:.2f} bytes each)"
        )


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Return the narrowest type of ids that holds the vocabulary."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def fingerprint(tokenizer: Tokenizer, meta: dict) -> str:
    """Return the SHA-256 of tokenizer.json and the hashes of both splits. A run finds its corpus by it."""
    hashes = meta["train"]["sha256"] + meta["val"]["sha256"]
    return hashlib.sha256(tokenizer.files[TOKENIZER_JSON] + hashes.encode()).hexdigest()


def is_prepared(source: str) -> bool:
    """Return whether a source is the directory of a prepared corpus, intact or not."""
    return Path(source, "train.bin").is_file()


def open_corpus(directory: Path) -> Corpus:
    """Open a prepared corpus.

    Raises UserError if the corpus is incomplete, or has changed since it was prepared.
    """
    if not (directory / "meta.json").is_file():
        raise UserError(f"{directory} is not empty, and not a complete prepared corpus")
    with errors_as_user_error(f"{directory} is not a complete prepared corpus"):
        meta = json.loads(read_small(directory / "meta.json"))
        tokenizer = load_tokenizer(directory)
        if meta["fingerprint"] != fingerprint(tokenizer, meta):
            raise UserError(f"{directory} has changed since it was prepared: remove it")
        tokens = {}
        for split in SPLITS:
            path = directory / f"{split}.bin"
            tokens[split] = np.memmap(path, dtype_of(tokenizer), mode="r")
            # Its content is compared if the file was touched since the preparation. No program can set the ctime.
            is_touched = path.stat().st_ctime_ns != meta[split]["ctime_ns"]
            if is_touched and sha256(path) != meta[split]["sha256"]:
                raise UserError(f"{path} has changed since it was prepared: remove {directory}")
        return Corpus(directory, meta, tokenizer, tokens)

"""Token files as a corpus: nothing is copied, and a file is read only where its tokens are asked for.

Each task of datatrove's `DocumentTokenizer` writes two files that are read here, and an index that is not:

    NAME.ds            token ids one after the other, little-endian; each document ends with a token for that
    NAME.ds.metadata   "TOKENIZER|BYTES PER TOKEN", the number of tokens, and that number for people

The shards of llm.c are the source SHARDS + PATH. Those for validation have "val" in their names. Documents begin with
the token that ends a text, and go on in the next shard:

    NAME.bin           256 numbers of 4 bytes: MAGIC_AND_VERSION, the number of tokens, zeros; then GPT-2's ids, of 2
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.corpus import Corpus
from data.encoding import Tokenizer
from data.sources import DataConfig, find_files
from data.tokenizer import TOKENIZER_JSON, find_tokenizer, make_tokenizer
from errors import UserError, errors_as_user_error

SHARDS = "bin:"  # before a source that is llm.c's
MAGIC_AND_VERSION = [20240520, 1]
HEADER_BYTES = 1024
SAMPLE_BYTES = 1 << 12  # of its beginning and its end, by which a change is noticed
COUNTED_TOKENS = 1 << 20  # of validation, decoded to count their bytes
MOST_OPEN = 512  # files; systems allow a process 1,024 or more


class TokenFile(NamedTuple):
    """A token file that is not empty, as its metadata or its header describe it."""

    path: Path
    tokenizer: str
    token_size: int
    num_tokens: int
    described: bytes
    """Its metadata; of a shard its split, which another name changes."""
    split: str = ""
    """ "train" or "val" for a shard of llm.c; "" for a file of datatrove, which is part of both."""


class TokenArray:
    """The ids of many files as one array: those from `first` up to `last`, counted from the beginning of the files.

    A file is memory-mapped when it is first read.
    """

    def __init__(self, files: list[TokenFile], vocab_size: int, first: int, last: int):
        self.files = files
        self.vocab_size = vocab_size
        self.length = last - first
        self.ends = np.cumsum([file.num_tokens for file in files]) - first  # the place behind a file's last id

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        """Read the ids at these places, of any shape, or of a slice. Raises UserError for one beyond the vocabulary."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.length))
        numbers = np.searchsorted(self.ends, places, side="right")  # of the files
        ids = np.empty(places.shape, f"<u{self.files[0].token_size}")
        for number in np.unique(numbers):
            file = self.files[number]
            here = numbers == number
            read = map_file(file)[places[here] - self.ends[number]]  # counted from its end, so behind its header
            if read.max() >= self.vocab_size:
                raise UserError(
                    f"{file.path} holds id {read.max()}, expected less than {self.vocab_size}: give the "
                    "--data.tokenizer that wrote it"
                )
            ids[here] = read
        return ids


@lru_cache(MOST_OPEN)
def map_file(file: TokenFile) -> np.ndarray:
    """Return a file as ids, memory-mapped; its header, if it has one, is before them."""
    return np.asarray(np.memmap(file.path, f"<u{file.token_size}", mode="r"))


def open_token_files(config: DataConfig, files: list[TokenFile], tokenizer: Tokenizer | None) -> Corpus:
    """Open token files as a corpus.

    Files for validation are those of `val_source`, else the last ones, and `max_tokens` of the others are for training.
    If no file is for validation, `max_tokens` of all are taken, and the last `val_fraction` of these are.

    tokenizer: the configured one, as `find_tokenizer` returns it.

    Raises UserError, with the name of the file, if one is unlike the others, or for an unusable tokenizer.
    """
    val_files = [file for file in files if file.split == "val"]
    if config.val_source and not (val_files := find_token_files(DataConfig(config.val_source))):
        raise UserError(f"--data.val_source must be token files, as --data.source is, got {config.val_source}")
    files = [file for file in files if file.split != "val" and file not in val_files] + val_files
    tokenizer = tokenizer_of(files, config.tokenizer, tokenizer)
    end = sum(file.num_tokens for file in files)
    start = end - sum(file.num_tokens for file in val_files)  # of validation
    stop = min(start, config.max_tokens or start)  # of training
    if start == end:
        end = stop
        start = stop = int(end * (1 - config.val_fraction))
    if min(stop, end - start) < 2:
        raise UserError(
            f"{config.source} has too few tokens: {stop} to train on, {end - start} to validate on; give more, or "
            "another --data.val_fraction or --data.val_source"
        )
    splits = {
        "train": TokenArray(files, tokenizer.vocab_size, 0, stop),
        "val": TokenArray(files, tokenizer.vocab_size, start, end),
    }
    counted = splits["val"][:COUNTED_TOKENS].tolist()
    num_bytes = max(1, len(tokenizer.decode(counted).encode()))
    identity = tokenizer.files[TOKENIZER_JSON] + "".join(map(digest, files)).encode()
    fingerprint = hashlib.sha256(identity).hexdigest()
    meta = {"source": config.source, "tokenizer": tokenizer.name, "fingerprint": fingerprint}
    for split, ids in splits.items():
        meta[split] = {"tokens": len(ids), "bytes": len(ids) * num_bytes / len(counted)}
    return Corpus(Path(config.source), meta, tokenizer, splits)


def tokenizer_of(files: list[TokenFile], name: str, tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of token files: the one asked for, by default the one that wrote them.

    name, tokenizer: the one asked for; None if it is to be made by its name.

    Raises UserError if the files disagree about it, or do not end as the one asked for ends a text.
    """
    first = files[0]
    written_by = find_tokenizer(first.tokenizer, None)
    if tokenizer is None and name == DataConfig.tokenizer:
        name = first.tokenizer
        tokenizer = written_by
    tokenizer = tokenizer or make_tokenizer(name, [])
    if written_by and written_by.files[TOKENIZER_JSON] != tokenizer.files[TOKENIZER_JSON]:
        raise UserError(f"{first.path} was written by {first.tokenizer:.200}, not by {name}: give no --data.tokenizer")
    for file in files:
        if (file.tokenizer, file.token_size) != (first.tokenizer, first.token_size):
            raise UserError(
                f"{file.path} and {first.path} are of two tokenizers or sizes: give token files of one kind"
            )
        if not file.split and (last := map_file(file)[-1]) not in tokenizer.ends:
            raise UserError(
                f"{file.path} ends with id {last}, expected an end of text of {tokenizer.name!r}: give "
                "the --data.tokenizer that wrote it"
            )
    return tokenizer


def find_token_files(config: DataConfig) -> list[TokenFile]:
    """Return the token files of a source, sorted, those for validation last; [] for a source of another kind.

    Empty ones of datatrove are left out. Raises UserError, with the name of the file, if one is not what its metadata
    or its header describe.
    """
    if config.source.startswith(SHARDS):  # llm.c's scripts leave the text beside them
        paths = find_files(os.path.expanduser(config.source.removeprefix(SHARDS)))
        files = [read_shard(path) for path in paths if path.suffix == ".bin"]
    else:
        stored = [path for path in config.files if path.suffix == ".ds"]
        others = [path for path in config.files if ".ds" not in path.suffixes]
        if stored and others:
            raise UserError(
                f"{config.source} holds token files (.ds), and {others[0]}: give files of one kind, as by a glob"
            )
        files = [read_described(path) for path in stored if path.stat().st_size]
    for file in files:
        size = file.path.stat().st_size
        if size != file.num_tokens * file.token_size + bool(file.split) * HEADER_BYTES:
            expected = f"{file.num_tokens} tokens of {file.token_size} bytes"
            raise UserError(f"{file.path} has {size} bytes, expected {expected}: copy it again")
    return sorted(files, key=lambda file: file.split)


def read_described(path: Path) -> TokenFile:
    """Return a file of datatrove. Raises UserError if there are no metadata that describe it."""
    with errors_as_user_error(f"{path}.metadata does not describe a token file"):
        metadata = Path(f"{path}.metadata").read_bytes()
        written_by, number, *_ = metadata.decode().splitlines()
        tokenizer, _, digit = written_by.rpartition("|")
        return TokenFile(path, tokenizer, {"2": 2, "4": 4}[digit], int(number), metadata)


def read_shard(path: Path) -> TokenFile:
    """Return a shard of llm.c, by its name for training or validation. Raises UserError for a file of another kind."""
    header = np.fromfile(path, "<u4", 3).tolist()
    if header[:-1] != MAGIC_AND_VERSION:
        raise UserError(f"{path} is no shard of llm.c for GPT-2: it begins with {header}, not {MAGIC_AND_VERSION}")
    split = "val" if "val" in path.stem.lower() else "train"
    return TokenFile(path, "gpt2", 2, header[-1], split.encode(), split)


def digest(file: TokenFile) -> str:
    """Return a hash of what is said about a file, and of its beginning and its end: a resumed run compares it."""
    content = np.memmap(file.path, mode="r")
    samples = file.described + content[:SAMPLE_BYTES].tobytes() + content[-SAMPLE_BYTES:].tobytes()
    return hashlib.sha256(samples).hexdigest()

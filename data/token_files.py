"""Token files of `datatrove` as a corpus: nothing is copied, and a file is read only where its tokens are asked for.

Each task of its `DocumentTokenizer` writes two files that are read here, and an index that is not:

    NAME.ds            token ids one after the other, little-endian; each document ends with a token for that
    NAME.ds.metadata   "TOKENIZER|BYTES PER TOKEN", the number of tokens, and that number for people
"""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.config import DataConfig
from data.corpus import Corpus
from data.encoding import Tokenizer
from data.sources import find_files
from data.tokenizer import TOKENIZER_JSON, find_tokenizer, make_tokenizer
from errors import UserError, errors_as_user_error

SAMPLE_BYTES = 1 << 12  # of its beginning and its end, by which a change is noticed
COUNTED_TOKENS = 1 << 20  # of validation, decoded to count their bytes
MOST_OPEN = 512  # files; systems allow a process 1,024 or more


class TokenFile(NamedTuple):
    """A token file that is not empty, as its metadata describe it."""

    path: Path
    tokenizer: str
    token_size: int
    num_tokens: int
    last: int
    """The last id."""
    digest: str
    """The hash of its metadata and of samples of its content."""


class TokenArray:
    """The ids of many files as one array: those from `first` up to `last`, counted from the beginning of the files.

    A file is memory-mapped when it is first read.
    """

    def __init__(self, files: list[TokenFile], vocab_size: int, first: int, last: int):
        self.files = files
        self.vocab_size = vocab_size
        self.length = last - first
        self.starts = np.cumsum([-first, *(file.num_tokens for file in files[:-1])])  # the place of a file's first id

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        """Read the ids at these places, of any shape, or of a slice. Raises UserError for one beyond the vocabulary."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.length))
        numbers = np.searchsorted(self.starts, places, side="right") - 1  # of the files
        ids = np.empty(places.shape, f"<u{self.files[0].token_size}")
        for number in np.unique(numbers):
            file = self.files[number]
            here = numbers == number
            read = map_file(file)[places[here] - self.starts[number]]
            if read.max() >= self.vocab_size:
                raise UserError(f"{file.path} holds id {read.max()}, and the vocabulary has {self.vocab_size}")
            ids[here] = read
        return ids


@lru_cache(MOST_OPEN)
def map_file(file: TokenFile) -> np.ndarray:
    """Return the ids of a file, memory-mapped."""
    return np.asarray(np.memmap(file.path, f"<u{file.token_size}", mode="r"))


def open_token_files(config: DataConfig, files: list[TokenFile], tokenizer: Tokenizer | None) -> Corpus:
    """Open token files as a corpus. The last `val_fraction` of all tokens are for validation.

    tokenizer: the configured one, as `find_tokenizer` returns it.

    Raises UserError, with the name of the file, if one is unlike the others, or for an unusable tokenizer.
    """
    tokenizer = tokenizer_of(files, config.tokenizer, tokenizer)
    num_tokens = sum(file.num_tokens for file in files)
    end = min(num_tokens, config.max_tokens or num_tokens)
    start = int(end * (1 - config.val_fraction))  # of validation
    if min(start, end - start) < 2:
        raise UserError(f"{config.source} has too few tokens to keep {config.val_fraction:g} of them for validation")
    splits = {
        "train": TokenArray(files, tokenizer.vocab_size, 0, start),
        "val": TokenArray(files, tokenizer.vocab_size, start, end),
    }
    counted = splits["val"][:COUNTED_TOKENS].tolist()
    num_bytes = max(1, len(tokenizer.decode(counted).encode()))
    identity = tokenizer.files[TOKENIZER_JSON] + "".join(file.digest for file in files).encode()
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
    own = find_tokenizer(first.tokenizer, None)
    if tokenizer is None:
        name = first.tokenizer if name == DataConfig.tokenizer else name
        tokenizer = find_tokenizer(name, None) or make_tokenizer(name, [])
    if own and own.files[TOKENIZER_JSON] != tokenizer.files[TOKENIZER_JSON]:
        raise UserError(f"{first.path} was written by {first.tokenizer:.200}, not by {name}")
    for file in files:
        if (file.tokenizer, file.token_size) != (first.tokenizer, first.token_size):
            raise UserError(
                f"{file.path} and {first.path} are of two tokenizers or sizes: give token files of one kind"
            )
        if file.last not in tokenizer.ends:
            raise UserError(f"{file.path} ends with id {file.last}, with which {tokenizer.name!r} ends no text")
    return tokenizer


def find_token_files(source: str) -> list[TokenFile]:
    """Return the token files of a source, but no empty ones; [] for a source of another kind.

    Raises UserError, with the name of the file, if the size of one is not that of its metadata.
    """
    found = []
    paths = find_files(source)
    stored = [path for path in paths if path.suffix == ".ds"]
    others = [path for path in paths if ".ds" not in path.suffixes]
    if stored and others:
        raise UserError(f"{source} holds token files (.ds), and {others[0]}: give files of one kind, as by a glob")
    for path in stored:
        size = path.stat().st_size
        if not size:
            continue
        with errors_as_user_error(f"{path}.metadata does not describe a token file"):
            metadata = Path(f"{path}.metadata").read_bytes()
            written_by, number, *_ = metadata.decode().splitlines()
            tokenizer, _, digit = written_by.rpartition("|")
            token_size = {"2": 2, "4": 4}[digit]
            num_tokens = int(number)
        if size != num_tokens * token_size:
            raise UserError(f"{path} has {size} bytes, and by its .metadata {num_tokens} tokens of {token_size} bytes")
        with open(path, "rb") as file:
            samples = metadata + file.read(SAMPLE_BYTES)
            file.seek(max(0, size - SAMPLE_BYTES))
            samples += file.read()
        last = int.from_bytes(samples[-token_size:], "little")
        digest = hashlib.sha256(samples).hexdigest()
        found.append(TokenFile(path, tokenizer, token_size, num_tokens, last, digest))
    return found

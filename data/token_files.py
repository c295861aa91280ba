"""Token files of `datatrove` as a corpus: nothing is copied, and a file is read only where its tokens are asked for.

Each task of its `DocumentTokenizer` writes three files:

    NAME.ds            token ids one after the other, little-endian; the end of each document has a token of its own
    NAME.ds.index      where the documents end, in tokens: uint64
    NAME.ds.metadata   "TOKENIZER|BYTES PER TOKEN", the number of tokens, and that number for people
"""

import hashlib
import resource
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import errors_as_user_error
from data.config import DataConfig
from data.corpus import Corpus
from data.encoding import Tokenizer
from data.sources import find_files
from data.tokenizer import TOKENIZER_JSON, find_tokenizer, make_tokenizer
from errors import UserError

SAMPLE_BYTES = 1 << 12  # of each of three samples of a file, by which a change is noticed
COUNTED_TOKENS = 1 << 20  # of validation, decoded to count their bytes


class TokenFile(NamedTuple):
    """A token file that is not empty, as its metadata describe it."""

    path: Path
    tokenizer: str
    token_size: int
    num_tokens: int
    digest: str
    """The hash of its metadata and of samples of its content."""

    def __str__(self) -> str:
        return f"{self.path} {self.token_size} bytes a token by {self.tokenizer:.60}"


class TokenArray:
    """The ids of many files as one array: those from `first` up to `last`, counted from the beginning of the files.

    A file is memory-mapped when it is first read, and stays mapped.
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


@cache
def map_file(file: TokenFile) -> np.ndarray:
    """Return the ids of a file, memory-mapped."""
    with errors_as_user_error(f"cannot read {file.path}"):
        return np.asarray(np.memmap(file.path, f"<u{file.token_size}", mode="r", shape=file.num_tokens))


def has_token_files(source: str) -> bool:
    """Return whether a source is token files. Raises UserError if there is no such source, or text beside them."""
    found, _ = find_files(source)
    others = [path for path in found if ".ds" not in path.suffixes]
    if others and any(path.suffix == ".ds" for path in found):
        raise UserError(f"{source} holds token files (.ds), and {others[0]}: give files of one kind, as by a glob")
    return bool(found) and not others


def open_token_files(config: DataConfig, tokenizer: Tokenizer | None) -> Corpus:
    """Open token files as a corpus.

    tokenizer: the configured one, as `find_tokenizer` returns it.

    The validation split is `val_source`, whose files are not trained on. Without `val_source` the split begins at the
    last end of a document within the first 1 - `val_fraction` of all tokens.

    Raises UserError, with the name of the file, if one is damaged or unlike the others, or for an unusable tokenizer.
    """
    validation = find_token_files(config.val_source) if config.val_source else []
    held_out = {file.path.resolve() for file in validation}
    training = [file for file in find_token_files(config.source) if file.path.resolve() not in held_out]
    if not training:
        raise UserError(f"all token files of {config.source} are kept for validation")
    all_files = training + validation
    tokenizer = tokenizer_of(all_files, config.tokenizer, tokenizer)
    allow_open_files(len(all_files) + 1024)
    num_tokens = sum(file.num_tokens for file in training)
    end = min(num_tokens, config.max_tokens or num_tokens)
    if validation:
        cut = end
        val = TokenArray(validation, tokenizer.vocab_size, 0, sum(file.num_tokens for file in validation))
    else:
        cut = last_document_end(training, min(end - 1, int(end * (1 - config.val_fraction))))
        val = TokenArray(training, tokenizer.vocab_size, cut, end)
    train = TokenArray(training, tokenizer.vocab_size, 0, cut)
    if min(len(train), len(val)) < 2:
        raise UserError(f"{config.source} has too few documents to keep {config.val_fraction:g} of it for validation")
    counted = val[:COUNTED_TOKENS].tolist()
    num_bytes = len(tokenizer.decode(counted).encode())
    if not num_bytes:
        raise UserError(f"the tokenizer {tokenizer.name!r} finds no text in the validation tokens of {config.source}")
    fingerprint = [f"{TOKENIZER_JSON}:{hashlib.sha256(tokenizer.files[TOKENIZER_JSON]).hexdigest()}"]
    fingerprint += [f"{file.path.name}:{file.digest}" for file in all_files]
    meta = {"source": config.source, "tokenizer": tokenizer.name, "fingerprint": "\n".join(fingerprint)}
    splits = {"train": train, "val": val}
    for split, ids in splits.items():
        meta[split] = {"tokens": len(ids), "bytes": len(ids) * num_bytes / len(counted)}
    return Corpus(Path(config.source), meta, tokenizer, splits)


def tokenizer_of(files: list[TokenFile], name: str, tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of token files: the one asked for, by default the one that wrote them.

    name, tokenizer: the one asked for; None if it is to be made by its name.

    Raises UserError if the files disagree about it, or if the one asked for is known to be another.
    """
    first = files[0]
    is_default = name == DataConfig.tokenizer
    for file in files:
        if file.token_size != first.token_size or (is_default and file.tokenizer != first.tokenizer):
            raise UserError(f"{file}, {first}: give token files of one kind")
    own = find_tokenizer(first.tokenizer, None)
    if is_default:
        name = first.tokenizer
        tokenizer = own
    elif name == "chars" or name.startswith("bpe:"):
        raise UserError(f"{first.path} was written by {first.tokenizer:.200}, so {name} cannot be learned from it")
    tokenizer = tokenizer or make_tokenizer(name, [])
    if own and name != "model" and own.files[TOKENIZER_JSON] != tokenizer.files[TOKENIZER_JSON]:
        raise UserError(f"{first.path} was written by {first.tokenizer:.200}, not by {name}")
    return tokenizer


def find_token_files(source: str) -> list[TokenFile]:
    """Return the token files of a source. Raises UserError if there are none, or one is unlike its metadata."""
    paths = [path for path in find_files(source)[0] if path.suffix == ".ds"]
    unfinished = [path for path in paths if path.stem.endswith("_unshuffled")]
    if unfinished and any(path.stem.endswith("_shuffled") for path in paths):
        raise UserError(f"{unfinished[0]} is to be shuffled by datatrove, which has not finished: run it again")
    found = [read_token_file(path) for path in paths if path.stat().st_size]
    if not found:
        raise UserError(f"no tokens found at {source!r}: give a folder or glob of .ds files")
    return found


def read_token_file(path: Path) -> TokenFile:
    """Read the metadata and samples of a token file. Raises UserError if its size is not that of the metadata."""
    with errors_as_user_error(f"{path}.metadata does not describe a token file"):
        metadata = Path(f"{path}.metadata").read_bytes()
        written_by, number, *_ = metadata.decode().splitlines()
        tokenizer, _, digit = written_by.rpartition("|")
        token_size = {"2": 2, "4": 4}[digit]
        num_tokens = int(number)
    size = path.stat().st_size
    num_bytes = num_tokens * token_size
    if size != num_bytes:
        raise UserError(f"{path} has {size} bytes, and by its .metadata {num_tokens} tokens in {num_bytes} bytes")
    digest = hashlib.blake2b(metadata, digest_size=8)
    with open(path, "rb") as file:
        for place in (0, num_bytes // 2, max(0, num_bytes - SAMPLE_BYTES)):
            file.seek(place)
            digest.update(file.read(SAMPLE_BYTES))
    return TokenFile(path, tokenizer, token_size, num_tokens, digest.hexdigest())


def allow_open_files(number: int) -> None:
    """Raise the limit on open files to a number, if the system permits it. A mapped file counts as an open one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # not permitted: an error will name the first file beyond the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number), hard))


def last_document_end(files: list[TokenFile], place: int) -> int:
    """Return the last end of a document at or before `place`. The beginning of a file counts as an end.

    Raises UserError if the index of the file there is missing, or is that of another file.
    """
    start = 0
    for file in files:
        if start + file.num_tokens > place:
            break
        start += file.num_tokens
    with errors_as_user_error(f"{file.path}.index does not say where documents end, so give a --data.val_source"):
        ends = np.memmap(f"{file.path}.index", "<u8", mode="r")
    if ends[-1] != file.num_tokens:
        raise UserError(f"{file.path}.index is not the index of {file.path}: it ends at token {ends[-1]}")
    num_before = np.searchsorted(ends, np.uint64(place - start), side="right")  # of its type, or NumPy copies all of it
    last_end = int(ends[num_before - 1]) if num_before else 0
    return start + last_end

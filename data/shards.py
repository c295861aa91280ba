"""Token files of `datatrove` as a corpus: nothing is copied, and no more is read than what is asked for.

Each task of its `DocumentTokenizer` writes three files:

    NAME.ds            token ids one after the other, little-endian; the end of each document has a token of its own
    NAME.ds.index      where the documents end, in tokens: uint64
    NAME.ds.metadata   "TOKENIZER|BYTES PER TOKEN", the number of tokens, and that number for people
"""

import hashlib
import resource
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import DataError, errors_as_data_error
from data.config import DataConfig
from data.corpus import Corpus
from data.sources import files
from data.tokenizer import FILES, read_tokenizer

SAMPLE = 1 << 12  # bytes at three places of a file, by which a change is noticed
COUNTED = 1 << 20  # validation tokens that are decoded to count their bytes


class Shard(NamedTuple):
    """A token file that is not empty."""

    path: Path
    written_by: tuple[str, int]
    """The tokenizer's name, and the bytes per token."""
    num_tokens: int
    digest: str
    """Of its metadata and samples of its content."""


class Shards:
    """Ids of many files as one array. A file is memory-mapped when it is first read, and stays so.

    Args:
        shards: the files, in order.
        vocab_size: one more than the largest id.
        first, last: the part of all ids that is the array; last None: up to the end.
    """

    def __init__(self, shards: list[Shard], vocab_size: int, first: int = 0, last: int | None = None):
        self.paths, self.vocab_size = [shard.path for shard in shards], vocab_size
        self.dtype = np.dtype(f"<u{shards[0].written_by[1]}")
        sizes = np.array([shard.num_tokens for shard in shards])
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.first, self.last, self.maps = first, int(self.ends[-1]) if last is None else last, {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a mapped file counts as an open one
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(len(shards) + 1024, hard)), hard))

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        """Read the ids at these places, (rows, columns) or a slice. Raises DataError for one beyond the vocabulary."""
        if isinstance(places, slice):
            return self[np.arange(*places.indices(len(self)))[None]][0]
        ids = np.empty(places.shape, self.dtype)
        for row, window in zip(ids, places + self.first, strict=True):
            number, last = np.searchsorted(self.ends, window[[0, -1]], side="right")
            if number == last and window[-1] - window[0] == len(window) - 1:  # neighbours in one file
                start = window[0] - self.starts[number]
                row[:] = self.read(number)[start : start + len(window)]
                continue
            numbers = np.searchsorted(self.ends, window, side="right")
            for number in np.unique(numbers):
                here = numbers == number
                row[here] = self.read(number)[window[here] - self.starts[number]]
        if ids.max(initial=0) >= self.vocab_size:
            number = np.searchsorted(self.ends, (places + self.first).flat[ids.argmax()], side="right")
            raise DataError(f"{self.paths[number]} holds id {ids.max()}, and the vocabulary has {self.vocab_size}")
        return ids

    def read(self, number: int) -> np.ndarray:
        """Return the ids of a file, mapped."""
        if number not in self.maps:
            shape = int(self.ends[number] - self.starts[number])
            with errors_as_data_error(f"cannot read {self.paths[number]}"):
                self.maps[number] = np.asarray(np.memmap(self.paths[number], self.dtype, mode="r", shape=shape))
        return self.maps[number]


def has_shards(source: str) -> bool:
    """Return whether a source holds token files. Raises DataError if there is no such source."""
    return not source.startswith("hf:") and any(path.suffix == ".ds" for path in files(source))


def open_shards(config: DataConfig, model: Path | None) -> Corpus:
    """Open token files as a corpus.

    Validation is `val_source`, or else the documents behind the last one that ends within the first 1 - `val_fraction`
    of all tokens. A tokenizer that would have to be learned from text is the one that the files were written with.

    Raises DataError, with the name of the file, if one is damaged or unlike the others, or for an unusable tokenizer.
    """
    shards = find_shards(config.source)
    validation = find_shards(config.val_source) if config.val_source else []
    written_by = shards[0].written_by
    for shard in shards + validation:
        if shard.written_by != written_by:
            raise DataError(f"{shard.path} was written by {shard.written_by}, {shards[0].path} by {written_by}")
    is_learned = config.tokenizer == "chars" or config.tokenizer.startswith("bpe:")
    name = written_by[0] if is_learned else config.tokenizer
    tokenizer, tokenizer_files = read_tokenizer(name, model)
    everything = Shards(shards, tokenizer.vocab_size)
    end = cut = min(len(everything), config.max_tokens or len(everything))
    if validation:
        val = Shards(validation, tokenizer.vocab_size)
    else:
        cut = last_document_end(everything, int(end * (1 - config.val_fraction)))
        val = Shards(shards, tokenizer.vocab_size, cut, end)
    train = Shards(shards, tokenizer.vocab_size, 0, cut)
    if min(len(train), len(val)) < 2:
        raise DataError(f"{config.source} has too few documents to keep {config.val_fraction:g} of it for validation")
    counted = val[:COUNTED].tolist()
    num_bytes = len(tokenizer.decode(counted).encode())
    if not num_bytes:
        raise DataError(f"the tokenizer {tokenizer.name!r} finds no text in the validation tokens of {config.source}")
    fingerprint = [f"{FILES[0]}:{hashlib.sha256(tokenizer_files[FILES[0]]).hexdigest()}"]
    fingerprint += [f"{shard.path.name}:{shard.digest}" for shard in shards + validation]
    meta = {"source": config.source, "tokenizer": name, "fingerprint": "\n".join(fingerprint)}
    for split, ids in {"train": train, "val": val}.items():
        meta[split] = {"tokens": len(ids), "bytes": len(ids) * num_bytes / len(counted)}
    return Corpus(Path(config.source), meta, tokenizer, tokenizer_files, {"train": train, "val": val})


def find_shards(source: str) -> list[Shard]:
    """Look at the token files of a source. Raises DataError if there are none, or one is not what its metadata say."""
    paths = [path for path in files(source) if path.suffix == ".ds" and path.stat().st_size]
    if not paths:
        raise DataError(f"no tokens found at {source!r}: give a folder or glob of .ds files")
    return [look_at(path) for path in paths]


def look_at(path: Path) -> Shard:
    """Read the metadata and samples of a token file."""
    with errors_as_data_error(f"{path}.metadata does not describe a token file"):
        metadata = Path(f"{path}.metadata").read_bytes()
        first, second, *_ = metadata.decode().splitlines()
        tokenizer, _, token_size = first.rpartition("|")
        num_tokens, token_size = int(second), {"2": 2, "4": 4}[token_size]
    num_bytes, expected = path.stat().st_size, num_tokens * token_size
    if num_bytes != expected:
        raise DataError(f"{path} has {num_bytes} bytes, and by its .metadata {num_tokens} tokens in {expected} bytes")
    digest = hashlib.blake2b(metadata, digest_size=8)
    with open(path, "rb") as file:
        for place in (0, num_bytes // 2, max(0, num_bytes - SAMPLE)):
            file.seek(place)
            digest.update(file.read(SAMPLE))
    return Shard(path, (tokenizer, token_size), num_tokens, digest.hexdigest())


def last_document_end(ids: Shards, place: int) -> int:
    """Return where the last document ends that ends at `place` or before; a file's beginning counts.

    Raises DataError if the index of the file there is missing, or is that of another file.
    """
    number = int(np.searchsorted(ids.ends, place, side="right"))
    path, start = ids.paths[number], int(ids.starts[number])
    with errors_as_data_error(f"{path}.index does not say where documents end, so give a --data.val_source"):
        ends = np.memmap(f"{path}.index", "<u8", mode="r")
    if ends[-1] != ids.ends[number] - start:
        raise DataError(f"{path}.index is not the index of {path}: it ends at token {ends[-1]}")
    before = ends[: np.searchsorted(ends, place - start, side="right")]
    return start + int(before[-1] if len(before) else 0)

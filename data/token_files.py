"""Token files of `datatrove` as a corpus: nothing is copied, and no more is read than what is asked for.

Each task of its `DocumentTokenizer` writes three files:

    NAME.ds            token ids one after the other, little-endian; the end of each document has a token of its own
    NAME.ds.index      where the documents end, in tokens: uint64
    NAME.ds.metadata   "TOKENIZER|BYTES PER TOKEN", the number of tokens, and that number for people
"""

import copy
import hashlib
import resource
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from data import errors_as_user_error
from data.config import DataConfig
from data.corpus import Corpus
from data.encoding import Tokenizer
from data.sources import files
from data.tokenizer import FILES, find_tokenizer, read_files, read_tokenizer
from errors import UserError

SAMPLE_BYTES = 1 << 12  # at three places of a file, by which a change is noticed
COUNTED_TOKENS = 1 << 20  # of validation, decoded to count their bytes


class Shard(NamedTuple):
    """A token file that is not empty."""

    path: Path
    tokenizer: str
    token_size: int
    num_tokens: int
    digest: str
    """Of its metadata and samples of its content."""


class Shards:
    """Ids of many files as one array. A file is memory-mapped when it is first read, and stays so."""

    def __init__(self, shards: list[Shard], vocab_size: int):
        self.paths, self.vocab_size = [shard.path for shard in shards], vocab_size
        self.dtype = np.dtype(f"<u{shards[0].token_size}")
        sizes = np.array([shard.num_tokens for shard in shards])
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.first, self.last, self.maps = 0, int(self.ends[-1]), {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = len(shards) + 1024  # a mapped file counts as an open one
        if hard == resource.RLIM_INFINITY or needed <= hard:  # else a file that is one too many will be named
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))

    def part(self, first: int, last: int) -> Self:
        """Return the ids from `first` up to `last`, as an array that shares the maps."""
        part = copy.copy(self)
        part.first, part.last = first, last
        return part

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        """Read the ids at these places, of any shape, or of a slice. Raises UserError for one beyond the vocabulary."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        places = places + self.first
        numbers = np.searchsorted(self.ends, places, side="right")  # of the files
        ids = np.empty(places.shape, self.dtype)
        for number in np.unique(numbers):
            here = numbers == number
            ids[here] = self.read(number)[places[here] - self.starts[number]]
        if ids.max(initial=0) >= self.vocab_size:
            path = self.paths[numbers.flat[ids.argmax()]]
            raise UserError(f"{path} holds id {ids.max()}, and the vocabulary has {self.vocab_size}")
        return ids

    def read(self, number: int) -> np.ndarray:
        """Return the ids of a file, mapped."""
        if number not in self.maps:
            shape = int(self.ends[number] - self.starts[number])
            with errors_as_user_error(f"cannot read {self.paths[number]}"):
                self.maps[number] = np.asarray(np.memmap(self.paths[number], self.dtype, mode="r", shape=shape))
        return self.maps[number]


def has_shards(source: str) -> bool:
    """Return whether a source holds token files. Raises UserError if there is no such source, or text beside them."""
    found = [] if source.startswith("hf:") else files(source)
    others = [path for path in found if ".ds" not in path.suffixes]
    if others and any(path.suffix == ".ds" for path in found):
        raise UserError(f"{source} holds token files (.ds), and {others[0]}: give files of one kind, as by a glob")
    return bool(found) and not others


def open_shards(config: DataConfig, model: Path | None) -> Corpus:
    """Open token files as a corpus.

    Validation is `val_source`, whose files are not trained on. Without it, it begins at the last end of a document
    within the first 1 - `val_fraction` of all tokens.

    Raises UserError, with the name of the file, if one is damaged or unlike the others, or for an unusable tokenizer.
    """
    shards = find_shards(config.source)
    validation = find_shards(config.val_source) if config.val_source else []
    held_out = {shard.path.resolve() for shard in validation}
    shards = [shard for shard in shards if shard.path.resolve() not in held_out]
    if not shards:
        raise UserError(f"all token files of {config.source} are kept for validation")
    tokenizer, tokenizer_files = tokenizer_of(shards + validation, config.tokenizer, model)
    tokens = Shards(shards, tokenizer.vocab_size)
    end = cut = min(len(tokens), config.max_tokens or len(tokens))
    if validation:
        val = Shards(validation, tokenizer.vocab_size)
    else:
        cut = last_document_end(tokens, min(end - 1, int(end * (1 - config.val_fraction))))
        val = tokens.part(cut, end)
    if min(cut, len(val)) < 2:
        raise UserError(f"{config.source} has too few documents to keep {config.val_fraction:g} of it for validation")
    counted = val[:COUNTED_TOKENS].tolist()
    num_bytes = len(tokenizer.decode(counted).encode())
    if not num_bytes:
        raise UserError(f"the tokenizer {tokenizer.name!r} finds no text in the validation tokens of {config.source}")
    fingerprint = [f"{FILES[0]}:{hashlib.sha256(tokenizer_files[FILES[0]]).hexdigest()}"]
    fingerprint += [f"{shard.path.name}:{shard.digest}" for shard in shards + validation]
    meta = {"source": config.source, "tokenizer": tokenizer.name, "fingerprint": "\n".join(fingerprint)}
    for split, size in {"train": cut, "val": len(val)}.items():
        meta[split] = {"tokens": size, "bytes": size * num_bytes / len(counted)}
    return Corpus(Path(config.source), meta, tokenizer, tokenizer_files, {"train": tokens.part(0, cut), "val": val})


def tokenizer_of(shards: list[Shard], name: str, model: Path | None) -> tuple[Tokenizer, dict[str, bytes]]:
    """Return the tokenizer of token files and its FILES: the one asked for, by default the one that wrote them.

    Raises UserError if the files disagree about it, or if the one asked for is known to be another.
    """
    first = shards[0]
    is_default = name == DataConfig.tokenizer
    for shard in shards:
        if shard.token_size != first.token_size or (is_default and shard.tokenizer != first.tokenizer):
            one, other = (f"{each.path} {each.token_size} bytes a token by {each.tokenizer}" for each in (shard, first))
            raise UserError(f"{one}, {other}: give token files of one kind")
    if not is_default and (name == "chars" or name.startswith("bpe:")):
        raise UserError(f"{first.path} was written by {first.tokenizer}, so {name} cannot be learned from it")
    tokenizer, content = read_tokenizer(first.tokenizer if is_default else name, model)
    own = find_tokenizer(first.tokenizer, None)
    if own and name != "model" and read_files(own)[FILES[0]] != content[FILES[0]]:
        raise UserError(f"{first.path} was written by {own}, not by {name}")
    return tokenizer, content


def find_shards(source: str) -> list[Shard]:
    """Look at the token files of a source. Raises UserError if there are none, or one is not what its metadata say."""
    paths = [path for path in files(source) if path.suffix == ".ds"]
    unfinished = [path for path in paths if path.stem.endswith("_unshuffled")]
    if unfinished and any(path.stem.endswith("_shuffled") for path in paths):
        raise UserError(f"{unfinished[0]} is to be shuffled by datatrove, which has not finished: run it again")
    paths = [path for path in paths if path.stat().st_size]
    if not paths:
        raise UserError(f"no tokens found at {source!r}: give a folder or glob of .ds files")
    return [read_shard(path) for path in paths]


def read_shard(path: Path) -> Shard:
    """Read the metadata and samples of a token file."""
    with errors_as_user_error(f"{path}.metadata does not describe a token file"):
        metadata = Path(f"{path}.metadata").read_bytes()
        first, second, *_ = metadata.decode().splitlines()
        tokenizer, _, token_size = first.rpartition("|")
        num_tokens, token_size = int(second), {"2": 2, "4": 4}[token_size]
    num_bytes, expected = path.stat().st_size, num_tokens * token_size
    if num_bytes != expected:
        raise UserError(f"{path} has {num_bytes} bytes, and by its .metadata {num_tokens} tokens in {expected} bytes")
    digest = hashlib.blake2b(metadata, digest_size=8)
    with open(path, "rb") as file:
        for place in (0, num_bytes // 2, max(0, num_bytes - SAMPLE_BYTES)):
            file.seek(place)
            digest.update(file.read(SAMPLE_BYTES))
    return Shard(path, tokenizer, token_size, num_tokens, digest.hexdigest())


def last_document_end(ids: Shards, place: int) -> int:
    """Return where the last document ends that ends at `place` or before; a file's beginning counts.

    Raises UserError if the index of the file there is missing, or is that of another file.
    """
    number = int(np.searchsorted(ids.ends, place, side="right"))
    path, start = ids.paths[number], int(ids.starts[number])
    with errors_as_user_error(f"{path}.index does not say where documents end, so give a --data.val_source"):
        ends = np.memmap(f"{path}.index", "<u8", mode="r")
    if ends[-1] != ids.ends[number] - start:
        raise UserError(f"{path}.index is not the index of {path}: it ends at token {ends[-1]}")
    before = np.searchsorted(ends, np.uint64(place - start), side="right")  # of its type, or NumPy copies all of it
    return start + int(ends[before - 1] if before else 0)

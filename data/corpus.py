"""A prepared corpus: train.bin and val.bin (flat token ids), the tokenizer's files, and meta.json, a description.

Ids are little-endian, of 16 bits where the vocabulary allows. Opening a corpus compares its files with meta.json.

It is written from a stream of documents, in bounded memory and on all cores. Every piece of text has its split before
it becomes tokens: documents are dealt by a hash of their first piece, so that equal ones are in the same split. Too few
to be dealt are one text, and its end is for validation.
"""

import hashlib
import json
import math
import os
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from cli.script import progress_bar
from data.encoding import END_OF_TEXT, TOKENIZER_JSON, TiktokenTokenizer, Tokenizer
from data.sources import DataConfig, documents
from data.tokenizer import load_tokenizer, make_tokenizer, save_tokenizer
from errors import UserError, errors_as_user_error
from files import read_small, sha256

SPLITS = ("train", "val")
FEWEST = 10  # different documents of each split; if there are fewer, the end of the text is for validation
GROUP = 16  # pieces that a thread encodes at a time, since documents may be small
Piece = tuple[str, str, bool]  # part of a document: its text, its split, and whether the document begins with it


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


def last_change(path: Path) -> int:
    """Return when a file was changed, in ns. No program can set the ctime; but on Windows it is the creation's."""
    return max(path.stat().st_ctime_ns, path.stat().st_mtime_ns)


def is_prepared(source: str) -> bool:
    """Return whether a source is the directory of a prepared corpus, intact or not."""
    return Path(source, "train.bin").is_file()


def open_corpus(directory: Path) -> Corpus:
    """Open a prepared corpus.

    Raises UserError if the corpus is incomplete, or has changed since it was prepared.
    """
    if not (directory / "meta.json").is_file():
        raise UserError(
            f"{directory} is not empty, and no complete corpus (nanoGPT's token ids?): give text or another --out"
        )
    with errors_as_user_error(f"{directory} is not a complete prepared corpus"):
        meta = json.loads(read_small(directory / "meta.json"))
        tokenizer = load_tokenizer(directory)
        if meta["fingerprint"] != fingerprint(tokenizer, meta):
            raise UserError(f"{directory} has changed since it was prepared: remove it")
        tokens = {}
        for split in SPLITS:
            path = directory / f"{split}.bin"
            tokens[split] = np.memmap(path, dtype_of(tokenizer), mode="r")
            # Its content is compared if the file was touched since the preparation.
            if last_change(path) != meta[split]["ctime_ns"] and sha256(path) != meta[split]["sha256"]:
                raise UserError(f"{path} has changed since it was prepared: remove {directory}")
        return Corpus(directory, meta, tokenizer, tokens)


def write_corpus(config: DataConfig, key: str, directory: Path, tokenizer: Tokenizer | None) -> None:
    """Tokenise a source into an empty directory and write meta.json last.

    Args:
        key: that of the corpus, for meta.json.
        tokenizer: None for one that is made by its name, and may learn the source.

    Raises UserError if there is not enough text.
    """
    if tokenizer is None:
        tokenizer = make_tokenizer(config.tokenizer, chain.from_iterable(documents(config)))
    save_tokenizer(tokenizer, directory)
    num_bytes = write_tokens(config, tokenizer, directory)
    dtype = dtype_of(tokenizer)
    # The type of the ids is for readers of train.bin that are not ours.
    meta = {"source": config.source, "tokenizer": config.tokenizer, "key": key, "dtype": dtype.str}
    for split in SPLITS:
        path = directory / f"{split}.bin"
        num_tokens = path.stat().st_size // dtype.itemsize
        if num_tokens < 2:
            raise UserError(
                f"too little text for {split}.bin: give more, or another --data.val_fraction or --data.val_source"
            )
        meta[split] = {
            "tokens": num_tokens,
            "bytes": num_bytes[split],
            "sha256": sha256(path),
            "ctime_ns": last_change(path),
        }
    meta["fingerprint"] = fingerprint(tokenizer, meta)
    (directory / "meta.json").write_text(f"{json.dumps(meta, indent=2)}\n")


def deal(first: str, val_fraction: float) -> float:
    """Return how many characters are to train on of the document that begins with this piece: none or inf."""
    hashed = int.from_bytes(hashlib.blake2b(first.encode(), digest_size=8).digest())
    return 0 if hashed < val_fraction * 2**64 else math.inf


def find_split(config: DataConfig, val_fraction: float) -> float:
    """Return how many characters of the source are to train on: inf if its documents are dealt.

    Of a source with many documents only some are read.
    """
    if val_fraction in (0, 1):  # all of it is for one split
        return math.inf
    dealt = defaultdict(set)
    size = 0
    for document in documents(config):
        first = next(document)
        found = dealt[deal(first, val_fraction)]
        if len(found) < FEWEST:
            found.add(first)
        size += len(first) + sum(map(len, document))
        if sum(map(len, dealt.values())) == 2 * FEWEST:
            return math.inf
    return int(size * (1 - val_fraction))


def pieces(config: DataConfig, val_fraction: float, room: dict[str, float], whole: bool) -> Iterator[Piece]:
    """Yield the source piece by piece, or document by document if they are to be `whole`.

    room: how many tokens each split may still get. Text for a full one is left out.
    """
    to_train = find_split(config, val_fraction)
    is_dealt = to_train == math.inf
    for document in documents(config):
        first = next(document)
        if is_dealt:
            to_train = deal(first, val_fraction)
        parts = chain([first], document)
        is_start = True
        for text in filter(None, ["".join(parts)] if whole else parts):
            end = int(min(to_train, len(text)))
            to_train -= end
            for split, part in zip(SPLITS, (text[:end], text[end:]), strict=True):
                if part and room[split] > 0:
                    yield part, split, is_start
                is_start = is_start and not part


def write_tokens(config: DataConfig, tokenizer: Tokenizer, directory: Path) -> Counter:
    """Write the ids of all documents to train.bin and val.bin, each document after the tokens that start one.

    Each split ends with the piece that reaches its share of `max_tokens`. Notes special tokens whose names are
    written in the text, and documents to validate on that are also to be trained on.

    Returns how many bytes of text, in UTF-8, each split has got.
    """
    parts = [(config, config.val_fraction)]  # a source, and its share for validation
    if config.val_source:
        # The small one first: it may be unusable.
        parts = [(replace(config, source=config.val_source, max_tokens=None), 1.0), (config, 0.0)]
    whole = not isinstance(tokenizer, TiktokenTokenizer)
    num_bytes = Counter()
    names = {END_OF_TEXT, *tokenizer.special_tokens}
    written = set()  # of the names
    shared = {}  # hash of the first piece of a document of val_source -> whether it is also to be trained on
    start = np.array(tokenizer.document_start, dtype_of(tokenizer))
    progress = progress_bar(desc="tokenising", unit="B", unit_scale=True, leave=False, delay=1)
    with open(directory / "train.bin", "wb") as train, open(directory / "val.bin", "wb") as val, progress:
        files = {"train": train, "val": val}
        for part, val_fraction in parts:
            most = part.max_tokens or sys.maxsize
            room = {"train": most * (1 - val_fraction), "val": most * val_fraction}
            for (text, split, is_start), ids in encode_in_parallel(tokenizer, pieces(part, val_fraction, room, whole)):
                if room[split] <= 0:  # it was encoded while others were written
                    continue
                if is_start:
                    ids = np.concatenate((start, ids))
                    key = hash(text)
                    if val_fraction == 1 or key in shared:  # documents that are dealt are never on both sides
                        shared[key] = val_fraction < 1
                files[split].write(ids.astype(start.dtype).data)
                room[split] -= len(ids)
                size = len(text.encode())
                num_bytes[split] += size
                progress.update(size)
                written |= {name for name in names if name in text}
                if max(room.values()) <= 0:
                    break
    if written:
        print(
            f"note: {', '.join(sorted(written))} in {config.source} is ordinary text; "
            "in a table each document has a row",
            file=sys.stderr,
        )
    if num := sum(shared.values()):
        print(f"note: {num:,} of {len(shared):,} documents to validate on are also in {config.source}", file=sys.stderr)
    return num_bytes


def encode_in_parallel(tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield the pieces with their ids, in order.

    Threads are enough: tiktoken releases Python's global lock while it encodes (benchmarks/bench.py).
    """
    workers = os.cpu_count() or 1
    running = deque()
    with ThreadPoolExecutor(workers) as pool:
        while group := list(islice(pieces, GROUP)):
            running.append(pool.submit(lambda group: [(piece, tokenizer.encode(piece[0])) for piece in group], group))
            if len(running) > 2 * workers:  # enough to keep all threads busy, and little enough to fit in memory
                yield from running.popleft().result()
        for future in running:
            yield from future.result()

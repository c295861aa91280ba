"""Turn any text into two flat files of token ids, once.

    python -m data.prepare SOURCE --tokenizer NAME --out DIR

A prepared corpus is a directory (data/corpus.py). It appears complete or not at all, and is made again when the source
or the recipe has changed, or when it is damaged.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from data import DataError, sources
from data.corpus import SPLITS, Corpus, open_corpus, read_blocks
from data.tokenizer import FILES, encode, make_tokenizer, save_tokenizer, token_lengths

FORMAT = 1
CORPUS_FILES = {"train.bin", "val.bin", "meta.json", *FILES}
PREPARED = Path(__file__).parent / "prepared"
Piece = tuple[str, bool, str]  # "train" or "val", whether a document starts here, text
BPE_SAMPLE = 1 << 28  # characters that a bpe tokenizer is trained on, at most


@dataclass(frozen=True)
class DataConfig:
    """The text to learn from."""

    source: str = "stdlib"
    """stdlib (the Python standard library); a file, folder or glob of text, JSON lines, Parquet or CSV;
    hf:NAME[:CONFIG] on the Hugging Face hub; or a directory made by data.prepare."""
    tokenizer: str = "bpe:4096"
    """bytes, chars, bpe:SIZE (trained on the source), or a tiktoken name such as gpt2 or o200k_base."""
    text_column: str = "text"
    """The column that holds the text, in tables and hub data sets."""
    val_fraction: float = 0.1
    """Share of the documents, or of a single document's end, that is kept for validation."""

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise DataError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")


def prepare(config: DataConfig, out: Path | None = None, fingerprint: str | None = None) -> Corpus:
    """The prepared corpus of a configuration, made now unless it is there and up to date.

    Raises DataError if the source cannot be used, `out` is a directory that holds something else, or what would be made
    does not have the fingerprint that is wanted; what was prepared before is untouched then.
    """
    if (Path(config.source) / "meta.json").is_file() and (Path(config.source) / "train.bin").is_file():
        corpus = open_corpus(Path(config.source))
        if corpus.meta["tokenizer"] != config.tokenizer:
            raise DataError(
                f"{config.source} was prepared with --data.tokenizer {corpus.meta['tokenizer']}, not {config.tokenizer}"
            )
        return corpus
    directory = out or default_directory(config)
    temporary = directory.with_name(directory.name + ".tmp")
    for path in (directory, temporary):
        if holds_something_else(path):
            raise DataError(f"{path} exists and is not a prepared corpus: choose another directory")
    recipe = {"format": FORMAT, **asdict(config)}
    try:
        recipe["signature"] = sources.signature(config.source)
    except DataError as error:
        _, corpus = look(directory, recipe)
        if not corpus:
            raise
        print(f"{error}; what was prepared from it is still there")
        return corpus
    outdated, corpus = look(directory, recipe)
    if corpus:
        return corpus
    lock = take(temporary)
    try:
        _, corpus = look(directory, recipe)  # another process may just have made it
        if corpus:
            return corpus
        if outdated:
            print(f"{outdated}: preparing it again")
        for path in temporary.iterdir():  # of a process that was killed
            path.unlink()
        made = write_corpus(config, recipe, temporary)
        if fingerprint not in (None, made):
            changed = f"its fingerprint was {fingerprint[:12]}, now {made[:12]}"
            raise DataError(f"{config.source} is not the text this run began with ({changed}): put that back to go on")
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        if holds(lock, temporary):
            shutil.rmtree(temporary)
        os.close(lock)
    return open_corpus(directory)


def look(directory: Path, recipe: dict) -> tuple[str, Corpus | None]:
    """What is wrong with the corpus in a directory, if there is one; and the corpus, if it is there and up to date."""
    if not (directory / "meta.json").is_file():
        return "", None
    try:
        corpus = open_corpus(directory)
    except DataError as error:
        return str(error), None
    if all(corpus.meta.get(key) == value for key, value in recipe.items()):
        return "", corpus
    return f"{directory} was made from something else, or its source has changed", None


def holds_something_else(path: Path) -> bool:
    """Whether there is something of this name that is not a corpus, or part of one."""
    try:
        return not set(os.listdir(path)) <= CORPUS_FILES
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


def take(directory: Path) -> int:
    """Make a directory for this process alone, or wait until another process has finished with it; returns its lock."""
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory, os.O_RDONLY)
        except (FileExistsError, FileNotFoundError):  # another process has finished with it between two of these
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which writes {directory}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if holds(lock, directory):
            return lock
        os.close(lock)  # of a directory that has got another name meanwhile, as it was finished


def holds(lock: int, directory: Path) -> bool:
    """Whether a lock is that of the directory which has this name now."""
    try:
        return os.path.samestat(os.stat(directory), os.fstat(lock))
    except FileNotFoundError:
        return False


def default_directory(config: DataConfig) -> Path:
    """A readable name, and a digest so that different recipes do not share a directory."""
    source = config.source if config.source.startswith("hf:") else os.path.abspath(config.source)
    digest = hashlib.sha256(repr((source, config)).encode()).hexdigest()[:8]
    stem = Path(config.source.removeprefix("hf:")).stem.replace("*", "all")
    return PREPARED / f"{re.sub(r'[^A-Za-z0-9]+', '-', f'{stem}-{config.tokenizer}').strip('-').lower()}-{digest}"


def write_corpus(config: DataConfig, recipe: dict, directory: Path) -> str:
    """Tokenise the source into a new directory, meta.json last; returns the fingerprint."""
    texts = (text for _, _, text in pieces(config))
    if config.tokenizer.startswith("bpe:"):
        texts = at_most(texts, BPE_SAMPLE)
    with tqdm(texts, desc=f"learning {config.tokenizer}", unit=" pieces", leave=False, delay=1) as progress:
        tokenizer = make_tokenizer(config.tokenizer, progress)
    save_tokenizer(tokenizer, directory)
    dtype = np.dtype("<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4")
    num_documents, num_tokens = write_tokens(config, tokenizer, dtype, directory)
    if not config.val_fraction / 2 <= num_tokens["val"] / max(1, sum(num_tokens.values())) <= config.val_fraction * 2:
        cut_tail(config.val_fraction, dtype, directory)  # one document, or too few to share out fairly
    lengths = token_lengths(tokenizer)
    meta = recipe | {"vocab_size": tokenizer.n_vocab, "dtype": dtype.str, "documents": num_documents}
    for split in SPLITS:
        with open(directory / f"{split}.bin", "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            written = os.fstat(file.fileno()).st_ctime_ns
        blocks = (block.astype(np.int64) for block in read_blocks(directory / f"{split}.bin", dtype))
        count = np.sum([np.bincount(block, minlength=len(lengths)) for block in blocks] or [lengths * 0], axis=0)
        meta[split] = {"tokens": int(count.sum()), "bytes": int(count @ lengths), "sha256": digest}
        meta[split] |= {"ctime_ns": written}
    if meta["train"]["tokens"] < 2 or meta["val"]["tokens"] < 2:
        raise DataError(f"{config.source} is too short to keep {config.val_fraction:.0%} of it for validation")
    content = (directory / FILES[0]).read_bytes() + (meta["train"]["sha256"] + meta["val"]["sha256"]).encode()
    meta["fingerprint"] = hashlib.sha256(content).hexdigest()
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta["fingerprint"]


def write_tokens(
    config: DataConfig, tokenizer: tiktoken.Encoding, dtype: np.dtype, directory: Path
) -> tuple[int, dict[str, int]]:
    """Write train.bin and val.bin; return how many documents there are, and how many tokens each file has.

    A document goes to validation by a hash of its beginning, so equal documents are never on both sides.
    """
    num_documents, num_tokens = 0, {"train": 0, "val": 0}
    lengths, end_of_text = token_lengths(tokenizer), np.array([tokenizer.eot_token], dtype)
    with (
        open(directory / "train.bin", "wb") as train,
        open(directory / "val.bin", "wb") as val,
        tqdm(
            desc="tokenising", total=text_size(config.source), unit="B", unit_scale=True, leave=False, delay=1
        ) as progress,
    ):
        files = {"train": train, "val": val}
        for split, is_start, ids in encode_in_parallel(tokenizer, pieces(config)):
            ids = ids.astype(dtype)
            if is_start:
                num_documents += 1
                ids = np.concatenate((end_of_text, ids))
            files[split].write(ids.data)
            num_tokens[split] += len(ids)
            progress.update(int(lengths[ids].sum()))
    return num_documents, num_tokens


def pieces(config: DataConfig) -> Iterator[Piece]:
    """The source piece by piece, without empty ones. Raises DataError at the end if all was white space."""
    blank = True
    for document in sources.documents(config.source, config.text_column):
        split = None
        for text in filter(None, document):
            is_start = split is None
            if is_start:
                number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
                split = "val" if number < config.val_fraction * 2**64 else "train"
            blank = blank and text.isspace()
            yield split, is_start, text
    if blank:
        raise DataError(f"{config.source} is empty: there is no text in it")


def encode_in_parallel(tokenizer: tiktoken.Encoding, pieces: Iterator[Piece]) -> Iterator[tuple[str, bool, np.ndarray]]:
    """The same pieces with ids for text, in order. tiktoken leaves Python's lock, so threads are enough."""

    def encode_all(group: list[Piece]) -> list[tuple[str, bool, np.ndarray]]:
        return [(split, is_start, encode(tokenizer, text)) for split, is_start, text in group]

    workers = os.cpu_count() or 1
    running = deque()
    with ThreadPoolExecutor(workers) as pool:
        for group in grouped(pieces, 1 << 20):
            running.append(pool.submit(encode_all, group))
            if len(running) > 2 * workers:  # enough to keep everyone busy, and no more in memory
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def grouped(pieces: Iterator[Piece], size: int) -> Iterator[list[Piece]]:
    """Lists of pieces of about `size` characters: small documents share a task."""
    group, filled = [], 0
    for piece in pieces:
        group.append(piece)
        filled += len(piece[-1])
        if filled >= size:
            yield group
            group, filled = [], 0
    yield group


def cut_tail(val_fraction: float, dtype: np.dtype, directory: Path) -> None:
    """Make the last `val_fraction` of all tokens the validation split."""
    with open(directory / "train.bin", "ab") as train, open(directory / "val.bin", "rb") as val:
        shutil.copyfileobj(val, train)
        num_train = int(train.tell() // dtype.itemsize * (1 - val_fraction))
    with open(directory / "train.bin", "r+b") as train, open(directory / "val.bin", "wb") as val:
        train.seek(num_train * dtype.itemsize)
        shutil.copyfileobj(train, val)
        train.truncate(num_train * dtype.itemsize)


def at_most(texts: Iterator[str], size: int) -> Iterator[str]:
    """The first texts, until they have `size` characters."""
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def text_size(source: str) -> int | None:
    """The bytes of a source that is plain text, None for any other."""
    if source.startswith("hf:"):
        return None
    paths = sources.files(source)
    return None if any(map(sources.table_kind, paths)) else sum(path.stat().st_size for path in paths)


if __name__ == "__main__":
    import tyro

    from configs import parse, run_script

    @dataclass(frozen=True)
    class Arguments(DataConfig):
        """Prepare a corpus: read text, tokenise it, split it, write flat files of ids."""

        source: tyro.conf.Positional[str] = "stdlib"
        out: Path | None = None
        """Where to write it. None: a directory in data/prepared/."""

    def main() -> None:
        arguments = parse(Arguments, sys.argv[1:])
        fields = {name: getattr(arguments, name) for name in DataConfig.__dataclass_fields__}
        corpus = prepare(DataConfig(**fields), arguments.out)
        print(f"{corpus.directory}: {corpus}")
        options = f"--data.source {corpus.directory} --data.tokenizer {corpus.meta['tokenizer']}"
        print(f"next: python train.py {options} --train.out_dir out/{corpus.directory.name}")

    run_script(main)

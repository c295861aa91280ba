"""Turn any text into two flat files of token ids, once.

    python -m data.prepare SOURCE --tokenizer NAME --out DIR

A prepared corpus is a directory (data/corpus.py). It appears complete or not at all, and is made again when the source
or the recipe has changed, or when it is damaged. A large one that was interrupted goes on where it was.
"""

import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from data import DataError, sources
from data.corpus import Corpus, open_corpus
from data.tokenise import PROGRESS, write_corpus
from data.tokenizer import FILES, load_tokenizer

FORMAT = 2
CORPUS_FILES = {"train.bin", "val.bin", "meta.json", PROGRESS, f"{PROGRESS}.tmp", *FILES}
PREPARED = Path(__file__).parent / "prepared"


@dataclass(frozen=True)
class DataConfig:
    """The text to learn from."""

    source: str = "stdlib"
    """stdlib (the Python standard library); a file, folder or glob of text, JSON lines, Parquet or CSV;
    hf:NAME[:CONFIG][@REVISION] on the Hugging Face hub; or a directory made by data.prepare."""
    tokenizer: str = "bpe:4096"
    """bytes, chars, bpe:SIZE (trained on the source), a tiktoken name such as gpt2 or o200k_base;
    or model: that of train.init_from."""
    text_column: str = "text"
    """The column that holds the text, in tables and hub data sets."""
    max_tokens: int | None = None
    """Stop reading after about this many tokens. None: all there are."""
    val_fraction: float = 0.1
    """Share of the documents, or of a single document's end, that is kept for validation."""

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise DataError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise DataError(f"max_tokens must be at least 1, got {self.max_tokens}")


def prepare(
    config: DataConfig, out: Path | None = None, fingerprint: str | None = None, model: Path | None = None
) -> Corpus:
    """The prepared corpus of a configuration, made now unless it is there and up to date.

    model: the directory whose tokenizer is meant by "model". Raises DataError if the source cannot be used, `out` is a
    directory that holds something else, or what would be made does not have the fingerprint that is wanted; what was
    prepared before is untouched then.
    """
    recipe = {"format": FORMAT, **asdict(config), "vocabulary": None}
    if config.tokenizer == "model":
        if model is None:
            raise DataError("the tokenizer 'model' is that of train.init_from, which is not given")
        load_tokenizer(model)  # raises DataError now, with the model's name
        recipe["vocabulary"] = digest([(model / name).read_bytes() for name in FILES])
    if (Path(config.source) / "meta.json").is_file() and (Path(config.source) / "train.bin").is_file():
        return open_source(config, recipe)
    directory = out or default_directory(config, recipe)
    temporary = directory.with_name(directory.name + ".tmp")
    for path in (directory, temporary):
        if holds_something_else(path):
            raise DataError(f"{path} exists and is not a prepared corpus: choose another directory")
    gone = None
    try:
        recipe["signature"] = sources.signature(config.source)
    except DataError as error:
        gone = error
    outdated, corpus = look(directory, recipe)
    if gone and corpus:
        print(f"{gone}; what was prepared from it is still there")
    elif gone:
        raise gone
    if corpus:
        return corpus
    with alone_in(temporary):
        _, corpus = look(directory, recipe)  # another process may just have made it
        if corpus:
            (temporary / PROGRESS).unlink(missing_ok=True)
            return corpus
        if outdated:
            print(f"{outdated}: preparing it again")
        made = write_corpus(config, recipe, temporary, model)
        if fingerprint not in (None, made):
            changed = f"its fingerprint was {fingerprint[:12]}, now {made[:12]}"
            raise DataError(f"{config.source} is not the text this run began with ({changed}): put that back to go on")
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    return open_corpus(directory)


def open_source(config: DataConfig, recipe: dict) -> Corpus:
    """A corpus that was prepared elsewhere. Raises DataError if it has another tokenizer."""
    corpus = open_corpus(Path(config.source))
    same = corpus.meta["tokenizer"] == config.tokenizer
    if recipe["vocabulary"]:
        same = digest([corpus.tokenizer_files[name] for name in FILES]) == recipe["vocabulary"]
    if not same:
        raise DataError(
            f"{config.source} was prepared with --data.tokenizer {corpus.meta['tokenizer']}, not {config.tokenizer}"
        )
    return corpus


def digest(files: list[bytes]) -> str:
    """Of the files of a tokenizer."""
    return hashlib.sha256(b"\0".join(files)).hexdigest()


def find_prepared(fingerprint: str | None, source: str) -> Corpus | None:
    """The corpus of this fingerprint, if it was prepared here: what a checkpoint was trained on."""
    for directory in (Path(source), *sorted(PREPARED.glob("*"))):
        with suppress(DataError, OSError, ValueError):
            if isinstance(fingerprint, str) and fingerprint in (directory / "meta.json").read_text(encoding="utf-8"):
                corpus = open_corpus(directory)
                if corpus.meta["fingerprint"] == fingerprint:
                    return corpus
    return None


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


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """A directory for this process alone; another one waits. What is in it at the end is kept only to go on with."""
    lock = take(directory)
    try:
        yield
    finally:
        if holds(lock, directory) and not (directory / PROGRESS).exists():
            shutil.rmtree(directory)
        os.close(lock)


def take(directory: Path) -> int:
    """Make a directory for this process alone, or wait until another process has finished with it; returns its lock."""
    while True:
        with suppress(FileExistsError):  # another process finishes with it at this moment
            directory.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:  # or at this one
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


def default_directory(config: DataConfig, recipe: dict) -> Path:
    """A readable name, and a digest so that different recipes do not share a directory."""
    source = config.source if config.source.startswith("hf:") else os.path.abspath(config.source)
    short = hashlib.sha256(repr((source, config, recipe["vocabulary"])).encode()).hexdigest()[:8]
    stem = Path(config.source.removeprefix("hf:")).stem.replace("*", "all")
    return PREPARED / f"{re.sub(r'[^A-Za-z0-9]+', '-', f'{stem}-{config.tokenizer}').strip('-').lower()}-{short}"


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

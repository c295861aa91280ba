"""Turn any text into two flat files of token ids, once.

    python -m data.prepare SOURCE --tokenizer NAME --out DIR

A prepared corpus is a directory (data/corpus.py). It is written as DIR.tmp and renamed when it is complete, so an
interrupted preparation never looks finished: the same command removes it and starts again. A corpus is prepared again
when its source or recipe has changed, or when it is damaged.
"""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from data import DataError, sources
from data.config import DataConfig
from data.corpus import Corpus, open_corpus
from data.tokenise import write_corpus
from data.tokenizer import FILES, load_tokenizer, read_files

FORMAT = 2
PREPARED = Path(__file__).parent / "prepared"
CORPUS_FILES = {"train.bin", "val.bin", "meta.json", *FILES}


def prepare(
    config: DataConfig, out: Path | None = None, fingerprint: str | None = None, model: Path | None = None
) -> Corpus:
    """Return the prepared corpus of a configuration; prepare it unless it exists and is up to date.

    Args:
        out: the directory to write. None: one in PREPARED.
        fingerprint: the corpus that a run began with. Another one is refused.
        model: the directory whose tokenizer the name "model" stands for.

    Raises DataError if the source cannot be used, if `out` holds something other than a corpus, or if the fingerprint
    differs. What was prepared before is untouched then.
    """
    recipe = make_recipe(config, model)
    if is_prepared(config.source):
        if out:
            raise DataError(f"{config.source} is a prepared corpus: there is nothing to write to {out}")
        return open_source(config, recipe)
    directory = (out or default_directory(config, recipe)).resolve()  # behind a link, where it can be renamed
    temporary = directory.with_name(f"{directory.name}.tmp")
    for path in (directory, temporary):
        refuse_something_else(path)
    try:
        recipe["signature"] = sources.signature(config.source)
    except DataError as error:
        corpus, _ = find_current(directory, recipe)
        if corpus is None:
            raise
        print(f"{error}; the corpus prepared from it still exists and is used")
        return corpus
    corpus, _ = find_current(directory, recipe)
    if corpus:
        return corpus
    with locked(directory):
        corpus, problem = find_current(directory, recipe)  # another process may just have prepared it
        if corpus:
            return corpus
        if problem:
            print(f"{problem}: preparing it again")
        shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
        temporary.mkdir()
        try:
            made = write_corpus(config, recipe, temporary, model)
            if fingerprint not in (None, made):
                raise DataError(
                    f"{config.source} is not the text this run began with (its fingerprint was {fingerprint[:12]}, "
                    f"now {made[:12]}): put that back to go on"
                )
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            shutil.rmtree(directory, ignore_errors=True)
            temporary.rename(directory)
            sync(directory.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return open_corpus(directory)


def make_recipe(config: DataConfig, model: Path | None) -> dict:
    """Everything a corpus depends on, apart from the state of its source.

    Raises DataError if the tokenizer of a model is asked for and there is none.
    """
    recipe = {"format": FORMAT, **asdict(config), "vocabulary": None}
    if config.tokenizer == "model":
        if model is None:
            raise DataError("the tokenizer 'model' is that of train.init_from, which is not given")
        load_tokenizer(model)  # a bad one is refused here, where its directory can be named
        recipe["vocabulary"] = digest(read_files(model))
    return recipe


def digest(tokenizer_files: dict[str, bytes]) -> str:
    """The SHA-256 of a tokenizer's files."""
    return hashlib.sha256(b"\0".join(tokenizer_files.values())).hexdigest()


def is_prepared(source: str) -> bool:
    """True if a source is a corpus that was prepared before."""
    return (Path(source) / "meta.json").is_file() and (Path(source) / "train.bin").is_file()


def open_source(config: DataConfig, recipe: dict) -> Corpus:
    """Open a source that is a prepared corpus. Raises DataError if it has another tokenizer than the configuration."""
    corpus = open_corpus(Path(config.source))
    same = corpus.meta["tokenizer"] == config.tokenizer
    if recipe["vocabulary"]:
        same = digest(corpus.tokenizer_files) == recipe["vocabulary"]
    if not same:
        raise DataError(
            f"{config.source} was prepared with --data.tokenizer {corpus.meta['tokenizer']}, not {config.tokenizer}"
        )
    return corpus


def find_prepared(fingerprint: str | None, source: str) -> Corpus | None:
    """Find the corpus that a checkpoint was trained on by its fingerprint, None if it is not on this machine."""
    for directory in (Path(source), *sorted(PREPARED.glob("*"))):
        with suppress(DataError, OSError, ValueError):
            if isinstance(fingerprint, str) and fingerprint in (directory / "meta.json").read_text(encoding="utf-8"):
                corpus = open_corpus(directory)
                if corpus.meta["fingerprint"] == fingerprint:
                    return corpus
    return None


def find_current(directory: Path, recipe: dict) -> tuple[Corpus | None, str]:
    """The corpus in a directory if it is up to date, else None and the problem with it; no problem if there is none."""
    if not (directory / "meta.json").is_file():
        return None, ""
    try:
        corpus = open_corpus(directory)
    except DataError as error:
        return None, str(error)
    if all(corpus.meta.get(key) == value for key, value in recipe.items()):
        return corpus, ""
    return None, f"{directory} was made from something else, or its source has changed"


def default_directory(config: DataConfig, recipe: dict) -> Path:
    """A directory in PREPARED with a readable name, and a digest that tells recipes apart."""
    is_local = config.source != "stdlib" and not config.source.startswith("hf:")
    source = os.path.abspath(config.source) if is_local else config.source
    short = hashlib.sha256(repr((source, config, recipe["vocabulary"])).encode()).hexdigest()[:8]
    stem = Path(config.source.removeprefix("hf:")).stem.replace("*", "all")
    return PREPARED / f"{re.sub(r'[^A-Za-z0-9]+', '-', f'{stem}-{config.tokenizer}').strip('-').lower()}-{short}"


def refuse_something_else(path: Path) -> None:
    """Raise DataError if the path exists and holds anything that is not part of a corpus."""
    try:
        is_ours = set(os.listdir(path)) <= CORPUS_FILES
    except FileNotFoundError:
        return
    except NotADirectoryError:
        is_ours = False
    if not is_ours:
        raise DataError(f"{path} exists and is not a prepared corpus: choose another directory")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one process at a time prepare a directory; others wait.

    The lock is an empty hidden file beside the directory, which stays: to remove it would let a process that waits for
    the old file and one that makes a new file work at the same time.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.with_name(f".{directory.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process that is preparing {directory}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    import tyro

    from configs import parse
    from configs.script import run_script

    @dataclass(frozen=True)
    class Arguments(DataConfig):
        """Prepare a corpus: read text, tokenise it, split it, write flat files of ids."""

        source: tyro.conf.Positional[str] = "stdlib"
        out: Path | None = None
        """The directory to write. None: one in data/prepared/."""

    def main() -> None:
        arguments = parse(Arguments, sys.argv[1:])
        fields = {name: getattr(arguments, name) for name in DataConfig.__dataclass_fields__}
        corpus = prepare(DataConfig(**fields), arguments.out)
        print(f"{corpus.directory}: {corpus}")
        options = f"--data.source {corpus.directory} --data.tokenizer {corpus.meta['tokenizer']}"
        print(f"next: python train.py {options} --train.out_dir out/{corpus.directory.name}")

    run_script(main)

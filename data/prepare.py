"""Turn any text into two flat files of token ids.

    python -m data.prepare SOURCE --tokenizer NAME --out DIR

A prepared corpus is a directory (data/corpus.py). It is written as .DIR.tmp and renamed when it is complete, so an
interrupted preparation never looks finished: the same command removes it and starts again. When the source has changed,
another corpus is prepared, in a directory of its own.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from data.config import DataConfig
from data.corpus import Corpus, is_prepared, open_corpus
from data.encoding import TOKENIZER_JSON, Tokenizer
from data.sources import find_files
from data.token_files import has_token_files, open_token_files
from data.tokenise import write_corpus
from data.tokenizer import find_tokenizer
from errors import UserError
from files import publish, read_small

FORMAT = 4  # raised when a source is read in another way than before: then it is prepared again
PREPARED = Path(__file__).parent / "prepared"


def prepare(
    config: DataConfig, out: Path | None = None, fingerprint: str | None = None, model: Path | None = None
) -> Corpus:
    """Return the corpus of a configuration, and prepare it first unless it exists.

    Args:
        out: the directory to write. None: one in PREPARED.
        fingerprint: that of the corpus with which a run began. This corpus is used if it is still on this machine, even
            if its source has changed since.
        model: the directory whose tokenizer has the name "model".

    Raises UserError if the source cannot be used, if `out` holds something other than this corpus or cannot be written,
    or if the corpus has another fingerprint.
    """
    corpus = find_prepared(fingerprint, config.source) or find_corpus(config, out, fingerprint is not None, model)
    if fingerprint not in (None, corpus.meta["fingerprint"]):
        raise UserError(f"{config.source} is not the text this run began with: put that back to go on")
    return corpus


def find_corpus(config: DataConfig, out: Path | None, is_resumed: bool, model: Path | None) -> Corpus:
    """Return the corpus of a configuration: a prepared one, token files, or text, which is prepared.

    is_resumed: the tokenizer of token files is that of `model`: another version of a library may make another one.

    Raises as `prepare`.
    """
    if is_prepared(config.source):
        return open_source(config, find_tokenizer(config.tokenizer, model))
    if has_token_files(config.source):
        return open_token_files(config, find_tokenizer("model" if is_resumed else config.tokenizer, model))
    if config.val_source:
        raise UserError(f"data.val_source is for token files of datatrove, and {config.source} has none")
    return prepare_source(config, out, find_tokenizer(config.tokenizer, model))


def open_source(config: DataConfig, tokenizer: Tokenizer | None) -> Corpus:
    """Open a source that is a prepared corpus. Raises UserError if it has another tokenizer than the configuration.

    tokenizer: the configured one, as `find_tokenizer` returns it, here and in the functions below.
    """
    corpus = open_corpus(Path(config.source))
    name = corpus.meta["tokenizer"]
    if tokenizer:  # other files of it may be of another version
        is_same = tokenizer.files[TOKENIZER_JSON] == corpus.tokenizer.files[TOKENIZER_JSON]
    else:
        is_same = name == config.tokenizer
    if not is_same:
        raise UserError(f"{config.source} was prepared with --data.tokenizer {name!s:.200}, not {config.tokenizer}")
    return corpus


def prepare_source(config: DataConfig, out: Path | None, tokenizer: Tokenizer | None) -> Corpus:
    """Open the corpus in a directory if it is there already, else write it. One process at a time; others wait.

    Raises UserError if the directory holds something else, or a corpus that has changed, or cannot be written.
    """
    key = corpus_key(config, tokenizer)
    directory = (out or default_directory(config, key)).resolve()  # behind a link, where it can be renamed
    temporary = directory.with_name(f".{directory.name}.tmp")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Never delete the lock file: a process that waits for the deleted one and one that locks a new one would both
        # work.
        with FileLock(directory.with_name(f".{directory.name}.lock")):
            if not directory.exists() or not os.listdir(directory):
                shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
                temporary.mkdir()
                try:
                    write_corpus(config, key, temporary, tokenizer)
                    publish(temporary, directory)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write a corpus: {error}; python -m data.prepare SOURCE --out DIR writes elsewhere"
        ) from None
    corpus = open_corpus(directory)
    if corpus.meta["key"] != key:
        raise UserError(f"{directory} is the corpus of another text, or of other options: give another --out")
    return corpus


def corpus_key(config: DataConfig, tokenizer: Tokenizer | None) -> str:
    """Return a hash of all that a corpus depends on: options, names, sizes and times of files, a given tokenizer."""
    stamps = [(path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in find_files(config.source)]
    options = {**vars(config), "out": None}  # of the command line
    return hashlib.sha256(repr((FORMAT, options, stamps, tokenizer and tokenizer.files)).encode()).hexdigest()


def default_directory(config: DataConfig, key: str) -> Path:
    """Return a directory in PREPARED with a readable name, which ends with the beginning of the corpus's key."""
    name = f"{Path(config.source).stem}-{Path(config.tokenizer).stem}-{key[:8]}"
    return PREPARED / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()


def find_prepared(fingerprint: object, *elsewhere: str) -> Corpus | None:
    """Return the prepared corpus with this fingerprint; None if it is neither in PREPARED nor one of `elsewhere`."""
    if fingerprint is None:
        return None
    for directory in (*map(Path, elsewhere), *PREPARED.glob("*")):
        with suppress(UserError, OSError, ValueError, TypeError, KeyError):
            if json.loads(read_small(directory / "meta.json"))["fingerprint"] == fingerprint:
                return open_corpus(directory)
    return None


if __name__ == "__main__":
    import tyro

    from cli.options import PathText, parse
    from cli.script import run_script, visible

    @dataclass(frozen=True)
    class Arguments(DataConfig):
        """Prepare a corpus: read text, tokenise it, split it, write flat files of ids."""

        source: tyro.conf.Positional[PathText] = "stdlib"
        out: Path | None = None
        """The directory to write. Left out: one in data/prepared/."""

    def main() -> None:
        arguments = parse(Arguments, sys.argv[1:])
        corpus = prepare(arguments, arguments.out)
        print(visible(f"{corpus.directory}: {corpus}"))
        words = ["--data.source", str(corpus.directory), "--data.tokenizer", arguments.tokenizer]
        print(f"next: python train.py {shlex.join(words)}")

    run_script(main)

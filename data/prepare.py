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
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from data import sources
from data.config import DataConfig
from data.corpus import Corpus, is_prepared, open_corpus
from data.encoding import TOKENIZER_JSON, Tokenizer
from data.token_files import has_token_files, open_token_files
from data.tokenise import write_corpus
from data.tokenizer import find_tokenizer
from errors import UserError
from files import publish, read_small

FORMAT = 3  # raised when a source is read in another way than before: then it is prepared again
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
    corpus = find_prepared(fingerprint, config.source)
    if corpus is None:
        is_corpus = is_prepared(config.source)
        is_tokens = not is_corpus and has_token_files(config.source)
        if is_tokens and fingerprint is not None:
            # The run's own copy of the tokenizer: another version of a library may write another.
            config = replace(config, tokenizer="model")
        tokenizer = find_tokenizer(config.tokenizer, model)
        if config.tokenizer == "model" and model is None and not is_corpus:
            raise UserError("the tokenizer 'model' is that of train.init_from, which is not given")
        if out is not None and (is_corpus or is_tokens):
            raise UserError(f"{config.source} is tokens already: there is nothing to write to {out}")
        if config.val_source and not is_tokens:
            raise UserError(f"data.val_source is for token files, and {config.source} has none")
        if is_corpus:
            corpus = open_source(config, tokenizer)
        elif is_tokens:
            corpus = open_token_files(config, tokenizer)
        else:
            corpus = prepare_source(config, out, tokenizer)
    if fingerprint not in (None, corpus.meta["fingerprint"]):
        different = sorted(set(fingerprint.splitlines()) ^ set(corpus.meta["fingerprint"].splitlines()))
        name, colon, _ = different[0].rpartition(":")  # of token files: a line for each
        changed = f" ({name:.60} differs, or is missing)" if colon else ""
        raise UserError(f"{config.source} is not the text this run began with{changed}: put that back to go on")
    return corpus


def open_source(config: DataConfig, tokenizer: Tokenizer | None) -> Corpus:
    """Open a source that is a prepared corpus. Raises UserError if it has another tokenizer than the configuration.

    tokenizer: the configured one, as `find_tokenizer` returns it, here and in the functions below.
    """
    corpus = open_corpus(Path(config.source))
    name = corpus.meta["tokenizer"]
    is_same = name == config.tokenizer
    if tokenizer:  # other files of it may be of another version
        one, other = ((each.files[TOKENIZER_JSON], each.document_start) for each in (corpus.tokenizer, tokenizer))
        is_same = one == other
    if not is_same:
        raise UserError(f"{config.source} was prepared with --data.tokenizer {name:.200}, not {config.tokenizer}")
    return corpus


def prepare_source(config: DataConfig, out: Path | None, tokenizer: Tokenizer | None) -> Corpus:
    """Open the corpus in a directory if it is there already, else write it. One process at a time; others wait.

    Raises UserError if the directory holds something else, or a corpus that has changed, or cannot be written.
    """
    files, left_out = sources.find_files(config.source)
    key = corpus_key(config, files, tokenizer)
    directory = (out or default_directory(config, key)).resolve()  # behind a link, where it can be renamed
    temporary = directory.with_name(f".{directory.name}.tmp")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Never delete the lock file: a process that waits for the deleted one and one that locks a new one would both
        # work.
        with FileLock(directory.with_name(f".{directory.name}.lock")):
            if directory.exists() and os.listdir(directory):
                with suppress(UserError):
                    corpus = open_corpus(directory)
                    if key.items() <= corpus.meta.items():
                        return corpus
                if out and not (directory / "meta.json").exists():
                    raise UserError(f"{directory} is not a corpus, and not empty: give another --out")
                raise UserError(
                    f"{directory} is not the corpus of this text, or is damaged: "
                    f"remove it{', or give another --out' if out else ''}"
                )
            if left_out:
                print(f"note: {config.source}: left out {left_out}", file=sys.stderr)
            shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
            temporary.mkdir()
            try:
                write_corpus(config, key, temporary, tokenizer)
                publish(temporary, directory)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write a corpus to {out or PREPARED}: {error}; python -m data.prepare SOURCE --out DIR writes "
            "elsewhere"
        ) from None
    return open_corpus(directory)


def corpus_key(config: DataConfig, files: list[Path], tokenizer: Tokenizer | None) -> dict:
    """Return everything that a corpus depends on, by name. meta.json repeats it."""
    key = {"format": FORMAT, **vars(config), "signature": sources.signature(files), "vocabulary": None}
    key.pop("val_source")  # of token files
    key.pop("out", None)  # of the command line
    if tokenizer:
        key["vocabulary"] = hashlib.sha256(b"\0".join(tokenizer.files.values())).hexdigest()
    return key


def default_directory(config: DataConfig, key: dict) -> Path:
    """Return a directory in PREPARED with a readable name, which ends with a hash of the corpus's key."""
    short = hashlib.sha256(repr(key).encode()).hexdigest()[:8]
    name = f"{Path(config.source).stem}-{Path(config.tokenizer).stem}-{short}"
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
    from cli.script import how_to_run, run_script, visible

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
        source = shlex.quote(str(corpus.directory))
        options = f"--data.source {source} --data.tokenizer {shlex.quote(corpus.meta['tokenizer'])}"
        out_dir = shlex.quote(f"out/{corpus.directory.name}")
        print(f"next: {how_to_run('train.py')} {options} --train.out_dir {out_dir}")

    run_script(main)

"""Turn any text into two flat files of token ids.

    python -m data.prepare SOURCE --tokenizer NAME --out DIR

A prepared corpus is a directory (data/corpus.py). It is written as .DIR.tmp and renamed when it is complete, so an
interrupted preparation never looks finished: the same command removes it and starts again. When the source has changed,
another corpus is prepared, in a directory of its own.
"""

import hashlib
import re
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data.corpus import Corpus, is_prepared, open_corpus, write_corpus
from data.encoding import Tokenizer
from data.sources import DataConfig, find_files
from data.token_files import find_token_files, open_token_files
from data.tokenizer import find_tokenizer
from errors import UserError
from files import expand, lock, publish, read_small

FORMAT = 4  # raised when a source is read in another way than before: then it is prepared again
IN_EVERY_KEY = ("source", "tokenizer", "text_column", "max_tokens", "val_fraction")
PREPARED = Path(__file__).parent / "prepared"


def prepare(
    config: DataConfig, out: str | Path = "", began_with: dict | None = None, model: Path | None = None
) -> Corpus:
    """Return the corpus of a configuration, and prepare it first unless it exists.

    Args:
        out: the directory to write. Empty: one in PREPARED.
        began_with: the trainer.json of a run that goes on. Its corpus is used if it is still on this machine, even if
            its source has changed since.
        model: the directory whose tokenizer has the name "model".

    Raises UserError if the source cannot be used, if `out` holds something other than this corpus, or if the run began
    with another text; and OSError if a file cannot be read or written.
    """
    config = replace(config)  # whose source is walked anew
    corpus = find_prepared(began_with) if began_with else None
    if corpus is None:
        # A run that goes on has the tokenizer of its model: another version of a library may make another one.
        tokenizer = find_tokenizer("model" if began_with else config.tokenizer, model)
        if is_prepared(config.source):
            if config.val_source:
                raise UserError(f"{config.source} has its own text to validate on: leave --data.val_source out")
            corpus = open_corpus(Path(config.source))
            wanted = tokenizer.identity if tokenizer else config.tokenizer
            if wanted not in (corpus.tokenizer.identity, corpus.meta["tokenizer"]):
                given = corpus.meta["tokenizer"]
                raise UserError(f"{config.source} was prepared with another tokenizer: --data.tokenizer {given}")
        elif files := find_token_files(config):
            corpus = open_token_files(config, files, tokenizer)
        else:
            corpus = prepare_source(config, out, tokenizer)
    if began_with and began_with["fingerprint"] != corpus.meta["fingerprint"]:
        raise UserError(f"{config.source} is not the text this run began with: restore that text to resume")
    return corpus


def prepare_source(config: DataConfig, out: str | Path, tokenizer: Tokenizer | None) -> Corpus:
    """Open the corpus in a directory if it is there already, else write it. One process at a time; others wait.

    tokenizer: the configured one, as `find_tokenizer` returns it.

    Raises UserError if the directory holds something else, or a corpus that has changed, and OSError if it cannot be
    written.
    """
    key = corpus_key(config, tokenizer)
    name = f"{Path(config.source).stem:.99}-{Path(config.tokenizer).stem}-{key[:8]}"  # to be read by people
    directory = expand(out or PREPARED / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-"))
    directory = directory.resolve()  # behind a link, where it can be renamed
    temporary = directory.with_name(f".{directory.name}.tmp")
    problem = f"cannot lock {directory} to write it; data.prepare has an --out for another place"
    with lock(directory.with_name(f".{directory.name}.lock"), problem):  # makes the parent directories
        if not directory.exists() or not any(directory.iterdir()):
            shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
            temporary.mkdir()
            try:
                write_corpus(config, key, temporary, tokenizer)
                if directory.exists():
                    directory.rmdir()  # which Windows would not replace
                publish(temporary, directory)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    corpus = open_corpus(directory)
    if corpus.meta.get("key") != key:  # a corpus of 2.x has none
        raise UserError(f"{directory} is the corpus of another text, or of other options: give another --out")
    return corpus


def corpus_key(config: DataConfig, tokenizer: Tokenizer | None) -> str:
    """Return a hash of all that a corpus depends on: options, names, sizes and times of files, a given tokenizer.

    Raises UserError if a file is for training and for validation.
    """
    files = config.files
    val_files = find_files(config.val_source) if config.val_source else []
    if shared := {*map(Path.resolve, files)} & {*map(Path.resolve, val_files)}:
        raise UserError(
            f"{min(shared)} is in --data.source and in --data.val_source: give a glob that leaves it out of one of them"
        )
    stamps = [(path.resolve(), path.stat().st_size, path.stat().st_mtime_ns) for path in files + val_files]
    # An option that is added, and left at its default, changes no key: the corpora that exist are found.
    values = asdict(config).items()
    options = {name: value for name, value in values if name in IN_EVERY_KEY or value != getattr(type(config), name)}
    options["out"] = None  # of the command line
    return hashlib.sha256(repr((FORMAT, options, stamps, tokenizer and tokenizer.files)).encode()).hexdigest()


def find_prepared(trainer: dict) -> Corpus | None:
    """Return the prepared corpus that a trainer.json names; None if it is neither in PREPARED nor the source itself.

    Runs of 4.1 and before do not know the name of its directory.
    """
    named = [PREPARED / trainer["corpus"]] if "corpus" in trainer else PREPARED.glob("*")
    for directory in (Path(trainer["config"]["data"]["source"]), *named):
        with suppress(UserError, OSError):  # `is_file` may raise where a folder is closed
            if f'"fingerprint": "{trainer["fingerprint"]}"'.encode() in read_small(directory / "meta.json"):
                return open_corpus(directory)
    return None


if __name__ == "__main__":
    import tyro

    from cli.options import parse
    from cli.script import printable, run_script

    @dataclass(frozen=True)
    class Arguments(DataConfig):
        """Prepare a corpus: read text, tokenise it, split it, write flat files of ids.

        Ways to start:
            python -m data.prepare my.txt                    the corpus of one text
            python -m data.prepare texts --tokenizer gpt2    a folder, in tokens of GPT-2
            python -m data.prepare hf:OWNER/NAME --out wiki  into a directory
        """

        source: tyro.conf.Positional[str] = "stdlib"
        out: str = ""
        """The directory to write. Left out: one in data/prepared/."""

    def main() -> None:
        sys.argv[0] = "python -m data.prepare"  # in --help
        arguments = parse(Arguments, sys.argv[1:])
        corpus = prepare(arguments, arguments.out)
        print(printable(f"{corpus.directory}: {corpus}"))
        words = ["--data.source", str(corpus.directory), "--data.tokenizer", arguments.tokenizer]
        print(f"next: python train.py {shlex.join(words)}")

    run_script(main)

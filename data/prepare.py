"""Turn any text into two flat files of token ids, once.

    python -m data.prepare SOURCE --tokenizer NAME --out DIR

A prepared corpus is a directory (data/corpus.py). It appears complete or not at all, and is made again when the source
or the recipe has changed, or when it is damaged. A large one that was interrupted goes on where it was.

Several processes, on one machine or many, share the work by its files: with --part 1/8 to --part 8/8 each tokenises an
eighth into a directory beside DIR, and the command without --part joins them (data/parts.py).
"""

import hashlib
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from data import DataError, sources
from data.corpus import Corpus, open_corpus
from data.directories import alone_in, refuse_something_else
from data.parts import join_parts, write_part
from data.tokenise import PROGRESS, digest, write_corpus
from data.tokenizer import FILES, load_tokenizer

FORMAT = 2
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
    directory that holds something else, some parts of the corpus are there and others are not, or what would be made
    does not have the fingerprint that is wanted; what was prepared before is untouched then.
    """
    recipe = make_recipe(config, model)
    if is_prepared(config.source):
        if out:
            raise DataError(f"{config.source} is a prepared corpus: there is nothing to write to {out}")
        return open_source(config, recipe)
    directory = behind_link(out or default_directory(config, recipe))
    temporary = directory.with_name(directory.name + ".tmp")
    for path in (directory, temporary):
        refuse_something_else(path)
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
        join_parts(config, recipe, directory, temporary, model)
        made = write_corpus(config, recipe, temporary, model)
        if fingerprint not in (None, made):
            changed = f"its fingerprint was {fingerprint[:12]}, now {made[:12]}"
            raise DataError(f"{config.source} is not the text this run began with ({changed}): put that back to go on")
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    return open_corpus(directory)


def prepare_part(config: DataConfig, part: str, out: Path | None = None) -> None:
    """Make one part of a corpus, "3/8" for the third of eight, unless it is there; `prepare` joins them.

    Raises DataError if it cannot be made alone.
    """
    number, count = map(int, part.split("/")) if re.fullmatch(r"\d{1,6}/\d{1,6}", part) else (0, 0)
    if not 1 <= number <= count:
        raise DataError(f"a part is K/N with K from 1 to N, as in 3/8, got {part!r}")
    if config.max_tokens is not None:
        raise DataError("where max_tokens ends depends on all parts before: leave out one of --max_tokens and --part")
    if is_prepared(config.source):
        raise DataError(f"{config.source} is a prepared corpus: there is nothing to do in parts")
    recipe = make_recipe(config)
    directory = behind_link(out or default_directory(config, recipe))
    if look(directory, recipe | {"signature": sources.signature(config.source)})[1]:
        print(f"{directory} is there, and up to date")
        return
    path, progress = write_part(config, recipe, directory, number, count)
    print(f"{path}: {progress.documents:,} documents, {progress.bytes_of_text / 1e6:,.1f} MB")
    print("next: the same command without --part, when all parts are there")


def make_recipe(config: DataConfig, model: Path | None = None) -> dict:
    """What a corpus is made from, besides the state of its source. Raises DataError if a tokenizer is missing."""
    recipe = {"format": FORMAT, **asdict(config), "vocabulary": None}
    if config.tokenizer == "model":
        if model is None:
            raise DataError("the tokenizer 'model' is that of train.init_from, which is not given")
        load_tokenizer(model)  # raises DataError now, with the model's name
        recipe["vocabulary"] = digest([(model / name).read_bytes() for name in FILES])
    return recipe


def is_prepared(source: str) -> bool:
    """Whether a source is a corpus that was prepared before."""
    return (Path(source) / "meta.json").is_file() and (Path(source) / "train.bin").is_file()


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


def default_directory(config: DataConfig, recipe: dict) -> Path:
    """A readable name, and a digest so that different recipes do not share a directory."""
    is_local = config.source != "stdlib" and not config.source.startswith("hf:")
    source = os.path.abspath(config.source) if is_local else config.source
    short = hashlib.sha256(repr((source, config, recipe["vocabulary"])).encode()).hexdigest()[:8]
    stem = Path(config.source.removeprefix("hf:")).stem.replace("*", "all")
    return PREPARED / f"{re.sub(r'[^A-Za-z0-9]+', '-', f'{stem}-{config.tokenizer}').strip('-').lower()}-{short}"


def behind_link(directory: Path) -> Path:
    """The directory itself, so that what is written beside it is on its disk."""
    return directory.resolve() if directory.is_symlink() or not directory.name else directory


if __name__ == "__main__":
    import tyro

    from configs import parse, run_script

    @dataclass(frozen=True)
    class Arguments(DataConfig):
        """Prepare a corpus: read text, tokenise it, split it, write flat files of ids."""

        source: tyro.conf.Positional[str] = "stdlib"
        out: Path | None = None
        """Where to write it. None: a directory in data/prepared/."""
        part: str | None = None
        """K/N: only this one of N parts, beside `out`, in a process for itself. The same command without it joins the
        parts when all are there, to the bytes that one process would have written."""

    def main() -> None:
        arguments = parse(Arguments, sys.argv[1:])
        fields = {name: getattr(arguments, name) for name in DataConfig.__dataclass_fields__}
        if arguments.part is not None:
            prepare_part(DataConfig(**fields), arguments.part, arguments.out)
            return
        corpus = prepare(DataConfig(**fields), arguments.out)
        print(f"{corpus.directory}: {corpus}")
        options = f"--data.source {corpus.directory} --data.tokenizer {corpus.meta['tokenizer']}"
        print(f"next: python train.py {options} --train.out_dir out/{corpus.directory.name}")

    run_script(main)

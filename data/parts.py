"""A large corpus in parts, each made by a process of its own, on any machine that sees the disk.

    DIR.part-3-of-8    what the third of eight ranges of the shards came to, or has come to so far
    DIR.part-0-of-8    what all of them share: no shard, but the vocabulary

Each is what an interrupted preparation leaves (data/tokenise.py), and joined they are what one process would have left
in DIR.tmp after the last shard, which then goes on from there.
"""

import re
import shutil
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from data import DataError
from data.corpus import SPLITS
from data.directories import alone_in, refuse_something_else
from data.sources import Shard, find_shards
from data.tokenise import Progress, digest, note, read_progress, save_vocabulary, unsigned, write_shards
from data.tokenizer import FILES

if TYPE_CHECKING:
    from data.prepare import DataConfig


def write_part(config: "DataConfig", recipe: dict, directory: Path, number: int, count: int) -> tuple[Path, Progress]:
    """Make the part with this number, from 1, or go on with it. Returns where it is, and what it has come to."""
    shards = find_shards(config.source, config.text_column)
    ends = bounds(shards, count)
    path, shared = part_of(directory, number, count), part_of(directory, 0, count)
    for place in (directory, path, shared):
        refuse_something_else(place)
    with alone_in(path):
        share_vocabulary(config, recipe, shards, shared, path)
        begin, shards = beginnings(recipe, shared, ends)[number - 1], shards[: ends[number]]
        progress, _ = write_shards(replace(config, tokenizer="model"), begin, shards, path, shared)
    return path, progress


def join_parts(config: "DataConfig", recipe: dict, directory: Path, target: Path, model: Path | None = None) -> None:
    """If there are parts of the corpus that is to be in `directory`, put them together in `target`, and remove them.

    Raises DataError naming those that are missing, if no number of parts is complete.
    """
    found = find_parts(directory)
    if not found:
        return
    for path in found:
        refuse_something_else(path)
    shards = find_shards(config.source, config.text_column)
    whole = Progress(unsigned(recipe), shard=len(shards))
    counts = sorted(set(filter(None, found.values())))
    if counts and not read_progress(target, whole, shards):  # else it was interrupted when they were joined
        count, parts = find_complete(config, recipe, shards, directory, counts, model)
        print(f"joining {count} parts")
        for path in target.iterdir():
            path.unlink()
        save_vocabulary(replace(config, tokenizer="model"), shards, target, part_of(directory, 0, count))
        files = {split: open(target / f"{split}.bin", "wb") for split in SPLITS}
        try:
            for number, part in enumerate(parts, 1):
                for split, file in files.items():
                    with open(part_of(directory, number, count) / f"{split}.bin", "rb") as ids:
                        shutil.copyfileobj(ids, file)
                    whole.sizes[split] += part.sizes[split]
                whole.documents += part.documents
                whole.without_text += part.without_text
                whole.bytes_of_text += part.bytes_of_text
                whole.blank &= part.blank
            note(whole, shards, target, files.values())
        finally:
            for file in files.values():
                file.close()
    for path in find_parts(directory):
        shutil.rmtree(path)


def find_complete(
    config: "DataConfig", recipe: dict, shards: list[Shard], directory: Path, counts: list[int], model: Path | None
) -> tuple[int, list[Progress]]:
    """The first of these numbers of parts of which all are finished and up to date, and what they have come to."""
    lacks = []
    for count in counts:
        ends, shared = bounds(shards, count), part_of(directory, 0, count)
        share_vocabulary(config, recipe, shards, shared, shared, model)
        parts = []
        for number, begin in enumerate(beginnings(recipe, shared, ends), 1):
            path = part_of(directory, number, count)
            part = read_progress(path, begin, shards[: ends[number]])
            whole = part and all((path / f"{split}.bin").stat().st_size == part.sizes[split] for split in SPLITS)
            parts.append(part if whole and part.shard == ends[number] else None)
        if None not in parts:
            return count, parts
        missing = [str(number) for number, part in enumerate(parts, 1) if part is None]
        lacks.append(f"{', '.join(missing)} of {count}")
    raise DataError(
        f"{directory} cannot be joined: missing, unfinished or outdated is part {' and part '.join(lacks)} "
        f"(remove {directory}.part-* to prepare it without parts)"
    )


def share_vocabulary(
    config: "DataConfig", recipe: dict, shards: list[Shard], shared: Path, path: Path, model: Path | None = None
) -> None:
    """Make what all parts share, unless it is there: on a network disk, where a lock may be known to one machine only.

    So it is made beside the part in `path`, which is ours, and appears complete; who comes late takes what is there.
    """
    begin, own = Progress(unsigned(recipe), shard=len(shards)), path.with_name(f"{path.name}.vocabulary")
    with alone_in(shared):
        if read_progress(shared, begin, shards):
            return
        with alone_in(own):
            write_shards(config, begin, shards, own, model)
            try:
                own.rename(shared)  # which is empty
            except OSError:
                if read_progress(shared, begin, shards):
                    shutil.rmtree(own)
                else:  # of another source or recipe
                    shutil.rmtree(shared)
                    own.rename(shared)


def beginnings(recipe: dict, shared: Path, ends: list[int]) -> list[Progress]:
    """How each part begins: at its first shard, with the shared vocabulary, whatever that was learned from."""
    vocabulary = digest([(shared / name).read_bytes() for name in FILES])
    recipe = unsigned(recipe) | {"vocabulary": vocabulary}
    return [Progress(recipe, first=first, shard=first) for first in ends[:-1]]


def bounds(shards: list[Shard], count: int) -> list[int]:
    """Where each of `count` ranges of shards begins, and where the last one ends: (count + 1,).

    A shard is in the range in which its middle is when all bytes are divided evenly.
    """
    weights = [shard.size + 1 for shard in shards]  # on the hub all count the same
    middles = [(2 * end - weight) * count for end, weight in zip(accumulate(weights), weights, strict=True)]
    return [bisect_right(middles, 2 * sum(weights) * number) for number in range(count + 1)]


def part_of(directory: Path, number: int, count: int) -> Path:
    """Where a part of what is to be in a directory is."""
    return directory.with_name(f"{directory.name}.part-{number}-of-{count}")


def find_parts(directory: Path) -> dict[Path, int]:
    """What is there of parts, each with how many there are to be; 0 for what only has a vocabulary."""
    names = re.compile(re.escape(directory.name) + r"\.part-(\d+)-of-(\d+)(\.vocabulary)?")
    found = {path: names.fullmatch(path.name) for path in directory.parent.iterdir()}
    return {path: 0 if name[1] == "0" or name[3] else int(name[2]) for path, name in found.items() if name}

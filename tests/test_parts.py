"""A corpus prepared in parts has the bytes of one that was not, whoever is killed, and in whatever order."""

import fcntl
import json
import os
import random
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import DataError, parts, prepare, sources, tokenise
from data.prepare import DataConfig
from data.sources import Shard
from tests.crash import KILLED, in_child


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 0 to some thousand characters: text, JSON lines and Parquet, with documents that have no text."""
    import pandas

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "PIECE", 509)
    (tmp_path / "text").mkdir()
    for shard, rows in enumerate((17, 0, 3, 61, 5, 0, 29, 2, 1, 0)):
        texts = [f"{shard}.{row} naïve 猫\n" * (row * 7 % 31) for row in range(rows)]
        path = tmp_path / "text" / str(shard)
        if shard % 3 == 0 and rows:
            pandas.DataFrame({"text": [*texts, None]}).to_parquet(path.with_suffix(".parquet"))
        elif shard % 3 == 1:
            path.with_suffix(".jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            path.with_suffix(".txt").write_text("".join(texts), encoding="utf-8")
    return tmp_path / "text"


def content(directory: Path | str) -> dict:
    """All that is in a corpus, but for the times of writing."""
    meta = json.loads((Path(directory) / "meta.json").read_text())
    for split in ("train", "val"):
        del meta[split]["ctime_ns"]
    files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    return files | {"meta.json": meta}


def straight(config: DataConfig) -> dict:
    prepare.prepare(config, Path("straight"))
    return content("straight")


def make_parts(config: DataConfig, numbers: list[int], of: int) -> None:
    for number in numbers:
        prepare.prepare_part(config, f"{number}/{of}", Path("out"))


def join(config: DataConfig) -> dict:
    """What the parts are when joined, and nothing of them is left."""
    prepare.prepare(config, Path("out"))
    assert list(Path().glob("out?*")) == []
    return content("out")


@pytest.mark.parametrize("of", [1, 2, 3, 7, 13])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300", "chars"])
def test_parts_are_joined_to_the_same_bytes(tokenizer: str, of: int) -> None:
    config, numbers = DataConfig("text", tokenizer), list(range(1, of + 1))
    random.Random(of).shuffle(numbers)
    make_parts(config, numbers, of)
    assert len(list(Path().glob("out.part-*"))) == of + 1
    assert Path(f"out.part-0-of-{of}/train.bin").stat().st_size == 0  # nothing is tokenised for the vocabulary
    assert join(config) == straight(config)


def test_one_file_is_one_part_and_the_others_are_empty(source: Path) -> None:
    config = DataConfig("text/3.parquet", "bytes")
    make_parts(config, [1, 2, 3], 3)
    assert [(Path(f"out.part-{number}-of-3") / "train.bin").stat().st_size > 0 for number in (1, 2, 3)] == [0, 1, 0]
    assert join(config) == straight(config)
    Path("one.txt").write_text("one document, whose end validates " * 9)  # as can be seen only when all is joined
    make_parts(DataConfig("one.txt", "bytes"), [1, 2, 3], 3)
    assert join(DataConfig("one.txt", "bytes")) == straight(DataConfig("one.txt", "bytes"))


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_parts_are_made_at_the_same_time(tokenizer: str, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by machines that do not know of each other's locks, as on many network disks."""
    config = DataConfig("text", tokenizer)
    expected = straight(config)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    learned, learn = [], parts.write_shards
    monkeypatch.setattr(parts, "write_shards", lambda *a: (learned.append(a[3].suffix), time.sleep(0.05), learn(*a))[2])
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda number: make_parts(config, [number], 5), range(1, 6)))
    assert (learned.count(".vocabulary") == 1) == locks
    assert join(config) == expected


def work_until(number: int, work: Callable[[], object]) -> None:
    """Work, and die before the effect on the disk of this number, if there are so many."""
    number_of = count()

    def mortal(effect: Callable) -> Callable:
        def wrapped(*arguments: object, **options: object) -> object:
            if next(number_of) == number:
                os._exit(KILLED)
            return effect(*arguments, **options)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(os, "fsync"), (os, "unlink"), (os, "rmdir"), (shutil, "copyfileobj"), (Path, "mkdir")]:
            patch.setattr(owner, name, mortal(getattr(owner, name)))
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, mortal(getattr(Path, name)))
        work()


@pytest.mark.parametrize("tokenizer, every", [("bytes", 3), ("bpe:300", 8)])
def test_killed_parts_and_a_killed_join_end_in_the_same_bytes(
    tokenizer: str, every: int, monkeypatch: pytest.MonkeyPatch, figure: Callable
) -> None:
    config, killed = DataConfig("text", tokenizer), 0
    expected = straight(config)
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    monkeypatch.setattr(tokenise, "GROUP", 4096)
    for part in (2, 1):
        for number in count(0, every):  # what is done is kept, and dies again
            code = in_child(partial(work_until, number, partial(make_parts, config, [part], 2)))
            killed += code == KILLED
            if code == 0:
                break
            assert code == KILLED
    for path in Path().glob("out.part-*"):
        shutil.copytree(path, Path("kept") / path.name)
    for number in count(0, every):
        shutil.copytree("kept", ".", dirs_exist_ok=True)
        code = in_child(partial(work_until, number, partial(join, config)))
        assert join(config) == expected
        shutil.rmtree("out")
        if code == 0:
            break
        assert code == KILLED
        killed += 1
    figure(f"{killed} deaths of a preparation in parts: joined to the same bytes")


def test_a_part_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    config, write, encoded, encode = DataConfig("text", "bytes"), tokenise.note, [], tokenise.encode
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    monkeypatch.setattr(tokenise, "GROUP", 1)
    monkeypatch.setattr(tokenise, "encode", lambda *a: encoded.append(a[1]) or encode(*a))

    def note(progress: tokenise.Progress, *rest: object) -> None:
        write(progress, *rest)
        if progress.documents == 20:
            raise KeyboardInterrupt

    make_parts(config, [1], 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenise, "note", note)
        make_parts(config, [2], 2)
    assert "what was prepared is kept" in capsys.readouterr().out
    with pytest.raises(DataError, match="out cannot be joined: missing, unfinished or outdated is part 2 of 2 "):
        join(config)
    make_parts(config, [2], 2)
    assert "going on after 20 documents" in capsys.readouterr().out
    number = len(encoded)
    make_parts(config, [1, 2], 2)
    assert join(config) == content("out")
    assert len(encoded) == number  # what is done is not done again
    make_parts(config, [1, 2], 2)
    assert "out is there, and up to date" in capsys.readouterr().out and not list(Path().glob("out?*"))
    assert content("out") == straight(config)


def test_missing_parts_are_named(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "data.prepare")  # as in a new process
    script = SimpleNamespace(
        __name__="prepare", main=lambda: runpy.run_module("data.prepare", run_name="__main__", alter_sys=False)
    )
    arguments = ("text", "--tokenizer", "bytes", "--out", "out")
    for part in ("2/5", "4/5", "1/2"):
        result = run(script, *arguments, "--part", part)
        assert result.exit_code == 0 and "next: the same command without --part" in result.out, result.err
    result = run(script, *arguments)
    assert result.exit_code == 2 and len(result.err.splitlines()) == 1
    assert "missing, unfinished or outdated is part 2 of 2 and part 1, 3, 5 of 5 (remove out.part-*" in result.err
    assert not Path("out").exists() and not Path("out.tmp").exists()
    assert run(script, *arguments, "--part", "2/2").exit_code == 0
    result = run(script, *arguments)
    assert result.exit_code == 0 and "joining 2 parts" in result.out and list(Path().glob("out*")) == [Path("out")]


@pytest.mark.parametrize(
    "part, options, sentence",
    [
        ("3", {}, "a part is K/N with K from 1 to N, as in 3/8, got '3'"),
        ("0/8", {}, "got '0/8'"),
        ("9/8", {}, "got '9/8'"),
        ("1/" + "8" * 5000, {}, "got '1/888"),
        ("1/2", {"max_tokens": 7}, "where max_tokens ends depends on all parts before"),
        ("1/2", {"tokenizer": "model"}, "the tokenizer 'model' is that of train.init_from"),
        ("1/2", {"source": "straight"}, "straight is a prepared corpus: there is nothing to do in parts"),
        ("1/2", {"source": "nowhere"}, "no text found at 'nowhere'"),
        ("2/2", {"text_column": "body"}, "has no column 'body'"),
        ("2/2", {"text_column": "body", "tokenizer": "chars"}, "has no column 'body'"),
    ],
)
def test_what_cannot_be_a_part_is_refused(part: str, options: dict, sentence: str) -> None:
    straight(DataConfig("text", "bytes"))
    with pytest.raises(DataError, match=sentence):
        prepare.prepare_part(DataConfig(**{"source": "text", "tokenizer": "bytes", **options}), part, Path("out"))
    assert not list(Path().glob("out.part-[1-9]*"))
    join(DataConfig("text", "bytes"))  # without parts, as there are none


@pytest.mark.parametrize("name", ["out", "out.part-2-of-3", "out.part-0-of-3", "out.part-1-of-9"])
def test_a_directory_with_other_things_is_no_part(name: str) -> None:
    config = DataConfig("text", "bytes")
    if name.endswith("9"):
        make_parts(config, [1, 2, 3], 3)
    Path(name).mkdir()
    (Path(name) / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=f"{name} exists and is not a prepared corpus"):
        make_parts(config, [2], 3)
        join(config)
    assert (Path(name) / "thesis.tex").read_text() == "years of work"
    assert name != "out" or not list(Path().glob("out.part-*"))  # said before the work, not after


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_only_parts_whose_source_has_changed_are_made_again(source: Path, tokenizer: str) -> None:
    config = DataConfig("text", tokenizer)
    make_parts(config, [1, 2, 3], 3)
    text = (source / "8.txt").read_text(encoding="utf-8")
    stamps = [Path(f"out.part-{number}-of-3/train.bin").stat().st_ino for number in (1, 2, 3)]
    (source / "8.txt").write_text(text.upper() + "naïve", encoding="utf-8")  # no new character
    with pytest.raises(DataError, match="is part 3 of 3 "):
        join(config)
    make_parts(config, [3], 3)
    assert [Path(f"out.part-{number}-of-3/train.bin").stat().st_ino for number in (1, 2)] == stamps[:2]
    assert join(config) == straight(config)


def test_parts_of_another_recipe_are_not_joined() -> None:
    make_parts(DataConfig("text", "bytes", val_fraction=0.2), [1, 2, 3], 3)
    config = DataConfig("text", "bytes", val_fraction=0.3)
    with pytest.raises(DataError, match="is part 1, 2, 3 of 3 "):
        join(config)
    make_parts(config, [1, 2, 3], 3)
    assert join(config) == straight(config)


def test_another_vocabulary_makes_all_parts_again(source: Path) -> None:
    config = DataConfig("text", "chars")
    make_parts(config, [1, 2, 3], 3)
    (source / "8.txt").write_text("a new letter: ß", encoding="utf-8")
    make_parts(config, [3], 3)
    with pytest.raises(DataError, match="is part 1, 2 of 3 "):
        join(config)
    make_parts(config, [1, 2], 3)
    assert join(config) == straight(config)


def test_a_damaged_part_is_not_joined() -> None:
    config = DataConfig("text", "bytes")
    make_parts(config, [1, 2], 2)
    with open("out.part-1-of-2/train.bin", "ab") as file:
        file.write(b"\0\0")
    Path("out.part-2-of-2/val.bin").unlink()
    with pytest.raises(DataError, match="is part 1, 2 of 2 "):
        join(config)
    make_parts(config, [1, 2], 2)
    assert join(config) == straight(config)


def test_an_interrupted_join_leaves_no_progress_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    config = DataConfig("text", "bytes")
    make_parts(config, [1, 2], 2)
    Path("out.tmp").mkdir()
    Path("out.tmp/progress.json").write_text("{}")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfileobj", interrupt)
        join(config)
    assert not Path("out.tmp").exists()
    assert join(config) == straight(config)


def test_a_source_without_text_is_refused_when_it_is_joined() -> None:
    Path("blank").mkdir()
    for name in "abc":
        (Path("blank") / f"{name}.txt").write_text(" \n" * 3)
    config = DataConfig("blank", "bytes")
    make_parts(config, [1, 2], 2)
    with pytest.raises(DataError, match="blank is empty: there is no text in it"):
        join(config)
    assert not Path("out").exists()


@pytest.mark.parametrize("of", [1, 2, 3, 5, 11])
def test_ranges_are_balanced_and_cover_all(of: int) -> None:
    choose = random.Random(of)
    for sizes in ([0] * 7, [choose.randrange(1000) for _ in range(97)], [5], [10_000, 1, 1], [0, 0, 9, 0, 0]):
        ends = parts.bounds([Shard(str(size), "", size, list) for size in sizes], of)
        assert len(ends) == of + 1 and ends[0] == 0 and ends[-1] == len(sizes) and ends == sorted(ends)
        filled = [sum(sizes[first:last]) for first, last in pairwise(ends)]
        assert max(filled) <= sum(sizes) / of + max(sizes) + len(sizes)

"""Preparation: every kind of source, split and counted right, complete or not there."""

import gzip
import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

import files
from data import prepare, sources
from data.corpus import Corpus, open_corpus
from data.prepare import DataConfig
from data.tokenizer import make_tokenizer
from errors import UserError

TEXT = "".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}, naïve 猫\n" for i in range(500))


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text_file(in_tmp: None) -> Path:
    Path("a.txt").write_text(TEXT, encoding="utf-8")
    return Path("a.txt")


def make(source: object, tokenizer: str = "bytes", **options: object) -> Corpus:
    return prepare.prepare(DataConfig(str(source), tokenizer, **options))


def read(source: str) -> list[str]:
    """The documents of a source."""
    return ["".join(document) for document in sources.documents(DataConfig(source))]


def prepared(parent: Path) -> list[str]:
    """The names in a directory, without locks."""
    return sorted(path.name for path in parent.glob("*") if path.suffix != ".lock")


def documents_of(corpus: Corpus, *splits: str) -> list[str]:
    """The documents of the splits, one after the other, as text; a tail cut off by the split is joined again."""
    ids = np.concatenate([corpus.tokens[split] for split in splits or ("train", "val")])
    ends = np.flatnonzero(ids == corpus.tokenizer.end_of_text)
    assert ends[0] == 0
    return [corpus.tokenizer.decode(document.tolist()) for document in np.split(ids, ends[1:])]


@pytest.mark.parametrize("tokenizer, val_fraction", [("bytes", 0.2), ("chars", 0.8), ("bpe:300", 0.2)])
def test_one_file_keeps_its_end_for_validation(text_file: Path, tokenizer: str, val_fraction: float) -> None:
    corpus = make("a.txt", tokenizer, val_fraction=val_fraction)
    assert documents_of(corpus) == [TEXT]
    assert corpus.tokens["train"].dtype == np.dtype(corpus.meta["dtype"]) == np.uint16
    cut = int(len(TEXT) * (1 - val_fraction))  # in characters
    for split, text in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
        ids = corpus.tokens[split].tolist()
        assert corpus.tokenizer.decode(ids) == text
        about = corpus.meta[split]
        assert (about["tokens"], about["bytes"]) == (len(ids), len(text.encode()))


def test_a_text_of_its_own_is_all_of_the_validation(text_file: Path) -> None:
    Path("val.jsonl").write_text("".join(f'{{"text": "{i} is odd"}}\n' for i in range(1, 60, 2)))
    corpus = make("a.txt", "chars", val_source="val.jsonl", max_tokens=7)
    assert documents_of(corpus, "train") == [TEXT]  # one piece
    assert documents_of(corpus, "val") == [f"{i} is odd" for i in range(1, 60, 2)]
    Path("val.txt").write_text("ß")
    with pytest.raises(UserError, match="the chars tokenizer never saw the character 'ß'"):  # it learns to train only
        make("a.txt", "chars", val_source="val.txt")
    for source, said in (
        (corpus.directory, "has its own text to validate on"),
        ("*.txt", "is in --data.source and in "),
    ):
        with pytest.raises(UserError, match=said):
            make(source, corpus.meta["tokenizer"], val_source="val.txt")
    Path("val.txt").write_text("2 is even")
    assert make("a.txt", "chars", val_source="val.txt").directory != corpus.directory


def test_a_document_on_both_sides_is_said(capsys: pytest.CaptureFixture) -> None:
    def write(name: str, first: int, last: int) -> str:
        rows = (f"{i} is odd. " * 50_000 * (i == 7) or f"{i} is odd" for i in (*range(first, last, 2), last))
        Path(name).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))  # the last one may come twice
        return name

    make(write("train.jsonl", 5, 2000), val_source=write("val.jsonl", 1, 13))
    assert "note: 5 of 7 documents to validate on are also in train.jsonl\n" in capsys.readouterr().err
    make("val.jsonl", val_source=write("other.jsonl", 15, 19))
    make("train.jsonl")
    assert "to validate on" not in capsys.readouterr().err


def test_documents_are_split_whole_and_copies_stay_together() -> None:
    rows = [f"document {i % 300} naïve " * 9 for i in range(600)]  # each one twice
    Path("a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    corpus = make("a.jsonl", val_fraction=0.2)
    assert sorted(documents_of(corpus)) == sorted(rows)
    split = {name: documents_of(corpus, name) for name in ("train", "val")}
    assert not set(split["train"]) & set(split["val"])
    assert 0.1 < len(split["val"]) / 600 < 0.3
    for name, texts in split.items():
        assert corpus.meta[name]["bytes"] == sum(len(text.encode()) for text in texts)


def test_a_data_set_of_the_hub_is_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is to `datasets` what a repository of the hub is: one with a card that names its configurations."""
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda name, timeout: None)
    card = "---\nconfigs:\n"
    for name in ("first", "second"):
        (tmp_path / "set" / name).mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), tmp_path / "set" / name / "train-0.parquet")
        packed = gzip.compress(f'{{"text": "{name} in JSON", "n": 1}}\n{{"text": "007"}}'.encode())
        (tmp_path / "set" / name / "train-1.jsonl.gz").write_bytes(packed)
        pyarrow.parquet.write_table(pyarrow.table({"text": ["held out"]}), tmp_path / "set" / name / "test-0.parquet")
        card += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
        card += f"  - split: validation\n    path: {name}/test-*\n"
    (tmp_path / "set" / "README.md").write_text(card + "---\n")
    assert read(f"hf:{tmp_path}/set:second") == ["second", "second in JSON", "007"]
    assert read(f"hf:{tmp_path}/set:second#validation") == ["held out"]
    with pytest.raises(UserError, match="cannot read .*/set from the hub: ValueError: Config name is missing"):
        make(f"hf:{tmp_path}/set")


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(name: str, timeout: int) -> None:
        raise TimeoutError(f"{timeout}\nand many more lines")

    monkeypatch.setattr("huggingface_hub.dataset_info", ask)
    with pytest.raises(
        UserError, match="^cannot read owner/silent from the hub: TimeoutError: 10 and many more lines$"
    ):
        make("hf:owner/silent:v2@main")


def test_command_line(run: Callable, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "data.prepare")  # as in a new process
    script = SimpleNamespace(
        __name__="prepare", main=lambda: runpy.run_module("data.prepare", run_name="__main__", alter_sys=False)
    )
    result = run(script, "a.txt", "--tokenizer", "bytes", "--val-fraction", "0.2", "--out", "mine").ok()
    assert f"next: python train.py --data.source {tmp_path}/mine --data.tokenizer bytes\n" in result.out
    assert documents_of(open_corpus(tmp_path / "mine")) == [TEXT]
    assert run(script, "b.txt", "--out", "other").exit_code == 2 and not Path("other").exists()


def test_standard_library_is_a_corpus() -> None:
    found = sources.find_files("stdlib")
    assert len(found) > 500 and not any("test" in path.parts for path in found) and found == sorted(found)
    names = {f"{path.parent.name}/{path.name}" for path in found}
    assert {"json/decoder.py", "encodings/utf_8.py"} <= names and "encodings/cp437.py" not in names  # a table of codes


def test_long_texts_are_cut_where_tokens_are_cut_anyway(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("bpe:400", [TEXT])
    whole = tokenizer.encode(TEXT).tolist()
    monkeypatch.setattr(sources, "PIECE", 512)
    (pieces,) = map(list, sources.documents(DataConfig("a.txt")))
    assert len(pieces) > 10 and max(map(len, pieces)) <= 512
    assert "".join(pieces) == TEXT
    assert [token for piece in pieces for token in tokenizer.encode(piece).tolist()] == whole
    corpus = make("a.txt")
    assert documents_of(corpus) == [TEXT]  # it starts once
    Path("line.txt").write_text("猫" * 10_000, encoding="utf-8")  # nowhere to cut without harm
    assert read("line.txt") == ["猫" * 10_000]


def test_tokens_are_as_narrow_as_the_vocabulary_allows() -> None:
    characters = "".join(map(chr, [*range(0x20, 0xD800), *range(0x10000, 0x14000)]))
    Path("a.txt").write_text(characters, encoding="utf-8")
    corpus = make("a.txt", "chars")
    assert corpus.tokens["train"].dtype == np.uint32 and documents_of(corpus) == [characters]


@pytest.mark.parametrize(
    "content, sentence",
    [
        (
            "猫".encode() * 9001 + b"\xe7\x8c",
            "cannot read .*a.txt as text in UTF-8 .convert or unpack it.*: UnicodeDecodeError: .*: unexpected end",
        ),
        ("odd".encode("utf-16-le"), "a.txt is no text: it has NUL characters, as UTF-16 and archives have"),
        (b"", "too little text for train.bin: give more, or another --data.val_fraction"),
    ],
)
def test_a_source_without_text_is_refused_and_nothing_is_left(content: bytes, sentence: str) -> None:
    Path("a.txt").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        make("a.txt", "bpe:300")
    assert not prepared(Path("prepared"))


def test_prepared_once_and_again_when_something_changed(text_file: Path) -> None:
    first = make("a.txt")
    assert make("a.txt").meta == first.meta  # and so are the times of its files
    assert make("a.txt", "chars").directory != first.directory
    changed = TEXT.replace("odd", "ODD")  # as many bytes
    text_file.write_text(changed, encoding="utf-8")
    assert documents_of(make("a.txt")) == [changed] and open_corpus(first.directory).meta == first.meta
    text_file.write_text(TEXT, encoding="utf-8")  # the same bytes at another time: the same corpus
    assert make("a.txt").meta["fingerprint"] == first.meta["fingerprint"]


def test_an_option_that_is_new_changes_no_corpus_while_it_has_its_default(text_file: Path) -> None:
    @dataclass(frozen=True)
    class Wider(DataConfig):
        backwards: bool = False

    assert prepare.corpus_key(DataConfig("hf:some", "chars"), None).startswith("7d8dc0dd5310")  # as in version 3.0
    first = make("a.txt").directory
    assert prepare.prepare(Wider("a.txt", "bytes")).directory == first
    assert prepare.prepare(Wider("a.txt", "bytes", backwards=True)).directory != first


def test_everything_is_on_the_disk_before_it_has_its_name(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, sync, replace = [], files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: (events.append(path.name), sync(path)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(f"to {new.name}"), replace(old, new)))
    prepare.prepare(DataConfig("a.txt", "bytes"), Path("mine"))
    assert sorted(events[:-3]) == sorted(os.listdir("mine"))
    assert events[-3:] == [".mine.tmp", "to mine", Path.cwd().name]


def test_a_corpus_that_has_changed_is_refused(text_file: Path, tmp_path: Path) -> None:
    corpus = make("a.txt")
    path = corpus.directory / "train.bin"
    intact = path.read_bytes()
    path.write_bytes(intact)  # the same at another time
    assert open_corpus(corpus.directory).meta == corpus.meta
    before = path.stat()
    for damaged in (intact[:-2], intact[:20] + bytes([intact[20] ^ 1]) + intact[21:]):
        path.write_bytes(damaged)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had been
        for source in (shutil.copytree(corpus.directory, tmp_path / f"copy{len(damaged)}"), "a.txt"):
            with pytest.raises(UserError, match="train.bin has changed since it was prepared: remove"):
                make(source)
    shutil.rmtree(corpus.directory)
    path = make("a.txt").directory / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"":').replace('"b":', '"a":').replace('"":', '"b":'))
    with pytest.raises(UserError, match="has changed since it was prepared: remove it"):
        open_corpus(corpus.directory)


def test_of_two_processes_one_prepares_and_one_waits(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = prepare.write_corpus, []

    def slow(*arguments: object) -> None:
        written.append(1)
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(prepare, "write_corpus", slow)
    with ThreadPoolExecutor(4) as pool:  # each opens the lock file by itself, so threads stand for processes
        assert list(pool.map(lambda _: documents_of(make("a.txt")), range(4))) == [[TEXT]] * 4
    assert len(written) == 1 and len(prepared(Path("prepared"))) == 1


def test_a_run_goes_on_with_the_corpus_it_began_with(text_file: Path) -> None:
    config, first = DataConfig("a.txt", "bytes"), make("a.txt")
    old = {"fingerprint": first.meta["fingerprint"], "config": {"data": {"source": "a.txt"}}}  # of 4.1 and before
    run = old | {"corpus": first.directory.name}
    text_file.unlink()
    for began_with in (run, old):
        assert prepare.prepare(config, began_with=began_with).meta == first.meta  # without its text
    text_file.write_text(TEXT + "more", encoding="utf-8")
    assert prepare.prepare(config, began_with=run).meta == first.meta  # not with another
    shutil.rmtree(first.directory)
    for source in ("a.txt", make("a.txt").directory):
        with pytest.raises(UserError, match=f"{source} is not the text this run began with: restore that text to"):
            prepare.prepare(DataConfig(str(source), "bytes"), began_with=run)
    text_file.write_text(TEXT, encoding="utf-8")
    assert prepare.prepare(config, began_with=run).meta["fingerprint"] == run["fingerprint"]
    for source in ("a.txt", "a" * 300):  # an OSError, as for a folder that is closed
        for other in ({}, {"corpus": "another"}):
            stranger = {"fingerprint": "another", "config": {"data": {"source": source}}} | other
            assert prepare.find_prepared(stranger) is None


def test_a_long_name_makes_no_longer_one(text_file: Path) -> None:
    text_file.rename(f"{240 * 'n'}.txt")
    assert documents_of(make(f"{240 * 'n'}.txt")) == [TEXT]


def test_a_prepared_directory_is_a_source(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "large" / "disk").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "large" / "disk")
    first = prepare.prepare(DataConfig("a.txt", "bytes"), tmp_path / "link")
    assert first.directory == tmp_path / "large" / "disk" and prepared(tmp_path / "large") == ["disk"]
    assert make(tmp_path / "link").meta == first.meta
    with pytest.raises(UserError, match="was prepared with another tokenizer: --data.tokenizer bytes$"):
        make(tmp_path / "link", "chars")


def test_a_directory_with_other_things_is_not_overwritten(text_file: Path) -> None:
    path = Path("mine/tokenizer.json")
    path.parent.mkdir()
    path.write_text("years of work")
    with pytest.raises(
        UserError, match="mine is not empty, and no complete corpus .nanoGPT's token ids.*: give text or another --out$"
    ):
        prepare.prepare(DataConfig("a.txt", "bytes"), Path("mine"))
    assert path.read_text() == "years of work"
    meta = prepare.prepare(DataConfig("a.txt", "bytes"), Path("other")).meta
    of_2x = {name: value for name, value in meta.items() if name != "key"}
    for tokenizer, there in (("chars", meta), ("bytes", of_2x)):
        Path("other/meta.json").write_text(json.dumps(there))
        with pytest.raises(UserError, match="other is the corpus of another text, or of other options: give another"):
            prepare.prepare(DataConfig("a.txt", tokenizer), Path("other"))
    with pytest.raises(NotADirectoryError, match="a.txt"):
        prepare.prepare(DataConfig("a.txt", "bytes"), text_file)


def test_each_split_ends_with_the_piece_that_reaches_its_share_of_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 512)
    rows = [json.dumps({"text": f"{row} " + TEXT[: row**3 % 1400]}) for row in range(99)]
    Path("a.jsonl").write_text("\n".join(rows))
    Path("a.txt").write_text(TEXT * 3)
    for name in ("a.jsonl", "a.txt"):  # of one document, validation is the end nevertheless
        whole, corpus = (make(name, val_fraction=0.3, max_tokens=most) for most in (None, 20_000))
        for split, share in (("train", 14_000), ("val", 6_000)):
            mine = corpus.tokens[split]
            assert share <= len(mine) < share + 3 * 512 < len(whole.tokens[split])
            assert np.array_equal(mine, whole.tokens[split][: len(mine)])
            assert corpus.meta[split]["bytes"] == len(corpus.tokenizer.decode(mine.tolist()).encode())


def test_few_documents_are_one_text() -> None:
    for number, row in ((30, "document {} "), (100, "the same ")):  # few, or few different ones
        text = "".join(map(row.format, range(number)))
        Path("a.jsonl").write_text("\n".join(json.dumps({"text": row.format(i)}) for i in range(number)))
        corpus = make("a.jsonl", val_fraction=0.2)
        assert corpus.tokenizer.decode(corpus.tokens["train"].tolist()) == text[: int(len(text) * 0.8)]
        assert corpus.tokenizer.decode(corpus.tokens["val"].tolist()) == text[int(len(text) * 0.8) :]


def test_a_folder_is_walked_once(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, walked = sources.walk, []
    monkeypatch.setattr(sources, "walk", lambda *folder: walked.append(folder) or walk(*folder))
    make(".", tokenizer="chars")
    assert len(walked) == 1

"""Preparation: every kind of source, split and counted right, complete or not there."""

import json
import os
import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data import DataError, directories, prepare, sources, tokenise
from data.corpus import Corpus, open_corpus
from data.prepare import DataConfig
from data.tokenizer import encode, make_tokenizer, token_bytes

TEXT = "".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}, naïve 猫\n" for i in range(500))


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(source: object, tokenizer: str = "bytes", **options: object) -> Corpus:
    return prepare.prepare(DataConfig(str(source), tokenizer, **options))


def read(source: str, first_shard: int = 0) -> list[tuple[int, str]]:
    """The documents of a source, each with its shard."""
    shards = sources.find_shards(source)
    return [(shard, "".join(document)) for shard, document in sources.documents(shards, first_shard)]


def documents_of(corpus: Corpus, *splits: str) -> list[str]:
    """The documents of the splits, one after the other, as text; a tail cut off by the split is joined again."""
    ids = np.concatenate([corpus.tokens[split] for split in splits or ("train", "val")]).tolist()
    start = corpus.tokenizer.eot_token
    text = b"".join(b"\xff" if token == start else token_bytes(corpus.tokenizer, token) for token in ids)
    return [part.decode() for part in text.split(b"\xff")[1:]]


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe:300"])
def test_one_file_keeps_its_end_for_validation(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    corpus = make("a.txt", tokenizer, val_fraction=0.2)
    assert documents_of(corpus) == [TEXT]
    train, val = corpus.tokens["train"], corpus.tokens["val"]
    assert len(train) == int(len([*train, *val]) * 0.8)
    assert train.dtype == np.uint16
    assert corpus.meta["documents"] == 1
    assert corpus.meta["train"]["bytes"] + corpus.meta["val"]["bytes"] == len(TEXT.encode())
    assert corpus.meta["train"]["tokens"] == len(train)
    assert corpus.meta["vocab_size"] == corpus.tokenizer.n_vocab


def test_documents_are_split_whole_and_copies_stay_together(tmp_path: Path) -> None:
    rows = [f"document {i % 300} " * 9 for i in range(600)]  # each one twice
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    corpus = make("a.jsonl", val_fraction=0.2)
    assert sorted(documents_of(corpus)) == sorted(rows)
    train, val = (set(documents_of(corpus, split)) for split in ("train", "val"))
    assert not train & val
    assert 0.1 < len(val) / 300 < 0.3


def test_folder_glob_and_tables(tmp_path: Path) -> None:
    import pandas

    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / ".git").mkdir()
    (tmp_path / "d" / "a.txt").write_text("first\r\n")
    (tmp_path / "d" / "sub" / "b.md").write_text("\ufeffsecond of two")  # with a byte order mark
    (tmp_path / "d" / "sub" / "empty.md").write_text("")
    (tmp_path / "d" / ".git" / "config").write_text("hidden")
    assert documents_of(make("d")) == ["first\r\n", "second of two"]
    assert documents_of(make("d/**/*.m?")) == ["second of two"]
    table = pandas.DataFrame({"body": ["one", None, "three\nlines"], "n": [1, 2, 3]})
    table.to_parquet(tmp_path / "t.parquet")
    table.to_csv(tmp_path / "t.csv")
    table.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    for name in ("t.parquet", "t.csv", "t.jsonl"):
        assert documents_of(make(name, text_column="body")) == ["one", "three\nlines"], name
    for name, types in (("t.jsonl", "body .str., n .int."), ("t.parquet", "body .*string., n .int64.")):
        with pytest.raises(DataError, match=f"{name} has no column 'text'; it has {types}"):
            make(name)
        with pytest.raises(DataError, match=f"{name}, column 'n', row 0 is no text, but int"):
            make(name, text_column="n")


@pytest.mark.parametrize(
    "source, name, revision",
    [
        ("hf:owner/some", None, None),
        ("hf:owner/some:v2", "v2", None),
        ("hf:owner/some:v2@refs/convert/parquet", "v2", "refs/convert/parquet"),
        ("hf:some@abc", None, "abc"),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_hub_data_sets_are_read_where_they_are(
    source: str, name: str | None, revision: str | None, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    texts = [f"document {i} of the hub" for i in range(250)]
    urls = [f"file://{tmp_path}/{shard}.{suffix}" for shard in range(3)]
    for shard, url in enumerate(urls):
        rows = datasets.Dataset.from_dict({"text": texts[shard::3], "id": range(len(texts[shard::3]))})
        (rows.to_parquet if suffix == "parquet" else rows.to_json)(url.removeprefix("file://"))

    def load_dataset_builder(path: str, config: str | None, revision: str | None) -> SimpleNamespace:
        assert path in source and (config, revision) == (name, asked)
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": urls}))

    def load_dataset(
        path: str, config: str | None, revision: str | None, **options: object
    ) -> datasets.IterableDataset:
        assert path in source and (config, revision) == (name, asked) and suffix == "jsonl"
        return load("json", data_files=urls, **options)

    asked, load = revision, datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(source) == [(shard, text) for shard in range(3) for text in texts[shard::3]]
    assert sorted(documents_of(make(source))) == sorted(texts)


def test_what_the_hub_would_answer_is_understood(tmp_path: Path) -> None:
    """A directory is to `datasets` what a repository of the hub is: one with a card that names its configurations."""
    import datasets

    for name in ("first", "second"):
        rows = datasets.Dataset.from_dict({"text": [name]})
        rows.to_parquet(tmp_path / "set" / name / "train-0.parquet")
        rows.to_parquet(tmp_path / "set" / name / "test-0.parquet")
    lines = [
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*"
        for name in ("first", "second")
    ]
    (tmp_path / "set" / "README.md").write_text("---\nconfigs:\n" + "\n".join(lines) + "\n---\n")
    (found,) = sources.find_shards(f"hf:{tmp_path}/set:second")
    assert found.name.endswith("second/train-0.parquet")
    with pytest.raises(DataError, match="cannot read .*/set: ValueError: Config name is missing"):
        make(f"hf:{tmp_path}/set")


@pytest.mark.parametrize("source", ["hf:", "hf:@main", "hf:a b"])
def test_a_name_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="does not name a data set of the Hugging Face hub, as hf:OWNER/NAME does"):
        make(source)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset_builder(*arguments: object, **options: object) -> None:
        raise ConnectionError("no network\nand many more lines")

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    with pytest.raises(DataError, match="^cannot read owner/some: ConnectionError: no network$"):
        make("hf:owner/some")


def test_command_line(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "data.prepare")  # as in a new process
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    script = SimpleNamespace(
        __name__="prepare", main=lambda: runpy.run_module("data.prepare", run_name="__main__", alter_sys=False)
    )
    result = run(script, "a.txt", "--tokenizer", "bytes", "--val-fraction", "0.2", "--out", "mine")
    assert result.exit_code == 0, result.err
    assert "next: python train.py --data.source mine --data.tokenizer bytes" in result.out
    assert documents_of(open_corpus(tmp_path / "mine")) == [TEXT]
    result = run(script, "b.txt", "--out", "other")
    assert result.exit_code == 2 and "no text found at 'b.txt'" in result.err
    assert run(script, "--help").exit_code == 0


def test_standard_library_is_a_corpus() -> None:
    names = {path.name for path in sources.files("stdlib")}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("test" in path.parts for path in sources.files("stdlib"))
    assert len(read("stdlib")) > 500


def test_long_texts_are_cut_where_tokens_are_cut_anyway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("bpe:400", [TEXT])
    whole = encode(tokenizer, TEXT).tolist()
    monkeypatch.setattr(sources, "PIECE", 512)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    pieces = list(sources.pieces_of(tmp_path / "a.txt"))
    assert len(pieces) > 10 and max(map(len, pieces)) <= 2 * 512
    assert "".join(pieces) == TEXT
    assert [token for piece in pieces for token in encode(tokenizer, piece).tolist()] == whole


def test_one_long_line_without_spaces_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 64)
    (tmp_path / "a.txt").write_text("猫" * 1000, encoding="utf-8")
    pieces = list(sources.pieces_of(tmp_path / "a.txt"))
    assert "".join(pieces) == "猫" * 1000 and max(map(len, pieces)) <= 64


def test_a_document_of_many_pieces_starts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 512)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    corpus = make("a.txt")
    assert documents_of(corpus) == [TEXT] and corpus.meta["documents"] == 1


def test_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("c", "a", "d", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 50)
    assert [path.stem for path in sources.files("*.txt")] == ["a", "b", "c", "d"]
    assert sources.files("stdlib") == sorted(sources.files("stdlib"))


def test_bpe_learns_from_a_sample_of_a_large_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("a", "first words " * 50), ("b", "first words " * 50), ("c", "second " * 200)):
        (tmp_path / f"{name}.txt").write_text(text)
    monkeypatch.setattr(tokenise, "BPE_SAMPLE", 1000)  # ends in the second file
    learned = make("*.txt", "bpe:300").tokenizer._mergeable_ranks
    assert b" words" in learned and b"second" not in learned


@pytest.mark.parametrize("num_characters, dtype", [(2**16 - 2, np.uint16), (2**16, np.uint32)])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(tmp_path: Path, num_characters: int, dtype: type) -> None:
    characters = [chr(i) for i in [*range(0x20, 0xD800), *range(0x10000, 0x14000)]][:num_characters]
    (tmp_path / "a.txt").write_text("".join(characters), encoding="utf-8")
    assert make("a.txt", "chars").tokens["train"].dtype == dtype


def test_another_recipe_for_the_same_directory_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    few, many = (
        prepare.prepare(DataConfig("a.txt", "bytes", val_fraction=share), tmp_path / "mine").meta["val"]["tokens"]
        for share in (0.1, 0.3)
    )
    assert many > 2 * few


def test_the_fingerprint_is_of_both_splits(tmp_path: Path) -> None:
    fingerprints = set()
    for last in "xy":
        (tmp_path / "a.txt").write_text(TEXT + last, encoding="utf-8")
        fingerprints.add(make("a.txt").meta["fingerprint"])
    assert len(fingerprints) == 2


def test_large_vocabularies_get_wide_tokens(tmp_path: Path) -> None:
    characters = "".join(map(chr, [*range(0x100, 0xD800), *range(0x10000, 0x14000)]))
    (tmp_path / "a.txt").write_text(characters, encoding="utf-8")
    corpus = make("a.txt", "chars")
    assert corpus.tokens["train"].dtype == np.uint32
    assert documents_of(corpus) == [characters]


@pytest.mark.parametrize("prefix", [b"", "猫".encode(), b"\xef\xbb\xbf", b"x" * 1000])
def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: bytes) -> None:
    monkeypatch.setattr(sources, "PIECE", 64)
    (tmp_path / "a.txt").write_bytes(prefix + b"\xff tail")
    with pytest.raises(DataError, match=f"a.txt is not UTF-8: byte 0xff at offset {len(prefix)};"):
        make("a.txt")
    assert not (tmp_path / "prepared").exists() or not list((tmp_path / "prepared").iterdir())


def test_a_character_cut_off_at_the_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xe7\x8c")
    with pytest.raises(DataError, match="byte 0xe7 at offset 3"):
        make("a.txt")


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b" \n"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_an_empty_source_is_refused_and_nothing_is_left(tmp_path: Path, content: bytes, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match="a.txt is empty: there is no text in it"):
        make("a.txt", tokenizer)
    assert not list((tmp_path / "prepared").iterdir())


def test_a_source_too_short_to_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="a.txt is too short to keep 10% of it for validation"):
        make("a.txt")


def test_a_missing_source_is_refused() -> None:
    with pytest.raises(DataError, match="no text found at 'nowhere/\\*.txt'"):
        make("nowhere/*.txt")


def test_prepared_once_and_again_when_something_changed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    first = make("a.txt")
    made = (first.directory / "meta.json").stat().st_mtime_ns
    assert (make("a.txt").directory / "meta.json").stat().st_mtime_ns == made
    assert make("a.txt", "chars").directory != first.directory
    (tmp_path / "a.txt").write_text(TEXT + "more", encoding="utf-8")
    second = make("a.txt")
    assert "its source has changed" in capsys.readouterr().out
    assert second.directory == first.directory
    assert second.meta["fingerprint"] != first.meta["fingerprint"]
    changed = TEXT.replace("odd", "ODD")  # as many bytes
    (tmp_path / "a.txt").write_text(changed, encoding="utf-8")
    assert documents_of(make("a.txt")) == [changed]
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")  # the same bytes at another time: the same corpus
    assert make("a.txt").meta["fingerprint"] == first.meta["fingerprint"]


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenise, "encode", interrupt)
        make("a.txt")
    assert not list((tmp_path / "prepared").iterdir())
    assert documents_of(make("a.txt")) == [TEXT]


def test_a_truncated_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    directory = make("a.txt").directory
    (directory / "train.bin").write_bytes((directory / "train.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match="train.bin has .* bytes instead of"):
        open_corpus(directory)


def test_a_corpus_that_has_changed_is_refused_and_prepared_again(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    corpus = make("a.txt")
    path = corpus.directory / "train.bin"
    intact = path.read_bytes()
    path.write_bytes(intact)  # the same at another time
    assert open_corpus(corpus.directory).meta == corpus.meta
    before = path.stat()
    path.write_bytes(intact[:20] + bytes([intact[20] ^ 1]) + intact[21:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had been
    with pytest.raises(DataError, match="train.bin has changed since it was prepared .SHA-256 [0-9a-f]{12}, now "):
        open_corpus(corpus.directory)
    path.write_bytes(intact[:20] + bytes([1, 1]) + intact[22:])
    with pytest.raises(DataError, match="train.bin holds id 257 at position 10, but vocab_size is 257"):
        open_corpus(corpus.directory)
    (tmp_path / "copy").mkdir()
    for file in corpus.directory.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match="holds id 257"):
        make(tmp_path / "copy")
    assert "preparing it again" not in capsys.readouterr().out
    assert documents_of(make("a.txt")) == [TEXT]
    assert "but vocab_size is 257: preparing it again" in capsys.readouterr().out


def test_two_processes_prepare_a_corpus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    write, log = prepare.write_corpus, tmp_path / "log"

    def slow(*arguments: object) -> None:
        with open(log, "a") as file:
            file.write("written\n")
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(prepare, "write_corpus", slow)
    with ThreadPoolExecutor(4) as pool:  # a lock is the file's, so threads stand for processes
        assert list(pool.map(lambda _: documents_of(make("a.txt")), range(4))) == [[TEXT]] * 4
    assert log.read_text() == "written\n"
    assert len(list((tmp_path / "prepared").iterdir())) == 1


def test_a_directory_is_taken_by_one_process_at_a_time(tmp_path: Path) -> None:
    inside, most = [], []

    def work(_: int) -> None:
        for _ in range(100):
            lock = directories.take(tmp_path / "corpus.tmp")
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            (tmp_path / "corpus.tmp").rmdir()
            os.close(lock)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(most) == 400 and max(most) == 1


def test_the_text_a_run_began_with_is_not_replaced_by_another(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    first, config = make("a.txt"), DataConfig("a.txt", "bytes")
    (tmp_path / "a.txt").write_text(TEXT + "more", encoding="utf-8")
    with pytest.raises(DataError, match="a.txt is not the text this run began with .its fingerprint was"):
        prepare.prepare(config, fingerprint=first.meta["fingerprint"])
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [first.directory.name]
    assert documents_of(open_corpus(first.directory)) == [TEXT]
    (tmp_path / "a.txt").unlink()
    assert prepare.prepare(config, fingerprint=first.meta["fingerprint"]).meta == first.meta
    assert "no text found at 'a.txt': " in capsys.readouterr().out


def test_an_opened_corpus_does_not_change_any_more(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    first = make("a.txt", "bpe:300")
    files, ids = dict(first.tokenizer_files), first.tokens["train"].tolist()
    (tmp_path / "a.txt").write_text("something else " * 400, encoding="utf-8")
    assert make("a.txt", "bpe:300").tokenizer_files != files
    assert first.tokenizer_files == files and first.tokens["train"].tolist() == ids


def test_a_prepared_directory_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    first = prepare.prepare(DataConfig("a.txt", "bytes"), tmp_path / "mine")
    assert make(tmp_path / "mine").meta == first.meta
    with pytest.raises(DataError, match="was prepared with --data.tokenizer bytes, not chars"):
        make(tmp_path / "mine", "chars")


def test_a_directory_with_other_things_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="exists and is not a prepared corpus"):
        prepare.prepare(DataConfig("a.txt", "bytes"), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "mine").rename(tmp_path / "yours.tmp")
    with pytest.raises(DataError, match="yours.tmp exists and is not a prepared corpus"):
        prepare.prepare(DataConfig("a.txt", "bytes"), tmp_path / "yours")
    assert (tmp_path / "yours.tmp" / "thesis.tex").read_text() == "years of work"


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source of 2 Parquet, 3 text and 2 JSON lines files, of long, short and empty documents."""
    import pandas

    monkeypatch.setattr(sources, "PIECE", 512)
    (tmp_path / "shards").mkdir()
    for shard in range(7):
        path = tmp_path / "shards" / str(shard)
        texts = [f"{shard}.{row} " + TEXT[: row**3 % 1400] * (row % 5 > 0) for row in range(23)]
        if shard in (2, 3, 4):
            path.with_suffix(".txt").write_text("".join(texts), encoding="utf-8")
        elif shard < 2:
            pandas.DataFrame({"text": [*texts, None]}).to_parquet(path.with_suffix(".parquet"))
        else:
            pandas.DataFrame({"text": texts}).to_json(path.with_suffix(".jsonl"), orient="records", lines=True)
    return tmp_path / "shards"


class Killed(BaseException):
    """Stands for an end without any time left."""


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_an_interrupted_preparation_goes_on_to_the_same_bytes(
    shards: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = DataConfig(str(shards), tokenizer)
    straight = prepare.prepare(config, Path("straight")).meta
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    monkeypatch.setattr(tokenise, "grouped", lambda pieces, size: ([piece] for piece in pieces))
    write, encode_piece, encoded = tokenise.note, tokenise.encode, []
    for when in (1, 30, 20, 59, 1):

        def note(*arguments: object, when: int = when) -> None:
            write(*arguments)
            note.count += 1
            if note.count == when:
                raise Killed

        note.count = 0
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(tokenise, "note", note)
            patch.setattr(tokenise, "encode", lambda *a: encoded.append(a[1]) or encode_piece(*a))
            prepare.prepare(config, Path("broken"))
        with open("broken.tmp/train.bin", "ab") as file:
            file.write(b"a tail that was not noted")
    capsys.readouterr()
    broken = prepare.prepare(config, Path("broken"))
    assert "going on after " in capsys.readouterr().out
    assert encoded.count(encoded[0]) == 1  # what was done is not done again
    differs = {key for key in straight if straight[key] != broken.meta[key]}
    assert differs <= {"train", "val"}  # in the time of writing
    for split in ("train", "val"):
        assert straight[split]["sha256"] == broken.meta[split]["sha256"]
    assert not (broken.directory / "progress.json").exists() and not Path("broken.tmp").exists()


@pytest.mark.parametrize("change", ["recipe", "source", "short file", "no JSON", "deep JSON", "no tokenizer"])
def test_what_was_interrupted_is_begun_again_if_it_does_not_fit(
    shards: Path, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    write = tokenise.note

    def note(progress: tokenise.Progress, *rest: object) -> None:
        write(progress, *rest)
        if min(progress.sizes.values()) > 200:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenise, "note", note)
        prepare.prepare(DataConfig(str(shards), "bytes"), Path("out"))
    assert Path("out.tmp/progress.json").is_file()  # kept, although there was time to clean up
    if change == "source":
        (shards / "0.parquet").write_bytes((shards / "1.parquet").read_bytes())
    if change == "short file":
        os.truncate("out.tmp/train.bin", 100)
    if change == "no JSON":
        Path("out.tmp/progress.json").write_text("[]")
    if change == "deep JSON":
        Path("out.tmp/progress.json").write_text("[" * 100_000)
    if change == "no tokenizer":
        Path("out.tmp/tokenizer.json").write_bytes(b"")
    config = DataConfig(str(shards), "bytes", val_fraction=0.2 if change == "recipe" else 0.1)
    again = prepare.prepare(config, Path("out"))
    assert "going on" not in capsys.readouterr().out
    assert again.meta["fingerprint"] == prepare.prepare(config, Path("other")).meta["fingerprint"]


def test_a_source_that_fails_half_way_says_that_nothing_is_lost(shards: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    monkeypatch.setattr(tokenise, "grouped", lambda pieces, size: ([piece] for piece in pieces))
    (shards / "6.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match="cannot read .*6.jsonl: .*; what was prepared is kept, and the same command"):
        prepare.prepare(DataConfig(str(shards), "bytes"), Path("out"))


def test_shards_that_were_prepared_are_not_opened_again(shards: Path) -> None:
    everything = read(str(shards))
    for first in range(8):
        assert read(str(shards), first) == [(shard, text) for shard, text in everything if shard >= first]
    assert {shard for shard, _ in everything} == set(range(7))
    (shards / "3.txt").write_bytes(b"\xff")
    assert read(str(shards), 4)[0][0] == 4


def test_reading_ends_at_max_tokens(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = prepare.prepare(DataConfig(str(shards), "bytes", max_tokens=20_000))
    assert 20_000 <= sum(map(len, corpus.tokens.values())) < 20_000 + 600  # to the end of a piece
    whole = prepare.prepare(DataConfig(str(shards), "bytes"))
    for split in ("train", "val"):
        mine = corpus.tokens[split]
        assert np.array_equal(mine, whole.tokens[split][: len(mine)])
    with pytest.raises(DataError, match="max_tokens must be at least 1, got 0"):
        DataConfig(max_tokens=0)


def test_a_shard_that_failed_may_be_mended(shards: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    expected = prepare.prepare(DataConfig(str(shards), "bytes"), Path("expected")).meta["fingerprint"]
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    monkeypatch.setattr(tokenise, "grouped", lambda pieces, size: ([piece] for piece in pieces))
    intact = (shards / "6.jsonl").read_bytes()
    (shards / "6.jsonl").write_bytes(b"no JSON")
    with pytest.raises(DataError):
        prepare.prepare(DataConfig(str(shards), "bytes"), Path("out"))
    (shards / "6.jsonl").write_bytes(intact)
    assert prepare.prepare(DataConfig(str(shards), "bytes"), Path("out")).meta["fingerprint"] == expected
    assert "going on after " in capsys.readouterr().out


def test_a_hub_that_changes_meanwhile_is_not_mixed(shards: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    import datasets

    names = ["1.parquet"]
    config = SimpleNamespace(data_files={"train": []})
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **o: SimpleNamespace(config=config))
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    write = tokenise.note

    def note(*arguments: object) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    config.data_files["train"] = [str(shards / name) for name in names]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenise, "note", note)
        prepare.prepare(DataConfig("hf:some/set", "bytes"), Path("out"))
    config.data_files["train"] = [str(shards / name) for name in ("0.parquet", *names)]
    again = prepare.prepare(DataConfig("hf:some/set", "bytes"), Path("out")).meta["fingerprint"]
    assert "going on" not in capsys.readouterr().out
    assert again == prepare.prepare(DataConfig("hf:some/set", "bytes"), Path("other")).meta["fingerprint"]


@pytest.mark.parametrize("max_tokens", [None, 20_000])
def test_an_end_while_it_is_finished_costs_nothing(shards: Path, max_tokens: int | None, monkeypatch) -> None:
    config = DataConfig(str(shards), "bytes", max_tokens=max_tokens)
    expected = prepare.prepare(config, Path("straight")).meta["fingerprint"]
    encoded, encode_piece = [], tokenise.encode
    monkeypatch.setattr(tokenise, "encode", lambda *a: encoded.append(a[1]) or encode_piece(*a))

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenise, "read_blocks", interrupt)
        prepare.prepare(config, Path("out"))
    count = len(encoded)
    assert prepare.prepare(config, Path("out")).meta["fingerprint"] == expected
    assert len(encoded) == count
    assert not Path("out.tmp").exists() and not Path("out/progress.json").exists()


def test_progress_is_noted_once_the_ids_are_on_the_disk(shards: Path, monkeypatch) -> None:
    events, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(Path, "replace", lambda old, new: events.append(f"replace {new}") or replace(old, new))
    monkeypatch.setattr(tokenise, "grouped", lambda pieces, size: ([piece] for piece in pieces))
    prepare.prepare(DataConfig(str(shards), "bytes"), Path("out"))
    names = [event.rpartition("/")[2] for event in events]
    assert names[:2] == ["tokenizer.json", "tokenizer_config.json"]
    assert names[2:6] == ["train.bin", "val.bin", "progress.json.tmp", "progress.json"]


def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    """Not as patterns, addresses or archives, as the libraries that read tables would."""
    import datasets

    (tmp_path / "d").mkdir()
    names = ["a[1].jsonl", "a1.jsonl", "b*.jsonl", "bc.jsonl", "empty.jsonl", "~x.jsonl", "c:d.jsonl"]
    names += [name.replace("jsonl", "parquet") for name in names if name != "empty.jsonl"]
    for name in names:
        row = {"text": name, name: 1}  # no two have the same columns
        if name.endswith("jsonl"):
            (tmp_path / "d" / name).write_text(json.dumps(row) + "\n" if name != "empty.jsonl" else "")
        else:
            datasets.Dataset.from_list([row]).to_parquet(tmp_path / "d" / "out")
            (tmp_path / "d" / "out").rename(tmp_path / "d" / name)
    assert [text for _, text in read("d")] == sorted(set(names) - {"empty.jsonl"})


def test_rows_without_text_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"text": f"row {i} " * 9} if i % 3 else {"body": "lost"} for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make("a.jsonl").meta["without_text"] == 100
    assert "100 of 300 documents have no text" in capsys.readouterr().out


def test_a_hub_data_set_without_a_training_split_says_what_it_has(monkeypatch) -> None:
    import datasets

    config = SimpleNamespace(config=SimpleNamespace(data_files={"test": [], "dev": []}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **o: config)
    with pytest.raises(DataError, match="some/set has no split 'train'; it has test, dev"):
        make("hf:some/set")


def test_a_place_that_cannot_be_made_ends_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    if Path("/proc/self").exists():
        with pytest.raises(OSError):
            prepare.prepare(DataConfig("a.txt", "bytes"), Path("/proc/x"))


def test_a_corpus_may_be_behind_a_link_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 50)
    (tmp_path / "large" / "disk").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "large" / "disk")
    corpus = prepare.prepare(DataConfig(str(tmp_path / "text.txt"), "bytes"), tmp_path / "link")
    assert corpus.directory == tmp_path / "large" / "disk" and (tmp_path / "link" / "meta.json").is_file()
    with pytest.raises(DataError, match="nothing to write to"):
        prepare.prepare(DataConfig(str(tmp_path / "link"), "bytes"), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "name, kind",
    [("a.csv", "csv"), ("A.CSV", "csv"), ("a.jsonl.gz", "json"), ("a.json.txt", None), ("a.parquet", "parquet")],
)
def test_a_kind_of_table_is_told_by_the_end_of_its_name(name: str, kind: str | None) -> None:
    assert sources.table_kind(name) == kind


def test_a_glob_leaves_out_what_python_keeps(tmp_path: Path) -> None:
    for name in ("a.py", "__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert sources.files(f"{tmp_path}/**") == [tmp_path / "a.py"]

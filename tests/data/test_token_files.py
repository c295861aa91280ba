"""Token files of datatrove and llm.c as a corpus: the tokens of one array, and a sentence for a file that is wrong."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inspect_attention
import train
from data import prepare
from data.prepare import prepare as prepare_corpus
from data.sources import DataConfig
from data.token_files import TokenArray, find_token_files, map_file
from data.tokenizer import load_tokenizer, make_tokenizer, save_tokenizer
from errors import UserError
from tests.conftest import metrics, run_python, same_bits, tiny_run, weights

END = 256  # the end of a document, in the tokenizer "bytes"
DOCUMENTS = [[i % 256, (7 * i + 1) % 256, *range(i % 13), END] for i in range(331)]


def write_token_file(path: Path, documents: list[list[int]], tokenizer: str = "bytes", token_size: int = 2) -> None:
    """Write the files of a task of datatrove that are read."""
    path.parent.mkdir(exist_ok=True)
    ids = [id for document in documents for id in document]
    path.write_bytes(np.array(ids, f"<u{token_size}").tobytes())
    Path(f"{path}.metadata").write_text(f"{tokenizer}|{token_size}\n{len(ids)}\n{len(ids) / 1e3:.2f} K")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three token files of the documents, and an empty one that datatrove writes for a task without documents."""
    for number, (first, last) in enumerate([(0, 97), (97, 200), (200, 331)]):
        write_token_file(tmp_path / "tokens" / f"0000{number}_shuffled.ds", DOCUMENTS[first:last])
    (tmp_path / "tokens" / "00003_shuffled.ds").touch()
    return tmp_path / "tokens"


def open_bytes(folder: Path | str, **options: object) -> prepare.Corpus:
    return prepare_corpus(DataConfig(str(folder), **{"tokenizer": "bytes", **options}))


@pytest.mark.parametrize("token_size", [2, 4])
def test_many_files_are_one_array(token_size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(deadline=None)  # a busy disk takes its time
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
    def check(sizes: list[int], data: st.DataObject) -> None:
        directory = tmp_path_factory.mktemp("tokens")
        expected = np.arange(sum(sizes)) * 3 % 257
        for number, part in enumerate(np.split(expected, np.cumsum(sizes)[:-1])):
            write_token_file(directory / f"{number}.ds", [part.tolist()], token_size=token_size)
        first = data.draw(st.integers(0, len(expected) - 1))
        last = data.draw(st.integers(first + 1, len(expected)))
        ids, expected = TokenArray(find_token_files(DataConfig(str(directory))), 257, first, last), expected[first:last]
        assert len(ids) == len(expected)
        start = data.draw(st.integers(0, len(expected)))
        ring = (np.arange(start, start + 5)[:, None] * 7 + np.arange(11)) % len(expected)
        assert np.array_equal(ids[ring], expected[ring])
        assert np.array_equal(ids[start:], expected[start:])

    check()


def test_validation_is_the_end_of_all_tokens(folder: Path) -> None:
    most = open_bytes(folder, max_tokens=1000)
    assert len(most.tokens["train"]) + len(most.tokens["val"]) == 1000
    ids = [id for document in DOCUMENTS for id in document]
    corpus = open_bytes(folder, val_fraction=0.3)
    assert corpus.tokens["train"][:].tolist() == ids[: int(len(ids) * 0.7)]
    text = ids[int(len(ids) * 0.7) :]
    assert corpus.tokens["val"][:].tolist() == text
    assert corpus.meta["val"]["tokens"] == len(text)
    assert corpus.meta["val"]["bytes"] == len(bytes(id for id in text if id != END).decode(errors="replace").encode())


def test_files_of_their_own_are_all_of_the_validation(folder: Path, tmp_path: Path) -> None:
    write_token_file(tmp_path / "val" / "0.ds", DOCUMENTS[:2])
    corpus = open_bytes(folder, val_source=str(tmp_path / "val"), max_tokens=1000)
    assert len(corpus.tokens["train"]) == 1000
    assert corpus.tokens["val"][:].tolist() == [id for document in DOCUMENTS[:2] for id in document]
    last = open_bytes(folder, val_source=str(folder / "00002_shuffled.ds"))  # is then no longer trained on
    assert [len(last.tokens[split]) for split in ("train", "val")] == [
        sum(map(len, documents)) for documents in (DOCUMENTS[:200], DOCUMENTS[200:331])
    ]
    (tmp_path / "val.txt").write_text("text")
    with pytest.raises(UserError, match="--data.val_source must be token files, .* got .*val.txt"):
        open_bytes(folder, val_source=str(tmp_path / "val.txt"))


def test_the_tokenizer_is_the_one_that_the_files_name(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    for path, text in ((mine, "so so "), (other, "la la ")):
        path.write_bytes(make_tokenizer("bpe:300", [text * 99]).files["tokenizer.json"])
    folder = tmp_path / "d"
    end = load_tokenizer(mine).end_of_text
    documents = [[*ids[:-1], end] for ids in DOCUMENTS]
    write_token_file(folder / "0.ds", documents, tokenizer=str(mine))
    moved = shutil.copy(mine, tmp_path / "moved.json")
    for asked in ([], [str(moved)]):
        assert prepare_corpus(DataConfig(str(folder), *asked)).tokenizer.encode("so").size == 1
    for name in (str(other), "chars", "bytes"):
        with pytest.raises(UserError, match=f"0.ds was written by {mine}, not by {name}: give"):
            prepare_corpus(DataConfig(str(folder), name))
    write_token_file(folder / "0.ds", documents, tokenizer="some/model")
    with pytest.raises(UserError, match="'some/model' is not bytes, chars, .*the path of a tokenizer.json"):
        prepare_corpus(DataConfig(str(folder)))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("", b"123", r"00001_shuffled.ds has 3 bytes, expected \d+ tokens of 2 bytes: copy"),
        (".metadata", b"", r"00001_shuffled.ds.metadata does not describe a token file: ValueError"),
        (".metadata", b"bytes|3\n500\n", r"00001_shuffled.ds.metadata does not describe a token file: KeyError: '3'"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / f"00001_shuffled.ds{name}").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_bytes(folder)


def test_a_file_of_another_kind_is_named(folder: Path) -> None:
    for fraction, few in ((0.9999, "0 to train on"), (1e-9, ".* 1 to validate on")):
        with pytest.raises(UserError, match=f"tokens has too few tokens: {few}.*; give more"):
            open_bytes(folder, val_fraction=fraction)
    for change in ({"tokenizer": "gpt2"}, {"token_size": 4}):
        write_token_file(folder / "00001_shuffled.ds", DOCUMENTS[97:200], **change)
        with pytest.raises(UserError, match="00001_shuffled.ds and .*00000.* are of two tokenizers or sizes: give"):
            open_bytes(folder)
    write_token_file(folder / "00001_shuffled.ds", [[97, 98]])
    with pytest.raises(UserError, match="00001_shuffled.ds ends with id 98, expected an end of text of 'bytes'"):
        open_bytes(folder)
    (folder / "a.txt").touch()
    with pytest.raises(UserError, match="tokens .*and .*a.txt: give files of one"):
        open_bytes(folder)


def test_ids_beyond_the_vocabulary_are_found_when_they_are_read(folder: Path, run, tmp_path: Path) -> None:
    write_token_file(folder / "00001_shuffled.ds", [[257, *ids] for ids in DOCUMENTS[97:200]])
    refused = "00001_shuffled.ds holds id 257, expected less than 257: give the --data.tokenizer that wrote it\n"
    run(train, *tiny_run(folder, tmp_path / "out")).refused(refused)


@pytest.mark.long
def test_a_run_resumes_and_is_inspected(folder: Path, run, tmp_path: Path, monkeypatch) -> None:
    straight, out = tmp_path / "straight", tmp_path / "out"
    for directory in (straight, out):
        assert run(train, *tiny_run(folder, directory, train__max_steps=12)).exit_code == 0
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    with monkeypatch.context() as patch:
        patch.setattr("data.tokenizer.make_tokenizer", None)  # the next version of a library may make another one
        run(train, "--resume", out).ok()
    assert same_bits(weights(straight), weights(out))
    assert metrics(straight, "val_loss") == metrics(out, "val_loss")
    assert "validation text is not on this machine: give a text with --text" in run(inspect_attention, out).err
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    write_token_file(folder / "00001_shuffled.ds", [[*ids[-2::-1], END] for ids in DOCUMENTS[97:200]])
    for _ in ("another", "missing"):
        run(train, "--resume", out).refused("tokens is not the text this run began with: restore that text")
        (folder / "00001_shuffled.ds").unlink(missing_ok=True)


def write_shard(path: Path, ids: list[int]) -> None:
    path.write_bytes(np.array([20240520, 1, len(ids), *range(253)], "<i4").tobytes() + np.array(ids, "<u2").tobytes())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A shard to validate on, two to train on, and a text, which is left out."""
    for name, ids in (("a_val", range(53)), ("b_train_01", range(97, 256)), ("b_train_02", [END, 2, 5, END, 7])):
        write_shard(tmp_path / f"{name}.bin", [*ids])
    (tmp_path / "a.txt").touch()
    return tmp_path


def test_shards_of_llm_c_have_their_own_validation(shards: Path, monkeypatch) -> None:
    monkeypatch.setattr("data.token_files.make_tokenizer", lambda name, _: {"gpt2": make_tokenizer("bytes", [])}[name])
    monkeypatch.setenv("HOME", str(shards))
    train = [*range(97, 256), END, 2, 5, END, 7]
    for source, most in ((shards, None), ("~", 101), (f"{shards}/*_*.bin", 999)):
        corpus = prepare_corpus(DataConfig(f"bin:{source}", max_tokens=most))
        assert corpus.tokens["train"][:].tolist() == train[:most]
        assert corpus.tokens["val"][:].tolist() == [*range(53)]
    assert isinstance(map_file(corpus.tokens["val"].files[0]).base, np.memmap)
    corpus = prepare_corpus(DataConfig(f"bin:{shards}/*_train_*", max_tokens=163, val_fraction=0.2))
    assert [corpus.tokens[split][:].tolist() for split in ("train", "val")] == [train[:130], train[130:163]]


def test_another_shard_has_another_fingerprint(shards: Path) -> None:
    path, source = shards / "b_train_02.bin", f"bin:{shards}/b*"
    first = open_bytes(source).meta["fingerprint"]
    path.rename(shards / "b_val.bin")
    assert open_bytes(source).meta["fingerprint"] != first
    write_shard((shards / "b_val.bin").rename(path), [END, 2, 5, END, 8])
    assert open_bytes(source).meta["fingerprint"] != first


def test_what_is_no_shard_is_named(shards: Path) -> None:
    right = (path := shards / "b_train_02.bin").read_bytes()
    wrong = [(right[:place] + b"\4" + right[place + 1 :], "is no shard.* begins with .*, not") for place in (0, 4)]
    for content, message in (*wrong, (right * 2, "has 2068 bytes"), (b"", r"is no shard.* begins with \[\], not")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"b_train_02.bin {message}"):
            open_bytes(f"bin:{shards}")


def read_documents(corpus: prepare.Corpus) -> list[list[int]]:
    """The documents of a corpus, sorted: the end of text stands between them, before each or behind each."""
    ids = np.concatenate([corpus.tokens[split][:] for split in ("train", "val")])
    end = corpus.tokenizer.end_of_text
    return sorted(filter(None, (part[part != end].tolist() for part in np.split(ids, np.flatnonzero(ids == end)))))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("datatrove") is None, reason="datatrove is not installed: make test-long")
def test_files_of_datatrove_itself(tmp_path: Path) -> None:
    texts = [f"{i} is {'even' if i % 2 == 0 else 'odd'}, says document {i * i}.\n" for i in range(400)]
    (tmp_path / "text").mkdir()
    for number in range(3):
        table = pyarrow.table({"text": texts[number::3], "int_score": [i % 5 for i in range(400)][number::3]})
        pyarrow.parquet.write_table(table, tmp_path / "text" / f"{number}.parquet")
    save_tokenizer(make_tokenizer("bpe:400", texts), tmp_path)
    tokenizer, folder = tmp_path / "tokenizer.json", tmp_path / "tokens"
    done = run_python("docs/make_tokens.py", tmp_path / "text", tokenizer, folder)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("*.ds"))) == 3

    theirs = prepare_corpus(DataConfig(str(folder)))
    assert theirs.tokenizer.name == "bpe:400"
    kept = [text for number, text in enumerate(texts) if number % 5 >= 3]  # as the script chooses them
    pyarrow.parquet.write_table(pyarrow.table({"text": kept}), tmp_path / "kept.parquet")
    ours = prepare_corpus(DataConfig(str(tmp_path / "kept.parquet"), str(tokenizer)))
    documents = read_documents(theirs)
    assert documents == read_documents(ours) and len(documents) == len(kept)
    assert theirs.tokenizer.decode(documents[0]) in kept

"""Token files of datatrove as a corpus: the tokens of one array, and a sentence for a file that is not right."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inspect_attention
import train
from data import prepare
from data.config import DataConfig
from data.prepare import prepare as prepare_corpus
from data.token_files import TokenArray, find_token_files, open_token_files
from data.tokenizer import make_tokenizer, save_tokenizer
from errors import UserError
from tests.conftest import metrics, same_bits, tiny_run, weights, write_corpus

CPU = torch.device("cpu")
END = 256  # the end of a document, in the tokenizer "bytes"
DOCUMENTS = [[i % 256, (7 * i + 1) % 256, *range(i % 13), END] for i in range(331)]


def write_token_file(path: Path, documents: list[list[int]], tokenizer: str = "bytes", token_size: int = 2) -> None:
    """Write the three files of a task of datatrove."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(np.array([id for ids in documents for id in ids], f"<u{token_size}").tobytes())
    ends = np.cumsum([len(ids) for ids in documents])
    Path(f"{path}.index").write_bytes(ends.astype("<u8").tobytes())
    Path(f"{path}.metadata").write_text(f"{tokenizer}|{token_size}\n{ends[-1]}\n{ends[-1] / 1e3:.2f} K")


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
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
    def check(sizes: list[int], data: st.DataObject) -> None:
        directory = tmp_path_factory.mktemp("tokens")
        expected = np.arange(sum(sizes)) * 3 % 257
        for number, part in enumerate(np.split(expected, np.cumsum(sizes)[:-1])):
            write_token_file(directory / f"{number}.ds", [part.tolist()], token_size=token_size)
        first = data.draw(st.integers(0, len(expected) - 1))
        last = data.draw(st.integers(first + 1, len(expected)))
        ids, expected = TokenArray(find_token_files(str(directory)), 257, first, last), expected[first:last]
        assert len(ids) == len(expected)
        width, start = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99))
        ring = (np.arange(start, start + 5)[:, None] * 7 + np.arange(width)) % len(expected)
        assert np.array_equal(ids[ring], expected[ring])
        clamped = np.minimum(ring[:, :1] + np.arange(width), len(expected) - 1)
        assert np.array_equal(ids[clamped], expected[clamped])
        assert np.array_equal(ids[start % len(expected) :], expected[start % len(expected) :])

    check()


@pytest.mark.parametrize("val_fraction", [0.1, 0.5, 0.9, 1e-9])
def test_validation_begins_with_a_document(folder: Path, val_fraction: float) -> None:
    ends = np.cumsum([len(ids) for ids in DOCUMENTS])
    corpus = open_bytes(folder, val_fraction=val_fraction)
    cut = len(corpus.tokens["train"])
    assert cut == ends[ends <= min(ends[-1] - 1, ends[-1] * (1 - val_fraction))][-1]
    text = [id for ids in DOCUMENTS for id in ids][cut:]
    assert corpus.meta["val"]["tokens"] == len(text)
    assert corpus.meta["val"]["bytes"] == len(bytes(id for id in text if id != END).decode(errors="replace").encode())


def test_options_choose_a_part_and_another_validation(folder: Path) -> None:
    most = open_bytes(folder, max_tokens=1000)
    assert len(most.tokens["train"]) + len(most.tokens["val"]) == 1000
    other = open_bytes(folder, val_source=str(folder / "00001*"), max_tokens=1000)
    trained = [id for ids in DOCUMENTS[:97] + DOCUMENTS[200:] for id in ids]  # not what is kept for validation
    assert other.tokens["train"][:].tolist() == trained[:1000]
    assert len(other.tokens["val"]) == sum(len(ids) for ids in DOCUMENTS[97:200])


def test_a_file_is_read_when_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, memmap = [], np.memmap

    def noted(path: Path, *rest: object, **options: object) -> np.memmap:
        opened.append(path.name)
        return memmap(path, *rest, **options)

    monkeypatch.setattr(np, "memmap", noted)
    train = open_bytes(folder, val_source=str(folder / "00002*")).tokens["train"]
    assert opened == ["00002_shuffled.ds"]  # whose bytes are counted
    train[np.arange(7)[None]], train[np.arange(7)[None]]
    assert opened[1:] == ["00000_shuffled.ds"]


def test_the_tokenizer_may_be_the_one_that_the_files_name(tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer("bpe:300", ["so so " * 99]), tmp_path)
    path = tmp_path / "tokenizer.json"
    path = path.rename(tmp_path / "mine.json")
    write_token_file(tmp_path / "d" / "0.ds", DOCUMENTS, tokenizer=str(path))
    assert prepare_corpus(DataConfig(str(tmp_path / "d"))).tokenizer.name == "bpe:300"
    write_token_file(tmp_path / "d" / "0.ds", DOCUMENTS, tokenizer="some/model")
    with pytest.raises(UserError, match="unknown tokenizer 'some/model'.*hf download NAME tokenizer.json"):
        prepare_corpus(DataConfig(str(tmp_path / "d")))
    text = write_corpus(tmp_path)  # text can be written in it, too
    assert prepare_corpus(DataConfig(str(text), str(path))).tokenizer.encode("so").size == 1


def test_files_of_two_kinds_are_refused(folder: Path) -> None:
    write_token_file(folder / "00001_shuffled.ds", DOCUMENTS[97:200], tokenizer="gpt2")
    with pytest.raises(UserError, match="00001_shuffled.ds 2 bytes a token by gpt2, .*00000.* by bytes: give"):
        prepare_corpus(DataConfig(str(folder)))
    assert open_bytes(folder).tokenizer.name == "bytes"
    write_token_file(folder / "00001_shuffled.ds", DOCUMENTS[97:200], token_size=4)
    with pytest.raises(UserError, match="00001_shuffled.ds 4 bytes a token by bytes, .*00000.* 2 bytes"):
        open_bytes(folder)


def test_another_tokenizer_than_the_files_own_is_refused(tmp_path: Path) -> None:
    for name, text in {"mine": "so so ", "other": "la la "}.items():
        (tmp_path / name).mkdir()
        save_tokenizer(make_tokenizer("bpe:300", [text * 99]), tmp_path / name)
    mine, other = (tmp_path / name / "tokenizer.json" for name in ("mine", "other"))
    write_token_file(tmp_path / "d" / "0.ds", DOCUMENTS, tokenizer=str(mine))
    same = mine.rename(tmp_path / "moved.json"), shutil.copy(tmp_path / "moved.json", mine)
    for path in same:
        assert prepare_corpus(DataConfig(str(tmp_path / "d"), str(path))).tokenizer.encode("so").size == 1
    with pytest.raises(UserError, match=f"0.ds was written by {mine}, not by {other}"):
        prepare_corpus(DataConfig(str(tmp_path / "d"), str(other)))
    for learned in ("chars", "bpe:8192"):
        with pytest.raises(UserError, match=f"0.ds was written by {mine}, so {learned} cannot be learned from it"):
            prepare_corpus(DataConfig(str(tmp_path / "d"), learned))


def test_text_beside_token_files_is_not_passed_over(folder: Path) -> None:
    write_corpus(folder)
    with pytest.raises(UserError, match=r"tokens holds token files \(.ds\), and .*corpus.txt: give files of one kind"):
        open_bytes(folder)


def test_files_that_are_to_be_shuffled_are_not_read(folder: Path) -> None:
    write_token_file(folder / "00002_unshuffled.ds", DOCUMENTS)
    with pytest.raises(UserError, match="00002_unshuffled.ds is to be shuffled by datatrove, which has not finished"):
        open_bytes(folder)
    assert len(open_bytes(folder / "*_unshuffled.ds").tokens["train"])  # of a run that shuffles nothing


def damage(folder: Path, name: str, content: str | bytes | None) -> None:
    path = folder / f"00001_shuffled.ds{name}"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("", b"123", r"00001_shuffled.ds has 3 bytes, and by its .metadata \d+ tokens in \d+ bytes"),
        (".metadata", None, r"00001_shuffled.ds.metadata does not describe a token file: FileNotFound"),
        (".metadata", "bytes|3\n500\n", r"00001_shuffled.ds.metadata does not describe a token file: KeyError: '3'"),
        (".metadata", b"\xff|2\n1\n", r"00001_shuffled.ds.metadata does not describe a token file"),
        (".metadata", "bytes|4\n500\n", r"00001_shuffled.ds has \d+ bytes, and by its .metadata 500 tokens in 2000"),
        (".index", None, "00001_shuffled.ds.index does not say where documents end, so give a --data.val_source"),
        (".index", b"", "00001_shuffled.ds.index does not say where documents end"),
        (".index", b"12345678", "00001_shuffled.ds.index is not the index of .*00001_shuffled.ds: it ends at token"),
    ],
)
def test_a_file_that_is_not_right_is_named(folder: Path, name: str, content: str | bytes | None, message: str) -> None:
    damage(folder, name, content)
    with pytest.raises(UserError, match=message):
        open_bytes(folder, val_fraction=0.5)


def test_ids_beyond_the_vocabulary_are_found_when_they_are_read(folder: Path, run, tmp_path: Path) -> None:
    write_token_file(folder / "00001_shuffled.ds", [[*ids, 257] for ids in DOCUMENTS[97:200]])
    result = run(train, *tiny_run(folder, tmp_path / "out"))
    assert result.exit_code == 2
    assert result.err.endswith("00001_shuffled.ds holds id 257, and the vocabulary has 257\n")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"val_source": "text"}, r"no tokens found at 'text': give a folder or glob of .ds files"),
        ({"val_fraction": 0.9999}, "has too few documents to keep 0.9999 of it for validation"),
        ({"val_fraction": 1e-6, "max_tokens": 2}, "has too few documents to keep 1e-06 of it for validation"),
        ({"tokenizer": "model"}, "the tokenizer 'model' is that of train.init_from, which is not given"),
        ({"val_source": "tokens"}, "all token files of tokens are kept for validation"),
        ({"source": "text", "val_source": "tokens"}, "data.val_source is for token files, and text has none"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    folder: Path, options: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("text").mkdir()
    write_corpus(Path("text"))
    with pytest.raises(UserError, match=message):
        open_bytes(**{"folder": options.pop("source", "tokens"), **options})


def test_tokens_without_text_are_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "tokens" / "0.ds", [[END, END]] * 50)
    with pytest.raises(UserError, match="the tokenizer 'bytes' finds no text in the validation tokens"):
        open_bytes(tmp_path / "tokens")


def test_there_is_nothing_to_prepare(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is tokens already: there is nothing to write to"):
        prepare_corpus(DataConfig(str(folder), "bytes"), tmp_path / "new")


def test_a_run_resumes_and_is_inspected(folder: Path, run, tmp_path: Path, monkeypatch) -> None:
    straight, out = tmp_path / "straight", tmp_path / "out"
    for directory in (straight, out):
        assert run(train, *tiny_run(folder, directory, train__max_steps=12)).exit_code == 0
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    with monkeypatch.context() as patch:
        patch.setattr("data.tokenizer.make_tokenizer", None)  # the next version of a library may make another one
        result = run(train, "--resume", out)
    assert result.exit_code == 0, result.err
    assert same_bits(weights(straight), weights(out))
    assert metrics(straight, "val_loss") == metrics(out, "val_loss")
    assert run(inspect_attention, out).exit_code == 0
    shutil.rmtree(out / "checkpoints" / "step-00000012")
    write_token_file(folder / "00001_shuffled.ds", [ids[::-1] for ids in DOCUMENTS[97:200]])
    for change in ("another", "missing"):
        result = run(train, "--resume", out)
        assert result.exit_code == 2
        assert "text this run began with (00001_shuffled.ds differs, or is missing): put that back" in result.err
        assert "validation text is not here: give a text with --text" in run(inspect_attention, out).err, change
        (folder / "00001_shuffled.ds").unlink(missing_ok=True)
    damage(folder, "", b"123")
    assert "00001_shuffled.ds has 3 bytes" in run(train, "--resume", out).err


def test_a_configuration_is_chosen_for_token_files(folder: Path, capsys: pytest.CaptureFixture) -> None:
    train.read_config(["--data.source", str(folder), "--train.device", "cpu"])
    assert re.search(r"config: for about [\d,]+ bytes of text: 2 layers of 128, bytes, ", capsys.readouterr().out)


def read_documents(ids: np.ndarray, end: int) -> Iterator[list[int]]:
    """Yield the documents among ids: the end of text stands between them, before each or behind each."""
    yield from filter(None, (part[part != end].tolist() for part in np.split(ids, np.flatnonzero(ids == end))))


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
    script = Path(__file__).parents[2] / "docs" / "make_tokens.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "text", tokenizer, folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("*.ds"))) == 3

    theirs = open_token_files(DataConfig(str(folder)), None)
    assert theirs.tokenizer.name == "bpe:400"
    kept = [text for number, text in enumerate(texts) if number % 5 >= 3]  # as the script chooses them
    pyarrow.parquet.write_table(pyarrow.table({"text": kept}), tmp_path / "kept.parquet")
    ours = prepare_corpus(DataConfig(str(tmp_path / "kept.parquet"), str(tokenizer)))
    end = theirs.tokenizer.end_of_text
    documents = [
        sorted(list(read_documents(np.concatenate([corpus.tokens[split][:] for split in ("train", "val")]), end)))
        for corpus in (theirs, ours)
    ]
    assert documents[0] == documents[1] and len(documents[0]) == len(kept)
    assert theirs.tokenizer.decode(documents[0][0]) in kept

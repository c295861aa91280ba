"""Tables and folders: each row is read as it is written, and whatever is not read is named."""

import bz2
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from data import prepare, sources
from data.config import DataConfig
from errors import UserError
from tests.data.test_prepare import documents_of, in_tmp, make, read  # noqa: F401

ROWS = ["eins", "zwei\n\tund", 'dr"ei', "猫 vier", "NA", "007", "2024-02-30", "true", "nan"]


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


PACK = {"": bytes, ".GZ": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def as_csv(rows: list[str], mark: str = ",") -> str:
    return f"id{mark}text\r\n" + "".join(
        f'{row!r}{mark}"{text.replace(chr(34), chr(34) * 2)}"\r\n' for row, text in enumerate(rows)
    )


def as_lines(rows: list[object]) -> str:
    """Rows whose other fields come late and have another type each time."""
    return "\n".join(json.dumps({"text": text, f"n{n % 3}": [n, "n", None, {}][n % 4]}) for n, text in enumerate(rows))


KINDS: dict[str, Callable] = {
    "t.jsonl": as_lines,
    "t.jsonlines": as_lines,
    "t.JL": as_lines,
    "T.NDJSON": lambda rows: as_lines(rows).replace("\n", "\r\n\r\n"),
    "lines.json": as_lines,
    "array.json": lambda rows: json.dumps(
        [{"n": "N", "text": row} for row in rows], indent=3, ensure_ascii=False
    ).replace('"N"', "9" * 5000),
    "dense.json": lambda rows: json.dumps([{"text": row} for row in rows]),
    "t.csv": as_csv,
    "t.tsv": lambda rows: as_csv(rows, "\t"),
}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", KINDS)
def test_each_row_is_read_as_it_is_written(name: str, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # which needs a home, and guesses types
    content = ("\ufeff" + KINDS[name](ROWS)).encode()
    Path(f"a::{name}{packed}").write_bytes(PACK[packed](content[:41]) + PACK[packed](content[41:]))
    for size in (7, sources.PIECE):  # rows end anywhere in what is read at a time
        monkeypatch.setattr(sources, "PIECE", size)
        assert read(f"a::{name}{packed}") == ROWS


def test_a_large_row_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a" * 300_001, "b", "c" * 70_001]
    sizes, parse = [], json.JSONDecoder.raw_decode
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", lambda *words: (sizes.append(len(words[1])), parse(*words))[1])
    monkeypatch.setattr(sources, "PIECE", 101)
    Path("t.json").write_text(json.dumps([{"text": text} for text in texts]))
    assert read("t.json") == texts
    assert sum(sizes) < 10 * 370_000
    Path("t.csv").write_text("text\n" + "\n".join(texts))
    assert read("t.csv") == texts


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("t.jsonl", '{"text": "a"}\n\n{"text": 5}', "t.jsonl, line 3: expected a text, got 5"),
        ("t.jsonl", '{"text": "a"}\n{"text": ["b"]}', r"t.jsonl, line 2: expected a text, got \['b'\]"),
        ("t.jsonl", '{"text": "a"}\n[1]', r"t.jsonl, line 2: expected .*, got"),
        ("t.jsonl", '"text"', "t.jsonl, line 1: expected an object with the column 'text', got 'text'"),
        (
            "t.jsonl",
            '{"text": "a"}\n{"text": "b\n{"text": "c"}',
            "t.jsonl, line 2: expected a row of JSON, got '{\"text",
        ),
        ("t.jsonl", '{"n": ' + "[" * 99_999, "t.jsonl, line 1: expected a row of JSON, got"),
        ("t.jsonl", r'{"text": "a\ud83d"}', r"t.jsonl, line 1: the text has '\\ud83d', which is half a character"),
        (
            "t.jsonl",
            '{"a": "b"}\n{"c": 1}',
            "t.jsonl: expected a column 'text', got a: choose one by --data.text_column",
        ),
        ("t.json", '[\n{"text": "a"},', "t.json, line 2: expected a row of JSON, got ''"),
        ("t.jsonl", '{"text": "a"}\n,,,[[', r"t.jsonl, line 2: expected a row of JSON, got '\[\['"),
        ("t.json", '[{"text": "a"}]\n{"text": "b"}', "t.json, line 1: expected a row of JSON, got ']"),
        ("t.csv", "a,b\n1,2\n", "t.csv: expected a column 'text', got a, b: choose .* first line of a CSV"),
        ("t.csv", "text,text\n1,2\n", "t.csv: expected a column 'text', got text, text: choose"),
        (
            "t.csv",
            ",".join(map(str, range(9999))),
            "t.csv: expected a column 'text', got 0, 1, .{,50}, 1[0-9],[.]{3}: choose",
        ),
        ("t.csv", 'n,text\n1,"a\nb"\n\n2\n', r"t.csv, line 5: 1 fields instead of 2"),
        (
            "t.csv",
            'n,text\n1,a\n2,"b\n3,c\n',
            "t.csv, line 3: unexpected end of data .is there a quote that never closes",
        ),
        ("t.csv", 'n,text\n1,"b"c\n', "t.csv, line 2: ',' expected"),
        ("t.csv", b"text\n\xff\xfea", "t.csv is not UTF-8 .invalid start byte.: convert or decompress it"),
        ("t.jsonl.gz", '{"text": "a"}', "cannot read t.jsonl.gz: BadGzipFile: Not a gzipped file"),
        ("t.txt.gz", gzip.compress(b"a" * 99, mtime=0)[:-9], "cannot read t.txt.gz: EOFError: Compressed file ended"),
        ("t.csv.zst", zstd(b"text\na")[:-3], "cannot read t.csv.zst: OSError: Truncated compressed stream"),
        *(
            (
                name,
                b"version https://git-lfs.github.com/spec/v1\n",
                f"{name} is a pointer of Git LFS, not the file itself",
            )
            for name in ("t.txt", "t.csv.gz", "t.parquet")
        ),
        ("t.tar.xz", lzma.compress(b"a"), "t.tar.xz is an archive: unpack it"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(name: str, content: str | bytes, sentence: str) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=sentence) as error:
        make(name)
    assert len(str(error.value)) < 250 and not list(Path("prepared").glob("[!.]*"))


def test_a_row_without_text_is_left_out_and_counted(capsys: pytest.CaptureFixture) -> None:
    values = ["a", None, "b", "", "c"]
    Path("t.jsonl").write_text(as_lines(values) + '\n{"other": 1}')
    Path("t.csv").write_text("n,text\n" + "".join(f"{value},{value or ''}\n" for value in values))
    Path("lines.csv").write_text('text\n\na\n""\nb\n\nc\n')  # of one column, in which an empty line may be either
    pyarrow.parquet.write_table(pyarrow.table({"text": values, "n": range(5)}), "t.parquet")
    for name, note in (("t.jsonl", "3 of 6"), ("t.csv", "2 of 5"), ("lines.csv", "1 of 4"), ("t.parquet", "2 of 5")):
        assert sorted(documents_of(make(name, "chars", val_fraction=0.4))) == [
            "a",
            "b",
            "c",
        ]  # which reads everything twice
        assert capsys.readouterr().err == f"note: {name}: {note} rows or files have no text\n"
    with pytest.raises(UserError, match="t.parquet, row 1: expected a text, got 0"):
        make("t.parquet", text_column="n")
    for name in ("t.parquet", "t.csv"):
        with pytest.raises(UserError, match=f"{name}: expected a column 'body', got .*text"):
            make(name, text_column="body")


def test_the_sign_of_an_end_in_a_text_is_text(capsys: pytest.CaptureFixture) -> None:
    text = "one<|endoftext|>two<|endoftext|>"
    Path("a.txt").write_text(text)
    assert documents_of(make("a.txt", "bpe:300", val_fraction=0.4)) == [text]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("note: a.txt: <|endoftext|> in it is ordinary text; ")
    Path("t.jsonl").write_text('{"text": "a</s><s>b"}\n{"text": "b"}')
    for ends, note in (
        (["</s>"], "</s> in it is ordinary text"),
        ([], "documents follow each other without a mark"),
    ):
        model = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate("abs/<>")}, []))
        model.add_special_tokens(["<s>", *ends])
        model.save("own.json")
        make("t.jsonl", "own.json", val_fraction=0.4)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith(f"note: t.jsonl: {note}")
    Path("own.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="own.json is a pointer of Git LFS"):
        make("t.jsonl", "own.json")


def test_links_are_followed_once_and_nothing_is_left_out_in_silence(capsys: pytest.CaptureFixture) -> None:
    for name in ("d/sub/b.txt", "elsewhere/c.txt", "d/.git/config", "d/__pycache__/a.pyc", "d/.x", "d/sub/empty.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("" if "empty" in name else name)
    Path("d/linked").symlink_to("../elsewhere")
    Path("d/sub/round").symlink_to("..")
    Path("elsewhere/round").symlink_to("../d/sub")
    Path("d/c2.txt").symlink_to("linked/c.txt")
    Path("d/sub/copy.txt").hardlink_to("d/sub/b.txt")  # as tools that save space make, so it is a document
    Path("d/broken").symlink_to("nowhere")
    os.mkfifo("d/pipe")
    # A name that is not UTF-8, where the file system has such.
    Path("d/latin.txt" if sys.platform == "darwin" else "d/latin\udcff.txt").write_text("name")
    expected = ["elsewhere/c.txt", "name", "d/sub/b.txt", "d/sub/b.txt"]
    assert documents_of(make("d", "chars")) == expected
    left_out = "left out 3 hidden, 2 not a file (broken link, pipe, socket), 3 found under another name"
    assert capsys.readouterr().err == f"note: d: {left_out}\nnote: d: 1 of 5 rows or files have no text\n"
    for pattern in ("d/**/*.txt", "**/*.txt", "d/../d/**/*t", "d/**/**/*.txt"):
        assert sorted(read(pattern)) == sorted(expected), pattern
    assert sorted(read("d/**")) == sorted([*expected, ""])
    assert read("d/c**.txt") == read("d/**/sub/../c2.txt") == ["elsewhere/c.txt"]
    Path("d/picture").write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match=r"d/picture is not UTF-8 .*, such as 'd/\*\*/\*\.txt'$"):
        make("d/")
    with pytest.raises(UserError, match=r"no text found at 'd/\.gi\*' .left out: 1 folder.: give"):
        sources.find_files("d/.gi*")


def test_what_may_not_be_read_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("d/.a/x", "d/b.txt", "d/closed/b.txt", "d/c.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("b")
    rights = {"b.txt": 0, "closed": os.R_OK}  # such a folder shows its names alone
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & ~rights.get(path.name, mode))
    expected = [Path("d/c.md")], "1 without permission to enter, 1 without permission to read"
    assert sources.find_files("d/**") == sources.find_files("d/**/*.*") == expected
    Path("d/c.md").unlink()
    reasons = "1 hidden, 1 without permission to read, 1 without permission to enter"
    with pytest.raises(UserError, match=f"no text found at 'd' .left out: {reasons}.: give"):
        make("d")


def test_a_place_that_cannot_be_written_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text("text " * 99)
    monkeypatch.setattr(prepare, "PREPARED", Path("a.txt/prepared"))
    with pytest.raises(UserError, match="cannot write a corpus to a.txt/prepared: .*--out DIR writes elsewhere"):
        make("a.txt")
    assert prepare.prepare(DataConfig("a.txt", "bytes"), Path("mine")).directory.name == "mine"
    monkeypatch.setattr(sources, "find_files", lambda source: open("gone.txt"))
    with pytest.raises(FileNotFoundError):  # of the source
        make("a.txt")

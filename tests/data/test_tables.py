"""Tables and folders: each row is read as it is written, and whatever is not read is named."""

import bz2
import gzip
import io
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

from data import sources
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
    "T.NDJSON": lambda rows: as_lines(rows).replace("\n", "\r\n\r\n"),
    "array.json": lambda rows: json.dumps(
        [{"n": "N", "text": row} for row in rows], indent=3, ensure_ascii=False
    ).replace('"N"', "9" * 5000),
    "t.csv": as_csv,
    "semicolons.csv": lambda rows: as_csv(rows, ";"),  # of Excel in Europe
    "tabs.csv": lambda rows: as_csv(rows, "\t"),
    "t.tsv": lambda rows: as_csv(rows, "\t"),
}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", KINDS)
def test_each_row_is_read_as_it_is_written(name: str, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # which needs a home, and guesses types
    content = ("\ufeff" + KINDS[name](ROWS)).encode()
    path = f"~a::[1]{name}{packed}"  # no address, no pattern, and no home folder where it is in a folder
    Path(path).write_bytes(PACK[packed](content[:41]) + PACK[packed](content[41:]))
    for size in (7, sources.PIECE):  # rows end anywhere in what is read at a time
        monkeypatch.setattr(sources, "PIECE", size)
        assert read(f"./{path}") == read(".") == ROWS


def test_json_is_read_as_its_first_line_is_not_as_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": text} for text in ROWS]
    Path("lines.json").write_text("\n\n" + as_lines(ROWS))  # as many data sets of the hub are
    Path("array.jsonlines").write_text(json.dumps(rows))
    Path("one.json").write_text(json.dumps(rows[0], indent=3))
    monkeypatch.setattr(sources, "LONGEST", 419)  # characters, fewer than lines.json has and more than the others
    assert [read(name) for name in ("lines.json", "array.jsonlines", "one.json")] == [ROWS, ROWS, ROWS[:1]]


@pytest.mark.parametrize(
    "read_table, content, sentence",
    [
        (sources.read_json, '[{"text": "%s"}]', "expected a row of JSON on this line, or on .* 997 charac"),
        (sources.read_json, '{"text": "a"}\n{"text": "%s"}', "expected a row of JSON"),
        (sources.read_json, '[\n{"text": "a"},\n"%s"]', "expected a row of JSON"),
        (sources.read_csv, "text\n%s", "field larger than field limit"),
        (sources.read_csv, 'n,text\n1,"%s"', "field larger than field limit"),
    ],
)
def test_no_more_of_a_table_is_read_at_a_time_than_the_longest_row(
    read_table: Callable, content: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LONGEST", 997)
    file = io.StringIO(content % ("a" * 10**6))
    with pytest.raises(UserError, match=f"a.table, line [123]: {sentence}"):
        list(read_table("a.table", file, "text"))
    assert file.tell() < 3 * 997


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("t.jsonl", '{"text": "a"}\n\n{"text": 5}', "t.jsonl, line 3: expected a text, got 5"),
        ("t.jsonl", '{"text": "a"}\n{"text": "b\n{"text": "c"}', "t.jsonl: JSONDecodeError: Invalid .*: line 2"),
        ("t.jsonl", r'{"text": "a\ud83d"}', "t.jsonl, line 1 has half a character: UnicodeEncodeError"),
        ("t.jsonl", '{"text": "b"}\n{"c": 1}', "t.jsonl, line 2: expected a column 'text', got c: choose one by"),
        ("t.json", '[\n{"text": "a"},', "cannot read t.json: JSONDecodeError: Expecting value: line 2"),
        ("t.json", '[{"text": "a"},\n{"text": [5]}]', r"t.json, row 2: expected a text, got \[5"),
        ("t.csv", "text,text\n1,2\n", "t.csv: expected a column 'text', got text, text: choose"),
        ("t.csv", ",".join(map(str, range(9999))), "t.csv: expected a column 'text', got 0, 1, .{,70}[.]{3}: choose"),
        ("t.csv", 'n,text\n1,"a\nb"\n\n2\n', r"t.csv, line 5: 1 fields instead of 2"),
        ("t.csv", 'n,text\n1,a\n2,"b\n3,c\n', "t.csv, line 3: unexpected end of data .is there a quote that never"),
        ("t.csv", b"text\n\xff\xfea", "cannot read t.csv: UnicodeDecodeError: .*invalid start byte"),
        ("t.csv.zst", zstd(b"text\na")[:-3], "cannot read t.csv.zst: OSError: Truncated compressed stream"),
        ("t.parquet", b"version https://git-lfs.github.com/spec/v1\n", "t.parquet is a pointer of Git LFS"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(name: str, content: str | bytes, sentence: str) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=sentence) as error:
        make(name)
    assert len(str(error.value)) < 250 and not list(Path("prepared").glob("[!.]*"))


def test_a_row_without_text_is_left_out() -> None:
    values = ["a", None, "b", "", "c"]
    Path("t.jsonl").write_text(as_lines(values))
    Path("t.csv").write_text("n,text\n" + "".join(f"{value},{value or ''}\n" for value in values))
    pyarrow.parquet.write_table(pyarrow.table({"text": values, "n": range(5)}), "t.parquet")
    for name in ("t.jsonl", "t.csv", "t.parquet"):
        assert documents_of(make(name, "chars", val_fraction=0.4)) == ["a", "b", "c"]
    with pytest.raises(UserError, match="t.parquet, row 1: expected a text, got 0"):
        make("t.parquet", text_column="n")
    with pytest.raises(UserError, match="t.parquet: expected a column 'body', got text, n: choose one by"):
        make("t.parquet", text_column="body")


def test_the_sign_of_an_end_in_a_text_is_text(capsys: pytest.CaptureFixture) -> None:
    text = "one<|endoftext|>two<|endoftext|>"
    Path("a.txt").write_text(text)
    assert documents_of(make("a.txt", "bpe:300", val_fraction=0.4)) == [text]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("note: <|endoftext|> in a.txt is ordinary text; ")
    Path("t.jsonl").write_text('{"text": "a</s><s>b"}\n{"text": "b"}')
    model = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate("abs/<>")}, []))
    model.add_special_tokens(["<s>", "</s>"])
    model.save("tokenizer.json")
    Path("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    make("t.jsonl", "tokenizer.json", val_fraction=0.4)
    assert capsys.readouterr().err.startswith("note: </s> in t.jsonl is ordinary text; ")


def test_only_what_programs_have_made_is_left_out() -> None:
    """A suffix that is a language, and folders of others that have some names of a run or of a corpus."""
    names = ["d/news.pt", "d/news.so", "d/server/config.toml", "d/server/checkpoints/README", "d/x/meta.json.txt"]
    names += ["d/x/train.bin", "d/book.pt/page.txt"]
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("d/weights.pt").write_bytes(b"PK\3\4\0\0")
    Path("d/code.so").write_bytes(b"\x7fELF\2\1\1\0")
    assert sorted(read("d")) == sorted(names)


FOREIGN = {
    "story.rtf": (b"{\\rtf1\\ansi Once}", "rich text"),
    "a.txt": (b"%PDF-1.4\n1 0 obj", "a PDF: make it plain text"),
    "a.ps": (b"%!PS-Adobe-3.0\n", "PostScript"),
    "a.mht": (b"From: <Saved by Blink>\nSubject: a", "a web page with its pictures"),
    "corpus.zip": (b"PK\3\4\n\0\0\0\xe7", "an archive, as .zip, .docx, .xlsx and .epub are: unpack it"),
    "t.csv": (b"PK\3\4\x14\0\6\0", "an archive"),  # a table of Excel under another name
    "a.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1", "a document of an old Office"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_text_is_named_by_its_kind(name: str) -> None:
    content, sentence = FOREIGN[name]
    Path(name).write_bytes(content * 99)
    with pytest.raises(UserError, match=f"^{name} is {sentence}"):
        make(name)
    assert not list(Path("prepared").glob("[!.]*"))


def test_links_are_followed_once_and_hidden_names_are_left_out() -> None:
    for name in ("d/sub/b.txt", "elsewhere/c.txt", "d/.git/config", "d/__pycache__/a.pyc", "d/.x", "d/sub/empty.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("" if "empty" in name else name if "c.txt" not in name else "\ufeffline\r\n")
    Path("d/linked").symlink_to("../elsewhere")
    Path("d/sub/round").symlink_to("..")
    Path("elsewhere/round").symlink_to("../d/sub")
    Path("d/c2.txt").symlink_to("linked/c.txt")
    Path("d/sub/copy.txt").hardlink_to("d/sub/b.txt")  # as tools that save space make, so it is a document
    Path("d/broken").symlink_to("nowhere")
    os.mkfifo("d/pipe")
    run = ("config.toml", "metrics.jsonl", "checkpoints/c")
    corpus = ("train.bin", "val.bin", "meta.json", "tokenizer.json")
    made = [f"d/run/{name}" for name in run] + [f"d/corpus/{name}" for name in corpus]
    spark = ("d/_committed_7", "d/_delta_log/0.json", "d/_metadata", "d/_common_metadata")
    for name in (*made, *spark, "d/a.pt", "d/a.so", "d/a.safetensors"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("what was made of the text, or is none\0")
    Path("d/latin.txt" if sys.platform == "darwin" else "d/latin\udcff.txt").write_text("name")  # not UTF-8
    expected = ["line\r\n", "name", "d/sub/b.txt", "d/sub/b.txt"]
    assert documents_of(make("d", "chars")) == documents_of(make("d/")) == expected
    assert read("d/*.txt") == expected[:2] and read("d/[b-l]*/*.txt") == ["line\r\n"]
    assert sorted(read("d/**/[b-d]*.txt")) == sorted([expected[0], *expected[2:]])
    with pytest.raises(UserError, match=r"no text found at 'd/\.gi\*': give a file, a folder, a glob, bin:PATH"):
        make("d/.gi*")
    with pytest.raises(UserError, match=r"'\*\*/sub/\*\*' has \*\* twice: give the folder"):
        make("**/sub/**")

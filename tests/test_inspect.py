"""The command, as a user types it: what it prints, what it writes, and what it refuses in a sentence."""

import csv
import json
from pathlib import Path

import pytest
import torch

import inspect_attention
from data.tokenizer import load_tokenizer
from inspection import capture, files
from inspection.plots import drawable, mosaic_of_all, pool
from inspection.terminal import COLUMNS, grey, label, triangle
from model import GPT
from model.attention import attention_weights
from tests.conftest import make_gpt, tiny_run

FIRST, LAST = "checkpoints/step-00000004", "checkpoints/step-00000012"
TEXT = "12 is even.\n1"


@pytest.mark.parametrize(
    "token, shown",
    [
        (b" the", "␣the"),
        (b"\n", "↵"),
        (b"\t\r", "⇥⟨u+000d⟩"),
        (b"\xe2\x80", "⟨e2⟩⟨80⟩"),
        ("␣".encode(), "⟨u+2423⟩"),
        ("⟨e2⟩".encode(), "⟨u+27e8⟩e2⟨u+27e9⟩"),
        ("\u200b\u202e\u00a0".encode(), "⟨u+200b⟩⟨u+202e⟩⟨u+00a0⟩"),
        ("e\u0301".encode(), "e⟨u+0301⟩"),
        ("猫🐈".encode(), "猫🐈"),
        (b"</script>", "</script>"),
        (b"", ""),
    ],
)
def test_labels_show_every_character(token: bytes, shown: str) -> None:
    assert label(token) == shown


def test_no_two_bytes_have_one_label() -> None:
    assert len({label(bytes([byte])) for byte in range(256)}) == 256


def test_grey_letters() -> None:
    assert "".join(map(grey, [0, 0.09, 0.1, 0.55, 0.95, 1, float("nan")])) == "  .+@@ "
    assert triangle(torch.eye(3), ["a", "␣b", "c"], 80).splitlines()[1].endswith("␣b  @")


def test_pooling_keeps_the_largest() -> None:
    pattern = torch.zeros(7, 7)
    pattern[6, 4] = 0.8
    assert torch.equal(pool(pattern, 7), pattern)
    small = pool(pattern, 4)
    assert small.shape == (4, 4) and small[3, 2] == pattern[6, 4] and small.sum() == pattern[6, 4]


def test_what_the_font_does_not_have_is_spelled() -> None:
    pytest.importorskip("matplotlib")
    assert drawable("␣a⟨e2⟩↵") == "␣a⟨e2⟩↵" and drawable("猫") == "⟨u+732b⟩"


def test_the_table_has_a_line_for_every_head(run, straight: Path) -> None:
    result = run(inspect_attention, straight)
    assert result.exit_code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "text:   8 x 11 tokens of its validation text"
    assert lines[1] == "probe:  8 x [start, 5 random tokens, the same again]"
    assert lines[2].startswith("model:  straight step-00000012, loss ")
    assert "weights match the fused kernel: max row error " in lines[3] and "(float32, cpu)" in lines[3]
    title = next(number for number, line in enumerate(lines) if "near > far" in line)
    heads = [line.split()[0] for line in lines[title + 1 : title + 7]]
    assert sorted(heads) == [f"{layer}.{head}" for layer in range(2) for head in range(3)]
    assert max(map(len, lines)) <= 80
    column = lines[title].split().index("ind") - len(lines[title].split())
    scores = [float(line.split()[column]) for line in lines[title + 1 : title + 7]]
    assert scores == sorted(scores, reverse=True)
    in_order = run(inspect_attention, straight, "--sort", "head").out.splitlines()[title + 1 : title + 7]
    assert [line.split()[0] for line in in_order] == sorted(heads)


def test_what_is_written_is_what_the_model_did(run, straight: Path, tmp_path: Path) -> None:
    """All formats in one command; the numbers against a model that is opened and captured here."""
    pytest.importorskip("matplotlib")
    names = ("a.png", "a.svg", "a.html", "a.npz", "a.safetensors", "a.csv", "a.json")
    outputs = [word for name in names for word in ("-o", tmp_path / name)]
    result = run(
        inspect_attention, straight, "--text", TEXT, "--heads", "1.*", "last.0", "0.-1", "--ablate", "mean", *outputs
    )
    assert result.exit_code == 0, result.err
    assert [line for line in result.out.splitlines() if line.startswith("wrote")] == [
        f"wrote {tmp_path / n}" for n in names
    ]
    assert not [path.name for path in tmp_path.iterdir() if "tmp" in path.name or "partial" in path.name]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "a.svg").read_text()

    model, tokenizer = GPT.from_pretrained(straight), load_tokenizer(straight / LAST)
    idx = torch.tensor([tokenizer.encode(TEXT)[:11]])
    assert "the first 11 of 13 tokens: the last 2 do not fit the context of 11" in result.out
    with capture(model) as att, torch.no_grad():
        model(idx)
    expected = att.scores()
    for name in ("a.npz", "a.safetensors"):
        saved = files.load(tmp_path / name)
        assert torch.equal(saved.tokens, idx[0]) and saved.about["labels"][2:4] == ["␣", "i"]
        assert saved.about["step"] == 12 and saved.about["config"]["n_embd"] == 15
        assert max(saved.att.verify().values()) < 1e-5
        for layer in range(2):
            assert all(torch.equal(*pair) for pair in zip(saved.att[layer], att[layer], strict=True))
            torch.testing.assert_close(saved.att.patterns(layer), att.patterns(layer), rtol=0, atol=1e-6)
        torch.testing.assert_close(saved.scores["entropy"].double(), expected["entropy"], rtol=0, atol=1e-6)
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    content = json.loads((tmp_path / "a.json").read_text())
    assert {row["head"] for row in rows} == {"1.0", "1.1", "1.2", "0.2"}
    assert len(rows) == len(content["scores"]) and content["tokens"] == idx[0].tolist()
    for row in rows:
        if row["metric"] in expected:
            layer, head = map(int, row["head"].split("."))
            assert float(row["mean"]) == pytest.approx(expected[row["metric"]][layer, head].item(), abs=1e-5)
    assert {"ablation", "induction", "induction_control", "entropy"} <= {row["metric"] for row in rows}
    assert "1.1, a line a query:" in result.out


def test_pictures_are_the_same_bytes_again(run, straight: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        assert run(inspect_attention, straight, "-o", tmp_path / name).exit_code == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_it_is_said_at_once(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(inspect_attention, straight, "-o", tmp_path / "a.png")
    assert result.exit_code == 2 and "pictures are drawn by matplotlib: pip install" in result.err and not result.out


def test_checkpoints_make_a_timeline(run, straight: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outputs = [word for name in ("t.png", "t.html", "t.json") for word in ("-o", tmp_path / name)]
    result = run(inspect_attention, *sorted((straight / "checkpoints").iterdir()), *outputs)
    assert result.exit_code == 0, result.err
    rows = json.loads((tmp_path / "t.json").read_text())["scores"]
    assert sorted({row["step"] for row in rows}) == [4, 8, 12]
    alone = run(inspect_attention, straight / FIRST, "-o", tmp_path / "one.json")
    assert alone.exit_code == 0
    first = [row for row in rows if row["step"] == 4]
    assert first == json.loads((tmp_path / "one.json").read_text())["scores"]
    losses = {row["step"]: row["loss"] for row in rows}
    assert losses[4] > losses[12]


def test_generated_text_is_seen_as_it_was_decoded(run, straight: Path, tmp_path: Path) -> None:
    result = run(inspect_attention, straight, "--text", "12 i", "--generate", 7, "-o", tmp_path / "a.npz")
    assert result.exit_code == 0 and "text:   4 tokens, and 7 that it wrote" in result.out
    saved, model = files.load(tmp_path / "a.npz"), GPT.from_pretrained(straight)
    assert torch.equal(model.generate(saved.tokens[None, :4], 7, temperature=0.8, seed=0)[0], saved.tokens)
    with capture(model) as att, torch.no_grad():
        model(saved.tokens[None])
    for layer in range(2):
        torch.testing.assert_close(saved.att.patterns(layer), att.patterns(layer), rtol=0, atol=1e-6)


def test_a_model_from_elsewhere_reads_the_standard_library(run, straight: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (alone / name).write_bytes((straight / LAST / name).read_bytes())
    result = run(inspect_attention, alone)
    assert result.exit_code == 0, result.err
    assert "8 x 11 tokens of the Python standard library, as its validation text is not here" in result.out


def test_an_older_precision_is_that_of_the_training(run, straight: Path) -> None:
    assert "(bfloat16, cpu)" in run(inspect_attention, straight, "--dtype", "bfloat16").out


def test_weights_that_are_not_the_kernels_are_not_shown(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("inspection.patterns.attention_weights", lambda q, k, mask: attention_weights(2 * q, k, mask))
    result = run(inspect_attention, straight, "-o", tmp_path / "a.html", "-o", tmp_path / "a.csv")
    assert result.exit_code == 1 and "the weights shown are not those of the kernel" in result.err
    assert not list(tmp_path.glob("a.*")) and "0.0" not in result.out


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "which checkpoint?"),
        (["{run}", "--heads", "2.0"], "there is no head 2.0: layers are 0 to 1, or -2 to -1"),
        (["{run}", "--heads", "-1.7"], "there is no head -1.7: heads are 0 to 2, or -3 to -1"),
        (["{run}", "--heads", "five"], "a head is written LAYER.HEAD, as 5.1, 5.*, -1.* or last.*, got 'five'"),
        (["{run}", "-o", "a.gif"], "a.gif: what is written ends in one of .png, .svg, .html,"),
        (["{run}", "-o", "{tmp}/no/a.png"], "cannot write {tmp}/no/a.png: "),
        (["{run}", "{run}/" + FIRST, "-o", "a.npz"], "a.npz holds the queries and keys of one checkpoint, got 2"),
        (["{run}", "--generate", "0"], "generate must be at least 1, got 0"),
        (["{run}", "--generate", "11"], "generate 11 leaves no room for a text: the context has 11 tokens"),
        (["{run}", "--text", "1"], "attention is between tokens, and the text has only one"),
        (["{run}", "--text", "@{tmp}/none"], "what begins with @ names a file, and there is no file"),
        (["{run}", "{other}"], "a timeline has checkpoints of one shape and tokenizer: those of {other}"),
        (["{tmp}"], "{tmp} is neither an intact checkpoint nor a run that has one"),
        (["{bare}"], "{bare} has no tokenizer that this version can read"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    run, straight: Path, corpus_file: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    names = {"run": straight, "tmp": tmp_path, "other": tmp_path / "other", "bare": tmp_path / "bare"}
    if "{other}" in words:
        import train

        assert run(train, *tiny_run(corpus_file, names["other"], model__n_layer=3, train__max_steps=1)).exit_code == 0
        names["other"] = names["other"] / "checkpoints" / "step-00000001"
    if "{bare}" in words:
        names["bare"].mkdir()
        for name in ("config.json", "model.safetensors"):
            (names["bare"] / name).write_bytes((straight / LAST / name).read_bytes())
    result = run(inspect_attention, *(word.format(**names) for word in words))
    assert result.exit_code == 2 and len(result.err.strip().splitlines()) == 1
    assert message.format(**names) in result.err
    assert not result.out


def test_all_heads_in_one_picture() -> None:
    model = make_gpt().eval()
    with capture(model) as att:
        model(torch.randint(17, (1, 11)))
    picture = mosaic_of_all(att)
    assert picture.dtype.name == "uint8" and picture.shape == (2 * 16, 3 * 13)
    assert picture[5, 0] == 0 and picture[0].min() == 255  # query 0 has nowhere else to look; above is blank


def test_columns_are_metrics() -> None:
    from inspection.metrics import __doc__ as definitions

    for name in COLUMNS.keys() - {"ablation", "induction_control"}:
        assert f"\n    {name} " in definitions

"""inspect_attention.py as a user types it: the table, pictures and pages, ablation, and refusals."""

import base64
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import inspect_attention
from data.prepare import find_prepared
from data.tokenizer import load_tokenizer
from inspection import inspect_heads
from inspection.checkpoints import OurNames, name_of_model, open_model
from model import GPT
from model.checkpoint import find_checkpoint
from model.device import dtype_name
from tests.conftest import make_gpt, metrics, save_gpt
from tests.tril.test_capture import run_captured
from tests.tril.test_page import data_of, stored
from tril import ablate, capture, head_scores, influence, page, terminal
from tril.experiments import predict
from tril.inspection import Inspection
from tril.kinds import name_of
from tril.metrics import METRICS, HeadScores
from tril.terminal import label, triangle
from tril.weights import attention_weights

FIRST, LAST = "checkpoints/step-00000004", "checkpoints/step-00000012"
TEXT = "12 is even.\n1"
WRITTEN = ("a.PNG", "a.svg", "a.html")


def texts_of(run_directory: Path) -> torch.Tensor:
    """Return the eight validation texts that are measured if no text is given."""
    trainer = json.loads((run_directory / LAST / "trainer.json").read_text())
    tokens = find_prepared(trainer).tokens["val"]
    starts = np.linspace(0, len(tokens) - 11, 8).astype(int)
    return torch.from_numpy(np.stack([tokens[start : start + 11] for start in starts]).astype(np.int64))


def test_labels_show_every_character() -> None:
    tokens = {" the": "␣the", "\t\r\n": "⇥\\r↵", "\u200b\u202e": "\\u200b\\u202e", "猫🐈</script>": "猫🐈</script>"}
    assert [label(token.encode()) for token in tokens] == [*tokens.values()]
    assert label(b"\xe2\x80") == "\\xe2\\x80"
    assert len({label(bytes([byte])) for byte in range(256)}) == 256


def test_a_head_is_drawn_in_characters() -> None:
    pattern = torch.tensor([[1.0, 0, 0], [0.09, 0.91, 0], [0.55, 0.1, 0.35]])
    lines = triangle(pattern, ["a", "␣b", "a label that is too long"], 80).splitlines()
    assert [line[22:] for line in lines] == ["@", " @", "+.-"] and lines[1].endswith("␣b  @")
    assert "do not fit 80 columns: give a shorter --text, or" in triangle(torch.eye(70), ["a"] * 70, 80)


def test_the_table_has_a_line_for_every_head(run, straight: Path) -> None:
    lines = run(inspect_attention, straight).ok().out.splitlines()
    assert lines[0] == "text:   8 x 11 tokens of its validation text, in pictures the first 11"
    assert lines[1] == "probe:  8 x [start, 5 random tokens of the validation text, the same again]"
    assert "weights match the fused kernel: max row error " in lines[3] and "(float32, cpu)" in lines[3]
    assert max(map(len, lines)) <= 80
    expected = head_scores(GPT.from_pretrained(straight), texts_of(straight))
    assert lines[2] == f"model:  straight step-00000012, loss {expected.losses.mean():.4f} on the text"
    assert lines[6].split() == ["head", *(title for title, _, _ in METRICS.values() if title != "loss")]
    for head, line in zip([(layer, head) for layer in range(2) for head in range(3)], lines[7:13], strict=True):
        name, entropy, *_ = line.split()
        assert name == f"{head[0]}.{head[1]}" and entropy == f"{expected.mean['entropy'][head]:.2f}"
    even = {name: values[0, 0] for name, values in expected.chance.items()}
    expected_even = [format(even[name], METRICS[name][1]) for name in METRICS if name in even]
    assert lines[13].split()[: 1 + len(expected_even)] == ["even", *expected_even]
    assert lines[16].startswith("heads by where they look")


def test_of_many_heads_the_best_are_shown(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(terminal, "MOST_ROWS", 5)
    monkeypatch.setattr(page, "MOST_WEIGHTS", 2 * 3 * 66)
    few, every = (run(inspect_attention, straight, *words).out for words in ([], ["--heads", "*.*"]))
    in_table = re.findall(r"^ (\d\.\d) ", few, re.M)
    assert f'{len(in_table)} of 6 heads; --heads "*.*" shows all' in few and "head 0.0:" not in every
    assert sum(map(int, re.findall(r"^ +(\d+)  [a-z ,]+(?::|$)", few, re.M))) == 6
    assert re.findall(r"^ (\d\.\d) ", every, re.M) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    missed = run(inspect_attention, straight, "--ablate", "zero").out
    rises = [float(rise) for rise in re.findall(r"^ \d\.\d .* (\S+) ± ", missed, re.M)]
    assert len(rises) == 5 and rises == sorted(rises, reverse=True)
    refused = run(inspect_attention, straight / FIRST, straight / LAST, "-o", tmp_path / "a.html")
    assert refused.exit_code == 2 and not refused.out
    assert "room for 2 heads of 11 tokens in each of 2 checkpoints, not 6: give fewer --heads" in refused.err


def test_the_log_of_a_run_and_its_inspection_have_the_same_induction(run, straight: Path) -> None:
    """Also with another text, and where the validation text is gone."""
    logged = metrics(straight, "heads")[12]
    checkpoint = find_checkpoint(straight)
    for text in (None, TEXT):
        found = inspect_heads(checkpoint, text, device="cpu")
        scores = found.scores
        assert scores.mean.keys() == logged.keys()
        for name in ("induction", "induction_control", "duplicate"):
            torch.testing.assert_close(scores.mean[name], torch.tensor(logged[name]).double(), rtol=0, atol=1e-4)
    assert found.note.endswith("\nprobe:  8 x [start, 5 random tokens of the validation text, the same again]")
    probed = set(found.probe.repeated[:, 1:].unique().tolist())
    assert probed <= set(checkpoint.trainer["probe_tokens"])
    assert "id=&quot;page&quot;" in found._repr_html_()  # in a notebook


@pytest.mark.long
def test_pages_and_pictures_hold_what_the_model_did(run, straight: Path, tmp_path: Path) -> None:
    """Write all formats in one command. Compare the numbers with a model that is opened and captured here."""
    straight = straight.rename(tmp_path / "$x_{$ 猫")  # a picture has this in its title
    outputs = [word for name in WRITTEN for word in ("-o", tmp_path / name)]
    result = run(inspect_attention, straight, "--text", TEXT, "--heads", "1.*", "-1.0", "0.2", *outputs).ok()
    wrote = [line for line in result.out.splitlines() if line.startswith("wrote ")]
    assert wrote == [f"wrote {tmp_path / name}" for name in WRITTEN]
    assert "text:   the first 11 of 13 tokens\n" in result.out
    assert "head 1.1, where it looks: a line is a query, a character a key, in the order of lines" in result.out
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "a.svg").read_text()

    tokenizer, names = load_tokenizer(straight / LAST), ["1.0", "1.1", "1.2", "0.2"]
    idx = torch.tensor([tokenizer.encode(TEXT)[:11].tolist()])
    att = run_captured(GPT.from_pretrained(straight), idx)
    content = data_of(tmp_path / "a.html")
    assert content["heads"] == names and content["labels"][2:4] == ["␣", "i"]
    for name in names:
        layer, head = map(int, name.split("."))
        weights = torch.from_numpy(stored(tmp_path / "a.html", f"0/{name}")).float()
        torch.testing.assert_close(weights, att.pattern(layer, head)[0], rtol=0, atol=1 / 65535)
    shares = influence(GPT.from_pretrained(straight), idx)
    expected = predict(GPT.from_pretrained(straight), idx)[2]
    assert np.abs(stored(tmp_path / "a.html", "0/influence") - shares.numpy()).max() < 1e-4
    predictions = content["checkpoints"][0]["predictions"]
    assert [chance for _, chance, _ in predictions] == [f"{probability:.1%}" for _, probability, _ in expected]
    assert predictions[0][0] == OurNames(tokenizer).label(expected[0][0])


def test_places_are_printed_and_on_the_page_of_the_last_checkpoint(run, straight: Path, tmp_path: Path) -> None:
    words = [straight / FIRST, straight / LAST, "--view", "places", "-o", tmp_path / "t.html"]
    result = run(inspect_attention, *words)
    found = inspect_heads(straight)
    assert max(map(len, result.out.partition("\nwrote ")[0].splitlines())) <= 80, result.err
    for head in found.heads:
        assert f"\nhead {name_of(head)}\n{found.places(*head)}\n" in result.out
    (packed,) = re.findall(r'id="(\d/places)">([^<]*)<', (tmp_path / "t.html").read_text())
    texts, shown = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    assert packed[0] == "1/places"
    for head, (note, groups) in zip(found.heads, shown, strict=True):
        expected = found.places(*head)
        assert note == expected.note
        for (title, places), (expected_title, expected_places) in zip(groups, expected.groups, strict=True):
            assert title == expected_title
            assert [tuple(place) for place in places] == [place[:5] for place in expected_places]
            assert all(texts[str(place.start)] == place.labels for place in expected_places)

    (tmp_path / "long.txt").write_text("one two three. " * 50)
    other = run(inspect_attention, straight, "--corpus", tmp_path / "long.txt", "--view", "places", "--heads", "1.1")
    assert "text:   8 x 11 tokens of the corpus, in pictures" in other.out
    assert "\n748 of 750 tokens\n" in other.out
    assert other.out.count("\nhead 1.1\n") == 1 and "where it looks: a line" not in other.out
    assert set(re.findall("«(.)»", other.out)) <= {"␣", *"onetwhr."}
    rows = [{"text": "one two three. " * 25, "name": "X" * 99}] * 2  # read as training reads them, by their column
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = run(inspect_attention, straight, "--corpus", tmp_path / "rows.jsonl", "--view", "places", "--heads", "1.1")
    assert table.out == other.out


def test_why_is_asked_of_a_head_a_query_and_a_key(run, straight: Path) -> None:
    words = [straight, "--text", TEXT, "--heads", "1.1", "--view", "why", "--at"]
    lines = run(inspect_attention, *words, 5, 3).ok().out.splitlines()
    assert lines[-8:] == ["head 1.1", *str(inspect_heads(straight, TEXT).why(1, 1, 5, 3)).splitlines()][-8:]
    assert max(map(len, lines)) <= 80
    run(inspect_attention, *words, 3, 5).refused("token 3 sees tokens 0 to 3, not 5")


def test_ablation_stands_beside_its_error(run, straight: Path) -> None:
    result = run(inspect_attention, straight, "--ablate", "mean")
    assert max(map(len, result.out.splitlines())) <= 80
    rises = ablate(GPT.from_pretrained(straight), texts_of(straight), [(1, 2)], "mean")[:, 1, 2]
    assert f"{rises.mean():+.4f} ± {rises.std() / 8**0.5:.4f}" in result.out
    alone = run(inspect_attention, straight, "--ablate", "zero", "--text", TEXT)
    assert alone.exit_code == 0 and "±" not in alone.out and "nan" not in alone.out


@pytest.mark.long
def test_what_a_model_writes_is_inspected_with_what_it_was_given(run, straight: Path, tmp_path: Path) -> None:
    """The likeliest tokens are those of `GPT.generate`, and a seed decides the others."""

    def inspect(*words: object) -> tuple[dict, list[str]]:
        result = run(inspect_attention, straight, "--generate", 5, *words, "-o", tmp_path / "a.html").ok()
        return data_of(tmp_path / "a.html"), result.out.splitlines()

    model, tokenizer = GPT.from_pretrained(straight), load_tokenizer(straight / LAST)
    idx = torch.tensor([tokenizer.encode("1 is").tolist()])
    likeliest = model.generate(idx, 5, temperature=0)[0].tolist()
    content, lines = inspect("--text", "1 is", "--temperature", 0)
    label = OurNames(tokenizer).label
    assert content["labels"] == [*map(label, likeliest)] and content["given"] == 4
    assert lines[0] == "text:   9 tokens, of which the model wrote 5"
    assert lines[2] == f"wrote:  {''.join(content['labels'][4:])}"
    first, second, third = (inspect("--seed", seed)[0]["labels"] for seed in (7, 7, 8))
    assert first == second != third and len(first) == 6 and first[0] == "⟦<|endoftext|>⟧"
    _, lines = inspect("--text", TEXT[:9])
    assert lines[0] == "text:   11 tokens, of which the model wrote 2, then the context was full"
    content, lines = inspect("--text", TEXT)
    assert content["given"] == 11
    assert lines[0].startswith("text:   the first 11 of 13 tokens, of which the model wrote 0,")


def test_checkpoints_make_a_timeline(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(straight)
    paths = [LAST, straight / FIRST, "checkpoints/step-00000008", f"checkpoints/../{LAST}"]
    result = run(inspect_attention, *paths, "-o", tmp_path / "t.html")
    assert result.exit_code == 0 and "\nstraight step-00000012, on average\n" in result.out, result.err
    summaries = [each["summary"] for each in data_of(tmp_path / "t.html")["checkpoints"]]
    assert [summary.split(" · ")[0] for summary in summaries] == [f"straight step-{n:08d}" for n in (4, 8, 12)]
    first = run_captured(GPT.from_pretrained(straight / FIRST), texts_of(straight)).pattern(1, 2)[0]
    assert np.abs(stored(tmp_path / "t.html", "0/1.2") - first.numpy()).max() <= 1 / 65535


def test_two_runs_are_compared_on_the_text_of_the_first(run, straight: Path, tmp_path: Path) -> None:
    other = shutil.copytree(straight / FIRST, tmp_path / "other")
    result = run(inspect_attention, straight, other, "-o", tmp_path / "both.html").ok()
    losses = [head_scores(GPT.from_pretrained(place), texts_of(straight)).losses.mean() for place in (straight, other)]
    assert f"\nloss {losses[0]:.4f} of straight step-00000012, {losses[1]:.4f} of other: " in result.out
    assert result.out.startswith("text:   8 x 11 tokens of its validation text")
    names = [each["name"] for each in data_of(tmp_path / "both.html")["checkpoints"]]
    assert names == ["straight step-00000012", "other"]


@pytest.mark.parametrize("only_shown", [False, True])
def test_weights_that_are_not_the_kernels_are_not_shown(run, straight: Path, tmp_path: Path, monkeypatch, only_shown):
    """The text of the pictures has a proof of its own."""
    monkeypatch.setattr("tril.weights.attention_weights", lambda *given: 0.9 * attention_weights(*given))
    if only_shown:
        monkeypatch.setattr(Inspection, "scores", HeadScores({}, torch.zeros(1), [], [], {}, {}))
    result = run(inspect_attention, straight, "--text", "12 i", "-o", tmp_path / "a.svg")
    assert result.exit_code == 1 and "the weights shown are not those of the kernel" in result.err
    assert not list(tmp_path.glob("a.*")) and "0.0" not in result.out


@pytest.mark.parametrize(
    "units, stored, trained, weights, products",
    [
        (True, "float32", "bfloat16", "float32", "bfloat16"),
        (False, "float32", "bfloat16", "float32", "float32"),
        (True, "bfloat16", None, "bfloat16", "bfloat16"),
        (False, "bfloat16", None, "float32", "float32"),
        (True, "float16", None, "float32", "float32"),  # a CPU is slow in it
        (True, "float64", None, "float64", "float64"),
    ],
)
def test_precision_is_one_that_the_machine_is_good_at(
    units: bool, stored: str, trained: str, weights: str, products: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("model.device.has_bfloat16", lambda _: units)
    about = {"environment": {"dtype": trained}} if trained else {}
    saved = save_gpt(tmp_path, 1, make_gpt().to(getattr(torch, stored)), {}, about=about)
    model = open_model(find_checkpoint(saved), torch.device("cpu"))
    with capture(model) as att, torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert (dtype_name(model.lm_head.weight.dtype), dtype_name(att.calls[0].q.dtype)) == (weights, products)
    slow = products != (trained or stored)
    assert ("device: cpu, in float32: it is slow in " in capsys.readouterr().out) == slow


def test_a_model_of_the_hub_has_its_name() -> None:
    snapshot = Path("/somewhere/hub/models--openai-community--gpt2/snapshots/607a30d783df")
    assert name_of_model(snapshot) == "openai-community/gpt2"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--heads", "0.1", "{run}"], "give a checkpoint first of all"),
        (["{run}", "--heads", "2.0"], "there is no head 2.0: the model has 2 layers of 3 heads"),
        (["{run}", "{run}/checkpoints/step-00000008", "--generate", "5"], "--generate takes one checkpoint, got 2"),
        (["{run}", "--generate", "-3"], "generate must be a number from 0 to "),
        (["{run}", "--generate", "5", "--top_k", "-1"], "top_k must be a number from 0 to "),
        (["{run}", "--text", "a", "--text", "b"], "--text was given twice: give one text, as in a file"),
        (["{run}", "--at", "5", "3"], "--at names the two tokens of --view why"),
        (["{run}", "-o", "a.gif"], "a.gif: the name of an output must end in one of .html, .png, .svg, .npz"),
        (["{run}", "-o", "{tmp}/no/a.png"], "cannot write {tmp}/no/a.png: it is a directory, or in none"),
        (["{run}", "--corpus", "{tmp}/none.txt"], "no text found at '{tmp}/none.txt'"),
        (["{run}", "--corpus", "{tmp}/short.txt"], "attention is between tokens: give a text of two or more"),
        (["{run}", "--corpus", "{run}/checkpoints/step-00000012/model.safetensors"], "codec can't decode"),
        (["{other}", "--text", "a b", "--view", "places"], "validation text is not here, give one with --corpus FILE"),
        (["{run}", "{run}/checkpoints/step-00000008", "{other}"], "two to compare, or several step-... of a run"),
        (["{run}", "{other}", "-o", "a.png"], "a.png: the name of an output must end in one of .html"),
        (["{run}", "{other}", "--live"], "--live and --view take one model, got two: leave"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(run, straight: Path, tmp_path: Path, words: list, message: str) -> None:
    names = {"run": straight, "tmp": tmp_path, "other": tmp_path / "other"}
    (straight / FIRST).rename(names["other"])
    (tmp_path / "short.txt").write_text("a")
    if "places" in words:
        shutil.rmtree(tmp_path / "prepared")
    result = run(inspect_attention, *(word.format(**names) for word in words))
    assert result.exit_code == 2 and len(result.err.strip().splitlines()) == 1
    assert message.format(**names) in result.err and not result.out

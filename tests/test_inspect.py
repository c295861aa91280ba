"""The command, as a user types it: what it prints, what it writes, and what it refuses in a sentence."""

import base64
import csv
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

import inspect_attention
from data.prepare import find_prepared
from data.tokenizer import TiktokenTokenizer, load_tokenizer
from inspection import HeadScores, ablate, capture, files, head_scores, influence, plots, rollout
from inspection.metrics import DEFINITIONS, PICTURE
from inspection.plots import drawable, pool
from inspection.terminal import COLUMNS, grey, label, table, triangle
from model import GPT, ModelError
from model.attention import Attend, attention_weights
from tests.conftest import sign, tiny_run

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
    lines = triangle(torch.eye(3), ["a", "␣b", "a label that is too long"], 80).splitlines()
    assert lines[1].endswith("␣b  @") and [line.index("@") for line in lines] == [22, 23, 24]
    assert (
        triangle(torch.eye(70), ["a"] * 70, 80)
        == "(a picture of 70 tokens does not fit 80 columns: write it to a file, with -o)"
    )


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
    assert max(map(len, lines)) <= 80
    title = next(number for number, line in enumerate(lines) if "near > far" in line)

    def heads_by(sort: str) -> list[str]:
        return [
            line.split()[0]
            for line in run(inspect_attention, straight, "--sort", sort).out.splitlines()[title + 1 :][:6]
        ]

    named = [f"{layer}.{head}" for layer in range(2) for head in range(3)]
    assert heads_by("head") == named
    model, tokens = GPT.from_pretrained(straight), find_val_tokens(straight)
    starts = np.linspace(0, len(tokens) - 11, 8).astype(int)
    windows = torch.from_numpy(np.stack([tokens[start : start + 11] for start in starts]).astype(np.int64))
    expected = head_scores(model, windows).mean
    for sort, metric in (("prev", "previous"), ("distance", "distance"), ("entropy", "entropy"), ("auto", "sink")):
        order = sorted(named, key=lambda name: -expected[metric][tuple(map(int, name.split(".")))].item())
        assert heads_by(sort) == order
    assert f"loss {head_scores(model, windows).losses.mean():.4f} on the text" in lines[2]
    assert lines[title].split().count("sink↓") == 1 and lines[title + 7].startswith("s.e.≤")


def find_val_tokens(run_directory: Path) -> np.ndarray:
    trainer = json.loads((run_directory / LAST / "trainer.json").read_text())
    return find_prepared(trainer["fingerprint"], trainer["config"]["data"]["source"]).tokens["val"]


def test_what_is_written_is_what_the_model_did(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    """All formats in one command; the numbers against a model that is opened and captured here."""
    pytest.importorskip("matplotlib")
    names = ("a.png", "a.svg", "a.html", "a.npz", "a.safetensors", "a.csv", "a.json")
    outputs = [word for name in names for word in ("-o", tmp_path / name)]
    drawn, original = set(), plots.draw_heads

    def draw(path, title, labels, heads, pattern, scores) -> None:
        opened = GPT.from_pretrained(straight)
        with capture(opened) as att, torch.no_grad():
            opened(torch.tensor([load_tokenizer(straight / LAST).encode(TEXT)[:11].tolist()]))
        for head in heads:
            drawn.add(head)
            torch.testing.assert_close(pattern(head), att.pattern(*head)[0], rtol=0, atol=1e-6)
        original(path, title, labels, heads, pattern, scores)

    monkeypatch.setattr(plots, "draw_heads", draw)
    words = ("--text", TEXT, "--heads", "1", "last.0", "0.-1", "--ablate", "mean")
    result = run(inspect_attention, straight, *words, *outputs)
    assert result.exit_code == 0, result.err
    assert [line for line in result.out.splitlines() if line.startswith("wrote")] == [
        f"wrote {tmp_path / n}" for n in names
    ]
    assert not [path.name for path in tmp_path.iterdir() if "tmp" in path.name or "partial" in path.name]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "a.svg").read_text()

    model, tokenizer = GPT.from_pretrained(straight), load_tokenizer(straight / LAST)
    idx = torch.tensor([tokenizer.encode(TEXT)[:11].tolist()])
    assert "the first 11 of 13 tokens: a context of 11 has no room for the last 2" in result.out
    assert drawn == {(1, 0), (1, 1), (1, 2), (0, 2)}
    page = (tmp_path / "a.html").read_text()
    with capture(model) as att, torch.no_grad():
        model(idx)
    expected = att.scores()
    for name in ("1.0", "1.1", "1.2", "0.2"):
        head = tuple(map(int, name.split(".")))
        torch.testing.assert_close(from_page(page, name), att.pattern(*head)[0], rtol=0, atol=1 / 65535)
    torch.testing.assert_close(from_page(page, "rollout"), rollout(att)[0], rtol=0, atol=1 / 65535)
    shares, tokens, probabilities = influence(model, idx, range(11))
    torch.testing.assert_close(from_page(page, "influence"), shares, rtol=0, atol=1e-4)
    told = json.loads(re.search(r'<script type="application/json" id="page">(.*?)</script>', page)[1])["snapshots"][0]
    assert [chance for _, chance in told["predictions"]] == pytest.approx(probabilities.tolist(), rel=1e-4)
    assert [name for name, _ in told["predictions"]][0] == inspect_attention.label(tokenizer, tokens[0].item())
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
    assert "head 1.1: a line is a query, a letter is a key" in result.out


def from_page(page: str, name: str) -> torch.Tensor:
    """(T, T) as the page's script decodes it."""
    packed = re.search(rf'id="0/{re.escape(name)}">(.*?)</script>', page)[1]
    planes = (
        np.frombuffer(zlib.decompress(base64.b64decode(packed + "==")), dtype=np.uint8).reshape(2, -1).astype(float)
    )
    square = np.zeros((11, 11), dtype=np.float32)
    square[np.tri(11, dtype=bool)] = (planes[0] + 256 * planes[1]) / 65535
    return torch.from_numpy(square)


def test_numbers_stand_beside_their_own_errors(run, straight: Path, tmp_path: Path) -> None:
    result = run(inspect_attention, straight, "--ablate", "zero", "-o", tmp_path / "a.json")
    assert max(map(len, result.out.splitlines()[:-1])) <= 80  # but for the path of the file
    tokens, model = find_val_tokens(straight), GPT.from_pretrained(straight)
    starts = np.linspace(0, len(tokens) - 11, 8).astype(int)
    windows = torch.from_numpy(np.stack([tokens[start : start + 11] for start in starts]).astype(np.int64))
    (rises,) = ablate(model, windows, [(1, 2)])
    samples = {name: values[:, 1, 2] for name, values in head_scores(model, windows).samples.items()}
    samples["ablation"] = rises
    for row in json.loads((tmp_path / "a.json").read_text())["scores"]:
        if row["head"] == "1.2" and row["metric"] in samples:
            values = samples[row["metric"]]
            assert row["mean"] == pytest.approx(values.mean().item(), abs=1e-5), row["metric"]
            assert row["standard_error"] == pytest.approx(values.std().item() / 8**0.5, abs=1e-5), row["metric"]
    assert f"{rises.mean():+.4f} ± {rises.std() / 8**0.5:.4f}" in result.out
    alone = run(inspect_attention, straight, "--ablate", "zero", "--text", TEXT)
    assert alone.exit_code == 0 and "±" not in alone.out and "nan" not in alone.out


def test_a_picture_has_one_scale_from_zero_to_one(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    from matplotlib.axes import Axes

    scales, original = [], Axes.imshow

    def imshow(self, *arguments, norm, **options):
        scales.append((norm.vmin, norm.vmax))
        return original(self, *arguments, norm=norm, **options)

    monkeypatch.setattr(Axes, "imshow", imshow)
    for number, words in enumerate(([], ["--heads", "0.1"], ["--text", TEXT])):
        assert run(inspect_attention, straight, *words, "-o", tmp_path / f"{number}.png").exit_code == 0
    assert len(scales) >= 8 and set(scales) == {(0, 1)}


def test_a_link_is_written_through(run, straight: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to(tmp_path / "real.csv")
    assert run(inspect_attention, straight, "-o", tmp_path / "a.csv").exit_code == 0
    assert (tmp_path / "a.csv").is_symlink() and (tmp_path / "real.csv").read_text().startswith("checkpoint,step,loss")


def test_without_a_probe_there_is_nothing_to_sort_by(run, corpus_file: Path, tmp_path: Path) -> None:
    import train

    short = {"model__context_length": 4, "train__max_steps": 1}
    assert run(train, *tiny_run(corpus_file, tmp_path / "short", **short)).exit_code == 0
    result = run(inspect_attention, tmp_path / "short", "--sort", "ind")
    assert result.exit_code == 2 and "ind is measured on a probe" in result.err
    result = run(inspect_attention, tmp_path / "short")
    assert result.exit_code == 0 and "probe:" not in result.out and " ind" not in result.out


def test_a_run_is_one_however_its_paths_are_spelled(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(straight)
    result = run(inspect_attention, FIRST, straight / LAST, f"checkpoints/../{FIRST}", "--sort", "head")
    assert result.exit_code == 0, result.err
    names = [line.split(",")[0] for line in result.out.splitlines() if line.startswith("model:")]
    assert names == ["model:  straight step-00000004", "model:  straight step-00000012"]


def test_other_files_are_left_alone(run, straight: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json.tmp").mkdir()
    (tmp_path / "a.json.tmp" / "mine").write_text("precious")
    assert run(inspect_attention, straight, "-o", tmp_path / "a.json").exit_code == 0
    assert (tmp_path / "a.json.tmp" / "mine").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} >= {"a.json", "a.json.tmp"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".a")]


@pytest.mark.long
def test_a_name_of_a_run_may_hold_anything(run, straight: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    straight = straight.rename(tmp_path / "$x_{$ 猫")
    assert run(inspect_attention, straight, "-o", tmp_path / "a.png").exit_code == 0
    assert run(inspect_attention, *(straight / "checkpoints").iterdir(), "-o", tmp_path / "b.png").exit_code == 0


def test_a_reader_that_has_enough_does_not_keep_files_from_being_written(straight: Path, tmp_path: Path) -> None:
    script = Path(inspect_attention.__file__)
    command = [sys.executable, script, straight, "-o", tmp_path / "a.csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0 and (tmp_path / "a.csv").read_text().startswith("checkpoint,step,loss")


@pytest.mark.long
def test_pictures_are_the_same_bytes_again(run, straight: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        assert run(inspect_attention, straight, "-o", tmp_path / name).exit_code == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_it_is_said_at_once(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(inspect_attention, straight, "-o", tmp_path / "a.png")
    assert result.exit_code == 2 and "pictures are drawn by matplotlib: pip install" in result.err and not result.out


def test_checkpoints_make_a_timeline(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    drawn, original = [], plots.draw_timeline

    def draw(path, title, steps, losses, scores, heads) -> None:
        drawn.append((steps, losses, scores))
        original(path, title, steps, losses, scores, heads)

    monkeypatch.setattr(plots, "draw_timeline", draw)
    outputs = [word for name in ("t.png", "t.html", "t.json") for word in ("-o", tmp_path / name)]
    newest_first = sorted((straight / "checkpoints").iterdir(), reverse=True)
    result = run(inspect_attention, *newest_first, newest_first[0], *outputs)
    assert result.exit_code == 0, result.err
    rows = json.loads((tmp_path / "t.json").read_text())["scores"]
    assert list(dict.fromkeys(row["step"] for row in rows)) == [4, 8, 12]
    assert "\nstraight step-00000012, on average\n" in result.out
    for step in (4, 8, 12):
        name = f"{step}.json"
        checkpoint = straight / "checkpoints" / f"step-{step:08d}"
        assert run(inspect_attention, checkpoint, "-o", tmp_path / name).exit_code == 0
        alone = json.loads((tmp_path / name).read_text())["scores"]
        assert alone == [row for row in rows if row["step"] == step]
        ((steps, losses, scores),) = drawn
        assert alone[0]["loss"] == losses[steps.index(step)]
        for row in alone:
            layer, head = map(int, row["head"].split("."))
            assert scores[steps.index(step)][row["metric"]][layer, head].item() == row["mean"]


def test_generated_text_is_seen_as_it_was_decoded(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    calls, forward = [], Attend.forward
    monkeypatch.setattr(
        Attend, "forward", lambda self, *inputs: calls.append(inputs[0].size(2)) or forward(self, *inputs)
    )
    result = run(inspect_attention, straight, "--text", "12 i", "--generate", 7, "-o", tmp_path / "a.npz")
    assert result.exit_code == 0 and "text:   4 tokens; and 7 that it wrote\nwrote:  " in result.out
    assert calls.count(1) == 2 * (6 + 7 + 7)  # two layers: written (the first with the text), seen, and by the proof
    monkeypatch.undo()
    saved, model = files.load(tmp_path / "a.npz"), GPT.from_pretrained(straight)
    assert torch.equal(model.generate(saved.tokens[None, :4], 7, temperature=0.8, seed=0)[0], saved.tokens)
    with capture(model) as att, torch.no_grad():
        model(saved.tokens[None])
    for layer in range(2):
        torch.testing.assert_close(saved.att.patterns(layer), att.patterns(layer), rtol=0, atol=1e-6)


def test_a_long_prompt_goes_on_from_its_end(run, straight: Path, tmp_path: Path) -> None:
    result = run(inspect_attention, straight, "--text", TEXT, "--generate", 4, "-o", tmp_path / "a.npz")
    assert "the last 7 of 13 tokens: a context of 11 has no room for the first 6; and 4 that it wrote" in result.out
    assert bytes(files.load(tmp_path / "a.npz").tokens[:7].tolist()) == TEXT[-7:].encode()


def test_only_what_was_decoded_may_be_wrong(run, straight: Path, tmp_path: Path, monkeypatch) -> None:
    """The pictured text has a proof of its own."""

    def corrupted(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return attention_weights(q, k, mask) * (0.9 if k.size(2) == 9 else 1)

    monkeypatch.setattr("inspection.patterns.attention_weights", corrupted)
    monkeypatch.setattr(inspect_attention, "head_scores", lambda *_: HeadScores({}, torch.zeros(1), 0.0))
    result = run(inspect_attention, straight, "--text", "12 i", "--generate", 5, "-o", tmp_path / "a.npz")
    assert result.exit_code == 1 and "the weights shown are not those of the kernel" in result.err


def test_what_the_training_ran_in_is_what_is_shown(run, corpus_file: Path, tmp_path: Path) -> None:
    import train

    assert (
        run(train, *tiny_run(corpus_file, tmp_path / "half", train__dtype="bfloat16", train__max_steps=1)).exit_code
        == 0
    )
    assert "(bfloat16, cpu)" in run(inspect_attention, tmp_path / "half", "-o", tmp_path / "a.npz").out
    saved = files.load(tmp_path / "a.npz").att
    assert saved[0][0].dtype == torch.bfloat16 and max(saved.verify().values()) < 1e-2
    assert "(float32, cpu)" in run(inspect_attention, tmp_path / "half", "--dtype", "float32").out


@pytest.mark.parametrize(
    "path, name",
    [
        ("out/mine/checkpoints/step-00000400", "mine step-00000400"),
        ("hub/models--openai-community--gpt2/snapshots/607a30d783df", "openai-community/gpt2"),
        ("models/gpt2", "gpt2"),
    ],
)
def test_a_model_has_a_name(path: str, name: str) -> None:
    assert inspect_attention.name_of_model(Path("/somewhere") / path) == name


def test_auto_sorts_by_what_is_shown(run, straight: Path, monkeypatch) -> None:
    scores = HeadScores({name: torch.zeros(1, 2, 3) for name in ("sink", "previous")}, torch.zeros(1), 0.0)
    scores.samples[PICTURE] = torch.zeros(1, 2, 3, 10)
    scores.samples["previous"][0, 0, 0], scores.samples["sink"][0, 1, 2] = 0.9, 0.1
    shown = table(scores, [(1, 0), (1, 1), (1, 2)], "auto", 80)
    assert "sink↓" in shown and shown.splitlines()[1].split()[0] == "1.2"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", about=np.array("{}"))
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    (tmp_path / "d.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-5])
    (tmp_path / "e.npz").write_bytes(b"")
    for name in ("a.npz", "b.safetensors", "c.npz", "d.npz", "e.npz"):
        with pytest.raises(ModelError, match="is not what inspect_attention.py writes"):
            files.load(tmp_path / name)


@pytest.mark.parametrize("step", [float("nan"), [1], 10**400, True, None])
def test_a_stranger_may_have_trained_for_any_time(run, straight: Path, tmp_path: Path, step: object) -> None:
    trainer = json.loads((straight / LAST / "trainer.json").read_text())
    (straight / LAST / "trainer.json").write_text(
        json.dumps(trainer | {"step": step, "fingerprint": step, "config": 3})
    )
    manifest = json.loads((straight / LAST / "manifest.json").read_text())
    (straight / LAST / "manifest.json").write_text(json.dumps(manifest | {"environment": [step]}))
    sign(straight / LAST)
    result = run(
        inspect_attention, straight / LAST, straight / FIRST, "-o", tmp_path / "a.html", "-o", tmp_path / "a.json"
    )
    assert result.exit_code == 0, result.err


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    samples = {"sink": torch.full((2, 1, 1), float("inf"), dtype=torch.float64)}
    about = {"checkpoint": "a", "loss": float("nan")}
    rows = files.score_table([about], [HeadScores(samples, torch.zeros(2), 0.0)], [(0, 0)])
    files.write_scores(tmp_path / "a.json", rows, {})
    (row,) = json.loads((tmp_path / "a.json").read_text())["scores"]
    assert row["loss"] is row["mean"] is row["standard_error"] is None


def test_special_tokens_cannot_command_a_terminal() -> None:
    encoding = tiktoken.Encoding(
        "any", pat_str=r"[\s\S]", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={"e2\x1b[2J": 256}
    )
    tokenizer = TiktokenTokenizer(encoding)
    assert inspect_attention.label(tokenizer, 256) == "⟦e2⟨u+001b⟩[2J⟧"
    assert inspect_attention.label(tokenizer, 0xE2) == "⟨e2⟩"


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
        (["{run}", "--heads", "five"], "a head is written LAYER.HEAD, as 0.1, 0.*, -1.* or last.*, got 'five'"),
        (["{run}", "-o", "a.gif"], "a.gif: what is written ends in one of .png, .svg, .html,"),
        (["{run}", "-o", "{tmp}/no/a.png"], "cannot write {tmp}/no/a.png: "),
        (["{run}", "{run}/" + FIRST, "-o", "a.npz"], "a.npz holds the queries and keys of one checkpoint, got 2"),
        (["{run}", "--generate", "0"], "generate must be at least 1, got 0"),
        (["{run}", "--sort", "loss"], "loss is what --ablate measures"),
        (["{run}", "--seed", str(10**30)], "seed must be from 0 to 2**63 - 1, got 1000000000"),
        (["{run}", "--device", "meta"], "device 'meta' cannot be used here"),
        (["{run}", "--heads", "9" * 5000], "a head is written LAYER.HEAD"),
        (["{run}", "--heads", "0.1", "{run}"], "checkpoints stand before --heads"),
        (["--heads", "0.1", "{run}"], "which checkpoint, before --heads?"),
        (["{run}", "--text", ""], "the text is empty"),
        (["{run}", "--text", "@{tmp}"], "what begins with @ names a file, and there is no file"),
        (["{run}", "--generate", "11"], "generate 11 leaves no room for a text: the context has 11 tokens"),
        (["{run}", "--text", "1"], "attention is between tokens, and the text has only one"),
        (["{run}", "--text", "@{tmp}/none"], "what begins with @ names a file, and there is no file"),
        (["{run}", "{other}"], "several checkpoints make a timeline of one run, and "),
        (["{run}/" + FIRST, "{run}/" + LAST], "a timeline has checkpoints of one shape and tokenizer: those of "),
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
    if words[-1:] == ["{run}/" + LAST]:
        config = json.loads((straight / LAST / "config.json").read_text())
        (straight / LAST / "config.json").write_text(json.dumps(config | {"n_positions": 10, "n_ctx": 10}))
        sign(straight / LAST)
    if "{bare}" in words:
        names["bare"].mkdir()
        for name in ("config.json", "model.safetensors"):
            (names["bare"] / name).write_bytes((straight / LAST / name).read_bytes())
    result = run(inspect_attention, *(word.format(**names) for word in words))
    assert result.exit_code == 2 and len(result.err.strip().splitlines()) == 1
    assert message.format(**names) in result.err
    assert not result.out


def test_columns_are_metrics() -> None:
    assert COLUMNS.keys() <= DEFINITIONS.keys()

"""sample.py: what it says of prompt, code and precision, and texts that end where they should."""

import json
from pathlib import Path

import pytest
import torch

import inspect_attention
import sample
import train
from data.tokenizer import make_tokenizer
from model.device import weights_dtype
from sample import Text
from tests.conftest import metrics, tiny_run
from tests.data.test_tokenizer import grow


def test_a_long_prompt_is_said(run, straight: Path) -> None:
    result = run(sample, straight, "--prompt", "one two three four five", "--max_new_tokens", 3)
    assert result.err.splitlines()[1:] == ["the prompt has 23 tokens, context is 11: using the last 11"]
    result = run(sample, straight, "--prompt", "one<|endoftext|>", "--max_new_tokens", 3, "--json")
    assert "note: <|endoftext|> in the prompt is ordinary text" in result.err


def test_two_letters_are_no_line_end(run, straight: Path) -> None:
    note = "note: a \\ in --stop is ordinary text; $'\\n' is the end of a line in bash\n"
    for stop, said in (("\\n", True), ("\n", False)):
        assert (note in run(sample, straight, "--stop", stop, "--max_new_tokens", 3).ok().err) == said


def test_a_text_that_ends_at_once_is_said(run, straight: Path, monkeypatch) -> None:
    for tokens, reason in ((b"ab", "stop"), ([256], "end of text"), (b"", "length"), (b"ba", "")):
        monkeypatch.setattr(sample, "stream", lambda *_, tokens=tokens: [torch.tensor([[token]]) for token in tokens])
        result = run(sample, straight, "--prompt", "one", "--stop", "ab", "--max_new_tokens", 2).ok()
        assert result.err.endswith(f"note: nothing is added to the prompt: {reason} at once\n") == bool(reason)
        assert result.out == f"one{'' if reason else 'ba'}\n"


def test_other_code_than_that_of_the_training_is_said_once(run, straight: Path, monkeypatch) -> None:
    def said(max_steps: int) -> list[str]:
        sampled = run(sample, straight, "--max_new_tokens", 3)
        inspected = run(inspect_attention, straight, "--text", "one two")
        resumed = run(train, "--resume", straight, "--train.max_steps", max_steps)
        return [result.out + result.err for result in (sampled, inspected, resumed)]

    assert " model/" not in "".join(said(13))
    for place in ("model.load", "training.device"):
        monkeypatch.setattr(f"{place}.code_hash", lambda: "another")
    for text in said(14):
        assert text.count(" was trained by another version of model/: its numbers may differ\n") == 1
        assert text.count(" model/") == 1


def test_one_sample_grows_and_several_differ_and_are_numbered(run, straight: Path) -> None:
    def both(*more: str) -> tuple[list[str], str]:
        options = "--prompt one --seed 5 --max_new_tokens 12 --device cpu --dtype float32".split()
        lines = run(sample, straight, *options, *more, "--json").out.splitlines()
        return [json.loads(line)["text"] for line in lines], run(sample, straight, *options, *more).out

    (text,), printed = both()
    assert printed == f"one{text}\n"
    (again, other), printed = both("--prompt", "<|endoftext|>")
    assert again == text and printed == f"one{text}\n<|endoftext|>{other}\n"
    (first, second), printed = both("--num_samples", "2")
    assert first != second
    assert printed == f"--- sample 1 of 2\none{first}\n--- sample 2 of 2\none{second}\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precision_is_said_and_is_that_of_the_weights(run, straight: Path, monkeypatch, dtype: str) -> None:
    seen, stream = [], sample.stream
    monkeypatch.setattr(sample, "stream", lambda model, *rest: seen.append(model) or stream(model, *rest))
    result = run(sample, straight, "--dtype", dtype, "--max_new_tokens", 3, "--device", "cpu")
    assert result.exit_code == 0 and result.err.splitlines()[0] == f"device: cpu, weights in {dtype}"
    assert {parameter.dtype for parameter in seen[0].parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_is_chosen_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: fast)
    for device in map(torch.device, ("cpu", "cuda")):
        assert weights_dtype("auto", device) == (torch.bfloat16 if fast else torch.float32)
        assert weights_dtype("float32", device) == torch.float32


def feed(tokens: list[int], *stops: str) -> tuple[list[str], Text]:
    """What is taken after each token, and in the end; and the text."""
    text = Text(make_tokenizer("bytes", []), stops, "")
    return grow(text, tokens), text


def test_a_text_ends_where_it_should_and_only_certain_characters_are_shown() -> None:
    taken, text = feed(list("a猫b".encode()))  # a character appears when its last byte does
    assert taken == ["a", "", "", "猫", "b", ""]
    assert (text.text, text.finish, text.num_tokens) == ("a猫b", "length", 5)
    assert feed(list("猫".encode())[:2])[0] == ["", "", "\ufffd"]
    taken, text = feed(list(b"one. two"), "", ". t", "two")  # the first of several, even across tokens
    assert taken == ["", "", "", "o", "n", "e", "", "", ""] and (text.text, text.finish) == ("one", "stop")
    taken, text = feed(list(b"one. "), ". t")  # not the stop text after all
    assert taken[-1] == "e. " and (text.text, text.finish) == ("one. ", "length")
    taken, _ = feed(list("👩\u200d🚀".encode()))  # one character of three: the joiner is shown with what it joins
    assert [*filter(None, taken)] == ["👩", "\u200d🚀"]
    _, text = feed([*b"one", 256, *b"two"])
    assert (text.text, text.finish, text.num_tokens) == ("one", "end of text", 3)


def test_a_sample_of_a_training_commands_no_terminal(run, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("training.validation.Validation.sample", lambda *_: "a\x1b[2Jb")
    result = run(train, *tiny_run(corpus_file, tmp_path / "out", train__max_steps=1))
    assert result.out.count("a\\x1b[2Jb") == 3 and "\x1b" not in result.out
    assert metrics(tmp_path / "out", "sample") == {0: "a\x1b[2Jb", 1: "a\x1b[2Jb"}

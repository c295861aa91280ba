"""Fine-tuning: a run begins with the weights, the shape and the tokenizer of a model, ours or another's."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from training.finetune import describe_finetuning

import sample
import train
from data.corpus import open_corpus
from data.tokenizer import FILES
from model import GPT
from tests.conftest import make_gpt, metrics, often, same_bits, save_gpt, tiny_run, weights
from tests.test_huggingface import SHAPES, make
from tests.test_huggingface import save as save_model
from tests.test_tokenizer import train_their_bpe
from training.config import TrainConfig


def options(init_from: Path, source: Path, out: Path, **changes: object) -> list[str]:
    """The arguments of a short fine-tuning run."""
    words = tiny_run(source, out, **{"train__init_from": init_from, "data__tokenizer": "model", **changes})
    pairs = zip(words[::2], words[1::2], strict=True)
    kept = [pair for pair in pairs if not pair[0].startswith("--model.") or pair[0][2:].replace(".", "__") in changes]
    return [word for pair in kept for word in pair]


@pytest.fixture
def other_text(tmp_path: Path) -> Path:
    path = tmp_path / "other.txt"
    path.write_text("".join(f"{i} is {'odd' if i % 3 == 0 else 'even'}!\n" for i in range(300)))
    return path


def test_a_run_begins_with_the_weights_of_another(run, corpus_file, other_text: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    run(train, *tiny_run(corpus_file, base, train__max_steps=40, train__learning_rate=1e-2))
    result = run(train, *options(base, other_text, tmp_path / "tuned"))
    assert result.exit_code == 0, result.err
    assert f"weights from {base}/checkpoints/step-00000040\n" in result.out
    run(train, *tiny_run(other_text, tmp_path / "new"))
    losses = [metrics(tmp_path / name, "val_loss") for name in ("tuned", "new")]
    assert losses[0][12] < losses[0][0] < losses[1][12]  # it begins where a new one does not come

    model = GPT.from_pretrained(base)
    val = open_corpus(next((tmp_path / "prepared").glob("other-model-*"))).tokens["val"].astype(np.int64)
    total = 0.0
    for start in range(0, len(val) - 1, 11):
        inputs, targets = (torch.from_numpy(val[start + shift : start + shift + 11]) for shift in (0, 1))
        inputs = inputs[: len(targets)]
        total += torch.nn.functional.cross_entropy(model(inputs[None])[0], targets, reduction="sum").item()
    assert losses[0][0] == pytest.approx(total / (len(val) - 1), rel=1e-5)


@pytest.mark.parametrize("name", often(*SHAPES))
def test_a_model_of_others_is_tuned_resumed_and_sampled(run, name: str, corpus_file: Path, tmp_path: Path) -> None:
    """Its tokenizer's files are kept to the byte, and what only its config.json says, also when it is gone."""
    made = save_model(make(name), tmp_path / "made")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made)
    if name == "llama 3":
        theirs.config.rms_norm_eps = 0.03
    theirs.save_pretrained(tmp_path / "theirs")
    shutil.rmtree(tmp_path / "made")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del config["tril"]
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | {"vocab_size": 263}))
    for file in FILES:  # 257 ids, fewer than the model has
        shutil.copyfile(Path(__file__).parent / "golden/format-3/step-00000003" / file, tmp_path / "theirs" / file)

    changes = {"train__learning_rate": 1e-3, "model__context_length": 7}
    for out, steps in (("straight", 4), ("broken", 2)):
        arguments = options(tmp_path / "theirs", corpus_file, tmp_path / out, **changes)
        result = run(train, *arguments, "--train.max_steps", steps, "--train.schedule", "wsd", "--train.eval_every", 2)
        assert result.exit_code == 0, result.err
    before = {file: (tmp_path / "theirs" / file).read_bytes() for file in FILES}
    expected = GPT.from_pretrained(tmp_path / "theirs").config
    shutil.rmtree(tmp_path / "theirs")
    result = run(train, "--resume", tmp_path / "broken", "--train.max_steps", 4)
    assert result.exit_code == 0, result.err
    checkpoint = tmp_path / "broken" / "checkpoints" / "step-00000004"
    assert {file: (checkpoint / file).read_bytes() for file in FILES} == before
    tuned = GPT.from_pretrained(checkpoint).config
    assert (tuned.norm_eps, tuned.rope_scaling, tuned.vocab_size) == (expected.norm_eps, expected.rope_scaling, 263)
    assert (tuned.context_length, tuned.tied, tuned.n_inner) == (7, expected.tied, expected.n_inner)
    assert run(sample, tmp_path / "broken", "--prompt", "1", "--seed", 1).exit_code == 0


def test_a_resumed_tuning_has_the_same_bits(run, straight: Path, other_text: Path, tmp_path: Path) -> None:
    arguments = options(straight, other_text, tmp_path / "whole", train__schedule="wsd", train__decay_fraction=0.0)
    assert run(train, *arguments).exit_code == 0
    arguments[arguments.index(str(tmp_path / "whole"))] = str(tmp_path / "parts")
    assert run(train, *arguments, "--train.max_steps", 5).exit_code == 0
    shutil.rmtree(straight)
    assert run(train, "--resume", tmp_path / "parts", "--train.max_steps", 12).exit_code == 0
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_text_begins_and_ends_as_the_model_knows_it(run, corpus_file: Path, tmp_path: Path) -> None:
    theirs = train_their_bpe(tmp_path, start=True, cut=None)
    config = replace(make("llama 3").config, vocab_size=theirs.get_vocab_size())
    base = save_model(GPT(config), tmp_path / "made").rename(tmp_path / "base")
    (base / "manifest.json").unlink()
    for file in FILES:
        shutil.copyfile(tmp_path / file, base / file)

    assert run(train, *options(base, corpus_file, tmp_path / "out", train__max_steps=2)).exit_code == 0
    begin, end = (theirs.token_to_id(token) for token in ("<|begin|>", "<|end|>"))
    corpus = open_corpus(next((tmp_path / "prepared").glob("corpus-model-*")))
    assert corpus.tokens["train"][:2].tolist() == [end, begin]
    assert corpus.tokens["train"][2:20].tolist() == theirs.encode(corpus_file.read_text()).ids[1:19]
    saved = json.loads((tmp_path / "out" / "checkpoints" / "step-00000002" / "config.json").read_text())
    assert (saved["bos_token_id"], saved["eos_token_id"]) == (begin, end)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__n_layer": 5}, "has n_layer = 2, got 5: leave model.n_layer out"),
        ({"model__context_length": 13}, "knows 11 positions, got model.context_length = 13"),
        ({"data__tokenizer": "bytes"}, "knows the ids of its own tokenizer: data.tokenizer must be model"),
        ({"train__init_from": "nowhere"}, "nowhere is neither an intact checkpoint nor a run that has one"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(
    run, straight: Path, corpus_file: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    result = run(train, *options(straight, corpus_file, tmp_path / "tuned", **changes))
    assert result.exit_code == 2 and message in result.err, result.err
    assert result.err.count("\n") == 1 and not (tmp_path / "tuned").exists()


def test_the_tokenizer_of_no_model_is_refused(run, corpus_file: Path, tmp_path: Path) -> None:
    result = run(train, *tiny_run(corpus_file, tmp_path / "run", data__tokenizer="model"))
    assert result.exit_code == 2 and "the tokenizer 'model' is that of train.init_from" in result.err


def test_a_tuned_run_cannot_begin_with_something_else(run, straight: Path, other_text: Path, tmp_path: Path) -> None:
    run(train, *options(straight, other_text, tmp_path / "tuned"))
    result = run(train, "--resume", tmp_path / "tuned", "--train.init_from", "other")
    assert result.exit_code == 2 and re.search(
        "cannot change train.init_from: it began with .*, now 'other'", result.err
    )


def test_a_corpus_prepared_for_a_model_is_not_for_another(
    run, straight: Path, other_text: Path, tmp_path: Path
) -> None:
    run(train, *options(straight, other_text, tmp_path / "tuned"))
    prepared = next((tmp_path / "prepared").glob("other-model-*"))
    result = run(train, *options(straight, prepared, tmp_path / "again"))
    assert result.exit_code == 0, result.err
    assert metrics(tmp_path / "again", "train_loss") == metrics(tmp_path / "tuned", "train_loss")
    checkpoint = straight / "checkpoints" / "step-00000012"
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "manifest.json").unlink()
    content = json.loads((copy / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (copy / "tokenizer.json").write_text(json.dumps(content, indent=1))
    result = run(train, *options(copy, prepared, tmp_path / "third"))
    assert result.exit_code == 2 and "was prepared with --data.tokenizer model, not model" in result.err


def test_a_tokenizer_that_ends_a_text_otherwise_is_another(run, straight: Path, other_text, tmp_path: Path) -> None:
    """As of a base model and one that was made to chat: the same vocabulary, with another token at the end."""
    first = shutil.copytree(straight / "checkpoints" / "step-00000012", tmp_path / "first")
    (first / "manifest.json").unlink()
    second = shutil.copytree(first, tmp_path / "second")
    config = json.loads((second / "tokenizer_config.json").read_text())
    (second / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "another"}))
    for base in (first, second):
        assert (
            run(train, *options(base, other_text, tmp_path / f"{base.name}-tuned", train__max_steps=1)).exit_code == 0
        )
        checkpoint = tmp_path / f"{base.name}-tuned" / "checkpoints" / "step-00000001"
        assert all((checkpoint / file).read_bytes() == (base / file).read_bytes() for file in FILES)


def test_a_model_without_a_tokenizer_that_we_read_is_named(run, straight: Path, other_text, tmp_path: Path) -> None:
    base = shutil.copytree(straight / "checkpoints" / "step-00000012", tmp_path / "base")
    (base / "manifest.json").unlink()
    for change, message in (
        (lambda path: path.unlink(), "there is no tokenizer.json"),
        (spell_with_words, "KeyError"),
    ):
        (base / "tokenizer.json").write_bytes((straight / "checkpoints/step-00000012/tokenizer.json").read_bytes())
        change(base / "tokenizer.json")
        result = run(train, *options(base, other_text, tmp_path / "tuned"))
        assert result.exit_code == 2 and f"{base} has no tokenizer" in result.err and message in result.err


def spell_with_words(path: Path) -> None:
    """As SentencePiece does."""
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {"\n": 0, "▁word": 1}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "trainer, more", [(None, ""), ({"config": {"train": 3}}, ""), ("muon", "(it was made with muon: try")]
)
def test_what_a_model_was_made_with_is_recommended(tmp_path: Path, trainer: object, more: str) -> None:
    save_gpt(tmp_path, 7, make_gpt(), {})
    model = tmp_path / "step-00000007"
    (model / "manifest.json").rename(tmp_path / "elsewhere")
    model = model.rename(tmp_path / "model")
    (model / "trainer.json").unlink()
    if trainer:
        made = {"config": {"train": {"optimizer": "muon", "learning_rate": 0.5}}} if trainer == "muon" else trainer
        (model / "trainer.json").write_text(json.dumps(made))
    said = describe_finetuning(TrainConfig(), model)
    assert said.startswith("to fine-tune: adamw, a learning rate of 0.0006, 2,000 steps")
    assert (more in said) and ("--train.learning_rate 0.25)" in said) == bool(more)

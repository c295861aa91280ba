"""Fine-tuning: a run begins with the weights, the shape and the tokenizer of another model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import sample
import train
from data.corpus import open_corpus
from data.tokenizer import FILES
from model import GPT
from tests.conftest import metrics, same_bits, tiny_run, weights
from tests.test_huggingface import SHAPES, make
from tests.test_huggingface import save as save_model
from tests.test_tokenizer import train_their_bpe
from training.config import TrainConfig
from training.options import describe_finetuning


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


@pytest.fixture
def unsigned(straight: Path, tmp_path: Path) -> Path:
    """A checkpoint without a manifest, whose files a test may change."""
    checkpoint = shutil.copytree(straight / "checkpoints" / "step-00000012", tmp_path / "unsigned")
    (checkpoint / "manifest.json").unlink()
    return checkpoint


def test_a_run_begins_with_the_weights_of_another(run, straight: Path, other_text: Path, tmp_path: Path) -> None:
    result = run(train, *options(straight, other_text, tmp_path / "tuned"))
    assert result.exit_code == 0, result.err
    assert f"weights from {straight}/checkpoints/step-00000012\n" in result.out
    losses = metrics(tmp_path / "tuned", "val_loss")
    assert losses[12] < losses[0]

    model = GPT.from_pretrained(straight)
    val = open_corpus(next((tmp_path / "prepared").glob("other-model-*"))).tokens["val"].astype(np.int64)
    total = 0.0
    for start in range(0, len(val) - 1, 11):
        inputs, targets = (torch.from_numpy(val[start + shift : start + shift + 11]) for shift in (0, 1))
        inputs = inputs[: len(targets)]
        total += torch.nn.functional.cross_entropy(model(inputs[None])[0], targets, reduction="sum").item()
    assert losses[0] == pytest.approx(total / (len(val) - 1), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_of_others_is_tuned_resumed_and_sampled(run, name: str, corpus_file: Path, tmp_path: Path) -> None:
    """Resuming needs no file of the base. A checkpoint keeps the bytes of its tokenizer and all of its config.json."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(save_model(make(name), tmp_path))
    if name == "llama 3":
        theirs.config.rms_norm_eps = 0.03
    base = tmp_path / "theirs"
    theirs.save_pretrained(base)
    for file in FILES:  # 257 ids, fewer than the model has
        shutil.copyfile(Path(__file__).parent / "golden/format-3/step-00000003" / file, base / file)
    before, expected = {file: (base / file).read_bytes() for file in FILES}, GPT.from_pretrained(base).config

    changes = {"train__learning_rate": 1e-3, "train__schedule": "wsd", "model__context_length": 7}
    for out, steps in (("whole", 4), ("broken", 2)):
        result = run(train, *options(base, corpus_file, tmp_path / out, **changes, train__max_steps=steps))
        assert result.exit_code == 0, result.err
    shutil.rmtree(base)
    result = run(train, "--resume", tmp_path / "broken", "--train.max_steps", 4)
    assert result.exit_code == 0, result.err
    assert same_bits(weights(tmp_path / "whole", 4), weights(tmp_path / "broken", 4))
    checkpoint = tmp_path / "broken" / "checkpoints" / "step-00000004"
    assert {file: (checkpoint / file).read_bytes() for file in FILES} == before
    assert GPT.from_pretrained(checkpoint).config == replace(expected, context_length=7)
    assert run(sample, tmp_path / "broken", "--prompt", "1", "--seed", 1).exit_code == 0


def test_a_text_begins_and_ends_as_the_model_knows_it(run, corpus_file: Path, tmp_path: Path) -> None:
    theirs = train_their_bpe(tmp_path)
    config = replace(make("llama 3").config, vocab_size=theirs.get_vocab_size())
    base = save_model(GPT(config), tmp_path / "made").rename(tmp_path / "base")
    (base / "manifest.json").unlink()
    for file in FILES:
        shutil.copyfile(tmp_path / file, base / file)

    assert run(train, *options(base, corpus_file, tmp_path / "out", train__max_steps=1)).exit_code == 0
    begin, end = (theirs.token_to_id(token) for token in ("<|begin|>", "<|end|>"))
    tokens = open_corpus(next((tmp_path / "prepared").glob("corpus-model-*"))).tokens["train"][:20].tolist()
    assert tokens == [end, begin, *theirs.encode(corpus_file.read_text()).ids[1:19]]
    saved = json.loads((tmp_path / "out" / "checkpoints" / "step-00000001" / "config.json").read_text())
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
def test_options_that_do_not_fit_the_weights_are_refused(
    run, straight: Path, corpus_file: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    result = run(train, *options(straight, corpus_file, tmp_path / "tuned", **changes))
    assert result.exit_code == 2 and message in result.err, result.err
    assert result.err.count("\n") == 1 and not (tmp_path / "tuned").exists()


def test_a_corpus_prepared_for_a_model_is_not_for_another(
    run, straight: Path, unsigned: Path, other_text: Path, tmp_path: Path
) -> None:
    run(train, *options(straight, other_text, tmp_path / "tuned", train__max_steps=1))
    prepared = next((tmp_path / "prepared").glob("other-model-*"))
    result = run(train, *options(straight, prepared, tmp_path / "again", train__max_steps=1))
    assert result.exit_code == 0, result.err
    assert metrics(tmp_path / "again", "train_loss") == metrics(tmp_path / "tuned", "train_loss")
    content = json.loads((unsigned / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (unsigned / "tokenizer.json").write_text(json.dumps(content, indent=1))
    result = run(train, *options(unsigned, prepared, tmp_path / "third"))
    assert result.exit_code == 2 and "was prepared with --data.tokenizer model, not model" in result.err


def test_a_model_without_a_tokenizer_is_named(run, unsigned: Path, other_text: Path, tmp_path: Path) -> None:
    (unsigned / "tokenizer.json").unlink()
    result = run(train, *options(unsigned, other_text, tmp_path / "tuned"))
    assert result.exit_code == 2 and f"{unsigned} has no tokenizer" in result.err


def test_muon_is_recommended_for_a_model_that_was_made_with_it(unsigned: Path) -> None:
    assert describe_finetuning(TrainConfig(), unsigned).startswith(
        "to fine-tune: adamw, a learning rate of 0.0006, 2,000 steps"
    )
    made = {"config": {"train": {"optimizer": "muon", "learning_rate": 0.5}}}
    (unsigned / "trainer.json").write_text(json.dumps(made))
    assert "try --train.optimizer muon --train.learning_rate 0.25)" in describe_finetuning(TrainConfig(), unsigned)

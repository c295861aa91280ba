"""Fine-tuning: a run begins with the weights, the shape and the tokenizer of another model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

import sample
import train
from data.encoding import TOKENIZER_CONFIG, TOKENIZER_JSON
from data.prepare import DataConfig, prepare
from data.tokenizer import load_tokenizer
from model import GPT
from tests.conftest import metrics, same_bits, tiny_run, weights
from tests.data.test_hub_tokenizer import put_model
from tests.model.test_huggingface import SHAPES, make
from tests.model.test_huggingface import save as save_model


def options(init_from: Path, source: Path, out: Path, **changes: object) -> list[str]:
    """The arguments of a short fine-tuning run."""
    words = tiny_run(source, out, **{"train__init_from": init_from, "data__tokenizer": "model", **changes})
    pairs = zip(words[::2], words[1::2], strict=True)
    kept = [pair for pair in pairs if not pair[0].startswith("--model.") or pair[0][2:].replace(".", "__") in changes]
    return [word for pair in kept for word in pair]


def test_a_run_begins_with_the_weights_of_another(run, straight: Path, corpus_file: Path, tmp_path: Path) -> None:
    still = {"train__learning_rate": 1e-30, "train__max_steps": 1}  # too little to change a bit
    result = run(train, *options(straight, corpus_file, tmp_path / "tuned", **still)).ok()
    assert f"weights from {straight}/checkpoints/step-00000012\n" in result.out
    assert same_bits(weights(straight), weights(tmp_path / "tuned", 1))
    loss = metrics(straight, "val_loss")[12]  # of the same text without its end-of-text tokens
    assert metrics(tmp_path / "tuned", "val_loss")[0] == pytest.approx(loss, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_of_others_is_tuned_resumed_and_sampled(run, name: str, corpus_file: Path, tmp_path: Path) -> None:
    """Resuming needs no file of the base. A checkpoint keeps the bytes of its tokenizer and all of its config.json."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(save_model(make(name), tmp_path))
    if name == "llama 3":
        theirs.config.rms_norm_eps = 0.03
    base = tmp_path / "theirs"
    theirs.save_pretrained(base)
    files = (TOKENIZER_JSON, TOKENIZER_CONFIG)
    for file in files:  # 257 ids, fewer than the model has
        shutil.copyfile(Path(__file__).parents[1] / "model/golden/format-3/step-00000003" / file, base / file)
    before, expected = {file: (base / file).read_bytes() for file in files}, GPT.from_pretrained(base).config

    changes = {"train__learning_rate": 1e-3, "train__schedule": "wsd", "model__context_length": 7}
    for out, steps in (("whole", 4), ("broken", 2)):
        run(train, *options(base, corpus_file, tmp_path / out, **changes, train__max_steps=steps)).ok()
    shutil.rmtree(base)
    run(train, "--resume", tmp_path / "broken", "--train.max_steps", 4).ok()
    assert same_bits(weights(tmp_path / "whole", 4), weights(tmp_path / "broken", 4))
    checkpoint = tmp_path / "broken" / "checkpoints" / "step-00000004"
    assert {file: (checkpoint / file).read_bytes() for file in files} == before
    assert GPT.from_pretrained(checkpoint).config == replace(expected, context_length=7)
    assert run(sample, tmp_path / "broken", "--prompt", "1", "--seed", 1).exit_code == 0


@pytest.mark.parametrize(
    "kind, config, generation, start, ends",
    [
        ("llama", {}, {"eos_token_id": [2, 0, 7], "top_k": 13}, 1, [2, 0, 7]),
        ("digits", {"bos_token_id": 0}, {"eos_token_id": 2, "top_k": 13}, 0, [2]),  # its tokenizer adds no start
    ],
)
def test_a_checkpoint_knows_how_a_text_begins_and_ends(
    run, corpus_file: Path, tmp_path: Path, kind: str, config: dict, generation: dict, start: int, ends: list[int]
) -> None:
    """Also one of a model that was tuned twice."""
    base = put_model(kind, tmp_path, eos_token="</s>")
    for name, change in (("config.json", config), ("generation_config.json", generation)):
        content = json.loads((base / name).read_text()) if name == "config.json" else {}
        content.pop("bos_token_id", None)
        (base / name).write_text(json.dumps(content | change))
    files = []
    for out in ("once", "twice"):
        run(train, *options(base, corpus_file, tmp_path / out, train__max_steps=1)).ok()
        base = tmp_path / out / "checkpoints" / "step-00000001"
        files.append(load_tokenizer(base).files)
    assert files[0] == files[1]
    assert files[0].keys() == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    tuned = transformers.AutoConfig.from_pretrained(base)
    sampled = transformers.GenerationConfig.from_pretrained(base)
    theirs = transformers.AutoTokenizer.from_pretrained(base)
    assert (tuned.bos_token_id, tuned.eos_token_id, theirs.eos_token_id) == (start, ends, 2)
    assert (sampled.bos_token_id, sampled.eos_token_id) == (start, ends)
    assert sampled.top_k == 13
    corpora = sorted((tmp_path / "prepared").glob("*/train.bin"))
    expected = {"llama": [2, 1], "digits": [2]}[kind]
    assert corpora and all(np.fromfile(path, "<u2")[: len(expected)].tolist() == expected for path in corpora)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__n_layer": 5}, "has n_layer = 2, got 5: leave --model.n_layer out"),
        ({"data__tokenizer": "bytes"}, "knows the ids of its own tokenizer: leave --data.tokenizer out"),
    ],
)
def test_options_that_do_not_fit_the_weights_are_refused(
    run, straight: Path, corpus_file: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    result = run(train, *options(straight, corpus_file, tmp_path / "tuned", **changes)).refused(message)
    assert result.err.count("\n") == 1 and not (tmp_path / "tuned").exists()


@pytest.mark.long
def test_a_corpus_prepared_for_a_model_is_not_for_another(run, straight: Path, corpus_file: Path, tmp_path) -> None:
    unsigned = shutil.copytree(straight / "checkpoints" / "step-00000012", tmp_path / "unsigned")
    (unsigned / "manifest.json").unlink()  # so that its files may change
    prepare(DataConfig(str(corpus_file), "model"), tmp_path / "there", model=unsigned)
    run(train, *options(straight, tmp_path / "there", tmp_path / "tuned", train__max_steps=1)).ok()
    alone = ["--data.source", tmp_path / "there", "--train.max_steps", 1, "--train.sample_tokens", 0]
    alone += ["--train.out_dir", tmp_path / "alone"]
    assert run(train, *alone, "--train.device", "cpu").exit_code == 0  # a model of its own, with that tokenizer
    content = json.loads((unsigned / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (unsigned / "tokenizer.json").write_text(json.dumps(content, indent=1))
    again = options(unsigned, tmp_path / "there", tmp_path / "other")
    run(train, *again).refused("was prepared with another tokenizer: --data.tokenizer model")

"""The model card says how a model came to be, and nothing of the machine it was made on."""

import re
import tomllib
from pathlib import Path

import train
from model import GPT
from model.checkpoint import verify
from tests.conftest import metrics, tiny_run


def read_card(run_directory: Path, step: int = 12) -> str:
    return (run_directory / "checkpoints" / f"step-{step:08d}" / "README.md").read_text(encoding="utf-8")


def test_a_checkpoint_says_what_it_is(run, corpus_file: Path, tmp_path: Path) -> None:
    assert run(train, *tiny_run(corpus_file, tmp_path / "mine", train__learning_rate=0.003)).exit_code == 0
    card, val_loss = read_card(tmp_path / "mine"), metrics(tmp_path / "mine", "val_loss")
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [tril]\n---\n\n# mine\n"
    )
    num_parameters = sum(parameter.numel() for parameter in GPT.from_pretrained(tmp_path / "mine").parameters())
    assert f"A gpt2 of {num_parameters:,} parameters, trained from nothing on corpus.txt: " in card
    assert f"Validation loss at step 12: {val_loss[12]:.4f} nats a token" in card
    assert "read 0.21 times in 12 steps" in card
    causal = "yes, each position sees its past and nothing else (asked 11 of 11 positions)"
    assert f"\nCausal: {causal}, float32 on cpu, torch" in card
    options = tomllib.loads(re.search("```toml\n(.*?)```", card, re.DOTALL)[1])
    assert (options["train"]["learning_rate"], options["model"]["n_embd"]) == (0.003, 15)
    assert str(tmp_path) not in card and str(Path.home()) not in card


def test_the_best_loss_is_named_too(run, corpus_file: Path, tmp_path: Path) -> None:
    diverging = {"train__learning_rate": 50.0, "train__warmup_steps": 12}
    run(train, *tiny_run(corpus_file, tmp_path / "run", **diverging))
    losses = metrics(tmp_path / "run", "val_loss")
    best = min((4, 8, 12), key=losses.get)
    assert best != 12
    assert f"at step {best}: {losses[best]:.4f} nats" in read_card(tmp_path / "run")


def test_a_resumed_run_writes_the_same_card(run, straight: Path, corpus_file: Path, tmp_path: Path) -> None:
    run(
        train,
        *tiny_run(corpus_file, tmp_path / "parts", train__schedule="wsd", train__decay_fraction=0, train__max_steps=5),
    )
    run(train, "--resume", tmp_path / "parts", "--train.max_steps", "12")
    run(train, *tiny_run(corpus_file, tmp_path / "whole", train__schedule="wsd", train__decay_fraction=0))
    whole, parts = (re.sub(r"\d+ seconds", "", read_card(tmp_path / name)) for name in ("whole", "parts"))
    assert parts.replace("parts", "whole") == whole and "step 12: " in whole


def test_a_model_of_the_hub_is_named_as_the_base(run, straight: Path, corpus_file, tmp_path: Path, monkeypatch) -> None:
    checkpoint = straight / "checkpoints" / "step-00000012"
    monkeypatch.setattr("model.checkpoint.download", lambda name: checkpoint)
    options = ["--data.source", corpus_file, "--train.max_steps", 2, "--train.device", "cpu"]
    result = run(train, "--train.init_from", "somebody/model", "--train.out_dir", tmp_path / "tuned", *options)
    assert result.exit_code == 0, result.err
    card = read_card(tmp_path / "tuned", 2)
    assert "\nbase_model: somebody/model\n" in card and "fine-tuned from somebody/model, on corpus.txt" in card
    run(train, "--train.init_from", straight, "--train.out_dir", tmp_path / "again", *options)
    card = read_card(tmp_path / "again", 2)
    assert "base_model" not in card and "fine-tuned from straight, on corpus.txt" in card
    straight.rename(tmp_path / "moved")
    run(train, "--resume", tmp_path / "again", "--train.max_steps", 3)
    card = read_card(tmp_path / "again", 3)
    assert "base_model" not in card and str(tmp_path) not in card


def test_people_may_edit_a_card(straight: Path) -> None:
    checkpoint = straight / "checkpoints" / "step-00000012"
    (checkpoint / "README.md").write_text("mine")
    verify(checkpoint)
    (checkpoint / "README.md").unlink()
    verify(checkpoint)

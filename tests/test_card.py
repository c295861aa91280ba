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


def test_a_checkpoint_says_how_it_was_made(run, corpus_file: Path, tmp_path: Path) -> None:
    diverging = {"train__learning_rate": 50.0, "train__warmup_steps": 12}  # so that the last loss is not the best
    assert run(train, *tiny_run(corpus_file, tmp_path / "mine", **diverging)).exit_code == 0
    card, losses = read_card(tmp_path / "mine"), metrics(tmp_path / "mine", "val_loss")
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [tril]\n---\n\n# mine\n"
    )
    num_parameters = sum(parameter.numel() for parameter in GPT.from_pretrained(tmp_path / "mine").parameters())
    assert f"A gpt2 of {num_parameters:,} parameters, trained from nothing on corpus.txt: " in card
    assert "read 0.21 times in 12 steps" in card
    best = min((4, 8, 12), key=losses.get)
    named = re.findall(r"at step (\d+): (\S+) nats", card)
    assert best != 12 and named == [(str(step), f"{losses[step]:.4f}") for step in (best, 12)]
    assert "\nCausal: yes, each position sees its past and nothing else (asked 11 of 11 positions), float32 on" in card
    options = tomllib.loads(re.search("```toml\n(.*?)```", card, re.DOTALL)[1])
    assert (options["train"]["learning_rate"], options["train"]["out_dir"], options["model"]["n_embd"]) == (
        50,
        "mine",
        15,
    )
    assert str(tmp_path) not in card and str(Path.home()) not in card


def test_a_fine_tuned_model_names_its_base(run, straight: Path, corpus_file, tmp_path: Path, monkeypatch) -> None:
    checkpoint = straight / "checkpoints" / "step-00000012"
    monkeypatch.setattr("model.checkpoint.download", lambda name: checkpoint)
    options = ["--data.source", corpus_file, "--train.max_steps", 2, "--train.device", "cpu"]
    result = run(train, "--train.init_from", "somebody/model", "--train.out_dir", tmp_path / "tuned", *options)
    assert result.exit_code == 0, result.err
    card = read_card(tmp_path / "tuned", 2)
    assert "\nbase_model: somebody/model\n" in card and "fine-tuned from somebody/model, on corpus.txt" in card
    run(train, "--train.init_from", straight, "--train.out_dir", tmp_path / "again", *options)
    straight.rename(tmp_path / "moved")
    run(train, "--resume", tmp_path / "again", "--train.max_steps", 3)
    card = read_card(tmp_path / "again", 3)
    assert "base_model" not in card and "fine-tuned from straight, on" in card and str(tmp_path) not in card


def test_people_may_edit_a_card(straight: Path) -> None:
    checkpoint = straight / "checkpoints" / "step-00000012"
    (checkpoint / "README.md").write_text("mine")
    verify(checkpoint)
    (checkpoint / "README.md").unlink()
    verify(checkpoint)

"""Schedule of the optimizer, loss scaling, and the guard against numbers that are not finite."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from model import GPT
from tests.conftest import make_gpt, metrics, same_bits, tiny_run, weights
from training.config import TrainConfig
from training.optimizer import learning_rate_at, make_optimizer, optimizer_tensors


def test_learning_rates() -> None:
    common = {"learning_rate": 1.0, "warmup_steps": 10}
    cosine = TrainConfig(**common, max_steps=110, final_lr_fraction=0.1)
    rates = [learning_rate_at(step, cosine) for step in range(111)]
    assert rates[:2] == [0.1, 0.2] and rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)
    wsd = TrainConfig(**common, max_steps=100, schedule="wsd", decay_fraction=0.4, final_lr_fraction=0.0)
    rates = [learning_rate_at(step, wsd) for step in range(101)]
    assert rates[10:61] == [1.0] * 51
    assert rates[80] == pytest.approx(0.5) and rates[100] == 0.0
    long = replace(wsd, warmup_steps=80)  # the descent waits for it
    assert [learning_rate_at(step, long) for step in (79, 80, 90)] == [1.0, 1.0, 0.5]
    assert learning_rate_at(150, wsd) == 0.0 and learning_rate_at(300, cosine) == pytest.approx(0.1)  # and stays there


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_overflows_in_float16_is_skipped_alone(name: str) -> None:
    model = make_gpt()
    optimizer = make_optimizer(model, TrainConfig(optimizer=name), torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # it makes its numbers with the first loss
    seen = []
    for number in (1.0, math.inf, 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append(copy.deepcopy(model.state_dict() | optimizer_tensors(model, optimizer)))
    assert same_bits(seen[0], seen[1]) and not any(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])


@pytest.mark.parametrize(
    "log_every, eval_every, bad, evaluated",
    [(1, 100, 7, [0]), (100, 100, 8, [0]), (100, 4, 7, [0, 4])],
    ids=["log", "save", "evaluation"],
)
@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_a_run_that_is_not_finite_ends_before_anything_holds_it(
    log_every, eval_every, bad, evaluated, of, run, straight: Path, uncertified, corpus_file, tmp_path, monkeypatch
) -> None:
    next_token_loss, steps = train.next_token_loss, []

    def broken(model: GPT, *rest: object, **options: object) -> torch.Tensor:
        steps.append(model.training)
        loss = next_token_loss(model, *rest, **options)
        if model.training and sum(steps) == 2 * bad and of == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss * (math.nan if sum(steps) == 2 * bad and of == "loss" else 1)

    monkeypatch.setattr(train, "next_token_loss", broken)
    waits = {"train__log_every": log_every, "train__eval_every": eval_every}
    result = run(train, *tiny_run(corpus_file, tmp_path / "nan", **waits))
    assert result.exit_code == 3
    assert f"not finite in step {bad}, and no checkpoint contains" in result.err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "nan" / "checkpoints").iterdir()] == ["step-00000004"]
    assert same_bits(weights(straight, 4), weights(tmp_path / "nan", 4))
    assert list(metrics(tmp_path / "nan", "val_loss")) == evaluated
    assert bad not in metrics(tmp_path / "nan", "train_loss")


def test_gradients_are_clipped_to_their_norm(run, uncertified, corpus_file, tmp_path, monkeypatch) -> None:
    clip, seen = train.clip_gradients, []

    def spy(model: GPT, *rest: object, **options: object) -> torch.Tensor:
        norm = clip(model, *rest, **options)
        left = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        seen.append((norm.item(), left.item()))
        return norm

    monkeypatch.setattr(train, "clip_gradients", spy)
    for grad_clip in (0.25, 0.0):  # 0: as it is
        run(train, *tiny_run(corpus_file, tmp_path / f"{grad_clip}", train__grad_clip=grad_clip, train__max_steps=1))
    (norm, clipped), (same, left) = seen
    assert norm == same > 0.3 and left == pytest.approx(norm) and clipped == pytest.approx(0.25)


@pytest.mark.long
def test_loss_scaling_in_float16_resumes_to_the_same_bits(run, corpus_file: Path, tmp_path: Path) -> None:
    half = {"train__dtype": "float16", "train__schedule": "wsd", "train__decay_fraction": 0}
    run(train, *tiny_run(corpus_file, tmp_path / "straight", **half))
    run(train, *tiny_run(corpus_file, tmp_path / "broken", **half, train__max_steps=5))
    run(train, "--resume", tmp_path / "broken", "--train.max_steps", 12)
    for out in (tmp_path / "straight", tmp_path / "broken"):
        trainer = json.loads((out / "checkpoints" / "step-00000012" / "trainer.json").read_text())
        assert trainer["scaler"]["_growth_tracker"] == 12
    assert same_bits(weights(tmp_path / "straight"), weights(tmp_path / "broken"))

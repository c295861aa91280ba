"""The optimizer: its schedule, loss scaling, the guard against what is not finite, and Muon against a plain loop."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import train
from cli.options import parse
from model import GPT, GPTConfig
from model.families import FAMILIES
from tests.conftest import ROOT, make_gpt, metrics, same_bits, tiny_run, weights
from training.config import Config, TrainConfig
from training.optimizer import Muon, learning_rate_at, make_optimizer, optimizer_tensors, orthogonalize, set_schedule
from training.run import set_first_weights


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


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(2, 23), st.integers(2, 23), st.integers(0, 2**32))
def test_an_update_is_nearly_orthogonal_and_keeps_its_directions(n: int, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(n, rows, rows, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(n, columns, columns, dtype=torch.float64))
    r = min(rows, columns)
    sizes = torch.rand(n, r, dtype=torch.float64) + 0.1  # very different ones
    made = orthogonalize(u[..., :r] @ sizes.diag_embed() @ v[..., :r].mT * 7)
    inside = u[..., :r].mT @ made @ v[..., :r]
    diagonal = inside.diagonal(dim1=-2, dim2=-1)
    assert (inside - diagonal.diag_embed()).abs().max() < 1e-9  # the same directions
    assert 0.6 < diagonal.min() and diagonal.max() < 1.3  # now of one size


def make(family: str = "nanochat", **changes: object) -> tuple[GPT, TrainConfig]:
    model = GPT(GPTConfig(family=family, n_layer=3, n_head=5, n_embd=30, context_length=11, vocab_size=17))
    options = {"learning_rate": 0.02, "warmup_steps": 2, "dtype": "float32"}
    return model, TrainConfig(optimizer="muon", **{**options, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_of_parameter_has_its_rate(family: str) -> None:
    model, config = make(family, embedding_rate=7.0, head_rate=0.3, vector_rate=0.5, momentum=0.95, warmup_steps=0)
    optimizer = make_optimizer(model, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(names.values())
    set_schedule(optimizer, 150, config)
    for group in optimizer.param_groups:
        for name in (names[id(parameter)] for parameter in group["params"]):
            inside = 1.0 if name.startswith("blocks.") else 7.0
            share = 0.3 if name == "lm_head.weight" else 0.5 if "norm" in name or name.endswith(".bias") else inside
            assert group["lr"] == learning_rate_at(150, config) * share, name
            by_muon = name.startswith("blocks.") and model.get_parameter(name).dim() == 2
            assert ("momentum" in group) == by_muon, name
    assert optimizer.param_groups[-1]["momentum"] == pytest.approx(0.875)  # half of the way from 0.8
    set_schedule(optimizer, 1000, config)
    assert optimizer.param_groups[-1]["momentum"] == pytest.approx(0.95)
    c = parse(Config, [], ROOT / "configs" / "quickstart.toml").train  # as in runs of 3.2, which had no such options
    assert (c.embedding_rate, c.head_rate, c.vector_rate, c.momentum) == (1, 1 / 3, 1 / 3, 0.9)


def test_a_matrix_is_muons_wherever_it_is_and_an_embedding_never() -> None:
    model, config = make("llama", embedding_rate=7.0)
    model.narrow = nn.Linear(30, 13)
    model.blocks[1].values = nn.Embedding(17, 30)
    model.stacked = nn.Parameter(torch.zeros(3, 5, 7))
    optimizer = make_optimizer(model, config)
    shares = {p: "momentum" in group or group["lr_share"] for group in optimizer.param_groups for p in group["params"]}
    assert shares[model.narrow.weight] is True and shares[model.blocks[1].values.weight] == 7.0
    assert shares[model.narrow.bias] == shares[model.stacked] == config.vector_rate
    assert shares.keys() == {*model.parameters()}
    assert make_optimizer(model, make(parallel="fsdp")[1], compiled=True).compiled is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_zero_outputs_make_a_block_begin_by_passing_on_what_it_reads(family: str, tied: bool) -> None:
    model = GPT(GPTConfig(family, n_layer=2, n_head=3, n_embd=18, context_length=11, vocab_size=17, tied=tied))
    set_first_weights(model, TrainConfig(zero_outputs=True))
    x = torch.randn(2, 7, 18)
    assert torch.equal(model.blocks[0](x), x)
    assert model(torch.arange(11)[None]).any() == tied
    assert all(p.any() for p in model.blocks[0].mlp.up_proj.parameters() if p.dim() == 2)


def plain_step(parameter: torch.Tensor, momentum: torch.Tensor, rate: float, beta: float, decay: float) -> None:
    """Update one float64 matrix as Jordan et al. (2024) write it."""
    momentum.mul_(beta).add_(parameter.grad.double(), alpha=1 - beta)
    x = parameter.grad.double() * (1 - beta) + momentum * beta
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    x = x.T if tall else x
    parameter.mul_(1 - rate * decay).sub_(rate * max(1, x.size(0) / x.size(1)) ** 0.5 * x)


@torch.no_grad()
def test_a_step_is_that_of_a_plain_loop() -> None:
    model, config = make(weight_decay=0.3)
    optimizer = make_optimizer(model, config)
    matrices = {name: p for name, p in model.named_parameters() if "momentum" in optimizer.state[p]}
    copies = {name: p.detach().double().clone() for name, p in matrices.items()}
    momenta = {name: torch.zeros_like(p) for name, p in copies.items()}
    for step in range(4):
        set_schedule(optimizer, step, config)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            if name in copies:
                rate = config.learning_rate * min(1, (step + 1) / 2)
                copies[name].grad = parameter.grad.double()
                plain_step(copies[name], momenta[name], rate, 0.8 + 0.1 * step / 300, 0.3)
        optimizer.step()
    for name, expected in copies.items():
        torch.testing.assert_close(matrices[name].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_compiling_the_update_changes_only_rounding(weight_decay: float) -> None:
    """For each rate by the same code, since compiling takes seconds."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(1)
        first, second, vector = (torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 3), (7, 3), (5,)))
        optimizer = Muon([first, second], weight_decay, [{"params": [vector]}], torch.float32, compiled)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rate in (0.1, 0.2, 0.3):
                for group in optimizer.param_groups:
                    group["lr"] = rate
                for parameter in (first, second, vector):
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
        found.append(torch.cat((first, second)))
    torch.testing.assert_close(*found)

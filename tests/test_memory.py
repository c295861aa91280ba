"""Memory: computing activations again changes no bit, and a loss in chunks only the rounding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import train
import training.memory
from data.batches import IGNORE
from model import GPT
from model.families import FAMILIES
from tests.conftest import make_gpt, tiny_run
from train import next_token_loss

B, T, V = 3, 11, 17
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def loss_and_gradients(model: GPT, loss: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(V, (2, B, T))
    return inputs, targets.masked_fill(torch.rand(B, T) < 0.2, IGNORE)


@EVERY_FAMILY
def test_what_is_computed_again_has_the_same_bits(family: str) -> None:
    model, (inputs, _) = make_gpt(family=family, n_embd=18, dropout=0.3).train(), batch()
    direction, results, calls = torch.randn(B, T, V), [], []
    model.blocks[0].mlp.register_forward_pre_hook(lambda *call: calls.append(call))
    for activation_checkpointing in (False, True):
        model.activation_checkpointing = activation_checkpointing
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, (model(inputs) * direction).sum()))
        results[-1].append(torch.rand(1))  # the random numbers that come next
    assert len(calls) == 1 + 2  # forward; forward and again
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


@EVERY_FAMILY
@pytest.mark.parametrize("logits", [V, 7 * V, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_chunks_is_the_loss(family: str, logits: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(training.memory, "LOGITS", logits)
    model, (inputs, targets), results = make_gpt(family=family, n_embd=18).train(), batch(), []
    sizes, head = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: sizes.append(hidden[..., 0].numel()) or head(hidden))
    for activation_checkpointing in (False, True):
        model.activation_checkpointing = activation_checkpointing
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, next_token_loss(model, inputs, targets, dtype)))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    plain, chunked = (torch.cat([tensor.flatten() for tensor in result]) for result in results)
    torch.testing.assert_close(chunked[0], plain[0], rtol=tolerance, atol=0)
    assert (plain - chunked).norm() <= tolerance * plain[1:].norm()
    largest = {V: 3, 7 * V: 7, 1 << 25: B * T}[logits]  # of 33 tokens there are at most 16 chunks
    assert max(sizes) == largest


@pytest.mark.long
def test_a_compiled_loss_may_compute_again() -> None:
    torch.compiler.reset()
    model, (inputs, targets), results = make_gpt(dropout=0.3).train(), batch(), []
    model.activation_checkpointing = True
    for loss_fn in (next_token_loss, torch.compile(next_token_loss, dynamic=False, backend="aot_eager")):
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, loss_fn(model, inputs, targets, torch.float32)))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_a_run_that_computes_again_learns_the_same(run, corpus_file: Path, straight: Path, tmp_path: Path) -> None:
    result = run(train, *tiny_run(corpus_file, tmp_path / "less", train__activation_checkpointing="true"))
    assert result.exit_code == 0 and "causal: yes" in result.out
    plain, less = (GPT.from_pretrained(out).state_dict() for out in (straight, tmp_path / "less"))
    for name in plain:
        torch.testing.assert_close(less[name], plain[name], rtol=1e-3, atol=1e-4)

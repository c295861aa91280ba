"""A GPU computes the same layer, leaks nothing and resumes to the same bits. Run by `pytest -m cuda`."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train
from errors import UserError
from inspection import capture
from model import GPT, GPTConfig
from model.attention import Attend
from tests.conftest import same_bits, tiny_run, weights
from training.certificate import certify

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, as make gpu does"),
]
DEVICE = "cuda"
ROUNDING = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative; float32 products are in TF32
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
SHAPE = {"n_layer": 2, "n_head": 6, "n_embd": 384, "context_length": 257, "vocab_size": 4099}


@pytest.fixture(autouse=True)
def settings() -> None:
    """The settings of training/device.py."""
    torch.compiler.reset()
    torch.set_float32_matmul_precision("high")


@DTYPES
@pytest.mark.parametrize("dropout, compiled", [(0.0, False), (0.0, True), (0.1, False), (0.1, True)])
def test_the_certificate_passes_the_layer_and_refuses_a_leak(
    dtype: torch.dtype, dropout: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        torch.compiler.reset()
        loss_fn = torch.compile(train.next_token_loss, dynamic=False) if compiled else train.next_token_loss
        certify(GPT(GPTConfig(**SHAPE, dropout=dropout)).to(DEVICE), partial(loss_fn, dtype=dtype), dtype, batch_size=8)

    def unmasked(self: Attend, q, k, v, mask, dropout: float = 0.0) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=True)

    ask()
    monkeypatch.setattr(Attend, "forward", unmasked)
    with pytest.raises(UserError, match="refusing to train"):
        ask()


@DTYPES
@pytest.mark.parametrize("n_kv_head", [2, 6])
@torch.no_grad()
def test_the_weights_shown_are_the_kernels(dtype: torch.dtype, n_kv_head: int) -> None:
    model = GPT(GPTConfig(**SHAPE, n_kv_head=n_kv_head)).to(DEVICE, dtype).eval()
    with capture(model) as att:
        model(torch.randint(4099, (2, 257), device=DEVICE))
    att.verify()  # the kernel computes the formula: raises if it does not


@torch.no_grad()
def test_a_cache_changes_no_token() -> None:
    torch.set_float32_matmul_precision("highest")  # rounding must not decide between two tokens
    model = GPT(GPTConfig(**SHAPE)).to(DEVICE).eval()
    idx = torch.randint(4099, (3, 11), device=DEVICE)
    with_cache, without = (model.generate(idx, 67, temperature=0, use_cache=use) for use in (True, False))
    assert with_cache.equal(without)


@DTYPES
def test_compiling_changes_only_rounding(dtype: torch.dtype) -> None:
    model = GPT(GPTConfig(**SHAPE)).to(DEVICE)
    inputs, targets = torch.randint(4099, (2, 5, 257), device=DEVICE)
    losses, gradients = [], []
    for loss_fn in (train.next_token_loss, torch.compile(train.next_token_loss, dynamic=False)):
        losses.append(loss_fn(model, inputs, targets, dtype))
        found = torch.autograd.grad(losses[-1], [*model.parameters()])
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    for eager, compiled in (losses, gradients):
        assert (compiled - eager).norm() < ROUNDING[dtype] * eager.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_resumed_run_ends_in_the_same_bits(run: Callable, corpus_file: Path, tmp_path: Path, compiled: bool) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = ["--train.device", DEVICE, "--train.dtype", "auto", "--train.deterministic", "true"]
    options += ["--train.compile", str(compiled).lower()]
    result = run(train, *tiny_run(corpus_file, straight), *options)
    assert result.exit_code == 0, result.err
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoints" / "step-00000012")
    result = run(train, "--resume", broken)
    assert result.exit_code == 0 and "resumed from" in result.out, result.err
    assert same_bits(weights(straight), weights(broken))

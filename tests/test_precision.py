"""bfloat16 matrices on a CPU: the numbers of the layers that they stand for, as nearly as bfloat16 allows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.families import FAMILIES
from model.precision import BFloat16Linear, keep_matrices_in_bfloat16
from tests.conftest import make_gpt

FEW, MANY = 3, 5  # rows


def largest_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return ((y.double() - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(13,), (FEW, 13), (FEW, 1, 13), (1, MANY, 13), (7, MANY, 13)])
def test_it_is_the_layer_with_rounded_weights(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool, has_units: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    linear = nn.Linear(13, 11, bias=bias)
    weight, constant = (t if t is None else t.bfloat16().double() for t in (linear.weight, linear.bias))
    x = torch.randn(shape)
    y = BFloat16Linear(linear)(x)
    assert y.dtype == torch.float32 and y.shape == (*shape[:-1], 11)
    error = largest_error(y, F.linear(x.double(), weight, constant))
    in_float32 = not has_units and x[..., 0].numel() > BFloat16Linear.FEW
    assert error < 1e-6 if in_float32 else 1e-6 < error < 1e-2


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_model_has_the_logits_of_its_rounded_weights(family: str, stored: torch.dtype) -> None:
    model = make_gpt(family=family, n_embd=18).eval()
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    exact, idx = copy.deepcopy(model).double(), torch.randint(17, (5, 11))
    model.to(stored)
    keep_matrices_in_bfloat16(model)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    logits = model(idx)
    assert logits.dtype == torch.float32
    assert largest_error(logits, exact(idx)) < 1e-5  # which have many rows
    caches = model.new_cache(1, 11)
    assert caches[0].keys.dtype == torch.float32
    one_by_one = [model.logits(model.hidden(idx[:1, t : t + 1], caches)) for t in range(11)]
    assert 1e-5 < largest_error(torch.cat(one_by_one, dim=1), exact(idx[:1])) < 0.03
    assert model.generate(idx[:1], 30, temperature=0).shape == (1, 41)

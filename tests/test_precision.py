"""bfloat16 matrices on a CPU: the numbers of the layers that they stand for, as nearly as bfloat16 allows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.families import FAMILIES
from model.precision import BFloat16Linear, keep_matrices_in_bfloat16
from tests.conftest import make_gpt

FEW = BFloat16Linear.FEW
ONE_ROUNDING = 2**-8  # relative, of bfloat16


def largest_error(y: Tensor, expected: Tensor) -> float:
    return ((y.double() - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(13,), (FEW, 13), (FEW, 1, 13), (1, FEW + 1, 13), (7, FEW + 1, 13)])
def test_it_is_the_layer_rounded_for_any_number_of_rows(shape: tuple[int, ...], bias: bool) -> None:
    linear, x = nn.Linear(13, 11, bias=bias), torch.randn(shape)
    weight, constant = (t if t is None else t.bfloat16().double() for t in (linear.weight, linear.bias))
    y = BFloat16Linear(linear)(x)
    assert y.dtype == torch.float32 and y.shape == (*shape[:-1], 11)
    assert torch.equal(y, y.bfloat16().float())
    assert largest_error(y, F.linear(x.bfloat16().double(), weight, constant)) < ONE_ROUNDING


def test_it_is_one_program_for_any_number_of_rows() -> None:
    layer = BFloat16Linear(nn.Linear(13, 11))
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=False)
    for rows in (FEW, FEW + 1):
        x = torch.randn(rows, 13)
        assert torch.equal(compiled(x), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_model_has_nearly_its_logits_with_a_cache_and_without(family: str, stored: torch.dtype) -> None:
    model = make_gpt(family=family, n_embd=18).eval()
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    exact, idx = copy.deepcopy(model).double(), torch.randint(17, (5, 11))
    model.to(stored)
    keep_matrices_in_bfloat16(model)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    logits, caches = model(idx), model.new_cache(1, 11)
    assert logits.dtype == caches[0].keys.dtype == torch.float32
    one_by_one = [model.logits(model.hidden(idx[:1, t : t + 1], caches)) for t in range(11)]
    for y, expected in ((logits, exact(idx)), (torch.cat(one_by_one, dim=1), exact(idx[:1]))):
        assert largest_error(y, expected) < 4 * ONE_ROUNDING


@pytest.mark.parametrize("seed", range(7))
def test_a_text_is_the_same_alone_in_a_batch_and_without_a_cache(seed: int) -> None:
    torch.manual_seed(seed)
    model, prompts = make_gpt(), torch.randint(17, (FEW + 2, 3))
    for parameter in model.parameters():
        parameter.data *= 20  # so that it has a preference
    keep_matrices_in_bfloat16(model)
    together = model.generate(prompts, 30, temperature=0)
    assert torch.equal(together, model.generate(prompts, 30, temperature=0, use_cache=False))
    assert torch.equal(together[:1], model.generate(prompts[:1], 30, temperature=0))

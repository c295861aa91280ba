"""No family sees the future, and each keeps its precision, in bfloat16 too. What they compute: test_huggingface.py."""

import pytest
import torch
from torch import Tensor

from model import GPT
from model.families import FAMILIES, RMSNorm
from tests.conftest import make_gpt, often
from tests.model.test_causality import see
from train import next_token_loss
from training import device
from training.config import TrainConfig
from tril.causality import check_causality

T, V = 11, 17
ONE_ROUNDING = 2**-8  # relative, of bfloat16


def make_family(family: str, **changes: object) -> GPT:
    return make_gpt(family=family, n_embd=18, **changes)  # three heads of an even width, for rotary positions


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_kv_head, dtype", often((1, torch.float32), (3, torch.float32), (1, torch.bfloat16)))
def test_no_family_sees_the_future(family: str, n_kv_head: int, dtype: torch.dtype, monkeypatch) -> None:
    model = make_family(family, n_kv_head=n_kv_head).to(dtype)
    outcome = check_causality(model, V, T)
    assert outcome.ok, outcome
    see(monkeypatch, torch.ones(T, T, dtype=torch.bool))
    assert not check_causality(model, V, T).ok


def test_rotary_tables_stay_exact_wherever_the_model_goes() -> None:
    model = make_family("llama")
    expected = model.rotary.cos.clone()
    for moved in (model.bfloat16(), model.to_empty(device="cpu")):
        assert torch.equal(moved.rotary.cos, expected) and moved.rotary.cos.dtype == torch.float32
        assert all(block.attention.rotary is moved.rotary for block in moved.blocks)
    assert not any("cos" in name for name in model.state_dict())


@pytest.mark.parametrize("affine", [False, True])
def test_under_autocast_rms_norm_has_the_dtype_of_its_input_its_eps_and_all_of_its_weight(affine: bool) -> None:
    norm, x = RMSNorm(1009, eps=3.0, elementwise_affine=affine), torch.randn(7, 1009).bfloat16()
    if affine:
        norm.weight.data += 2**-9  # bfloat16 cannot tell this sum from one
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 3).sqrt() * (1 + affine * 2**-9)
    assert y.dtype == torch.bfloat16
    assert (y == exact.bfloat16()).float().mean() > 0.99  # rounded once


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_in_bfloat16_where_products_are(family: str) -> None:
    model = make_family(family, n_layer=5, dropout=0.0)
    inputs, targets, seen = *torch.randint(17, (2, 7, 11)), set()
    for block in model.blocks:
        block.register_forward_hook(lambda block, x, y: seen.update((x[0].dtype, y.dtype)))

    def gradients(dtype: torch.dtype) -> tuple[float, Tensor]:
        seen.clear()
        model.zero_grad()
        loss = next_token_loss(model, inputs, targets, dtype)
        loss.backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    loss, exact = gradients(torch.float32)
    for dtype, stream, bound in ((torch.bfloat16, torch.bfloat16, 16), (torch.float16, torch.float32, 3)):
        rounded_loss, rounded = gradients(dtype)
        assert seen == {stream}
        assert abs(rounded_loss - loss) < bound / 50 * ONE_ROUNDING * loss
        assert (rounded - exact).norm() < bound * ONE_ROUNDING * exact.norm()


@pytest.mark.parametrize(
    "units, n_embd, asked, expected",
    [
        (True, 64, "auto", torch.bfloat16),
        (True, 63, "auto", torch.float32),
        (False, 64, "auto", torch.float32),
        (True, 64, "float32", torch.float32),
    ],
)
def test_a_cpu_with_units_for_bfloat16_trains_in_it(
    monkeypatch, units: bool, n_embd: int, asked: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(device, "has_bfloat16", lambda _: units)
    assert device.choose_device(TrainConfig(device="cpu", dtype=asked), n_embd)[1] == expected

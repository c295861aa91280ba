"""bfloat16: where it is chosen, where it is used, and how near it stays to float32."""

import pytest
import torch
from torch import Tensor

from model.families import FAMILIES
from tests.conftest import make_gpt
from train import next_token_loss
from training import device
from training.config import TrainConfig

ONE_ROUNDING = 2**-8  # relative, of bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_in_bfloat16_where_products_are(family: str) -> None:
    model = make_gpt(family=family, n_embd=18, n_layer=5, dropout=0.0)
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

"""bfloat16: where it is chosen, where it is used, and how near it stays to the numbers that it stands for."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.families import FAMILIES
from model.precision import BFloat16Linear, keep_matrices_in_bfloat16
from tests.conftest import make_gpt
from train import next_token_loss
from training import device
from training.config import TrainConfig

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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_residual_stream_is_in_bfloat16_where_products_are(family: str, checkpointing: bool) -> None:
    model = make_gpt(family=family, n_embd=18, n_layer=5, dropout=0.0)
    model.activation_checkpointing = checkpointing
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
    ("units", "n_embd", "asked", "expected"),
    [
        (torch.bfloat16, 128, "auto", (torch.bfloat16, "bfloat16: this CPU has units for it")),
        (torch.bfloat16, 127, "auto", (torch.float32, "float32: nothing is known to be faster for this model here")),
        (torch.float32, 128, "auto", (torch.float32, "float32: nothing is known to be faster for this model here")),
        (torch.bfloat16, 128, "float32", (torch.float32, "float32: as asked")),
    ],
)
def test_a_cpu_with_units_for_bfloat16_trains_in_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    units: torch.dtype,
    n_embd: int,
    asked: str,
    expected: tuple[torch.dtype, str],
) -> None:
    monkeypatch.setattr(device, "precision", lambda _: units)
    _, dtype = device.choose_device(TrainConfig(device="cpu", dtype=asked), n_embd)
    assert (dtype, capsys.readouterr().out.strip().partition("), ")[2]) == expected


def test_a_model_of_shapes_alone_runs() -> None:
    with torch.device("meta"):  # which has no autocast to ask for
        assert make_gpt()(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 17)

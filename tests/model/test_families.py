"""No family sees the future, and norms and positions keep their precision. What they compute: test_huggingface.py."""

import pytest
import torch

from model import GPT
from model.causality import check_causality
from model.families import FAMILIES, RMSNorm
from tests.conftest import make_gpt, often
from tests.model.test_causality import see

T, V = 11, 17


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

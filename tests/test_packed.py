"""model/packed.py: the same numbers from packed weights, and layers that are afterwards as they were."""

import pytest
import torch
from torch import nn

from model import GPT, GPTConfig
from model.device import has_bfloat16
from model.packed import MOST_ROWS, packed

needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(torch.device("cpu")), reason="this CPU has no units for bfloat16: nothing is packed"
)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def make(family: str, **options: int) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(family, n_layer=2, n_head=3, n_embd=66, context_length=31, vocab_size=101, **options)
    return GPT(config).eval().bfloat16()


@needs_bfloat16
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "nanochat"])
def test_packed_weights_write_the_same_tokens(family: str) -> None:
    model = make(family)
    idx = torch.randint(101, (2, 7))
    expected = model.generate(idx, 43, temperature=0)  # beyond the context
    with packed(model):
        assert all("forward" in vars(module) for module in model.modules() if isinstance(module, nn.Linear))
        assert model.generate(idx, 43, temperature=0).equal(expected)
    assert not any("forward" in vars(module) for module in model.modules())


@needs_bfloat16
def test_layers_of_other_kinds_many_rows_and_gradients_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(67, 71), Doubled(71, 73)).bfloat16()
    few = torch.randn(MOST_ROWS, 67).bfloat16()
    many = torch.randn(MOST_ROWS + 1, 67).bfloat16()
    with torch.no_grad():
        expected = model(few), model(many)
        with pytest.raises(KeyError), packed(model):
            assert "forward" in vars(model[0]) and "forward" not in vars(model[1])
            torch.testing.assert_close(model(few), expected[0])
            assert model(many).equal(expected[1])
            with torch.enable_grad():
                model(few).sum().backward()
            raise KeyError
    assert model[0].weight.grad is not None and "forward" not in vars(model[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_precisions_are_not_packed(dtype: torch.dtype) -> None:
    model = make("gpt2").to(dtype)
    with packed(model):
        assert not any("forward" in vars(module) for module in model.modules())


def test_a_cache_in_float32_serves_a_model_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without AMX."""
    model = make("qwen3", n_kv_head=1)
    idx = torch.randint(101, (2, 7))
    caches = {}
    for amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        cache = model.new_cache(2, 7)
        with torch.no_grad():
            hidden = model.hidden(idx[:, :5], cache)
            caches[amx] = cache, torch.cat((hidden, model.hidden(idx[:, 5:], cache)), dim=1)
    assert (caches[True][0][0].keys.dtype, caches[False][0][0].keys.dtype) == (torch.bfloat16, torch.float32)
    assert caches[False][0][0].keys.bfloat16().equal(caches[True][0][0].keys)
    torch.testing.assert_close(caches[False][1], caches[True][1], atol=0.1, rtol=0.1)
    assert caches[False][1].dtype == torch.bfloat16

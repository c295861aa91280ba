"""model/packed.py: the same numbers from packed weights, and layers that are afterwards as they were."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import sample
from model import GPT, GPTConfig
from model.device import has_bfloat16
from model.packed import multiply, packed

needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(torch.device("cpu")), reason="this CPU has no units for bfloat16: nothing is packed"
)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def make(family: str, **options: int) -> GPT:
    config = GPTConfig(family, n_layer=2, n_head=3, n_embd=66, context_length=31, vocab_size=101, **options)
    return GPT(config).eval().bfloat16()


@needs_bfloat16
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "nanochat"])
@torch.no_grad()
def test_packed_weights_give_the_same_logits(family: str) -> None:
    model = make(family)
    idx = torch.randint(101, (2, 7))

    def logits() -> torch.Tensor:
        cache = model.new_cache(2, 7)
        return torch.cat([model.logits(model.hidden(part, cache)) for part in (idx[:, :5], idx[:, 5:])], dim=1)

    expected = logits()
    with packed(model):
        assert all("forward" in vars(module) for module in model.modules() if isinstance(module, nn.Linear))
        with packed(model):  # nothing is left to pack
            torch.testing.assert_close(logits(), expected, atol=0.05, rtol=0.05)
        assert "forward" in vars(model.lm_head)
    with packed(model.float()):
        assert not any("forward" in vars(module) for module in model.modules())


@needs_bfloat16
def test_sampling_packs_the_weights(run, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Mock(wraps=multiply)
    monkeypatch.setattr("model.packed.multiply", watched)
    assert run(sample, straight, "--device", "cpu", "--dtype", "bfloat16", "--max_new_tokens", 2).exit_code == 0
    assert watched.called
    watched.reset_mock()
    model = make("gpt2")
    model.generate(torch.tensor([[2]]), 3)
    assert watched.called and not any("forward" in vars(module) for module in model.modules())


@needs_bfloat16
def test_layers_of_other_kinds_and_gradients_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(67, 71), Doubled(71, 73)).bfloat16()
    few = torch.randn(3, 67).bfloat16()
    many = torch.randn(101, 67).bfloat16()
    with torch.no_grad():
        expected = model(few), model(many)
        with pytest.raises(KeyError), packed(model):
            assert "forward" in vars(model[0]) and "forward" not in vars(model[1])
            model[0].weight.data.zero_()  # is not read
            torch.testing.assert_close((model(few), model(many)), expected)
            with torch.enable_grad():
                model(few).sum().backward()
            with torch.autocast("cpu", torch.bfloat16):
                assert model(few.float()).dtype == torch.bfloat16
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(few[:, 1:])
            raise KeyError
    assert model[0].weight.grad is not None and "forward" not in vars(model[0])


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
    torch.testing.assert_close(caches[False][1], caches[True][1], atol=0.1, rtol=0.1)
    assert caches[False][1].dtype == torch.bfloat16

"""No family sees the future, with a cache or without; its parts do what their papers say."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, GPTConfig, ModelError
from model.attention import Attend
from model.causality import check_causality
from model.families import FAMILIES, RMSNorm, Rotary
from tests.conftest import make_gpt

T, V = 11, 17
EVERY = pytest.mark.parametrize("family", FAMILIES)
WIDE = {"n_embd": 18}  # rotary positions need an even width of three heads


def make_family(family: str, **changes: object) -> GPT:
    return make_gpt(family=family, **WIDE, **changes)


@EVERY
@pytest.mark.parametrize("n_kv_head", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_family_sees_the_future(family: str, n_kv_head: int, dtype: torch.dtype, monkeypatch) -> None:
    model = make_family(family, n_kv_head=n_kv_head).to(dtype)
    outcome = check_causality(model, V, T)
    assert outcome.ok, outcome
    see_all(monkeypatch)
    assert not check_causality(model, V, T).ok


def see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the mask away."""

    def forward(self: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    monkeypatch.setattr(Attend, "forward", forward)


@EVERY
@torch.no_grad()
def test_a_cache_changes_nothing_in_any_family(family: str) -> None:
    model, idx = make_family(family, n_kv_head=1).double().eval(), torch.randint(V, (2, T))
    for chunk in (1, 2, 3, T - 1):
        caches = model.new_cache(2, T)
        parts = [model.logits(model.hidden(part, caches)) for part in idx.split(chunk, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(idx), rtol=1e-12, atol=1e-12)
    assert torch.equal(*(model.generate(idx, 3 * T, temperature=0, use_cache=use_cache) for use_cache in (True, False)))


@pytest.mark.parametrize(
    "config, size",
    [
        (
            {"family": "llama", "n_layer": 16, "n_head": 32, "n_kv_head": 8, "n_embd": 2048, "n_inner": 8192}
            | {"vocab_size": 128_256},
            1_235_814_400,  # Llama 3.2 1B
        ),
        (
            {"family": "qwen3", "n_layer": 28, "n_head": 16, "n_kv_head": 8, "n_embd": 1024, "head_dim": 128}
            | {"n_inner": 3072, "vocab_size": 151_936},
            596_049_920,  # Qwen3 0.6B
        ),
        ({"family": "nanochat", "n_layer": 20, "n_head": 10, "n_embd": 1280, "vocab_size": 65_536}, 560_988_160),  # d20
    ],
    ids=lambda value: value["family"] if isinstance(value, dict) else str(value),
)
def test_published_sizes(config: dict, size: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**config))
    assert sum(parameter.numel() for parameter in model.parameters()) == size


def test_rotary_positions_turn_and_only_their_distance_counts() -> None:
    module = Rotary(GPTConfig(family="llama", n_embd=12, n_head=2, context_length=29, vocab_size=2)).double()

    def rotary(x: torch.Tensor, position: int) -> torch.Tensor:
        turned = module(x, slice(position, position + 1))
        assert torch.equal(turned, module(x, torch.tensor(position).expand(len(x), 1, 1)))
        return turned

    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64).unbind()
    for distance in (0, 1, 5):
        products = [(rotary(q, at + distance) * rotary(k, at)).sum() for at in (0, 3, 17)]
        torch.testing.assert_close(products, products[:1] * 3, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotary(q, 23).norm(), q.norm(), rtol=1e-6, atol=0.0)
    assert torch.equal(rotary(q, 0), q)
    angle = 7 * 10_000.0 ** (-2 / 6)  # the second pair, at position 7
    turned = rotary(torch.tensor([0.0, 1, 0, 0, 0, 0])[None, None, None], 7).flatten()
    torch.testing.assert_close(turned[[1, 4]], torch.tensor([angle, angle - torch.pi / 2]).cos(), rtol=0, atol=1e-6)


def test_rotary_tables_stay_exact_wherever_the_model_goes() -> None:
    model = make_family("llama")
    expected = model.rotary.cos.clone()
    for moved in (model.bfloat16(), model.to("meta").to_empty(device="cpu")):
        assert torch.equal(moved.rotary.cos, expected) and moved.rotary.cos.dtype == torch.float32
        assert all(block.attention.rotary is moved.rotary for block in moved.blocks)
    assert not any("cos" in name for name in model.state_dict())


def test_capped_logits_stay_between_the_caps() -> None:
    model = make_family("nanochat")
    torch.nn.init.normal_(model.lm_head.weight, std=100)
    logits = model(torch.randint(V, (2, T)))
    assert 14.9 < logits.abs().max() <= 15


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"family": "llama", "n_embd": 15}, "head_dim must be even, got 5"),
        ({"family": "llama", "bias": True}, "a llama has no biases"),
        ({"family": "nanochat", "head_dim": 4}, "head_dim is n_embd / n_head in a nanochat, got 4"),
        ({"family": "mamba"}, "family must be one of gpt2, llama, qwen3, nanochat, got 'mamba'"),
        ({"family": "llama", "rope_theta": -1.0}, "must be numbers from 0"),
    ],
)
def test_impossible_families_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        GPTConfig(**{"n_head": 3, "n_embd": 18, "vocab_size": V, **changes})


def test_rms_norm_has_the_precision_of_its_input_and_all_of_its_weight() -> None:
    norm, x = RMSNorm(1009), torch.randn(7, 1009).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        before = norm(x)
        norm.weight.data += 2**-9  # which bfloat16 does not tell from one
        after = norm(x)
    assert before.dtype == after.dtype == torch.bfloat16
    exact = F.rms_norm(x.double(), (1009,), norm.weight.double())
    torch.testing.assert_close(after.double(), exact, rtol=2**-7, atol=0)
    assert not torch.equal(before, after)


def test_rms_norm_has_its_eps_under_autocast() -> None:
    x = torch.randn(7, 11)
    for affine in (False, True):
        norm = RMSNorm(11, eps=3.0, elementwise_affine=affine)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 3).sqrt())

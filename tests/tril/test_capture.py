"""Shown weights are the kernel's: captured patterns, their proof, and that capturing changes nothing."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tril.weights
from model import GPT
from tests.conftest import make_gpt
from tril import Captured, NotTheKernels, capture
from tril.weights import Computed, attention_weights

B, T, V, L, H = 2, 11, 17, 2, 3
WEIGHTS = attention_weights


def run_captured(model: nn.Module, idx: Tensor) -> Captured:
    with capture(model) as att:
        model(idx)
    return att


def call_captured(q: Tensor, k: Tensor, v: Tensor | None = None, **options: object) -> Captured:
    """Capture one call of the kernel without a model."""
    with capture(nn.Module()) as att:
        F.scaled_dot_product_attention(q, k, torch.randn_like(k) if v is None else v, **options)
    return att


def test_a_call_with_a_cache_has_its_rows_and_replaces_the_one_before() -> None:
    model, first, second = make_gpt().eval(), torch.randint(V, (1, T)), torch.randint(V, (1, T))
    with capture(model) as att, torch.no_grad():
        cache = model.new_cache(1, T)
        model.hidden(first[:, :5], cache)
        assert att.pattern(1, 2).shape == (1, 5, 5)
        model(second)
        model.hidden(first[:, 5:], cache)
    att.verify()
    alone = run_captured(model, first)
    torch.testing.assert_close(att.pattern(1, 2), alone.pattern(1, 2)[:, 5:], rtol=0, atol=1e-6)


def test_a_large_key_without_weight_excuses_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(B, H, T, 7), torch.randn(B, H, T, 7)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, 0] = torch.tensor([-1e5, 0, 0, 0, 0, 0, 0])
    att = call_captured(q, k, is_causal=True)
    att.verify()
    monkeypatch.setattr(tril.weights, "attention_weights", lambda *given: WEIGHTS(*given) + 1e-4 * given[2])
    with pytest.raises(NotTheKernels):
        att.verify()


def test_rounding_grows_with_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of ten thousand that are nearly the same have an error of a thousandth, which is not a wrong weight."""
    q, k = 1000 + torch.randn(B, H, T, 7), 3 + 1e-4 * torch.randn(B, H, T, 7)
    att = call_captured(q, k, is_causal=True)
    assert (q @ k.mT).min() / 7**0.5 > 7000 and att.scores()["entropy"].min() > 0.9
    att.verify()
    (call,) = att.calls
    att.layers[0] = [replace(call, k=k + 1e-4 * torch.randn_like(k))]
    kernel = Computed.output
    monkeypatch.setattr(Computed, "output", lambda self, values: kernel(call, values))
    with pytest.raises(NotTheKernels):
        att.verify()


WRONG = {
    "scale": lambda q, k, mask, scale: WEIGHTS(q, k, mask, scale * (5 / 6) ** 0.5),  # sqrt(D + 1)
    "mask": lambda q, k, mask, scale: WEIGHTS(q, k, mask.roll(1, -1).maximum(mask), scale),
    "keys of another head": lambda q, k, mask, scale: WEIGHTS(q, k.flip(-1), mask, scale),
    "another group's keys": lambda q, k, mask, scale: WEIGHTS(q, k.roll(1, 1), mask, scale),
    "one weight": lambda q, k, mask, scale: (
        WEIGHTS(q, k, mask, scale) + 1e-3 * (torch.arange(mask.size(-1)) == T - 1) * (mask == 0)
    ),
    "not a number": lambda q, k, mask, scale: WEIGHTS(q, k, mask, scale) * float("nan"),
}


@pytest.mark.parametrize("block_size", [3 * B * 4 * T, 1 << 21])  # three rows of four heads, all rows
@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_are_not_the_kernels_are_refused(monkeypatch, wrong: str, block_size: int) -> None:
    model = make_gpt(family="llama", n_head=4, n_kv_head=2, n_embd=24, bias=None).eval()
    att = run_captured(model, torch.randint(V, (B, T)))
    att.verify()
    monkeypatch.setattr(tril.weights, "BLOCK_SIZE", block_size)
    monkeypatch.setattr(tril.weights, "attention_weights", WRONG[wrong])
    with pytest.raises(NotTheKernels, match="layer 0: the weights shown are not those of the kernel, a row is off by "):
        att.verify()


def test_an_error_that_the_values_hide_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """T rows of D values have combinations that vanish: with them added, weights times values are what they were."""
    q, k, v = torch.randn(3, 1, H, T, 5)
    att = call_captured(q, k, v, is_causal=True)
    v = v[0, 0].double()  # (T, D), head 0
    hidden = torch.linalg.svd(v.T).Vh[-1]  # (T,), orthogonal to every column of the values
    assert (hidden @ v).abs().max() < 1e-7
    honest = att.pattern(0, 0)

    def corrupted(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
        weights = WEIGHTS(q, k, mask, scale)
        weights[:, 0, -1] += 5e-2 * hidden
        return weights

    monkeypatch.setattr(tril.weights, "attention_weights", corrupted)
    assert not torch.equal(att.pattern(0, 0), honest)
    torch.testing.assert_close(att.pattern(0, 0)[0].double() @ v, honest[0].double() @ v, rtol=0, atol=1e-6)
    with pytest.raises(NotTheKernels):
        att.verify()


def test_capturing_changes_no_bit_and_leaves_no_hook() -> None:
    idx = torch.randint(V, (B, T))

    def train_once(model: GPT) -> list[Tensor]:
        torch.manual_seed(1)
        logits = model.train()(idx)
        logits.square().mean().backward()
        return [logits, *(parameter.grad for parameter in model.parameters())]

    torch.manual_seed(0)
    plain = train_once(make_gpt())
    for edits in (None, {(1, 2): lambda output: output}):
        torch.manual_seed(0)
        model = make_gpt()
        with capture(model, edits) as att:
            captured = train_once(model)
        assert all(torch.equal(*pair) for pair in zip(plain, captured, strict=True))
        att.verify()
        assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ZeroDivisionError), capture(model):
        1 / 0  # noqa: B018
    assert not any(module._forward_hooks for module in model.modules())
    assert set(model.state_dict()) == set(make_gpt().state_dict())

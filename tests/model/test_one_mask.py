"""One mask, four readers: formula, fused kernel, decoding with a cache and inspection are the same function."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model import attention
from model.attention import Attend, CausalSelfAttention, attention_weights, make_causal_mask
from model.cache import LayerCache
from tests.conftest import often
from tests.model.test_attention import by_formula
from tests.model.test_leakage import GrowingCache
from tril import capture

# The largest relative error of a tensor, by its norm. One rounding is 1e-16, 6e-8 or 4e-3, and a layer and its gradient
# have some twenty in a row. A wrong scale or head shows in float64.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 0.2}


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """Sizes of a layer and its input, and the places where the input is split for the cache."""
    T = draw(st.integers(1, 31))
    n_kv_head, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "layer": {
            "n_embd": draw(st.integers(5, 23)),  # of a narrower output little may be left
            "n_head": n_kv_head * group,
            "n_kv_head": n_kv_head,
            "head_dim": draw(st.integers(1, 11)),
            "bias": draw(st.booleans()),
        },
        "context_length": T + draw(st.integers(0, 3)),
        "shape": (draw(st.integers(1, 3)), T),
        "cuts": draw(st.lists(st.integers(1, T), unique=True, max_size=5).map(sorted)),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "seed": draw(st.integers(0, 2**32)),
    }


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, size: Tensor | None = None) -> None:
    """Assert that the error is rounding, relative to `size`. None: the norm of `expected`."""
    error, size = (actual.double() - expected.double()).norm(), expected.double().norm() if size is None else size
    assert error <= TOLERANCE[dtype] * size, f"relative error {error / size:.1e}"


def gradients(layer: CausalSelfAttention, x: Tensor, y: Tensor, direction: Tensor) -> Tensor:
    """The gradients of y in this direction, for x and all parameters, as one vector."""
    found = torch.autograd.grad((y * direction).sum(), [x, *layer.parameters()], retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found])


def check_case(case: dict) -> None:
    torch.manual_seed(case["seed"])
    dtype, (B, T) = case["dtype"], case["shape"]
    layer = CausalSelfAttention(mask=make_causal_mask(case["context_length"]), **case["layer"]).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
    x = torch.randn(B, T, layer.q_proj.in_features, dtype=dtype, requires_grad=True)

    def by_cache(cache: LayerCache | GrowingCache) -> Tensor:
        parts = [part for part in x.tensor_split(case["cuts"], dim=1) if part.size(1)]
        return torch.cat([layer(part, cache) for part in parts], dim=1)

    with patch.object(attention, "formula_is_faster", return_value=False), capture(layer) as att:
        kernel = layer(x)
    n_kv_head = layer.k_proj.out_features // layer.head_dim
    cache = LayerCache(torch.zeros(B, n_kv_head, T, layer.head_dim, dtype=dtype, device=x.device))
    cache.keys.fill_(torch.nan)  # old memory must not matter
    cache.values.fill_(torch.nan)
    with torch.no_grad(), capture(layer) as cached:
        close(by_cache(cache), kernel, dtype)
    # In one direction the terms of a gradient may cancel. The largest of several norms says how large the terms are.
    directions = torch.randn(4, *kernel.shape, dtype=dtype)
    expected, *others = [gradients(layer, x, kernel, direction) for direction in directions]
    size = max(gradient.double().norm() for gradient in (expected, *others))
    for y in (by_formula(layer, x), by_cache(GrowingCache())):
        close(y, kernel, dtype)
        close(gradients(layer, x, y, directions[0]), expected, dtype, size)

    if T == 1 and cached.left_out:  # heads that share the keys of one token are packed in another way
        return
    (call,) = att.calls
    weights = attention_weights(call.q.double(), call.k.double(), make_causal_mask(T))
    for inspected in (att, cached):
        if inspected.left_out:  # the last call was of one token
            continue
        rows = inspected.calls[0].q.size(2)  # with a cache, those of the last call
        inspected.verify()
        for head in range(weights.size(1)):
            close(inspected.pattern(0, head), weights[:, head, -rows:], dtype)


@pytest.mark.parametrize("examples", often(20, 2000))
def test_formula_kernel_cache_and_inspection_agree(examples: int) -> None:
    settings(deadline=None, max_examples=examples)(given(cases())(check_case))()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])  # by the kernel, and by the formula
@settings(deadline=None, max_examples=20)
@given(st.integers(1, 23), st.integers(1, 3), st.integers(1, 3), st.floats(0.05, 0.95), st.integers(0, 2**32))
def test_dropout_drops_allowed_weights_and_scales_the_rest(
    dtype: torch.dtype, T: int, B: int, H: int, p: float, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(2, B, H, T, 5, dtype=dtype, requires_grad=True)
    one_hot = torch.eye(T, dtype=dtype).expand(B, H, T, T)  # values that show the weights
    mask = make_causal_mask(T)
    weights, dropped = (
        attention_weights(q, k, mask),
        Attend()(q, k, one_hot, mask if dtype == torch.bfloat16 else None, p),
    )
    kept = dropped != 0
    tolerance = 1e-12 if dtype == torch.float64 else 2**-6
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - p), rtol=tolerance, atol=1e-12)
    assert not (kept & ~mask).any()

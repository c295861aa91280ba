"""Multi-head attention beside Llama-3.2-3B: 24 heads of 128, 8 key and value heads, and a picture of nine tokens.

Its bugs: `combine_heads` computes and returns nothing; and -1e9 stands for minus infinity, which half precision cannot
hold. (The model itself, and the picture of its heads, come with its family.)
"""

import pytest
import torch

from model.attention import Attend, CausalSelfAttention, attention_weights, make_causal_mask

H, N_KV_HEAD, D, T = 24, 8, 128, 9
C = 3072


def test_matrices_of_nine_tokens() -> None:
    layer = CausalSelfAttention(C, H, N_KV_HEAD, D, make_causal_mask(T), bias=False).eval()
    seen = []
    layer.attend.register_forward_hook(lambda module, inputs, output: seen.append((inputs, output)))
    with torch.no_grad():
        assert layer(torch.randn(1, T, C)).shape == (1, T, C)
    (q, k, v, mask, _), output = seen[0]
    weights = attention_weights(q, k, mask)
    assert weights.shape == (1, H, T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, H, T))
    torch.testing.assert_close(weights @ v.repeat_interleave(H // N_KV_HEAD, dim=1), output)


def test_splitting_and_combining_heads_are_inverse() -> None:
    """`CausalSelfAttention` combines by transposing and flattening; if the values are kept, so is everything."""
    layer = CausalSelfAttention(15, 3, 3, 5, make_causal_mask(T), bias=False)
    for proj in (layer.v_proj, layer.o_proj):
        torch.nn.init.eye_(proj.weight)
    layer.attend.register_forward_hook(lambda module, inputs, output: inputs[2])  # each token attends to itself alone
    x = torch.randn(2, T, 15)
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite_and_sums_to_one(dtype: torch.dtype) -> None:
    q, k, v = (30 * torch.randn(1, heads, T, D).to(dtype) for heads in (H, N_KV_HEAD, N_KV_HEAD))
    weights = attention_weights(q, k, make_causal_mask(T))
    assert weights.isfinite().all() and Attend()(q, k, v, make_causal_mask(T)).isfinite().all()
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(1, H, T), rtol=0, atol=1e-2)
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))


def test_its_minus_infinity_does_not_fit_half_precision() -> None:
    scores = torch.randn(T, T, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="overflow"):
        scores.masked_fill(~make_causal_mask(T), -1e9)

"""Multi-head attention, in einsum there, equal to torch.nn.MultiheadAttention, after Ramzi and Peyre.

The source prints the relative error of the norm, 1.98e-7, for a batch of 8, 80 points, width 12, 2 heads, no bias.
"""

import pytest
import torch
from torch import nn

from model.attention import CausalSelfAttention, attention_weights, make_causal_mask

B, T, C, H = 8, 80, 12, 2
BARS = {torch.float32: 2e-7, torch.float64: 1e-14}


@pytest.mark.parametrize("dtype", BARS, ids=str)
@torch.no_grad()
def test_equals_torch_multihead_attention(dtype: torch.dtype) -> None:
    theirs = nn.MultiheadAttention(C, H, bias=False, batch_first=True).to(dtype)
    x, mask = torch.randn(B, T, C, dtype=dtype), make_causal_mask(T)
    matrices = [*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight]
    layer = CausalSelfAttention(C, H, H, C // H, mask, bias=False).to(dtype)
    for proj, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj), matrices, strict=True):
        proj.weight.copy_(weight)
    expected, expected_weights = theirs(x, x, x, attn_mask=~mask, average_attn_weights=False)
    assert (layer(x) - expected).norm() / expected.norm() <= BARS[dtype]

    q, k = layer.split_heads(layer.q_proj(x)), layer.split_heads(layer.k_proj(x))
    torch.testing.assert_close(attention_weights(q, k, mask), expected_weights)
    everything = torch.ones_like(mask)  # not causal, as in the source
    _, expected_weights = theirs(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(attention_weights(q, k, everything), expected_weights)

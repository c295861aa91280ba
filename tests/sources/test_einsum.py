"""Multi-head attention in einsum, equal to torch.nn.MultiheadAttention, after Ramzi and Peyre.

The source prints the relative error of the norm, 1.98e-7, for a batch of 8, 80 points, width 12, 2 heads, no bias.
"""

import pytest
import torch
from torch import Tensor, nn

from model.attention import CausalSelfAttention, attention_weights, make_causal_mask

B, T, C, H = 8, 80, 12, 2
BARS = {torch.float32: 2e-7, torch.float64: 1e-14}


def einsum_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, mask: Tensor) -> Tensor:
    """The source's way: one einsum a step, the heads an index (h) of the matrices."""
    q, k, v = (torch.einsum("btc,hdc->bhtd", x, w.unflatten(0, (H, -1))) for w in (w_q, w_k, w_v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / (C // H) ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bhkd,chd->bqc", weights, v, w_o.unflatten(1, (H, -1)))


def formula_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, mask: Tensor) -> Tensor:
    q, k, v = ((x @ w.T).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
    return (attention_weights(q, k, mask) @ v).transpose(1, 2).flatten(2) @ w_o.T


def layer_attention(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, mask: Tensor) -> Tensor:
    layer = CausalSelfAttention(C, H, H, C // H, mask, bias=False).to(x.dtype)
    for proj, weight in ((layer.q_proj, w_q), (layer.k_proj, w_k), (layer.v_proj, w_v), (layer.o_proj, w_o)):
        proj.weight = nn.Parameter(weight)
    return layer(x)


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize(
    "attention, causal",
    [(formula_attention, False), (formula_attention, True), (layer_attention, True), (einsum_attention, True)],
)
def test_equals_torch_multihead_attention(attention: object, causal: bool, dtype: torch.dtype) -> None:
    theirs = nn.MultiheadAttention(C, H, bias=False, batch_first=True).to(dtype)
    x = torch.randn(B, T, C, dtype=dtype)
    mask = make_causal_mask(T) if causal else torch.ones(T, T, dtype=torch.bool)
    with torch.no_grad():
        expected, _ = theirs(x, x, x, attn_mask=~mask)
        actual = attention(x, *theirs.in_proj_weight.chunk(3), theirs.out_proj.weight, mask)
    error = (actual - expected).norm() / expected.norm()
    assert error <= BARS[dtype]

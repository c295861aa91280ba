"""Multi-head attention beside Llama-3.2-3B: 24 heads of 128, 8 key and value heads, and a picture of nine tokens.

Its bugs: `combine_heads` computes and returns nothing; and -1e9 stands for minus infinity, which half precision cannot
hold. With the real weights the picture at the end is: python inspect_attention.py meta-llama/Llama-3.2-3B --text "the
financial bank is located on river bank" --heads "last.*" -o heads.png
"""

import pytest
import torch

from model.attention import CausalSelfAttention, attention_weights, make_causal_mask

TEXT = "the financial bank is located on river bank"
H, N_KV_HEAD, D, T, C = 24, 8, 128, 9, 3072


def test_matrices_of_nine_tokens() -> None:
    layer = CausalSelfAttention(C, H, N_KV_HEAD, D, make_causal_mask(T), bias=False).eval()
    seen = []
    layer.attend.register_forward_hook(lambda module, inputs, output: seen.append((inputs, output)))
    with torch.no_grad():
        assert layer(torch.randn(1, T, C)).shape == (1, T, C)
    (q, k, v, mask, _), output = seen[0]
    weights = attention_weights(q, k, mask)
    assert weights.shape == (1, H, T, T)
    torch.testing.assert_close(weights @ v.repeat_interleave(H // N_KV_HEAD, dim=1), output)


def test_its_value_for_masked_scores_overflows_in_half_precision() -> None:
    with pytest.raises(RuntimeError, match="overflow"):
        torch.zeros(T, T, dtype=torch.float16).masked_fill(~make_causal_mask(T), -1e9)


def test_splitting_and_combining_heads_are_inverse() -> None:
    layer = CausalSelfAttention(15, 3, 3, 5, make_causal_mask(T), bias=False)
    for proj in (layer.v_proj, layer.o_proj):
        torch.nn.init.eye_(proj.weight)
    layer.attend.register_forward_hook(lambda module, inputs, output: inputs[2])  # each token attends to itself alone
    x = torch.randn(2, T, 15)
    assert torch.equal(layer(x), x)

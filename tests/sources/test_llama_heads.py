"""Multi-head attention beside Llama-3.2-3B: 24 heads of 128, 8 key and value heads, and a picture of nine tokens.

Its bugs: `combine_heads` computes and returns nothing; and -1e9 stands for minus infinity, which half precision cannot
hold: tests/mutants.py has that one. With the real weights its picture is: python inspect_attention.py
meta-llama/Llama-3.2-3B --text "the financial bank is located on river bank" --heads "-1.*" -o heads.png
"""

import torch

from model.attention import CausalSelfAttention, make_causal_mask


def test_splitting_and_combining_heads_are_inverse() -> None:
    layer = CausalSelfAttention(15, 3, 3, 5, make_causal_mask(9), bias=False)
    for proj in (layer.v_proj, layer.o_proj):
        torch.nn.init.eye_(proj.weight)
    layer.attend.register_forward_hook(lambda module, inputs, output: inputs[2])  # each token attends to itself alone
    x = torch.randn(2, 9, 15)
    assert torch.equal(layer(x), x)

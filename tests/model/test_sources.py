"""Five tutorials on attention: our layer computes the figures that they print, and has none of their bugs."""

import math

import pytest
import torch
from torch import Tensor, nn

from model.attention import Attend, CausalSelfAttention, attention_weights, make_causal_mask
from tests.conftest import make_gpt
from tril.causality import check_causality

B, H, T, D = 2, 3, 7, 5

TOKENS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)


def printed(actual: Tensor, expected: list) -> None:
    """Assert that numbers equal the four decimals that the source prints."""
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=0.5001e-4)


def test_causal_weights() -> None:
    """Self-attention with trainable weights, a notebook after "Build a Large Language Model (From Scratch)", chapter 3.

    It computes attention for the six tokens of "Your journey starts with one step", and ends in a layer with two heads.
    Its bug: `scores.masked_fill(...)` without using what it returns, so its causal layer sees the future:
    tests/mutants.py has it.
    """
    torch.manual_seed(789)
    q_proj, k_proj = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    rows = [
        [1.0],
        [0.5517, 0.4483],
        [0.3800, 0.3097, 0.3103],
        [0.2758, 0.2460, 0.2462, 0.2319],
        [0.2175, 0.1983, 0.1984, 0.1888, 0.1971],
        [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
    ]
    q, k = q_proj(TOKENS), k_proj(TOKENS)  # of one sequence and one head
    causal = attention_weights(q[None, None], k[None, None], make_causal_mask(6))[0, 0].detach()
    printed(causal, [row + [0.0] * (6 - len(row)) for row in rows])


def test_our_layer_prints_what_the_two_head_layer_prints() -> None:
    torch.manual_seed(123)
    q_proj, k_proj, v_proj = (nn.Linear(6, 6, bias=False) for _ in range(3))
    o_proj = nn.Linear(6, 6)
    layer = CausalSelfAttention(n_embd=6, n_head=2, n_kv_head=2, head_dim=3, mask=make_causal_mask(3))
    ours = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    for proj, theirs in zip(ours, (q_proj, k_proj, v_proj, o_proj), strict=True):
        proj.weight, proj.bias = theirs.weight, theirs.bias
    rows = [
        [0.1569, -0.0873, 0.0210, 0.0215, -0.3243, -0.2518],
        [0.1117, -0.0547, 0.0406, -0.0213, -0.3251, -0.2993],
        [0.1196, -0.0491, 0.0318, -0.0635, -0.2788, -0.2578],
    ]
    printed(layer(TOKENS.view(1, 3, 6))[0].detach(), rows)


BARS = {torch.float32: 2e-7, torch.float64: 1e-14}


@pytest.mark.parametrize("dtype", BARS, ids=str)
@torch.no_grad()
def test_equals_torch_multihead_attention(dtype: torch.dtype) -> None:
    """Multi-head attention, in einsum there, equal to torch.nn.MultiheadAttention, after Ramzi and Peyre.

    The source prints the relative error of the norm, 1.98e-7, for a batch of 8, 80 points, width 12, 2 heads, no bias.
    """
    theirs = nn.MultiheadAttention(12, 2, bias=False, batch_first=True).to(dtype)
    x, mask = torch.randn(8, 80, 12, dtype=dtype), make_causal_mask(80)
    matrices = [*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight]
    layer = CausalSelfAttention(12, 2, 2, 6, mask, bias=False).to(dtype)
    for proj, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj), matrices, strict=True):
        proj.weight.copy_(weight)
    expected, expected_weights = theirs(x, x, x, attn_mask=~mask, average_attn_weights=False)
    assert (layer(x) - expected).norm() / expected.norm() <= BARS[dtype]

    q, k = layer.split_heads(layer.q_proj(x)), layer.split_heads(layer.k_proj(x))
    torch.testing.assert_close(attention_weights(q, k, mask), expected_weights)
    everything = torch.ones_like(mask)  # not causal, as in the source
    _, expected_weights = theirs(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(attention_weights(q, k, everything), expected_weights)


def masked_after_softmax(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The source's causal switch."""
    return attention_weights(q, k, torch.ones_like(mask)) * mask


def test_a_mask_after_softmax_is_refused_though_its_weights_look_causal(monkeypatch) -> None:
    """Scaled dot-product and multi-head attention as formulas with a causal switch, after Vaswani et al. 2017.

    Its bugs: the mask is multiplied in after softmax, so that rows no longer sum to one and the denominator has seen
    the future; and the heads are in a plain Python list, so that no optimizer and no checkpoint ever sees their
    weights: tests/mutants.py has that one.
    """
    q, k = torch.randn(2, B, H, T, D)
    wrong = masked_after_softmax(q, k, make_causal_mask(T))
    assert torch.equal(wrong.triu(1), torch.zeros_like(wrong))  # a picture would show nothing wrong
    assert (wrong.sum(-1)[..., :-1] < 1).all()

    def forward(self: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object) -> Tensor:
        return masked_after_softmax(q, k, make_causal_mask(k.size(2))[-q.size(2) :]) @ v

    monkeypatch.setattr(Attend, "forward", forward)
    outcome = check_causality(make_gpt(), vocab_size=17, length=11)
    assert not outcome.ok and (outcome.query, outcome.key) == (0, 1)


def test_splitting_and_combining_heads_are_inverse() -> None:
    """Multi-head attention beside Llama-3.2-3B: 24 heads of 128, 8 key and value heads, and a picture of nine tokens.

    Its bugs: `combine_heads` computes and returns nothing; and -1e9 stands for minus infinity, which half precision
    cannot hold: tests/mutants.py has that one. With the real weights its picture is: python inspect_attention.py
    meta-llama/Llama-3.2-3B --text "the financial bank is located on river bank" --heads "-1.*" -o heads.png
    """
    layer = CausalSelfAttention(15, 3, 3, 5, make_causal_mask(9), bias=False)
    for proj in (layer.v_proj, layer.o_proj):
        torch.nn.init.eye_(proj.weight)
    layer.attend.register_forward_hook(lambda module, inputs, output: inputs[2])  # each token attends to itself alone
    x = torch.randn(2, 9, 15)
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("T_query, T_key", [(7, 7), (3, 7), (1, 7)])
def test_same_weights_in_another_layout_with_a_mask_for_each_sequence(T_query: int, T_key: int) -> None:
    """Multi-head attention with separate query, key and value, and a mask of (T_query, T_key, B), after labml.

    Time is first: everything is (T, B, ...) there and the scores are (T_query, T_key, B, H), kept for logging. Its
    hazard: softmax over a dimension given by its number, which in our layout is the heads or the queries:
    tests/mutants.py has both.
    """
    q, k, v = torch.randn(T_query, B, H, D), torch.randn(T_key, B, H, D), torch.randn(T_key, B, H, D)
    causal = make_causal_mask(T_key)[T_key - T_query :]
    masks = torch.stack((causal, causal), dim=-1)  # (T_query, T_key, B)
    masks[-1, 0, 1] = False  # in the second sequence, the last token may not see the first
    scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / math.sqrt(D)
    theirs = scores.masked_fill(~masks[..., None], float("-inf")).softmax(dim=1)
    q, k, v_ours = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # (T, B, H, D) -> (B, H, T, D)
    ours = attention_weights(q, k, masks.permute(2, 0, 1)[:, None])
    torch.testing.assert_close(theirs.permute(2, 3, 0, 1), ours)
    output = torch.einsum("ijbh,jbhd->ibhd", theirs, v)
    torch.testing.assert_close(output.permute(1, 2, 0, 3)[:1], Attend()(q, k, v_ours, causal)[:1])

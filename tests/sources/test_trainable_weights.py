"""Self-attention with trainable weights, a notebook after "Build a Large Language Model (From Scratch)", chapter 3.

It computes attention for the six tokens of "Your journey starts with one step", and ends in a layer with two heads. Its
bug: `scores.masked_fill(...)` without using what it returns, so its causal layer sees the future: tests/mutants.py
has it.
"""

import torch
from torch import Tensor, nn

from model.attention import CausalSelfAttention, attention_weights, make_causal_mask

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


def weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """`attention_weights` for one sequence and one head: (T, D), (T, D) -> (T, T)."""
    return attention_weights(q[None, None], k[None, None], mask)[0, 0]


def printed(actual: Tensor, expected: list) -> None:
    """Assert that numbers equal the four decimals that the source prints."""
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=0.5001e-4)


def test_causal_weights() -> None:
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
    causal = weights(q_proj(TOKENS), k_proj(TOKENS), make_causal_mask(6)).detach()
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

"""Multi-head attention with separate query, key and value, time first, and a mask of (T_query, T_key, B), after labml.

Everything is (T, B, ...) there and the scores are (T_query, T_key, B, H), kept for logging. Its hazard: softmax over a
dimension given by its number, which in our layout is the heads or the queries: tests/mutants.py has both.
"""

import math

import pytest
import torch
from torch import Tensor

from model.attention import Attend, attention_weights, make_causal_mask

B, H, D = 2, 3, 5


def time_first_weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """(T_query, B, H, D), (T_key, B, H, D), (T_query, T_key, B) -> (T_query, T_key, B, H)."""
    scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / math.sqrt(q.size(-1))
    return scores.masked_fill(~mask[..., None], float("-inf")).softmax(dim=1)


@pytest.mark.parametrize("T_query, T_key", [(7, 7), (3, 7), (1, 7)])
def test_same_weights_in_another_layout_with_a_mask_for_each_sequence(T_query: int, T_key: int) -> None:
    q, k, v = torch.randn(T_query, B, H, D), torch.randn(T_key, B, H, D), torch.randn(T_key, B, H, D)
    causal = make_causal_mask(T_key)[T_key - T_query :]
    masks = torch.stack((causal, causal), dim=-1)  # (T_query, T_key, B)
    masks[-1, 0, 1] = False  # in the second sequence, the last token may not see the first
    theirs = time_first_weights(q, k, masks)
    q, k, v_ours = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # (T, B, H, D) -> (B, H, T, D)
    ours = attention_weights(q, k, masks.permute(2, 0, 1)[:, None])
    torch.testing.assert_close(theirs.permute(2, 3, 0, 1), ours)
    output = torch.einsum("ijbh,jbhd->ibhd", theirs, v)
    torch.testing.assert_close(output.permute(1, 2, 0, 3)[:1], Attend()(q, k, v_ours, causal)[:1])

"""Scaled dot-product and multi-head attention as formulas with a causal switch, after Vaswani et al. 2017.

Its bugs: the mask is multiplied in after softmax, so that rows no longer sum to one and the denominator has seen the
future; and the heads are in a plain Python list, so that no optimizer and no checkpoint ever sees their weights:
tests/mutants.py has that one.
"""

import torch
from torch import Tensor

from model.attention import Attend, attention_weights, make_causal_mask
from model.causality import check_causality
from tests.conftest import make_gpt

B, H, T, D = 2, 3, 7, 5


def masked_after_softmax(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The source's causal switch."""
    return attention_weights(q, k, torch.ones_like(mask)) * mask


def test_a_mask_after_softmax_is_refused_though_its_weights_look_causal(monkeypatch) -> None:
    q, k = torch.randn(2, B, H, T, D)
    wrong = masked_after_softmax(q, k, make_causal_mask(T))
    assert torch.equal(wrong.triu(1), torch.zeros_like(wrong))  # a picture would show nothing wrong
    assert (wrong.sum(-1)[..., :-1] < 1).all()
    monkeypatch.setattr(Attend, "forward", lambda self, q, k, v, mask, dropout: masked_after_softmax(q, k, mask) @ v)
    outcome = check_causality(make_gpt(), vocab_size=17, length=11)
    assert not outcome.ok and (outcome.query, outcome.key) == (0, 1)

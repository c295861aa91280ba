"""The layer: three loops over plain numbers, its formula and its fused kernel are the same function."""

import copy
import itertools
import math
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import FORMULA_KEYS, Attend, CausalSelfAttention, attention_weights, make_causal_mask, repeat_kv
from model.cache import LayerCache

B, T, H, D = 2, 7, 3, 5  # all different, all prime
C = H * D


def make_layer(n_kv_head: int = H, mask: Tensor | None = None, **options: object) -> CausalSelfAttention:
    return CausalSelfAttention(C, H, n_kv_head, D, make_causal_mask(T) if mask is None else mask, **options).eval()


def by_formula(layer: CausalSelfAttention, x: Tensor) -> Tensor:
    """The layer's output through `attention_weights`."""
    q, k, v = (layer.split_heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    mask = layer.causal_mask[..., : x.size(1), : x.size(1)]
    y = attention_weights(q, k, mask) @ v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    return layer.o_proj(y.transpose(1, 2).flatten(2))


def test_weights_worked_out_by_hand() -> None:
    # One head of width 4: scores are q.k / 2, so 2 ln 3 and 0 become weights of 3/4 and 1/4.
    q = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]).view(1, 1, 2, 4)
    k = torch.tensor([[9.0, 2 * torch.log(torch.tensor(3.0)), 0, 0], [9.0, 0, 0, 0]]).view(1, 1, 2, 4)
    expected = torch.tensor([[1.0, 0.0], [0.75, 0.25]])
    torch.testing.assert_close(attention_weights(q, k, make_causal_mask(2))[0, 0], expected)


ENDS = torch.tensor([[0, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0]]).cumsum(1)  # documents of the two sequences
MASKS = {
    "triangle": make_causal_mask(T),
    "window": make_causal_mask(T).triu(-2),
    "prefix": make_causal_mask(T) | (torch.arange(T) < 3),
    "documents": make_causal_mask(T) & (ENDS[:, None, :, None] == ENDS[:, None, None]),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("n_kv_head", [1, H])
def test_layer_equals_three_loops_over_plain_numbers(n_kv_head: int, kind: str) -> None:
    layer, x = make_layer(n_kv_head, bias=False).double(), torch.randn(B, T, C, dtype=torch.float64)
    if kind == "documents":  # a mask for each sequence
        layer.mask_of = lambda q, k, positions: MASKS[kind][..., positions, : k.size(2)]
    layer.causal_mask = layer.triangle if kind == "triangle" else MASKS[kind]
    seen = MASKS[kind].expand(B, 1, T, T)[:, 0].tolist()
    q, k, v = ((x @ proj.weight.T).tolist() for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = torch.zeros(B, T, C, dtype=torch.float64)
    for b, i, h in itertools.product(range(B), range(T), range(H)):
        own, shared = range(h * D, h * D + D), range(h * n_kv_head // H * D, h * n_kv_head // H * D + D)
        scores = [sum(q[b][i][m] * k[b][j][n] for m, n in zip(own, shared, strict=True)) for j in range(T)]
        weights = [math.exp(score / math.sqrt(D)) * may for score, may in zip(scores, seen[b][i], strict=True)]
        for m, n in zip(own, shared, strict=True):
            heads[b, i, m] = sum(weight * v[b][j][n] for j, weight in enumerate(weights)) / sum(weights)
    cache = LayerCache(torch.zeros(B, n_kv_head, T, D).to(x))
    with torch.no_grad():
        in_parts = [layer(part, cache) for part in x.split((3, 1, 1, 2), dim=1)]
    if kind in ("window", "documents"):  # the first tokens of a prefix see what is not in the cache yet
        torch.testing.assert_close(torch.cat(in_parts, dim=1), layer(x), rtol=1e-12, atol=1e-12)
    for y in (layer(x), by_formula(layer, x)):  # tests/model/test_one_mask.py: for random sizes, gradients and caches
        torch.testing.assert_close(y, heads @ layer.o_proj.weight.T, rtol=1e-12, atol=1e-12)


def test_a_mask_is_used_also_where_it_is_assigned_later_or_is_nearly_the_triangle() -> None:
    nearly = make_causal_mask(T)
    nearly[3, 5] = True
    x = torch.randn(B, T, C)
    for mask in (make_causal_mask(T).triu(-2), nearly, make_causal_mask(T) | True):
        made, assigned = make_layer(mask=mask), make_layer()
        assigned.load_state_dict(made.state_dict())
        assigned.causal_mask = mask
        for layer in (made, assigned, copy.deepcopy(made), made.to(torch.float32)):
            torch.testing.assert_close(layer(x), by_formula(layer, x))
            assert layer.mask_of(x[:, None], x[:, None], slice(0, T)).equal(mask)


@pytest.mark.parametrize("T", [FORMULA_KEYS, FORMULA_KEYS + 1])
def test_in_bfloat16_a_gradient_goes_through_the_formula_up_to_a_length(T: int, monkeypatch) -> None:
    kernel = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    mask = make_causal_mask(T)
    q, k, v, dy = (torch.randn(B, heads, T, D) for heads in (H, 1, 1, H))

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = Attend()(*inputs, mask)
        return y, *torch.autograd.grad(y, inputs, dy.to(dtype))

    exact, rounded = run(torch.float64), run(torch.bfloat16)
    for expected, found in zip(exact, rounded, strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()
    assert kernel.call_count == (1 if T <= FORMULA_KEYS else 2)  # in float64, and in bfloat16 where it is longer
    with torch.no_grad():
        assert (Attend()(*(x.bfloat16() for x in (q, k, v)), mask) - exact[0]).norm() < 0.01 * exact[0].norm()
    assert kernel.call_count == (2 if T <= FORMULA_KEYS else 3)  # nothing to train: the kernel


@pytest.mark.parametrize("n_kv_head", [1, 2, 6])
@pytest.mark.parametrize("T_query, T_key", [(1, 1), (1, 7), (3, 7), (7, 7)])
def test_a_single_query_and_a_whole_text_need_no_mask(T_query: int, T_key: int, n_kv_head: int, monkeypatch) -> None:
    q = torch.randn(B, 6, T_query, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(B, n_kv_head, T_key, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask, used = make_causal_mask(T_key)[-T_query:], make_layer().mask_of(q, k, slice(T_key - T_query, T_key))
    kernel = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    y = Attend()(q, k, v, used)
    expected = attention_weights(q, k, mask) @ repeat_kv(v, q)
    dy = torch.randn_like(y)
    gradients = [torch.autograd.grad(output, (q, k, v), dy) for output in (y, expected)]
    torch.testing.assert_close((y, *gradients[0]), (expected, *gradients[1]), rtol=1e-12, atol=1e-12)
    own_q, own_k, _, own_mask = kernel.call_args.args[:4]
    assert own_k is k and own_mask is used and (used is None) == (T_query != 3)
    assert own_q.size(1) == (n_kv_head if T_query == 1 else 6)  # heads that share keys ask as queries of one head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite(dtype: torch.dtype) -> None:
    layer, x = make_layer().to(dtype), torch.randn(B, T, C).to(dtype)
    assert layer(x).isfinite().all() and by_formula(layer, x).isfinite().all()

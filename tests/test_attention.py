"""The layer: its formula, its fused kernel and PyTorch's own attention are the same function."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attend, CausalSelfAttention, attention_weights, make_causal_mask
from model.cache import LayerCache
from model.config import GPTConfig
from model.gpt import Block

B, T, H, D = 2, 7, 3, 5  # all different, all prime
C = H * D


def make_layer(n_kv_head: int = H, n_embd: int = C, context_length: int = T, **options: object) -> CausalSelfAttention:
    return CausalSelfAttention(n_embd, H, n_kv_head, D, make_causal_mask(context_length), **options).eval()


def by_formula(layer: CausalSelfAttention, x: Tensor) -> Tensor:
    """The layer's output through `attention_weights`."""
    q, k, v = (layer.split_heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    mask = layer.causal_mask[: x.size(1), : x.size(1)]
    y = attention_weights(q, k, mask) @ v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    return layer.o_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("n_kv_head", [1, H])
@pytest.mark.parametrize("n_embd", [C, 11])
def test_shapes(n_kv_head: int, n_embd: int) -> None:
    layer, x = make_layer(n_kv_head, n_embd), torch.randn(B, T, n_embd)
    seen = {}
    layer.attend.register_forward_hook(lambda module, inputs, output: seen.update(inputs=inputs, output=output))
    assert layer(x).shape == (B, T, n_embd)
    q, k, v, mask, dropout = seen["inputs"]
    assert (q.shape, k.shape, v.shape) == ((B, H, T, D), (B, n_kv_head, T, D), (B, n_kv_head, T, D))
    assert mask.shape == (T, T) and mask.dtype == torch.bool and dropout == 0.0
    assert attention_weights(q, k, mask).shape == (B, H, T, T)
    assert seen["output"].shape == (B, H, T, D)


def test_mask_is_a_registered_lower_triangle_that_no_checkpoint_has() -> None:
    layer = make_layer()
    assert torch.equal(layer.causal_mask, torch.ones(T, T).tril() == 1)
    assert "causal_mask" in dict(layer.named_buffers())
    assert "causal_mask" not in layer.state_dict()


def test_weights_are_averages_over_the_past() -> None:
    weights = attention_weights(torch.randn(B, H, T, D), torch.randn(B, 1, T, D), make_causal_mask(T))
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T))
    assert torch.equal(weights.triu(1), torch.zeros(B, H, T, T))
    assert (weights.tril() > 0).sum() == B * H * T * (T + 1) / 2


def test_weights_worked_out_by_hand() -> None:
    # One head of width 4: scores are q.k / 2, so 2 ln 3 and 0 become weights of 3/4 and 1/4.
    q = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]).view(1, 1, 2, 4)
    k = torch.tensor([[9.0, 2 * torch.log(torch.tensor(3.0)), 0, 0], [9.0, 0, 0, 0]]).view(1, 1, 2, 4)
    expected = torch.tensor([[1.0, 0.0], [0.75, 0.25]])
    torch.testing.assert_close(attention_weights(q, k, make_causal_mask(2))[0, 0], expected)


@pytest.mark.parametrize("n_kv_head", [1, H])
def test_layer_equals_three_loops_over_plain_numbers(n_kv_head: int) -> None:
    layer, x = make_layer(n_kv_head, bias=False).double(), torch.randn(B, T, C, dtype=torch.float64)
    q, k, v = ((x @ proj.weight.T).tolist() for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = torch.zeros(B, T, C, dtype=torch.float64)
    for b, i, h in itertools.product(range(B), range(T), range(H)):
        own, shared = range(h * D, h * D + D), range(h * n_kv_head // H * D, h * n_kv_head // H * D + D)
        scores = [sum(q[b][i][m] * k[b][j][n] for m, n in zip(own, shared, strict=True)) for j in range(i + 1)]
        weights = [math.exp(score / math.sqrt(D)) for score in scores]
        for m, n in zip(own, shared, strict=True):
            heads[b, i, m] = sum(weight * v[b][j][n] for j, weight in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(layer(x), heads @ layer.o_proj.weight.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_kv_head", [1, H])
def test_kernel_equals_formula(n_kv_head: int) -> None:
    layer, x = make_layer(n_kv_head).double(), torch.randn(B, T, C, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_formula(layer, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite(dtype: torch.dtype) -> None:
    layer, x = make_layer().to(dtype), torch.randn(B, T, C).to(dtype)
    assert layer(x).isfinite().all() and by_formula(layer, x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores_in_half_precision_stay_finite_and_causal(dtype: torch.dtype) -> None:
    layer, x = make_layer().to(dtype), 300 * torch.randn(B, T, C).to(dtype)
    assert layer(x).isfinite().all()
    changed = torch.cat((x[:, :-1], -x[:, -1:]), dim=1)
    assert torch.equal(layer(x)[:, :-1], layer(changed)[:, :-1])


def test_shared_heads_equal_repeated_ones() -> None:
    shared, full = make_layer(n_kv_head=1), make_layer()
    full.load_state_dict(
        {k: v.repeat(H, *[1] * (v.dim() - 1)) if k[:2] in ("k_", "v_") else v for k, v in shared.state_dict().items()}
    )
    x = torch.randn(B, T, C)
    torch.testing.assert_close(shared(x), full(x))


def test_neighbouring_query_heads_share_keys() -> None:
    q, k = torch.randn(B, 6, T, D), torch.randn(B, 2, T, D)
    weights = attention_weights(q, k, make_causal_mask(T))
    for head in range(6):
        alone = attention_weights(q[:, head : head + 1], k[:, head // 3 : head // 3 + 1], make_causal_mask(T))
        torch.testing.assert_close(weights[:, head : head + 1], alone)
    v = torch.randn(B, 2, T, D)
    by_formula = weights @ v.repeat_interleave(3, dim=1)
    torch.testing.assert_close(Attend()(q, k, v, make_causal_mask(T)), by_formula)


def test_equals_torch_multihead_attention_in_output_and_weights() -> None:
    layer, torchs = make_layer(), nn.MultiheadAttention(C, H, batch_first=True).eval()
    torchs.in_proj_weight.data = torch.cat([p.weight.data for p in (layer.q_proj, layer.k_proj, layer.v_proj)])
    torchs.in_proj_bias.data = torch.cat([p.bias.data for p in (layer.q_proj, layer.k_proj, layer.v_proj)])
    torchs.out_proj.load_state_dict(layer.o_proj.state_dict())
    x = torch.randn(B, T, C)
    y, weights = torchs(x, x, x, attn_mask=~make_causal_mask(T), average_attn_weights=False)
    torch.testing.assert_close(layer(x), y, rtol=1e-6, atol=1e-6)
    q, k = layer.split_heads(layer.q_proj(x)), layer.split_heads(layer.k_proj(x))
    torch.testing.assert_close(attention_weights(q, k, layer.causal_mask), weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_block_equals_torch_transformer_layer(bias: bool) -> None:
    block = Block(GPTConfig(n_embd=C, n_head=H, context_length=T, vocab_size=2, bias=bias), make_causal_mask(T)).eval()
    torchs = nn.TransformerEncoderLayer(
        C, H, 4 * C, 0.0, lambda x: F.gelu(x, approximate="tanh"), batch_first=True, norm_first=True, bias=bias
    ).eval()
    parts = [block.attention.q_proj, block.attention.k_proj, block.attention.v_proj]
    torchs.self_attn.in_proj_weight.data = torch.cat([p.weight.data for p in parts])
    if bias:
        torchs.self_attn.in_proj_bias.data = torch.cat([p.bias.data for p in parts])
    torchs.self_attn.out_proj.load_state_dict(block.attention.o_proj.state_dict())
    for theirs, ours in (
        (torchs.norm1, block.attention_norm),
        (torchs.norm2, block.mlp_norm),
        (torchs.linear1, block.mlp.up_proj),
        (torchs.linear2, block.mlp.down_proj),
    ):
        theirs.load_state_dict(ours.state_dict())
    x = torch.randn(B, T, C)
    torch.testing.assert_close(block(x), torchs(x, src_mask=~make_causal_mask(T)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 3, T])
@pytest.mark.parametrize("n_kv_head", [1, H])
def test_cache_in_chunks_equals_one_pass(chunk: int, n_kv_head: int) -> None:
    layer, x = make_layer(n_kv_head).double(), torch.randn(B, T, C, dtype=torch.float64)
    cache = LayerCache(B, n_kv_head, T, D, x.dtype, x.device)
    cache.keys.fill_(torch.nan)  # whatever was in memory must not matter
    cache.values.fill_(torch.nan)
    y = torch.cat([layer(part, cache) for part in x.split(chunk, dim=1)], dim=1)
    torch.testing.assert_close(y, layer(x), rtol=1e-12, atol=1e-12)


def test_dropout_acts_in_training_only() -> None:
    layer, x = make_layer(dropout=0.5), torch.randn(B, T, C)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    seen = []
    layer.attend.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[-1]))
    layer(x), layer.eval()(x)
    assert seen == [0.5, 0.0]


def test_there_is_no_dropout_unless_it_is_asked_for() -> None:
    layer, x = make_layer().train(), torch.randn(B, T, C)
    assert torch.equal(layer(x), layer.eval()(x))


def test_mask_and_cache_are_made_where_they_are_used() -> None:
    meta = torch.device("meta")
    assert make_causal_mask(T, meta).device == meta
    cache = LayerCache(B, H, T, D, torch.bfloat16, meta)
    assert (cache.keys.device, cache.values.device, cache.values.dtype) == (meta, meta, torch.bfloat16)


def test_dropout_drops_weights_in_the_kernel_and_elements_of_the_output() -> None:
    layer, x = make_layer(dropout=0.5).train(), torch.randn(B, T, C)
    y = layer(x)
    assert 0.3 < (y == 0).float().mean() < 0.7
    layer.residual_dropout.p = 0.0
    assert not torch.equal(layer(x), layer(x))  # what is left drops inside the kernel
    q, k, v = torch.randn(3, B, H, T, D)
    undropped = attention_weights(q, k, layer.causal_mask)
    kept = Attend()(q, k, torch.eye(T)[None, None].expand(B, H, T, T), layer.causal_mask, 0.5)  # v = 1: the weights
    dropped = kept == 0
    assert 0.3 < dropped[undropped > 0].float().mean() < 0.7
    torch.testing.assert_close(kept[~dropped], 2 * undropped[~dropped])


def test_a_hook_on_the_seam_replaces_a_head() -> None:
    layer, x = make_layer(), torch.randn(B, T, C)
    layer.attend.register_forward_hook(lambda module, inputs, y: torch.zeros_like(y))
    torch.testing.assert_close(layer(x), layer.o_proj.bias.expand(B, T, C))


def test_query_heads_that_cannot_share_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="n_head must be a multiple of n_kv_head, got n_head=3 and n_kv_head=2"):
        make_layer(n_kv_head=2)

"""Multi-head attention beside Llama-3.2-3B: 24 heads of 128, 8 key and value heads, and a picture of nine tokens.

Its bugs: `combine_heads` computes and returns nothing; and -1e9 stands for minus infinity, which half precision cannot
hold. With the real weights the picture at the end is: python inspect_attention.py meta-llama/Llama-3.2-3B --text "the
financial bank is located on river bank" --heads "-1.*" -o heads.png
"""

from pathlib import Path

import pytest
import torch

import inspect_attention
from inspection import Inspection, plots
from model import GPT, GPTConfig
from model.attention import Attend, CausalSelfAttention, attention_weights, make_causal_mask
from tests.test_huggingface import save

TEXT = "the financial bank is located on river bank"
H, N_KV_HEAD, D, T = 24, 8, 128, 9


def test_splitting_and_combining_heads_are_inverse() -> None:
    layer = CausalSelfAttention(15, 3, 3, 5, make_causal_mask(T), bias=False)
    for proj in (layer.v_proj, layer.o_proj):
        torch.nn.init.eye_(proj.weight)
    layer.attend.register_forward_hook(lambda module, inputs, output: inputs[2])  # each token attends to itself alone
    x = torch.randn(2, T, 15)
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite_and_sums_to_one(dtype: torch.dtype) -> None:
    q, k, v = (30 * torch.randn(1, heads, T, D).to(dtype) for heads in (H, N_KV_HEAD, N_KV_HEAD))
    weights = attention_weights(q, k, make_causal_mask(T))
    assert Attend()(q, k, v, make_causal_mask(T)).isfinite().all()
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(1, H, T), rtol=0, atol=1e-2)
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))
    with pytest.raises(RuntimeError, match="overflow"):
        torch.zeros(T, T, dtype=torch.float16).masked_fill(~make_causal_mask(T), -1e9)


def test_its_picture_of_the_last_layer(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random weights of its number of heads, one command draws every head of the last layer."""
    pytest.importorskip("matplotlib")
    shape = {"n_layer": 3, "n_head": H, "n_kv_head": N_KV_HEAD, "n_embd": 8 * H, "n_inner": 64, "context_length": 61}
    checkpoint = save(GPT(GPTConfig(family="llama", vocab_size=257, **shape)), tmp_path)
    drawn = {}

    def draw(path: Path, inspection: Inspection, heads: list, labels: list[str]) -> None:
        drawn.update(heads=heads)
        path.touch()

    monkeypatch.setattr(plots, "draw_heads", draw)
    result = run(inspect_attention, checkpoint, "--text", TEXT, "--heads", "-1.*", "-o", tmp_path / "heads.png")
    assert result.exit_code == 0, result.err
    assert list(drawn["heads"]) == [(2, head) for head in range(H)]

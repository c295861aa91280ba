"""Multi-head attention beside Llama-3.2-3B: 24 heads of 128, 8 key and value heads, and a picture of nine tokens.

Its bugs: `combine_heads` computes and returns nothing; and -1e9 stands for minus infinity, which half precision cannot
hold. With the real weights the picture at the end is: python inspect_attention.py meta-llama/Llama-3.2-3B --text "the
financial bank is located on river bank" --heads "last.*" -o heads.png
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import inspect_attention
from data.tokenizer import make_tokenizer, save_tokenizer
from inspection import capture, plots
from model import GPT, GPTConfig
from model.attention import Attend, CausalSelfAttention, attention_weights, make_causal_mask
from model.checkpoint import to_json
from model.huggingface import config_to_huggingface, tensors_to_huggingface

H, N_KV_HEAD, D, T = 24, 8, 128, 9
C = 3072


def test_matrices_of_nine_tokens() -> None:
    layer = CausalSelfAttention(C, H, N_KV_HEAD, D, make_causal_mask(T), bias=False).eval()
    seen = []
    layer.attend.register_forward_hook(lambda module, inputs, output: seen.append((inputs, output)))
    with torch.no_grad():
        assert layer(torch.randn(1, T, C)).shape == (1, T, C)
    (q, k, v, mask, _), output = seen[0]
    weights = attention_weights(q, k, mask)
    assert weights.shape == (1, H, T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, H, T))
    torch.testing.assert_close(weights @ v.repeat_interleave(H // N_KV_HEAD, dim=1), output)


def test_splitting_and_combining_heads_are_inverse() -> None:
    """`CausalSelfAttention` combines by transposing and flattening; if the values are kept, so is everything."""
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
    assert weights.isfinite().all() and Attend()(q, k, v, make_causal_mask(T)).isfinite().all()
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(1, H, T), rtol=0, atol=1e-2)
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))


def test_its_minus_infinity_does_not_fit_half_precision() -> None:
    scores = torch.randn(T, T, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="overflow"):
        scores.masked_fill(~make_causal_mask(T), -1e9)


def test_its_picture_of_the_last_layer(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of its shape, scaled down, as a directory from elsewhere: one command draws every head."""
    pytest.importorskip("matplotlib")
    text = "the financial bank is located on river bank"
    tokenizer = make_tokenizer("bpe:300", [text + "\n", text] * 9)
    shape = {"n_layer": 3, "n_head": H, "n_kv_head": N_KV_HEAD, "n_embd": 8 * H, "n_inner": 64, "context_length": 61}
    model = GPT(GPTConfig(family="llama", vocab_size=tokenizer.n_vocab, **shape)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_bytes(to_json(config_to_huggingface(model.config, *[tokenizer.eot_token] * 2)))
    save_file(tensors_to_huggingface(model.config, model.state_dict()), tmp_path / "model.safetensors")

    drawn = {}

    def draw(path, inspection, heads, labels) -> None:
        drawn.update(labels=labels, weights={head: inspection.att.pattern(*head)[0] for head in heads})
        original(path, inspection, heads, labels)

    original = plots.draw_heads
    monkeypatch.setattr(plots, "draw_heads", draw)
    outputs = ("-o", tmp_path / "heads.png", "-o", tmp_path / "heads.npz")
    result = run(inspect_attention, tmp_path, "--text", text, "--heads", "last.*", *outputs)
    assert result.exit_code == 0, result.err
    assert drawn["labels"] == ["the", *("␣" + word for word in text.split()[1:])]
    assert list(drawn["weights"]) == [(2, head) for head in range(H)]
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    with capture(model, [-1]) as att, torch.no_grad():
        model(torch.from_numpy(np.load(tmp_path / "heads.npz")["tokens"])[None])
    for (layer, head), weights in drawn["weights"].items():
        torch.testing.assert_close(weights, att.pattern(layer, head)[0], rtol=0, atol=1e-6)

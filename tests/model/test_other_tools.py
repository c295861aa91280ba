"""Tools of others open our checkpoints and show the same attention; nanoGPT itself is inspected and certified here.

Each test runs where its tool is installed; docs/other_tools.md has what was found.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.tokenizer import make_tokenizer
from inspection import capture, inspect_heads
from model import GPT
from model.causality import check_causality
from tests.conftest import make_gpt, save_gpt

FAMILIES = ("gpt2", "llama", "qwen3")
IDX = torch.randint(256, (1, 13), generator=torch.Generator().manual_seed(0))
NANOGPT = Path(os.environ.get("NANOGPT", "nanoGPT"), "model.py")


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    gpt = make_gpt(family=request.param, n_embd=18, bias=None, vocab_size=257, context_length=31)
    return save_gpt(tmp_path, 1, gpt, make_tokenizer("bytes", []).files)


@torch.no_grad()
def ours(checkpoint: Path) -> tuple[Tensor, list[Tensor]]:
    """The logits of our own code, as log-probabilities, and the attention of each layer."""
    model = GPT.from_pretrained(checkpoint)
    with capture(model) as att:
        logits = model(IDX)
    return logits.log_softmax(-1), [att.calls[layer].weights() for layer in range(len(att.calls))]


@needs("mlx_lm")  # before the others: beside them it aborts
def test_mlx_computes_the_same_logits(checkpoint: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    if GPT.from_pretrained(checkpoint).config.family == "gpt2":
        pytest.skip("mlx-lm reads the names of gpt2 without their prefix, as no version of transformers writes them")
    mx.set_default_device(mx.cpu)
    model, _ = load_model(checkpoint)
    theirs = torch.tensor(model(mx.array(IDX.tolist())).astype(mx.float32).tolist())
    torch.testing.assert_close(theirs.log_softmax(-1), ours(checkpoint)[0], rtol=0, atol=1e-5)


@needs("transformer_lens")
@torch.no_grad()
def test_transformer_lens_shows_the_same_attention(checkpoint: Path) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(checkpoint), device="cpu", dtype=torch.float32)
    theirs, cache = bridge.run_with_cache(IDX)
    logits, patterns = ours(checkpoint)
    torch.testing.assert_close(theirs.log_softmax(-1), logits, rtol=0, atol=1e-5)
    for layer, pattern in enumerate(patterns):
        torch.testing.assert_close(cache[f"blocks.{layer}.attn.hook_pattern"], pattern, rtol=0, atol=1e-6)


@needs("attnread")
def test_attnread_shows_the_same_attention(checkpoint: Path) -> None:
    from attnread import extract_attention

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    _, patterns = ours(checkpoint)
    found = extract_attention(model, {"input_ids": IDX})
    assert len(found) == sum(pattern.size(1) for pattern in patterns)
    for (_, layer, head), weights in found.items():
        torch.testing.assert_close(weights[0], patterns[layer][0, head], rtol=0, atol=1e-6)


@pytest.mark.skipif(not NANOGPT.is_file(), reason="no nanoGPT beside: NANOGPT=PATH names its directory")
def test_nanogpt_itself_is_inspected_and_certified() -> None:
    spec = importlib.util.spec_from_file_location("nanogpt", NANOGPT)
    nanogpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)

    class EveryPosition(nn.Module):
        """nanoGPT returns the logits of all positions only if it is given targets."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt = nanogpt.GPT(nanogpt.GPTConfig(block_size=31, vocab_size=257, n_layer=2, n_head=3, n_embd=15))

        def forward(self, idx: Tensor) -> Tensor:
            return self.gpt(idx, idx)[0]

    model = EveryPosition().eval()
    found = inspect_heads(model, IDX, ablate="zero")
    assert len(found.heads) == 6 and found.scores.row_error < 1e-5 and not found.influence.isnan().any()
    assert check_causality(model, 257, 31).ok
    gpt = model.gpt
    assert check_causality(lambda idx: gpt(idx, idx)[0], 257, 31, module=gpt).ok
    for block in gpt.transformer.h:
        block.attn.flash = False  # attention written out, with a mask that can be opened
        block.attn.register_buffer("bias", torch.ones(1, 1, 31, 31))
    assert not check_causality(model, 257, 31).ok

"""Attention in other people's models, where they are installed, is shown as the models themselves keep it.

nanoGPT and minGPT are no packages: the environment variables NANOGPT and MINGPT name the directories of their clones.
"""

import os
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.inspection.test_capture import B, H, L, T, V, run_captured
from tests.inspection.test_written_out import MEMORY, TRIANGLE, C, Decoder

SIZES = {"block_size": 97, "vocab_size": V, "n_layer": L, "n_head": H, "n_embd": C}
TEXT = torch.arange(B * T).view(B, T) ** 2 % V


def enlarged(model: nn.Module) -> nn.Module:
    """Return a model in evaluation mode, with weights that are large enough for attention that is not even."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.5 * parameter.size(-1) ** -0.5)
    return model.eval()


def inputs_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return a list that grows by what modules read."""
    read: list[Tensor] = []
    for module in modules:
        module.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    return read


@torch.no_grad()
def check(model: nn.Module, truth: Callable[[], list[Tensor]]) -> None:
    """Compare what is shown with the weights that the model itself has kept, (B, H, T, T) for each layer."""
    att = run_captured(model, TEXT)
    assert len(att.calls) == len(expected := truth()) == L
    for call, weights in zip(att.calls, expected, strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)
    att.verify()


def clone(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(reason=f"{variable} is not given: the directory of a clone")
    return Path(os.environ[variable]).expanduser()


def test_nanogpt_with_and_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    nanogpt = runpy.run_path(str(clone("NANOGPT") / "model.py"))  # the name of our own package
    config = nanogpt["GPTConfig"](**SIZES)
    by_kernel = enlarged(nanogpt["GPT"](config))
    with monkeypatch.context() as older:
        older.delattr("torch.nn.functional.scaled_dot_product_attention")  # as before PyTorch 2
        written_out = nanogpt["GPT"](config).eval()
    written_out.load_state_dict(by_kernel.state_dict(), strict=False)  # without a mask
    kept = inputs_of(block.attn.attn_dropout for block in written_out.transformer.h)
    check(written_out, lambda: kept)
    check(by_kernel, lambda: kept)


def test_mingpt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(clone("MINGPT"))
    mingpt = pytest.importorskip("mingpt.model")
    config = mingpt.GPT.get_default_config()
    config.merge_from_dict(SIZES | {"model_type": None})
    model = enlarged(mingpt.GPT(config))
    kept = inputs_of(block.attn.attn_dropout for block in model.transformer.h)
    check(model, lambda: kept)


PLAIN = [{}, {"attn_kv_heads": 1}, {"attn_one_kv_head": True}, {"alibi_pos_bias": True}, {"rotary_pos_emb": True}]
NO_KERNEL = [{"attn_head_learned_sink": True}, {"attn_softclamp_logits": True}, {"attn_num_mem_kv": 2}]


@pytest.mark.parametrize(
    "options", [*PLAIN, *({**options, "attn_flash": True} for options in PLAIN), *NO_KERNEL], ids=str
)
def test_x_transformers(options: dict) -> None:
    xt = pytest.importorskip("x_transformers", reason="x-transformers is not installed")

    def make(**options: object) -> nn.Module:
        layers = xt.Decoder(dim=C, depth=L, heads=H, attn_dim_head=34, **options)
        return xt.TransformerWrapper(num_tokens=V, max_seq_len=97, attn_layers=layers).eval()

    model, written_out = enlarged(make(**options)), make(**options | {"attn_flash": False})
    written_out.load_state_dict(model.state_dict())
    layers = written_out(TEXT, return_intermediates=True)[1].attn_intermediates
    num_sinks = int("attn_head_learned_sink" in options)  # in front, and cut off before the values
    check(model, lambda: [layer.post_softmax_attn[..., num_sinks:] for layer in layers])


def test_labml() -> None:
    mha = pytest.importorskip("labml_nn.transformers.mha", reason="labml_nn is not installed")
    if not hasattr(mha.tracker, "debug"):
        pytest.skip("labml_nn needs an older labml")
    layers = [enlarged(mha.MultiHeadAttention(H, C)) for _ in range(L)]

    def attend(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in layers:
            x = x + layer(query=x, key=x, value=x, mask=TRIANGLE[:, :, None])
        return x.transpose(0, 1)

    check(Decoder(first=attend), lambda: [layer.attn.permute(2, 3, 0, 1) for layer in layers])


STACKS = [("Encoder", {"enable_nested_tensor": False}, []), ("Decoder", {}, [MEMORY])]


@pytest.mark.parametrize("kind, options, memory", STACKS)
def test_stacks_of_pytorch(kind: str, options: dict, memory: list[Tensor]) -> None:
    layer = getattr(nn, f"Transformer{kind}Layer")(C, H, 31, batch_first=True)
    stack = enlarged(getattr(nn, f"Transformer{kind}")(layer, L, **options))
    read, asked = inputs_of(stack.layers), {"attn_mask": ~TRIANGLE, "average_attn_weights": False}
    check(
        Decoder(first=lambda x: stack(x, *memory, ~TRIANGLE)),
        lambda: [layer.self_attn(x, x, x, **asked)[1] for layer, x in zip(stack.layers, read, strict=True)],
    )

"""What a head moves and adds to logits is what the papers' formulas, written out here, make of the model's weights."""

import pytest
import torch
from torch import Tensor, nn

import tril.experiments
from model import GPT
from tests.conftest import make_gpt
from tests.decoders import make_decoder
from tril import capture, inspect_heads
from tril.look import look
from tril.views import Stream, attribute_logits, projected_values

T, L, H = 7, 2, 3
FAMILIES = {"gpt2": {"n_embd": 15}, "llama": {"n_embd": 18}, "qwen3": {"n_embd": 18}, "nanochat": {"n_embd": 18}}


def captured(model: GPT, idx: Tensor):
    """Run a model: its `Captured`, its `Stream`, and the inputs and outputs of its attention and last norm."""
    seen = []
    for module in [*(block.attention for block in model.blocks), model.final_norm]:
        module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0][0], output[0])))
    att, _ = look(model, idx)
    stream, logits = look(model, idx, positions=slice(None), kind=Stream)
    return att, (stream, logits), seen[: len(model.blocks) + 1]


def transformed(model: GPT, layer: int, head: int, x: Tensor) -> Tensor:
    """f(x) = (x W^V + b^V) W^O of a head (Kobayashi et al. 2020), (T, C). The heads of a group share W^V."""
    attention = model.blocks[layer].attention
    D = attention.head_dim
    of_key = head // (H // (attention.v_proj.out_features // D))
    rows = slice(of_key * D, (of_key + 1) * D)
    value = x @ attention.v_proj.weight[rows].T
    if attention.v_proj.bias is not None:
        value = value + attention.v_proj.bias[rows]
    return value @ attention.o_proj.weight[:, head * D : (head + 1) * D].T


@pytest.mark.parametrize("n_kv_head", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_heads_move_and_say_are_their_shares_of_the_whole(family: str, n_kv_head: int) -> None:
    model = make_gpt(family=family, n_kv_head=n_kv_head, bias=None, **FAMILIES[family]).eval()
    idx = torch.randint(17, (1, T))
    if family == "gpt2":  # no way may lead through an MLP, not even through one that is linear but for signs
        for mlp in (block.mlp for block in model.blocks):
            mlp.activate = lambda x, up=mlp.up_proj: up(x) * (up(x) > 0)
    model.lm_head.pads_on = "cpu"
    att, stream, (*seen, (residual, _)) = captured(model, idx)
    found = attribute_logits(att, *stream, [(layer, head) for layer in range(L) for head in range(H)])

    # The logits are linear in the parts of the residual stream once the scale of the final norm is that of the whole.
    norm = model.final_norm
    centre = (lambda x: x - x.mean(-1, keepdim=True)) if family == "gpt2" else (lambda x: x)
    sigma = (centre(residual).square().mean(-1, keepdim=True) + norm.eps).sqrt()
    gain = torch.ones(()) if norm.weight is None else norm.weight

    def share(part: Tensor) -> Tensor:
        return centre(part) / sigma * gain @ model.lm_head.weight.T

    rest = residual
    total = torch.zeros(T, 17)
    for layer, (x, attended) in enumerate(seen):
        before = rest
        for head in range(H):
            values = transformed(model, layer, head, x)
            torch.testing.assert_close(projected_values(att, (layer, head)), values, rtol=1e-4, atol=1e-5)
            output = att.pattern(layer, head)[0] @ values
            tokens, logits = found[layer, head]
            torch.testing.assert_close(logits, share(output).gather(1, tokens), rtol=1e-4, atol=1e-4)
            ranks = share(output).argsort(-1, descending=True)
            assert torch.equal(tokens[:, :5], ranks[:, :5]) and torch.equal(tokens[:, 5:], ranks.flip(-1)[:, :5])
            rest, total = rest - output, total + share(output)
        bias = getattr(model.blocks[layer].attention.o_proj, "bias", None)
        shares = before - rest + (0 if bias is None else bias)  # of the heads: there are no others
        torch.testing.assert_close(shares, attended, rtol=1e-4, atol=1e-4)
    total = total + share(rest)
    if getattr(norm, "bias", None) is not None:
        total = total + norm.bias @ model.lm_head.weight.T
    cap = model.family.logit_cap
    total = total if cap is None else cap * torch.tanh(total / cap)
    torch.testing.assert_close(total, model(idx)[0], rtol=1e-3, atol=1e-3)


BEHIND = {"gemma2": "post_attention_layernorm", "olmo2": "post_attention_layernorm"}  # a norm of what heads write


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2", "olmo2", "granite"])
@torch.no_grad()
def test_norms_and_factors_between_heads_and_logits_are_followed(name: str) -> None:
    """With the scale that it has, a norm without a mean multiplies each number by a number."""
    model, idx = make_decoder(name), torch.randint(2, 61, (1, T))
    ratios = {}
    for part in model.modules():
        if "RMSNorm" in type(part).__name__:
            part.register_forward_hook(lambda part, inputs, output: ratios.update({part: (output / inputs[0])[0]}))
    found = inspect_heads(model, idx).logit_attribution
    att, _ = look(model, idx)
    factor = getattr(model.config, "residual_multiplier", 1.0)
    for layer, head in found:
        behind = ratios[getattr(model.model.layers[layer], BEHIND[name])] if name in BEHIND else 1.0
        part = att.pattern(layer, head)[0] @ projected_values(att, (layer, head)) * behind * factor
        share = part * ratios[model.model.norm] @ model.lm_head.weight.T
        tokens, logits = found[layer, head]
        torch.testing.assert_close(logits, share.gather(1, tokens), rtol=1e-4, atol=1e-6)
    assert len(found) == 2 * H


@pytest.mark.parametrize("name", "nemotron starcoder2 gptj phi".split())
def test_norms_of_several_classes_are_followed(name: str) -> None:
    assert len(inspect_heads(make_decoder(name), [2, 3, 5, 7]).logit_attribution) == 2 * H


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


LASTS = {nn.Tanh(): False, nn.Linear(42, 42): False, nn.Softmax(-1): False, Normalize(): True}


@pytest.mark.parametrize("last, is_known", LASTS.items(), ids=str)
def test_what_is_no_norm_is_not_taken_for_one(last: nn.Module, is_known: bool) -> None:
    model = make_decoder("llama")
    model.model.norm = last
    assert bool(inspect_heads(model, torch.randint(2, 61, (1, T))).logit_attribution) == is_known


def test_another_head_over_the_vocabulary_is_not_taken_for_the_unembedding() -> None:
    """As Medusa's, which predict further ahead, and are called behind it."""
    model = make_gpt(n_embd=15)
    medusa = nn.Linear(15, 17)
    plain = inspect_heads(model, IDX).logit_attribution
    model.final_norm.register_forward_hook(lambda _, inputs, output: print(medusa(output).shape))
    before = inspect_heads(model, IDX).logit_attribution
    assert all(torch.equal(before[head][0], tokens) for head, (tokens, _) in plain.items()) and len(plain) == L * H
    model.lm_head.register_forward_hook(lambda _, inputs, output: print(medusa(inputs[0]).shape))
    assert inspect_heads(model, IDX).logit_attribution == {}


def test_a_layer_with_fewer_rows_than_logits_is_not_taken_for_the_unembedding() -> None:
    """As the value head of reinforcement learning, whose one number is the largest where token 0 is the likeliest."""
    model = make_gpt(n_embd=15)
    value = nn.Linear(15, 1)
    first = 99 * (torch.arange(17) == 0)
    model.lm_head.register_forward_hook(lambda _, inputs, output: output + first + 0 * value(inputs[0]))
    assert inspect_heads(model, IDX).logit_attribution == {}


def test_of_few_tokens_whose_rows_are_padded_some_are_likeliest_and_others_unlikeliest() -> None:
    model = make_gpt(n_embd=15, vocab_size=3)
    model.lm_head.pads_on = "cpu"
    found = inspect_heads(model, torch.randint(3, (1, T)))
    assert {tokens.shape for tokens, _ in found.logit_attribution.values()} == {(T, 2)}


def test_only_as_many_positions_as_a_cpu_can_afford_say_something(monkeypatch) -> None:
    model = make_gpt().eval()
    att, stream, _ = captured(model, torch.randint(17, (1, T)))
    monkeypatch.setattr(tril.experiments, "CPU_FLOPS", 2 * 17 * 15 * 3.5)
    tokens, logits = attribute_logits(att, *stream, [(0, 1)])[0, 1]
    assert (~logits.isnan()).all(1).nonzero().flatten().tolist() == [0, 3, 6]
    assert tokens.shape == logits.shape == (T, 10)


IDX = [2, 3, 5, 7, 11]


def test_lengths_have_the_precision_of_the_weights() -> None:
    model = make_gpt().eval()
    exact = inspect_heads(make_gpt().double(), IDX)
    assert exact.value_norms[1, 2].dtype == torch.float64 and len(exact.logit_attribution) == L * H
    with torch.autocast("cpu", torch.bfloat16):
        found = inspect_heads(model, IDX)
        assert found.pattern(1, 2).dtype == torch.float32 and len(found.logit_attribution) == L * H
        with torch.no_grad(), capture(model) as att:
            model(torch.tensor([IDX]))
    values = att.calls[1].values.float()[0, 2]
    expected = (values @ model.blocks[1].attention.o_proj.weight[:, 10:].T).norm(dim=-1)
    torch.testing.assert_close(found.value_norms[1, 2], expected.detach(), rtol=1e-5, atol=0)
    compiled = inspect_heads(torch.compile(model, backend="eager"), IDX)
    assert compiled.logit_attribution.keys() == exact.logit_attribution.keys()
    with torch.inference_mode():
        found = inspect_heads(model, IDX)
        assert len(found.logit_attribution) == L * H and found.explained

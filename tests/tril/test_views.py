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
from tril.views import attribute_logits, projected_values, unembedding

T, L, H = 7, 2, 3
FAMILIES = {"gpt2": {"n_embd": 15}, "llama": {"n_embd": 18}, "qwen3": {"n_embd": 18}, "nanochat": {"n_embd": 18}}


def captured(model: GPT, idx: Tensor):
    """Run a model: its `Captured`, how it makes logits, and the inputs and outputs of its attention and last norm."""
    seen = []
    for module in [*(block.attention for block in model.blocks), model.final_norm]:
        module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0][0], output[0])))
    att, _ = look(model, idx)
    return att, unembedding(att), seen[: len(model.blocks) + 1]


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
    att, out, (*seen, (residual, _)) = captured(model, idx)
    found = attribute_logits(att, out, [(layer, head) for layer in range(L) for head in range(H)])

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


STRANGERS = {  # type -> whether what its heads write is known to reach the logits, and of a block that adds at once
    **dict.fromkeys("llama nemotron gemma starcoder2".split(), (True, False)),
    **dict.fromkeys("gptj phi".split(), (True, True)),
    **dict.fromkeys("gemma2 olmo2 granite".split(), (False, False)),  # a norm or a factor behind attention
}


@pytest.mark.parametrize("name", STRANGERS)
@torch.no_grad()
def test_how_a_stranger_makes_logits_is_seen_or_not_known(name: str) -> None:
    """Norms of several classes. Logits are linear in the stream but for what is the same at all positions."""
    is_known, adds_at_once = STRANGERS[name]
    model, idx = make_decoder(name), torch.randint(2, 61, (1, T))
    att, logits = look(model, idx, positions=slice(None))
    att, _ = look(model, idx)
    out = unembedding(att)
    assert (out is not None) == is_known == bool(inspect_heads(model, idx).logit_attribution)
    if is_known:
        rest = logits[0] - out.scale * out.logits(att.last[2][1][0])
        torch.testing.assert_close(rest, rest[:1].expand(T, -1), rtol=1e-4, atol=1e-4)
    if adds_at_once:  # nothing reads a head of the last layer but the norm
        without, _ = look(model, idx, {(1, 2): torch.zeros_like})
        lost = (att.last[2][1] - without.last[2][1])[0]
        torch.testing.assert_close(lost, att.pattern(1, 2)[0] @ projected_values(att, (1, 2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("last", [nn.Tanh(), nn.Linear(42, 42), nn.Softmax(-1)], ids=str)
def test_what_is_no_norm_is_not_taken_for_one(last: nn.Module) -> None:
    model = make_decoder("llama")
    model.model.norm = last
    assert unembedding(look(model, torch.randint(2, 61, (1, T)))[0]) is None


def test_only_as_many_positions_as_a_cpu_can_afford_say_something(monkeypatch) -> None:
    model = make_gpt().eval()
    att, out, _ = captured(model, torch.randint(17, (1, T)))
    monkeypatch.setattr(tril.experiments, "CPU_FLOPS", 2 * 17 * 15 * 3.5)
    tokens, logits = attribute_logits(att, out, [(0, 1)])[0, 1]
    assert (~logits.isnan()).all(1).nonzero().flatten().tolist() == [0, 3, 6]
    assert tokens.shape == logits.shape == (T, 10)


IDX = [2, 3, 5, 7, 11]


def test_lengths_have_the_precision_of_the_weights() -> None:
    model = make_gpt().eval()
    exact = inspect_heads(make_gpt().double(), IDX)
    assert exact.value_norms[1, 2].dtype == torch.float64 and len(exact.logit_attribution) == L * H
    with torch.autocast("cpu", torch.bfloat16):
        found = inspect_heads(model, IDX)
        assert found.pattern(1, 2).dtype == torch.float32
        with torch.no_grad(), capture(model) as att:
            model(torch.tensor([IDX]))
    values = att.calls[1].values.float()[0, 2]
    expected = (values @ model.blocks[1].attention.o_proj.weight[:, 10:].T).norm(dim=-1)
    torch.testing.assert_close(found.value_norms[1, 2], expected.detach(), rtol=1e-5, atol=0)
    compiled = inspect_heads(torch.compile(model, backend="eager"), IDX)
    assert compiled.logit_attribution.keys() == exact.logit_attribution.keys()

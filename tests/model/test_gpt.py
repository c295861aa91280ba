"""The model around the layer: sizes, first weights, the one mask, and the edges of the vocabulary."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from errors import UserError
from model import GPT, GPTConfig
from model.attention import CausalSelfAttention, is_triangle, make_causal_mask
from model.families import FAMILIES
from model.gpt import Dropout, Head
from tests.conftest import make_gpt, save_gpt


def test_gpt2_small_has_its_published_size() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(GPTConfig()).parameters()) == 124_439_808


def test_first_weights_are_gpt2s() -> None:
    model = GPT(GPTConfig(n_layer=8, n_head=2, n_embd=64, context_length=13, vocab_size=503))
    block = model.blocks[3]
    assert abs(block.attention.q_proj.weight.std().item() - 0.02) < 0.002
    assert abs(block.attention.o_proj.weight.std().item() - 0.02 / 4) < 0.0005
    assert abs(block.mlp.down_proj.weight.std().item() - 0.02 / 4) < 0.0005
    assert torch.equal(block.mlp.up_proj.bias, torch.zeros(256))
    assert torch.equal(model.final_norm.weight, torch.ones(64))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_takes_texts_of_any_length(family: str, tmp_path: Path) -> None:
    model = GPT(GPTConfig(family, n_layer=2, n_head=2, n_embd=28, context_length=37, vocab_size=53)).eval()
    first, *others = (torch.arange(n)[None] for n in (11, 2, 13, 37))
    program = torch.export.export(model, (first,), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    torch.export.save(program, tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    for idx in others:
        assert torch.allclose(exported(idx), model(idx), atol=1e-5)


def test_one_mask_and_a_tied_head_wherever_the_model_goes() -> None:
    triangle = torch.ones(11, 11).tril() == 1
    with torch.device("meta"):
        assert make_gpt()(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 17)  # where there is no autocast to ask
    for model in (make_gpt(), copy.deepcopy(make_gpt()), make_gpt().double(), make_gpt().to_empty(device="cpu")):
        masks = [block.attention.causal_mask for block in model.blocks]
        assert len({mask.data_ptr() for mask in masks}) == 1
        assert torch.equal(masks[0], triangle)
        assert model.lm_head.weight is model.token_embedding.weight


def test_a_layer_keeps_the_mask_it_has_made_wherever_the_model_goes(tmp_path: Path, monkeypatch) -> None:
    class Window(CausalSelfAttention):
        def __init__(self, mask: torch.Tensor, **options: object):
            super().__init__(mask=mask.triu(-2), **options)

    monkeypatch.setattr("model.gpt.CausalSelfAttention", Window)
    model, window = make_gpt(), (torch.ones(11, 11).tril().triu(-2)) == 1
    from_disk = GPT.from_pretrained(save_gpt(tmp_path, 1, model, {}))
    for moved in (from_disk, model.bfloat16(), model.to_empty(device="cpu")):
        assert all(torch.equal(block.attention.causal_mask, window) for block in moved.blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_acts_after_embedding_attention_and_mlp_and_only_in_training(family: str) -> None:
    model, idx, shares = make_gpt(family=family, n_embd=18, dropout=0.5).train(), torch.randint(17, (2, 7)), []
    assert {block.attention.weight_dropout for block in model.blocks} == {0.5 if family == "gpt2" else 0.0}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, inputs, y: shares.append((y == 0).float().mean()))
    assert not torch.equal(model(idx), model(idx))
    assert len(shares) == 2 * (1 + 2 * 2)
    assert all(0.3 < share < 0.7 for share in shares)
    assert torch.equal(model.eval()(idx), model(idx))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_dropout_drops_its_share_of_independent_elements_and_divides_the_others(p: float) -> None:
    x = torch.ones(31, 41, 53, requires_grad=True)
    y = Dropout(p)(x)
    y.backward(torch.ones_like(y))
    kept = (y != 0).flatten()
    assert torch.equal(x.grad, y) and y.max().item() == pytest.approx(1 / (1 - p))
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.01)
    for lag in range(1, 9):  # four share a random number
        assert (kept[lag:] & kept[:-lag]).float().mean().item() == pytest.approx((1 - p) ** 2, abs=0.01)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_head": 6, "n_embd": 6, "n_kv_head": 4}, "n_head must be a multiple of n_kv_head"),
        ({"family": "llama", "n_head": 3, "n_embd": 15}, "head_dim must be even, got 5"),
        ({"family": "llama", "bias": True}, "a llama has no biases"),
        ({"family": "nanochat", "head_dim": 4}, "head_dim is n_embd / n_head in a nanochat, got 4"),
    ],
)
def test_impossible_models_are_refused_in_the_users_words(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPTConfig(**changes)


@pytest.mark.parametrize("V", [17, 64, 257])
@pytest.mark.parametrize("family", ["gpt2", "nanochat"])
def test_a_padded_head_changes_no_logit_and_no_gradient(V: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_gpt(vocab_size=V, family=family, n_embd=18, dropout=0.0).double()
    idx = torch.randint(V, (2, 11))

    def logits_and_gradients() -> list[torch.Tensor]:
        logits = model(idx)
        return [logits, *torch.autograd.grad(logits.logsumexp(-1).sum(), [*model.parameters()])]

    plain = logits_and_gradients()
    monkeypatch.setattr(Head, "pads_on", "cpu")
    multiply = Mock(wraps=F.linear)
    monkeypatch.setattr(F, "linear", multiply)
    padded = logits_and_gradients()
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
    assert len(multiply.call_args.args[1]) % 64 == 0
    with torch.no_grad():
        model.generate(idx, 3)  # of single tokens, where copying the rows would cost more
    assert len(multiply.call_args.args[1]) == V


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_can_be_sent_to_another_process(family: str) -> None:
    model, idx = make_gpt(family=family, n_embd=18).eval(), torch.tensor([[3, 5, 2]])
    assert torch.equal(pickle.loads(pickle.dumps(model))(idx), model(idx))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_begins_without_values_and_fills_its_mask_and_tables(family: str) -> None:
    model, idx = make_gpt(family=family, n_embd=18).eval(), torch.tensor([[3, 5, 2]])
    with torch.device("meta"):
        empty = GPT(model.config).eval()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty(idx), model(idx)) and empty.blocks[1].attention.triangle is not None
    with FakeTensorMode(), torch.device("cpu"):
        assert GPT(model.config)(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, 17)


@pytest.mark.parametrize("kind", [torch.nn.Buffer, lambda mask: torch.nn.Parameter(mask, requires_grad=False)])
def test_a_window_in_a_tensor_of_another_class_is_no_triangle(kind: Callable) -> None:
    triangle = make_causal_mask(7)
    assert is_triangle(kind(triangle)) and not is_triangle(kind(triangle.triu(-2)))

"""The model around the layer: sizes, first weights, the one mask, and the edges of the vocabulary."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig, ModelError
from model.gpt import padded_linear
from tests.conftest import make_gpt


def masks(model: GPT) -> list[torch.Tensor]:
    return [block.attention.causal_mask for block in model.blocks]


def test_gpt2_small_has_its_published_size() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(GPTConfig()).parameters()) == 124_439_808


@pytest.mark.parametrize("n_kv_head", [1, 3])
def test_logits_have_a_score_for_every_token_of_the_vocabulary(n_kv_head: int) -> None:
    assert make_gpt(n_kv_head=n_kv_head)(torch.randint(17, (2, 7))).shape == (2, 7, 17)


def test_first_loss_is_that_of_a_fair_guess() -> None:
    model = GPT(GPTConfig(n_layer=3, n_head=2, n_embd=64, context_length=31, vocab_size=101)).eval()
    idx = torch.randint(101, (5, 31))
    loss = F.cross_entropy(model(idx).flatten(0, 1), torch.randint(101, (5 * 31,)))
    assert abs(loss.item() - math.log(101)) < 0.1


def test_first_weights_are_gpt2s() -> None:
    model = GPT(GPTConfig(n_layer=8, n_head=2, n_embd=64, context_length=13, vocab_size=503))
    block = model.blocks[3]
    assert abs(block.attention.q_proj.weight.std().item() - 0.02) < 0.002
    assert abs(block.attention.o_proj.weight.std().item() - 0.02 / 4) < 0.0005
    assert abs(block.mlp.down_proj.weight.std().item() - 0.02 / 4) < 0.0005
    assert torch.equal(block.mlp.up_proj.bias, torch.zeros(256))
    assert torch.equal(model.final_norm.weight, torch.ones(64))


def test_head_is_tied_and_stays_so() -> None:
    model = make_gpt()
    for moved in (model, copy.deepcopy(model), model.double(), model.to("cpu")):
        assert moved.lm_head.weight is moved.token_embedding.weight


def test_one_mask_for_all_layers_wherever_the_model_goes() -> None:
    triangle = torch.ones(11, 11).tril() == 1
    with torch.device("meta"):
        from_meta = GPT(GPTConfig(n_layer=3, n_head=3, n_embd=15, context_length=11, vocab_size=17))
    for model in (make_gpt(), copy.deepcopy(make_gpt()), make_gpt().double(), from_meta.to_empty(device="cpu")):
        assert len({mask.data_ptr() for mask in masks(model)}) == 1
        assert torch.equal(masks(model)[0], triangle)


def test_blocks_read_the_sum_of_token_and_position() -> None:
    model, idx, seen = make_gpt().eval(), torch.randint(17, (2, 7)), []
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(idx)
    assert torch.equal(seen[0], model.token_embedding.weight[idx] + model.position_embedding.weight[:7])


def test_dropout_is_off_in_eval() -> None:
    model, idx = make_gpt(dropout=0.5), torch.randint(17, (2, 7))
    assert not torch.equal(model.train()(idx), model(idx))
    assert torch.equal(model.eval()(idx), model(idx))


def test_dropout_acts_after_embedding_attention_and_mlp() -> None:
    model = make_gpt(dropout=0.5).train()
    dropped = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda m, x, y, name=name: dropped.update({name: (y == 0).float().mean()}))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append((inputs[0] == 0).float().mean()))
    model.blocks[1].mlp.register_forward_hook(lambda module, inputs, y: seen.append((y == 0).float().mean()))
    model(torch.randint(17, (2, 7)))
    assert len(dropped) == 1 + 2 * 2
    for share in (*dropped.values(), *seen):
        assert 0.3 < share < 0.7


def test_padding_the_head_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(5, 13, 7), torch.randn(17, 7, requires_grad=True)
    plain, padded = F.linear(x, weight), padded_linear(x, weight)
    assert padded.shape == (5, 13, 17)
    shapes = []
    monkeypatch.setattr(F, "linear", lambda x, w: shapes.append(w.shape) or torch.zeros(*x.shape[:-1], len(w)))
    for rows, width, computed in ((65, 17, 64), (65, 128, 128), (64, 17, 17)):
        padded_linear(torch.randn(rows, 7), torch.randn(width, 7))
        assert shapes.pop() == (computed, 7)
    torch.testing.assert_close(padded, plain)
    for y in (plain, padded):
        (gradient,) = torch.autograd.grad(y.square().sum(), weight)
        assert gradient.shape == (17, 7)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ModelError, match="12 tokens do not fit the context length of 11"):
        make_gpt()(torch.zeros(1, 12, dtype=torch.long))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_embd": 10, "n_head": 3}, "n_embd must be a multiple of n_head, got n_embd=10 and n_head=3"),
        ({"n_head": 6, "n_embd": 6, "n_kv_head": 4}, "n_head must be a multiple of n_kv_head"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"n_layer": 0}, "n_layer must be a whole number from 1 to 512, got 0"),
        ({"n_embd": 2**21}, "n_embd must be a whole number from 1 to 1,048,576, got 2097152"),
        ({"context_length": 11.0}, "context_length must be a whole number from 1 to 32,768, got 11.0"),
        ({"bias": 1}, "bias and tied must be true or false"),
    ],
)
def test_impossible_models_are_refused_in_the_users_words(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        GPTConfig(**changes)

"""No token sees the future, on any path, to the last bit; and every token sees all of its past."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model import GPT
from model.attention import attention_weights, make_causal_mask
from tests.conftest import make_gpt

B, T, V = 2, 11, 17


def plain(model: GPT, idx: Tensor) -> Tensor:
    return model.eval()(idx)


def training(model: GPT, idx: Tensor) -> Tensor:
    torch.manual_seed(1)  # the same elements are dropped in every call
    return model.train()(idx)


def autocast(model: GPT, idx: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.eval()(idx)


class GrowingCache:
    """A cache through which gradients flow: it concatenates, where the real one writes in place."""

    def __init__(self) -> None:
        self.keys, self.values, self.length = [], [], 0

    def positions(self, T: int) -> slice:
        return slice(self.length, self.length + T)

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(k)
        self.values.append(v)
        self.length += k.size(2)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def cached(chunk: int) -> Callable[[GPT, Tensor], Tensor]:
    def run(model: GPT, idx: Tensor) -> Tensor:
        caches = model.eval().new_cache(len(idx), idx.size(1))
        if torch.is_grad_enabled():
            caches = [GrowingCache() for _ in caches]
        return torch.cat([model.logits(model.hidden(part, caches)) for part in idx.split(chunk, dim=1)], dim=1)

    return run


def by_weights(model: GPT, idx: Tensor) -> Tensor:
    """The logits with the written-out formula in place of the kernel."""

    def formula(module: torch.nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        q, k, v, *_ = inputs
        mask = make_causal_mask(k.size(2))[-q.size(2) :]
        return attention_weights(q, k, mask) @ v.repeat_interleave(q.size(1) // v.size(1), dim=1)

    hooks = [block.attention.attend.register_forward_hook(formula) for block in model.eval().blocks]
    logits = model(idx)
    for hook in hooks:
        hook.remove()
    return logits


PATHS = {
    "eval": plain,
    "train": training,
    "autocast": autocast,
    "weights": by_weights,
    **{f"cache of {chunk}": cached(chunk) for chunk in (1, 3, T)},
}
EVERY_PATH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
HEADS = pytest.mark.parametrize("n_kv_head", [1, 3])


@EVERY_PATH
@HEADS
@torch.no_grad()
def test_changing_the_future_changes_no_bit_of_the_past(path: Callable, n_kv_head: int) -> None:
    model, idx = make_gpt(n_kv_head=n_kv_head), torch.randint(V, (B, T))
    before = path(model, idx)
    for cut in range(1, T):
        changed = idx.clone()
        changed[:, cut:] = (changed[:, cut:] + torch.randint(1, V, (B, T - cut))) % V
        after = path(model, changed)
        assert torch.equal(before[:, :cut], after[:, :cut]), f"a token before {cut} sees a token from {cut} on"
        assert not torch.equal(before[:, cut], after[:, cut])


@EVERY_PATH
@HEADS
def test_gradient_is_zero_to_the_future_and_not_to_the_past(path: Callable, n_kv_head: int) -> None:
    model, idx = make_gpt(n_kv_head=n_kv_head, dropout=0.0), torch.randint(V, (B, T))
    embedded = []
    model.embedding_dropout.register_forward_hook(lambda module, inputs, x: embedded.append(x.requires_grad_()))
    logits = path(model, idx)
    direction = torch.randn(V)
    for query in range(T):
        score = (logits[:, query] @ direction.to(logits)).sum()
        gradients = torch.autograd.grad(score, embedded, retain_graph=True, materialize_grads=True, allow_unused=True)
        influence = torch.cat([gradient.abs().sum(-1) for gradient in gradients], dim=1)  # (B, T)
        assert torch.equal(influence[:, query + 1 :], torch.zeros(B, T - query - 1)), f"token {query} sees the future"
        assert (influence[:, : query + 1] > 0).all(), f"token {query} is blind to its past"


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model, idx = make_gpt().eval(), torch.randint(V, (3, T))
    other = torch.cat((idx[:1], (idx[1:] + 1) % V))
    assert torch.equal(model(idx)[0], model(other)[0])


@HEADS
@torch.no_grad()
def test_extreme_scores_hide_no_leak(n_kv_head: int) -> None:
    """A mask of -10,000 is causal until a model learns larger scores."""
    model, idx = make_gpt(n_kv_head=n_kv_head).eval(), torch.randint(V, (5, T))
    for block in model.blocks:
        for proj in (block.attention.q_proj, block.attention.k_proj):
            proj.weight.mul_(300)
    before = model(idx)
    for cut in range(1, T):
        changed = torch.cat((idx[:, :cut], (idx[:, cut:] + torch.randint(1, V, (5, T - cut))) % V), dim=1)
        assert torch.equal(before[:, :cut], model(changed)[:, :cut])


@HEADS
@torch.no_grad()
def test_logits_through_the_cache_are_those_of_one_pass(n_kv_head: int) -> None:
    model, idx = make_gpt(n_kv_head=n_kv_head).double().eval(), torch.randint(V, (B, T))
    for chunk in (1, 2, 3, T - 1):
        torch.testing.assert_close(cached(chunk)(model, idx), model(idx), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_no_token_sees_the_future_of_a_long_text() -> None:
    long = 131
    model, idx = make_gpt(context_length=long).eval(), torch.randint(V, (1, long))
    before = model(idx)
    for cut in range(1, long):
        changed = torch.cat((idx[:, :cut], (idx[:, cut:] + 1) % V), dim=1)
        assert torch.equal(before[:, :cut], model(changed)[:, :cut])

"""Metrics have their known values, scores are those of the captured patterns, and measuring changes nothing."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tril.decoder
import tril.experiments
import tril.weights
from errors import UserError
from model import GPT
from tests.conftest import make_gpt
from tests.tril.test_capture import run_captured
from tril import ablate, head_scores, influence, repeat_probe
from tril.experiments import by_sides, predict, upstream_heads
from tril.inspection import Inspection, inspect_heads
from tril.look import look
from tril.metrics import layer_metrics

B, T, V, L, H = 2, 11, 17, 2, 3
REPEAT = 7  # r_1 to r_7, twice, behind a start
SIZE = 2 * REPEAT + 1


def in_blocks(pattern: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (T, T) in blocks of rows for `layer_metrics`, for a batch and heads of one that see all their past."""
    past = torch.ones_like(pattern, dtype=torch.bool).tril()[None, None]
    for start in range(0, len(pattern), rows):
        block = pattern[start : start + rows, : start + rows][None, None].clone()
        yield block, past[:, :, start : start + rows, : start + rows]
        block.fill_(math.nan)  # a view of it would spoil the results, and hold all weights in memory


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def one_hot(key_of: dict[int, int]) -> Tensor:
    """Return the weights (T, T) of a head whose query i looks at key_of[i] only, or at itself if i is not in key_of."""
    return F.one_hot(torch.tensor([key_of.get(i, i) for i in range(SIZE)]), SIZE).float()


SHARE = (harmonic(SIZE) - 1) / (SIZE - 1)
BEFORE = (harmonic(SIZE) - 1.5) / (SIZE - 2)
LATE = (harmonic(SIZE) - harmonic(REPEAT + 1)) / REPEAT
UNIFORM = torch.ones(SIZE, SIZE).tril() / torch.arange(1, SIZE + 1)[:, None]
# name -> the pattern, and entropy, distance, sink, current, previous, duplicate, induction
KNOWN = {
    "uniform": (UNIFORM, (1, (SIZE - 1) / 4, SHARE, SHARE, BEFORE, LATE, LATE)),
    "identity": (one_hot({}), (0, 0, 0, 1, 0, 0, 0)),
    "previous": (one_hot({i: i - 1 for i in range(1, SIZE)}), (0, (SIZE - 1) / SIZE, 1 / (SIZE - 1), 0, 1, 0, 0)),
    "sink": (one_hot(dict.fromkeys(range(SIZE), 0)), (0, (SIZE - 1) / 2, 1, 0, 0, 0, 0)),
    "duplicate": (one_hot({i: i - REPEAT for i in range(REPEAT + 1, SIZE)}), (0, REPEAT**2 / SIZE, 0, 0.5, 0, 1, 0)),
    "induction": (
        one_hot({i: i - REPEAT + 1 for i in range(REPEAT + 1, SIZE)}),
        (0, REPEAT * (REPEAT - 1) / SIZE, 0, 0.5, 0, 0, 1),
    ),
}


@pytest.mark.parametrize("rows", [1, 7, SIZE])
@pytest.mark.parametrize("name", KNOWN)
def test_known_heads_have_their_known_values(name: str, rows: int) -> None:
    pattern, values = KNOWN[name]
    found = layer_metrics(in_blocks(pattern, rows), REPEAT)
    names = ("entropy", "distance", "sink", "current", "previous", "duplicate", "induction")
    for metric, *known in zip(names, values, KNOWN["uniform"][1], strict=True):  # of the head, and of an even one
        assert found[metric].tolist() == [pytest.approx(known, abs=1e-6)], metric


@pytest.mark.parametrize("size", [1, 7, 10**9])
def test_scores_do_not_depend_on_blocks_and_are_those_of_the_patterns(size: int, monkeypatch) -> None:
    model, idx = make_gpt(n_kv_head=1).eval(), torch.randint(V, (B, T))
    att = run_captured(model, idx)
    before = [tensor.clone() for call in att.calls for tensor in (call.q, call.k)]
    monkeypatch.setattr(tril.weights, "BLOCK_SIZE", size * B * H * T if size < T else size)
    found = att.scores(5)
    after = [tensor for call in att.calls for tensor in (call.q, call.k)]
    assert all(map(torch.equal, before, after))
    for layer in range(L):
        for head in range(H):
            for b in range(B):
                alone = layer_metrics(in_blocks(att.pattern(layer, head)[b], T), 5)
                for name in found:
                    torch.testing.assert_close(found[name][b, layer, head], alone[name][0, 0], rtol=0, atol=1e-6)


def test_a_probe_repeats_and_its_control_does_not() -> None:
    tokens = torch.tensor([3, 5, 7, 11, 13, 2, 19])
    probe = repeat_probe(tokens, 99, 1000, num=5)
    r, again, other = probe.repeated[:, 1:4], probe.repeated[:, 4:], probe.control[:, 4:]
    assert probe.repeated.shape == probe.control.shape == (5, 7)
    assert torch.equal(r, again) and torch.equal(probe.control[:, :4], probe.repeated[:, :4])
    assert (probe.repeated[:, 0] == 99).all() and len(r.unique(dim=0)) > 1
    for first, second in zip(r.tolist(), other.tolist(), strict=True):
        assert len({*first, *second}) == 6 and {*first, *second} <= set(tokens.tolist())
    for n, T, length in ((1000, 11, 5), (1000, 1000, 50), (4, 5, 2), (1000, 101, 50)):
        assert repeat_probe(torch.arange(n), 0, T).repeated.size(1) // 2 == length
    assert repeat_probe(tokens[:3], 0, 1000) is None and repeat_probe(tokens, 0, 4) is None


def loss(model: GPT, text: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(text)[:, :-1].transpose(1, 2), text[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_head": 1}, {"family": "qwen3", "n_embd": 18}, {"family": "nanochat", "n_embd": 18}], ids=str
)
@pytest.mark.parametrize("positions", [3, 256])
def test_scores_of_a_model_have_means_errors_and_losses(changes: dict, positions: int, monkeypatch) -> None:
    monkeypatch.setattr(tril.experiments, "POSITIONS", positions)
    model, text = make_gpt(**changes, bias=None), torch.randint(V, (5, T))
    probe = repeat_probe(torch.arange(V - 1), V - 1, T, num=3)
    scores = head_scores(model, text, probe)
    assert model.training and max(scores.proofs).error < 1e-5
    edits = {(layer, head): torch.zeros_like for layer in range(L) for head in range(H)}
    changed = head_scores(model, text, probe, edits).samples
    same = [name for name, samples in scores.samples.items() if changed[name].equal(samples)]
    assert {*same} == {f"{name}{end}" for name in ("duplicate", "induction") for end in ("", "_control")}
    for name, samples in scores.samples.items():
        num = 3 if name.startswith(("duplicate", "induction")) else 5
        assert samples.shape == (num, L, H)
        torch.testing.assert_close(scores.mean[name], samples.mean(0))
    model.eval()
    torch.testing.assert_close(scores.losses, loss(model, text), rtol=0, atol=1e-5)
    assert math.isnan(head_scores(make_gpt(), text[:1, :1]).losses.item()) and not model.training
    for sequences, name in ((probe.repeated, "induction"), (probe.control, "induction_control")):
        att = run_captured(model, sequences)
        torch.testing.assert_close(scores.mean[name], att.scores(5)["induction"].mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["zero", "mean"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_ablation_is_the_loss_of_a_model_whose_head_is_cut(family: str, mode: str, monkeypatch) -> None:
    """Compare with a model whose output projection reads zero, or a constant, from the head."""
    monkeypatch.setattr(tril.experiments, "POSITIONS", 3)  # whose logits are made in parts
    model, text = make_gpt(family=family, n_embd=18, bias=None, dropout=0.0).eval(), torch.randint(V, (5, T))
    D, heads = model.config.head_dim, [(layer, head) for layer in range(L) for head in range(H)]
    rises = ablate(model, text, heads, mode)
    assert rises.shape == (5, L, H) and not any(module._forward_hooks for module in model.modules())
    alone = ablate(model, text, [(1, 1)], mode)  # the others were not asked for
    assert alone[:, 0].isnan().all() and torch.equal(alone[:, 1, 1], rises[:, 1, 1])
    with pytest.raises(UserError, match="a head's output becomes zero or mean, got 'half'"):
        ablate(model, text, heads, "half")
    outputs = []
    for block in model.blocks:
        hook = block.attention.attend.register_forward_hook(lambda module, inputs, y: outputs.append(y))
        loss(model, text)
        hook.remove()
    for layer, head in heads:
        rise = rises[:, layer, head].float()
        o_proj, part = model.blocks[layer].attention.o_proj, slice(head * D, (head + 1) * D)
        whole, plain = o_proj.weight.data.clone(), loss(model, text)
        means = outputs[layer][:, head].mean(1, keepdim=True)  # of each text
        constant = means @ whole[:, part].T if mode == "mean" else 0.0
        o_proj.weight.data[:, part] = 0
        hook = o_proj.register_forward_hook(lambda module, inputs, y, constant=constant: y + constant)
        torch.testing.assert_close(rise, loss(model, text) - plain, rtol=0, atol=1e-5)
        assert rise.abs().max() > 1e-3
        hook.remove()
        o_proj.weight.data = whole


class Circuit(nn.Module):
    """A decoder of two layers, in which 1.2 looks at what followed the token before, 1.0 and 0.2 at copies of it.

    Heads 0.0 and 0.1 look at the token before, and tell which it is. What reaches 1.2 of that is `written` of the token
    ids, (B, T), and the outputs of these two, (B, T, V). Head 1.1 attends evenly.
    """

    def __init__(self, written: Callable):
        super().__init__()
        self.written = written

    def forward(self, idx: Tensor) -> Tensor:
        token, places = F.one_hot(idx, CIRCUIT_V).float(), torch.arange(idx.size(1))
        place, back = (F.one_hot(x, CIRCUIT_V).expand_as(token) for x in (places, (places - 1).clamp(min=0)))
        below = self.attend((back, back, token), (place, place, token), token)
        written = self.written(idx, below[:, 0], below[:, 1])
        return self.attend((token, 0 * token, token), (token, token, written), token).sum(1)

    def attend(self, queries: tuple, keys: tuple, token: Tensor) -> Tensor:
        q, k, v = (torch.stack(x, dim=1).float() for x in (queries, keys, (token,) * 3))
        return F.scaled_dot_product_attention(50 * q, k, v, is_causal=True, scale=1.0)


CIRCUIT_V = 67
WRITTEN = {  # how 1.2 knows what stood before a token -> `written`, and the heads that it needs
    "mostly by head 0.1": (lambda idx, first, second: 0.05 * first + 0.1 * second, [(0, 1)]),
    "by either": (lambda idx, first, second: first + second, []),
    "by another in each text": (lambda idx, *heads: heads[idx[0, 1] // 31 % 2], []),
}


@pytest.mark.parametrize("mode", [None, "zero", "mean"])
@pytest.mark.parametrize("way", WRITTEN)
def test_an_induction_head_is_fed_by_the_head_that_it_needs(way: str, mode: str | None, monkeypatch) -> None:
    written, needed = WRITTEN[way]
    model, heads = Circuit(written), [(layer, head) for layer in range(2) for head in range(3)]
    probe = repeat_probe(torch.arange(CIRCUIT_V - 1), CIRCUIT_V - 1, 23)
    assert {0, 1} == set((probe.repeated[:2, 1] // 31 % 2).tolist())  # so that two texts differ in it
    scores = head_scores(model, probe.control[:1], probe)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    upstream = upstream_heads(model, probe, scores, heads, mode)
    # Each of the heads below is taken away in eight texts, and those that are needed once more for the sides.
    assert len(passes) == 3 * 8 + 2 * 8 * len(needed)
    assert upstream.keys() == {(1, 0), (1, 2)}  # 1.1 has no name, nothing is below 0.2
    assert list(upstream[1, 2].without) == needed and not upstream[1, 0].without
    assert upstream[1, 2].score == scores.mean["induction"][1, 2] > 0.97
    assert str(upstream[1, 0]) == ".50, without the median head .50"
    if needed:
        assert (upstream == upstream_heads(model, probe, scores, heads, "mean")) == (mode != "zero")
        assert upstream[1, 2].without[0, 1] < 0.5 and 0.8 < upstream[1, 2].median < upstream[1, 2].score
        sides = {"keys": pytest.approx(upstream[1, 2].without[0, 1]), "queries": pytest.approx(upstream[1, 2].score)}
        assert upstream[1, 2].sides == {(0, 1): sides}  # it acts by what it writes to the keys
        assert " (by keys ." in str(upstream[1, 2])

    passes.clear()
    monkeypatch.setattr(tril.experiments, "MOST_EARLIER", 2)
    few = upstream_heads(model, probe, scores, heads, mode)
    assert len(passes) == (3 * 2 + 2 * 2 * len(needed) if mode else 0)
    assert {head: list(each.without) for head, each in few.items()} == ({(1, 0): [], (1, 2): needed} if mode else {})


@pytest.mark.parametrize("n_kv_head", [1, 3])
def test_both_sides_are_the_whole_ablation_and_a_head_replaced_by_itself_moves_no_bit(n_kv_head: int) -> None:
    model = make_gpt(family="qwen3", n_embd=18, n_kv_head=n_kv_head, bias=None, context_length=SIZE).eval()
    texts = repeat_probe(torch.arange(V - 1), V - 1, SIZE, num=5).repeated.split(1)
    edits = {(0, 1): torch.zeros_like}
    for head in ((1, 0), (1, 2)):
        plain, without = (
            [look(model, idx, each)[0].scores(REPEAT)["induction"][0, *head].item() for idx in texts]
            for each in (None, edits)
        )
        assert by_sides(model, texts, {(0, 1): lambda x: x}, head, "induction") == {
            side: sum(plain) / len(plain) for side in ("keys", "queries")
        }
        found = by_sides(model, texts, edits, head, "induction")
        assert len({sum(plain), sum(without), *(5 * score for score in found.values())}) == 4
        for n, idx in enumerate(texts):  # the queries of the whole ablation with its keys
            ablated = look(model, idx, edits)[0].calls[1].of_head(head[1])
            mixed = dataclasses.replace(look(model, idx)[0].calls[1].of_head(head[1]), q=ablated.q, k=ablated.k)
            assert layer_metrics(mixed.blocks(), REPEAT)["induction"][0, 0].item() == without[n]


@pytest.mark.parametrize("family", ["gpt2", "nanochat"])
def test_influence_is_the_derivative_of_the_prediction(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Influence from the future is zero, and no gradient or hook stays behind."""
    model, idx = make_gpt(family=family, n_embd=18, bias=None, tied=False).double(), torch.randperm(V)[None, :T]
    shares = influence(model, idx)
    assert model.training
    model.eval()
    tokens, probabilities, losses = zip(*predict(model, idx)[2], strict=True)
    likeliest = model(idx)[0].softmax(-1).max(-1)
    assert list(tokens) == likeliest.indices.tolist()
    torch.testing.assert_close(torch.tensor(probabilities), likeliest.values.float())
    expected = F.cross_entropy(model(idx)[0, :-1], idx[0, 1:], reduction="none")
    torch.testing.assert_close(torch.tensor(losses[:-1]), expected.float())
    assert losses[-1] is None
    assert torch.equal(shares.triu(1), torch.zeros(T, T))
    torch.testing.assert_close(shares.sum(-1), torch.ones(T))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    rows = model.token_embedding.weight  # each token is there once, so its row has the gradient of its place
    monkeypatch.setattr(tril.experiments, "CPU_FLOPS", 3.5 * 2 * T * sum(p.numel() for p in model.parameters()))
    some = influence(model, idx)
    assert (~some.isnan().any(1)).nonzero().flatten().tolist() == [0, 5, 10] and torch.equal(some[5], shares[5])

    for position in (4, T - 1):
        log_probability = model(idx)[0, position].log_softmax(-1)[tokens[position]]
        norms = torch.autograd.grad(log_probability, rows)[0][idx[0]].norm(dim=-1)
        torch.testing.assert_close(shares[position], (norms / norms.sum()).float(), rtol=1e-5, atol=1e-6)


def test_keys_in_front_of_the_tokens_are_left_out() -> None:
    found = Inspection(*[None] * 5)
    found.att = SimpleNamespace(pattern=lambda layer, head: torch.arange(12).view(1, 3, 4))
    assert found.pattern(0, 0).tolist() == [[1, 2, 3], [5, 6, 7], [9, 10, 11]]


def test_what_a_head_is_worth_is_that_of_the_weights_which_were_inspected() -> None:
    model, ids = make_gpt().eval(), torch.randint(V, (T,))
    found = inspect_heads(model, ids, ablate="zero")
    whole = F.cross_entropy(model(ids[None])[0, :-1], ids[1:])
    D = model.config.head_dim
    model.blocks[1].attention.o_proj.weight.data[:, 2 * D : 3 * D] = 0  # after the inspection
    rise = F.cross_entropy(model(ids[None])[0, :-1], ids[1:]) - whole
    assert abs(rise) > 0.01
    torch.testing.assert_close(found.scores.mean["ablation"][1, 2], rise.detach().double(), atol=1e-5, rtol=0)

"""Generation: the cache changes nothing, the filters keep what they say, and the same seed writes the same text."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from errors import UserError
from model import GPT
from model.attention import make_causal_mask
from model.cache import LayerCache
from model.families import FAMILIES
from model.gpt import Block
from model.recorded import KEPT, FewKernels, can_record, reader
from model.sampling import Sampler, keep_top_k, keep_top_p, stream
from tests.conftest import make_gpt

T, V = 11, 17
SHAPES = [{}, {"n_kv_head": 1}, *({"family": family, "n_embd": 18} for family in FAMILIES)]


def windows(text: list[int], prompt: int) -> list[list[int]]:
    """The tokens that the model sees before each new one, by the rule: a full window drops its older half."""
    start, seen = max(0, prompt - T), []
    for end in range(prompt, len(text)):
        if end - start > T:
            start = end - (T - T // 2)
        seen.append(text[start:end])
    return seen


@pytest.mark.parametrize("length", [2, 11, 25])
def test_with_a_cache_each_token_is_read_once(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    model, read = make_gpt(), []
    hidden = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda *rest, **more: read.append(rest[0][0].tolist()) or hidden(*rest, **more)
    )
    text = model.generate(torch.randint(V, (1, length)), 3 * T, temperature=0)[0].tolist()
    expected, before = [], None
    for window in windows(text, length):
        expected.append(window[-1:] if before == window[:-1] else window)
        before = window
    assert read == expected  # and half a window again when it was full


def test_a_prompt_is_read_once_for_all_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = make_gpt(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, caches: read.append(tuple(idx.shape)) or hidden(idx, caches))
    prompt = torch.randint(V, (1, 5)).repeat(3, 1)
    text = model.generate(prompt, 3, seed=1)
    assert read == [(1, 5), (3, 1), (3, 1)] and len(text.unique(dim=0)) == 3
    prompt[2, 3] = (prompt[2, 3] + 1) % V
    model.generate(prompt, 1)
    assert read[3:] == [(3, 5)]


def test_each_part_of_a_model_keeps_its_mode() -> None:
    model = make_gpt().train()
    model.blocks[1].eval()
    model.generate(torch.zeros(1, 1, dtype=torch.int64), 2)
    assert model.training and model.blocks[0].training and not model.blocks[1].mlp.training


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("length", [1, 5, 11, 25])
def test_a_seed_draws_what_multinomial_draws_from_the_whole_model(changes: dict, length: int) -> None:
    model, idx, generator = make_gpt(**changes).double().eval(), torch.randint(V, (3, length)), torch.Generator()
    text = model.generate(idx, 3 * T, seed=7)
    assert text.shape == (3, length + 3 * T) and torch.equal(text[:, :length], idx)
    generator.manual_seed(7)
    seen = zip(*(windows(row, length) for row in text.tolist()), strict=True)
    for column, window in enumerate(seen, start=length):
        probabilities = model(torch.tensor(window))[:, -1].float().softmax(-1)  # temperature 1 unless another is given
        assert torch.equal(text[:, column], torch.multinomial(probabilities, 1, generator=generator)[:, 0])


@pytest.mark.parametrize("changes", [*SHAPES, {"family": "llama", "n_embd": 18, "n_kv_head": 1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length, launches", [(1, 30), (5, 28), (25, 27)])
def test_a_step_of_static_shapes_writes_the_same_text(
    changes: dict, dtype: torch.dtype, length: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, idx, launched = make_gpt(**changes).to(dtype), torch.randint(V, (3, length)), []
    expected = model.generate(idx, 3 * T, seed=7)
    monkeypatch.setattr("model.recorded.can_record", lambda model, token: True)
    monkeypatch.setattr("model.recorded.record", lambda work: lambda: launched.append(1) or work())
    assert torch.equal(model.generate(idx, 3 * T, seed=7), expected)
    assert len(launched) == launches  # one to compare, and of 33 those that are not read with a text or half a window


class Tape(TorchDispatchMode):
    """Stands for a CUDA graph: the same operators again, on the storage that they had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        self.calls.append((func, args, kwargs, func(*args, **kwargs)))
        return self.calls[-1][-1]

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                old.copy_(new)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    tapes = []

    def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        tapes.append(tape := Tape())
        with tape:
            logits = work()
        return lambda: tape.replay() or logits

    monkeypatch.setattr("model.recorded.can_record", lambda model, token: True)
    monkeypatch.setattr("model.recorded.record", record)
    return tapes


def test_a_graph_is_kept_until_it_does_not_fit(tapes: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_gpt(family="qwen3", n_embd=18, context_length=23, tied=False).double().eval()
    weight = model.blocks[0].mlp.up_proj.weight
    monkeypatch.setattr("model.recorded.ROOM", 13)

    def check(recorded: int, rows: int = 3, length: int = 5) -> None:
        idx = torch.randint(V, (rows, length))
        with monkeypatch.context() as eager:
            eager.setattr("model.recorded.can_record", lambda model, token: False)
            expected = model.generate(idx, 4, seed=7)
        assert torch.equal(model.generate(idx, 4, seed=7), expected)
        assert len(tapes) == recorded

    check(1)
    check(1, length=2)
    check(2, length=11)  # has no room in the caches
    check(3, rows=2, length=11)
    check(4)
    for part in (weight, model.blocks[1].attention.v_proj.weight):
        part.data.normal_()
        check(4)
    before = weight.data.clone()
    weight.data.fill_(torch.nan)
    model.generate(torch.zeros(3, 8, dtype=torch.int64), 4)
    weight.data.copy_(before)
    check(4)
    weight.data = weight.data.roll(1)
    check(5)
    model.blocks[1].mlp = copy.deepcopy(model.blocks[0].mlp)
    check(6)
    model.blocks[0].attention.q_norm.eps = 1.0
    check(7)
    model.train()  # keeps none
    check(8)
    check(9)


@pytest.mark.parametrize("family, bias", [("gpt2", True), ("gpt2", False), ("llama", False), ("nanochat", False)])
def test_a_recorded_step_computes_once_what_layers_repeat(family: str, bias: bool, tapes: list[Tape]) -> None:
    model = make_gpt(family=family, bias=bias, n_embd=18, tied=family == "gpt2").eval()
    model.blocks[1].attention.causal_mask = make_causal_mask(T)  # of its own: a row more
    model.generate(torch.randint(V, (3, 5)), 3)
    calls = [func.overloadpacket for func, *_ in tapes[0].calls]
    products = {"llama": 5}.get(family, 4) * len(model.blocks)  # of a layer: q, k and v are one
    assert calls.count(torch.ops.aten.linear) == products + 1
    assert calls.count(torch.ops.aten.where) == 2
    assert calls.count(torch.ops.aten.index) == 2 + (1 if family == "gpt2" else 2)  # positions; cos and sin


class Casting(nn.RMSNorm):
    """A norm that asks for float32, as that of `transformers`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.float32)).to(x.dtype)


def add_in_place(block: nn.Module, x: Tensor, cache: LayerCache) -> Tensor:
    x += block.attention(block.attention_norm(x), cache)
    x += block.mlp(block.mlp_norm(x))
    return x


class Adapted(nn.Module):
    """A linear layer and an adapter (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.down = nn.Parameter(torch.randn(2, layer.in_features))
        self.up = nn.Parameter(torch.randn(layer.out_features, 2))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


def write_into_the_residual_stream(model: GPT) -> None:
    model.bfloat16()
    for block in model.blocks:
        block.attention_norm = Casting(18, dtype=torch.float32)
        block.mlp_norm = Casting(18, dtype=torch.float32)
        block.__class__ = type("Changed", (Block,), {"forward": add_in_place})


def tie_queries_to_keys(model: GPT) -> None:
    for block in model.blocks:
        block.attention.k_proj.weight = block.attention.q_proj.weight
        nn.init.normal_(block.attention.q_proj.bias)


def adapt_queries(model: GPT) -> None:
    model.blocks[1].attention.q_proj = Adapted(model.blocks[1].attention.q_proj)


@pytest.mark.parametrize("change", [write_into_the_residual_stream, tie_queries_to_keys, adapt_queries])
def test_a_changed_model_is_recorded_as_it_is(change: Callable, tapes: list[Tape], monkeypatch) -> None:
    model = make_gpt(family="gpt2", n_embd=18)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(0.05 if "proj" in name else 1)  # what is wrong would be less than LIMIT
    change(model)
    idx = torch.randint(V, (3, 5))
    with torch.inference_mode(), reader(model.eval(), idx, T) as (_, read):
        recorded = [read(idx), read(idx[:, :1]), read(idx[:, 1:2])]
    assert len(tapes) == 1 and all(KEPT.pop(model).values())
    monkeypatch.setattr("model.recorded.can_record", lambda model, token: False)
    with torch.inference_mode(), reader(model, idx, T) as (_, read):
        expected = [read(idx), read(idx[:, :1]), read(idx[:, 1:2])]
    torch.testing.assert_close(recorded[2], expected[2], rtol=1e-5, atol=1e-6)


def test_only_the_same_call_is_computed_once() -> None:
    table, (first, second) = torch.rand(5, 7), torch.tensor([[2], [3]])
    with FewKernels({}, first):
        rows = [table[first, :3], table[first, :4], table[second, :3], table[first, :3]]
        rows.append(rows[0].to(torch.int64))
        assert rows[0] is rows[3] and rows[4] is rows[0].to(dtype=torch.int64) is not rows[0].to(torch.float64)
    assert [row.tolist() for row in rows[:3]] == [
        table[[2], :3].tolist(),
        table[[2], :4].tolist(),
        table[[3], :3].tolist(),
    ]


def test_a_part_that_is_watched_or_replaced_is_not_recorded() -> None:
    model, token = make_gpt(), SimpleNamespace(is_cuda=True)
    hook = model.blocks[1].attention.attend.register_forward_hook(print)
    assert not can_record(model, token)
    hook.remove()
    assert can_record(model, token)
    model.blocks[1].mlp.forward = print
    assert not can_record(model, token)


def test_two_texts_at_a_time_do_not_share_a_graph(tapes: list[Tape]) -> None:
    model, idx = make_gpt().eval(), torch.randint(V, (3, 5))
    expected = model.generate(idx, 4, seed=7)[:, 5:]
    texts = zip(*(stream(model, idx, 4, Sampler(), seed=7) for _ in range(2)), strict=True)
    assert all(torch.equal(torch.cat(text, dim=1), expected) for text in zip(*texts, strict=True))
    assert len(tapes) == 2


def test_a_kept_graph_is_no_part_of_the_model_and_ends_with_it(tapes: list[Tape]) -> None:
    model, idx = make_gpt().eval(), torch.randint(V, (3, 5))
    expected = model.generate(idx, 4, seed=7)
    for another in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(another.generate(idx, 4, seed=7), expected)
    assert len(tapes) == 3 and model in KEPT
    kept = weakref.ref(next(iter(KEPT[model].values()))[0][0])
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("record", [lambda work: lambda: work().flip(-1), lambda work: 1 / 0], ids=["other", "none"])
def test_a_step_that_a_graph_would_change_is_not_recorded(record: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model, idx = make_gpt(), torch.randint(V, (3, 5))
    model.lm_head.weight.data *= 50  # probabilities that differ
    expected = model.generate(idx, T, seed=7)
    monkeypatch.setattr("model.recorded.can_record", lambda model, token: True)
    monkeypatch.setattr("model.recorded.record", record)
    assert torch.equal(model.generate(idx, T, seed=7), expected)


def test_a_seeded_call_leaves_the_global_generator_and_the_mode_alone() -> None:
    model, idx = make_gpt(), torch.randint(V, (2, 3))
    before = torch.random.get_rng_state()
    model.generate(idx, 5, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    model.eval().generate(idx, 2)
    assert not model.training


LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


@pytest.mark.parametrize(
    "kept, expected",
    [
        (keep_top_k(LOGITS, 2), [True, True, False, False]),
        (keep_top_k(LOGITS, 99), [True, True, True, True]),
        (keep_top_p(LOGITS, 0.5), [True, True, False, False]),
        (keep_top_p(torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log(), 0.5), [True, False, False, False]),
        (keep_top_p(LOGITS, 0.05), [True, False, False, False]),
        (keep_top_p(LOGITS.flip(-1), 0.71), [False, True, True, True]),
    ],
)
def test_filters_worked_out_by_hand(kept: Tensor, expected: list[bool]) -> None:
    assert kept.isfinite()[0].tolist() == expected


def test_impossible_requests_are_refused() -> None:
    for length, top_k, message in ((0, None, "the prompt is empty"), (1, -1, "top_k must be a number from 0 to 4,294")):
        with pytest.raises(UserError, match=message):
            make_gpt().generate(torch.zeros(1, length, dtype=torch.long), 1, top_k=top_k)

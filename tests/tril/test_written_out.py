"""Attention however it is computed: tiny decoders of many layouts that keep their own weights, and what looks alike."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from model.attention import repeat_kv
from tests.conftest import run_python
from tests.tril import zoo
from tests.tril.test_capture import run_captured
from tests.tril.zoo import B, H, T, V, attend, causal, drawn, flat, masked, scores, seen_as, weigh
from tril import Captured, UserError, capture, inspect_heads
from tril.look import UNMASKED, look

C, D, MANY = 21, 7, 15  # MANY heads share H heads of keys and values
Written, Decoder = partial(zoo.Layer, D=D), partial(zoo.Decoder, C=C)
TRIANGLE = torch.ones(T, T, dtype=torch.bool).tril()
MEMORY = drawn(B, T, C)  # as long as a text


# Other layers, (B, T, C) -> (B, T, C). `kept` begins with the weights of the last call, (B, H, T, T).


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.weights = weigh(q, k)
        return self.weights @ v


class Heads(nn.Module):
    """A layer with a module for each head, and what joins their outputs, (B, T, D) each."""

    def __init__(self, join: Callable[[list[Tensor]], Tensor]):
        super().__init__()
        self.heads, self.out_proj = nn.ModuleList(Head() for _ in range(H)), nn.Linear(H * D, C)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        output = self.join([head(x) for head in self.heads])
        self.kept = [torch.stack([head.weights for head in self.heads], 1)]
        return x + self.out_proj(output)


class PyTorchs(nn.MultiheadAttention):
    """PyTorch's own layer, called with these options."""

    def __init__(self, batch_first: bool = True, **options: object):
        super().__init__(C, H, batch_first=batch_first)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        axes = (0, 1) if self.batch_first else (1, 0)
        self.again = partial(super().forward, *3 * [x.movedim((0, 1), axes)], attn_mask=~TRIANGLE)
        return x + self.again(**self.options)[0].movedim(axes, (0, 1))

    @property
    def kept(self) -> list[Tensor]:  # when all is seen: computing them is a call
        return [self.again(average_attn_weights=False)[1]]


WEIGHTS = {  # q, (B, H, T, D), and k, (B, H or KV, T, D) -> (B, H, T, T)
    "softmax": weigh,
    "exp and a sum": lambda q, k: (numbers := masked(scores(q, k)).exp()) / numbers.sum(-1, keepdim=True),
    "mask after the softmax": lambda q, k: scores(q, k).softmax(-1) * TRIANGLE,
    "learned sink": lambda q, k: F.pad(masked(scores(q, k)), (0, 1), value=0.7).softmax(-1)[..., :-1],
    "window": lambda q, k: masked(scores(q, k), TRIANGLE.triu(-3)).softmax(-1),
    "soft cap": lambda q, k: masked(2 * (scores(q, k) / 2).tanh()).softmax(-1),
}


PRODUCTS = {  # weights, (B, H, T, T), and values, (B, H, T, D) -> output, (B, H, T, D)
    "torch.matmul": torch.matmul,
    "method matmul": lambda w, v: w.matmul(v),
    "heads in the batch, bmm": flat(torch.bmm),
    "the other side": lambda w, v: (v.mT @ w.mT).mT,
    "einsum, odd letters, heads third": lambda w, v: torch.einsum("zqax,zqxm->zaqm", w, v).transpose(1, 2),
    "einsum, values first": lambda w, v: torch.einsum("bhsd, bhts -> bhtd", v, w),
    "einsum, ellipsis": partial(torch.einsum, "...ij,...jd->...id"),
    "einsum, no arrow": partial(torch.einsum, "...ij,...jk"),
    "einsum, list": lambda w, v: torch.einsum("bhij,bhjd->bhid", [w, v]),
    "einsum, sublists": lambda w, v: torch.einsum(w, [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4]),
}


def time_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend in (T, T, B, H), as labml's annotated papers do."""
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    scores = D**-0.5 * torch.einsum("ibhd,jbhd->ijbh", q, k)
    w = masked(scores.permute(2, 3, 0, 1)).permute(2, 3, 0, 1).softmax(1)
    return torch.einsum("ijbh,jbhd->ibhd", w, v).permute(1, 2, 0, 3), w.permute(2, 3, 0, 1)


def twice(*given: object, make: Callable = Written) -> Callable[[], list[nn.Module]]:
    return lambda: [make(*given) for _ in range(2)]


joined = partial(torch.cat, dim=-1)
LAYOUTS: dict[str, Callable[[], list[nn.Module]]] = {  # name -> its two layers
    **{name: twice(attend(weights=weights)) for name, weights in WEIGHTS.items()},
    **{name: twice(attend(product)) for name, product in PRODUCTS.items()},
    "time first": twice(time_first),
    "one head, no axis": twice(attend(lambda w, v: (w[:, 0] @ v[:, 0])[:, None]), 1, 1),
    "shared values": twice(attend(lambda w, v: torch.einsum("bhij,bjd->bhid", w, v[:, 0])), H, 1),
    "groups": twice(attend(lambda w, v: w @ v.repeat_interleave(MANY // H, 1)), MANY, H),
    "axis of groups": twice(attend(lambda w, v: (w.unflatten(1, (H, -1)) @ v[:, :, None]).flatten(1, 2)), MANY, H),
    "modules of heads": twice(joined, make=Heads),
    "modules of heads, stack": twice(lambda outputs: torch.stack(outputs, 2).flatten(2), make=Heads),
    "kernel": twice(seen_as(causal)),
    "kernel, heads in the batch": twice(seen_as(flat(causal))),
    "kernel, one head, no axis": twice(seen_as(flat(causal)), 1, 1),
    "kernel, then written out": lambda: [Written(seen_as(causal)), Written(attend())],
    "written out, then kernel": lambda: [Heads(joined), Written(seen_as(causal))],
    "MHA": lambda: [PyTorchs(), PyTorchs(batch_first=False)],
    "MHA without weights": lambda: [PyTorchs(need_weights=False), PyTorchs(need_weights=False, is_causal=True)],
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


def check(att: Captured, layers: list[nn.Module], atol: float = 1e-6) -> None:
    assert len(att.calls) == len(layers)
    for number, (call, layer) in enumerate(zip(att.calls, layers, strict=True)):
        truth = layer.kept[0].float()
        torch.testing.assert_close(call.weights().float(), truth, rtol=0, atol=atol)
        for head in range(truth.size(1)):
            torch.testing.assert_close(att.pattern(number, head).float(), truth[:, head], rtol=0, atol=atol)
    att.verify()


@by_layout
def test_weights_are_those_that_met_the_values_and_outputs_are_replaced_as_by_hand(layout: str) -> None:
    model, text = Decoder(*LAYOUTS[layout]()), torch.randint(V, (B, T))
    check(run_captured(model, text[:1]), model.layers)
    plain, outputs = model(text), {}
    att = run_captured(model, text)

    def keep(head: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        return lambda output: outputs.setdefault(head, output)

    heads = [(layer, head) for layer, call in enumerate(att.calls) for head in range(call.shape[1])]
    with capture(model, {head: keep(head) for head in heads}) as att:
        assert model(text).equal(plain)
    check(att, model.layers)
    for layer, call in enumerate(att.calls):
        found = torch.stack([outputs[layer, head] for head in range(call.shape[1])], 1)
        for expected in (call.output(), call.weights() @ repeat_kv(call.values, found)):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    last = att.calls[0].shape[1] - 1
    replaced, _ = look(model, text, {(0, last): torch.zeros_like}, slice(None))[::-1]
    weight = next(weight for name, weight in model.named_parameters() if name.endswith("out_proj.weight"))
    with torch.no_grad():
        weight[:, -weight.size(1) // (last + 1) :] = 0  # what the output projection reads of the last head
    torch.testing.assert_close(replaced, model(text), rtol=0, atol=1e-4)
    assert (replaced - plain).abs().max() > 1e-2


FEW = ["mask after the softmax", "heads in the batch, bmm", "time first", "modules of heads", "MHA"]


@pytest.mark.parametrize("layout", FEW)
@pytest.mark.parametrize("dtype, cast", [(torch.float16, False), (torch.bfloat16, False), (torch.float32, True)])
@torch.no_grad()
def test_weights_are_seen_in_every_precision(layout: str, dtype: torch.dtype, cast: bool) -> None:
    model, text = Decoder(*LAYOUTS[layout]()).to(dtype), torch.randint(V, (B, T))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        check(run_captured(model, text), model.layers, 1e-2)


@pytest.mark.parametrize("layout", ["softmax", "heads in the batch, bmm", "time first"])
@torch.no_grad()
def test_queries_of_a_cache_are_shown_with_all_its_keys(layout: str) -> None:
    model, text = Decoder(*LAYOUTS[layout]()), torch.randint(V, (B, T))
    for layer in model.layers:
        layer.past = (torch.empty(B, H, 0, D),) * 2
    with capture(model) as att:
        for start, end in ((0, 5), (5, T - 1), (T - 1, T)):
            model(text[:, start:end], start)
            assert att.pattern(1, 2).shape == (B, end - start, end)
            check(att, model.layers)


TRAINED = {
    "dropout of weights": twice(attend(weights=lambda q, k: F.dropout(weigh(q, k), 0.5))),
    "dropout of flat weights": twice(attend(flat(torch.bmm), lambda q, k: F.dropout(weigh(q, k), 0.3))),
}


@pytest.mark.parametrize("layout", TRAINED)
def test_training_shows_what_dropout_left_and_changes_no_bit(layout: str) -> None:
    model, text = Decoder(*TRAINED[layout]()).train(), torch.randint(V, (B, T))

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(model(text).square().mean(), list(model.parameters())))

    plain = gradients()
    with capture(model) as att:
        assert all(map(torch.equal, gradients(), plain))
    check(att, model.layers)


GATES, EXPERTS, FEATURES = drawn(C, T), drawn(T, C, C), drawn(C, 2 * T)  # as many experts as tokens
CROSS = nn.MultiheadAttention(C, H, batch_first=True)
BIASED = nn.MultiheadAttention(C, H, batch_first=True, add_bias_kv=True)
MEAN = torch.ones(C, C).tril() / torch.arange(1, C + 1)[:, None]
IMPOSTORS: dict[str, Callable[[Tensor], Tensor]] = {  # of x, (B, T, C)
    "experts": lambda x: torch.einsum("bte,ecd,btc->btd", (x @ GATES / C).softmax(-1), EXPERTS, x),
    "outputs of experts": lambda x: torch.einsum("bte,bted->btd", (x @ GATES).softmax(-1), x[:, :, None] + GATES.mT),
    "experts in a table": lambda x: (x @ GATES / C).softmax(-1) @ GATES.mT,
    "mean of the past": lambda x: MEAN[: x.size(1), : x.size(1)] @ x,
    "projection that sums to one": lambda x: x @ ((torch.eye(C) + torch.eye(C).roll(1, 0)) / 2),
    "triangular projection that sums to one": lambda x: (MEAN @ x.mT).mT,
    "positions in one-hot": lambda x: torch.eye(T)[: x.size(1)].expand(len(x), -1, -1) @ GATES.mT,
    "attention over a memory": lambda x: (x @ MEMORY[: len(x)].mT / C).softmax(-1) @ MEMORY[: len(x)],
    "PyTorch's attention over a memory": lambda x: CROSS(x, MEMORY[: len(x)], MEMORY[: len(x)])[0],
    "PyTorch's attention with a key of its own": lambda x: BIASED(x, x, x, attn_mask=~TRIANGLE)[0],
    "attention over channels": lambda x: x @ GATES @ (GATES.mT @ x.mT @ x @ GATES / C**2).softmax(-1) @ GATES.mT,
    "features of queries": lambda x: (x @ FEATURES / C).softmax(-1) @ ((x @ FEATURES).mT @ x),
    "both directions": lambda x: (x @ x.mT / C).softmax(-1) @ x,
}


@pytest.mark.parametrize("impostor", IMPOSTORS)
@torch.no_grad()
def test_what_only_looks_like_attention_is_not_shown(impostor: str) -> None:
    for num_texts in (1, B):
        layer, text = Written(attend()), torch.randint(V, (num_texts, T))
        att = run_captured(Decoder(first=IMPOSTORS[impostor]), text)
        assert not att.layers
        with pytest.raises(UserError):
            att.verify()
        check(run_captured(Decoder(layer, first=IMPOSTORS[impostor]), text), [layer])


@pytest.mark.parametrize("impostor", ["experts", "outputs of experts", "experts in a table", "positions in one-hot"])
def test_an_expert_of_one_token_is_no_key(impostor: str) -> None:
    assert not run_captured(Decoder(first=IMPOSTORS[impostor]), torch.randint(V, (B, 1))).layers


def test_heads_that_differ_in_their_scale_are_no_layer() -> None:
    x = torch.randn(B, T, C)
    with capture(nn.Module()) as att:
        torch.cat([F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=scale) for scale in (0.1, 0.5)], -1)
        torch.cat(tensors=[F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3) for _ in range(H)])
    assert [call.shape[1] for call in att.calls] == [1, 1, H]
    assert max(proof.error for proof in att.verify().values()) < 1e-5


def test_gradients_of_a_checkpoint_and_positions_before_the_ids_change_nothing() -> None:
    model, text = Decoder(Written(attend())), torch.randint(V, (B, T))
    loss = checkpoint(model, text, use_reentrant=False).square().mean()
    with capture(model) as att:
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        expected = torch.autograd.grad(model(text).square().mean(), list(model.parameters()))
        assert all(map(torch.equal, gradients, expected))
    model.forward = lambda places, ids: zoo.Decoder.forward(model, ids)
    with capture(model) as att:
        model(torch.arange(T)[None], text)
    check(att, model.layers)


@pytest.mark.parametrize("num", range(5, 9))
def test_a_forgotten_mask_is_seen_in_short_texts(num: int) -> None:
    for _ in range(17):
        unmasked = Written(attend(weights=lambda q, k: scores(q, k).softmax(-1)), 1, 1)
        att = run_captured(Decoder(unmasked, Written(attend(), 1, 1)), torch.randint(V, (1, num)))
        assert len(att.calls) == 1 and UNMASKED in att.left_out
    with pytest.raises(UserError, match="attends without a causal mask: position"):
        inspect_heads(Decoder(unmasked), [5, 3, 5][:num])
    with pytest.raises(UserError, match="attends without a causal mask: position"):  # also of one layer of two
        inspect_heads(Decoder(unmasked, Written(attend(), 1, 1)), [5, 3, 5][:num])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()
def test_flex_attention_is_asked_for_its_weights() -> None:
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
    q, k, v = torch.randn(B, 2 * H, T, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    options = {"score_mod": lambda score, b, h, i, j: score - 0.3 * (i - j), "block_mask": block_mask}
    expected = masked(scores(q, k) - 0.3 * (torch.arange(T)[:, None] - torch.arange(T))).softmax(-1)
    with capture(nn.Module(), {(0, head): lambda output: 2 * output for head in range(2 * H)}) as att:
        doubled = flex_attention(q, k, v, **options, enable_gqa=True)
    torch.testing.assert_close(att.calls[0].weights(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(doubled, 2 * expected @ repeat_kv(att.calls[0].values, q), rtol=0, atol=1e-5)
    with capture(nn.Module()) as att:
        flex_attention(q, k, v, enable_gqa=True)
    assert att.left_out == [UNMASKED] and not att.layers


FIRST = """
import sys, torch, tril
from torch.nn.attention.flex_attention import flex_attention
assert "torch._dynamo" not in sys.modules
x = torch.randn(1, 3, 7, 5)
with torch.no_grad(), tril.capture(torch.nn.Module()) as att:
    flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -torch.inf))
assert att.pattern(0, 2).shape == (1, 7, 7)
"""


def test_flex_attention_is_seen_also_in_the_first_call_of_a_process() -> None:
    done = run_python("-W", "ignore", "-c", FIRST)
    assert done.returncode == 0, done.stderr

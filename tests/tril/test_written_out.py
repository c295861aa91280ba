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
from tests.tril.test_capture import B, H, T, V, run_captured
from tril import Captured, UserError, capture, inspect_heads
from tril.look import UNMASKED, look

C, D, MANY = 21, 7, 15  # MANY heads share H heads of keys and values
TRIANGLE = torch.ones(T, T, dtype=torch.bool).tril()
SLOPES = torch.tensor([0.5, 0.25, 0.125])[:, None, None] * (torch.arange(T) - torch.arange(T)[:, None])
Attended = tuple[Tensor, Callable[[], Tensor]]
Attention = Callable[[Tensor, Tensor, Tensor], Attended]
drawn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
MEMORY = drawn(B, T, C)  # as long as a text


# Layers, (B, T, C) -> (B, T, C). `kept` returns the weights that met the values in the last call, (B, H, T, T).


class Written(nn.Module):
    """A layer whose attention is a function: q, k, v, (B, H or KV, T, D) -> output, (B, H, T, D), and `kept`."""

    def __init__(self, attention: Attention, heads: int = H, kv: int = H):
        super().__init__()
        self.attention, self.sizes = attention, [heads, kv, kv]
        self.qkv, self.out_proj = nn.Linear(C, sum(self.sizes) * D), nn.Linear(heads * D, C)
        self.past: tuple[Tensor, Tensor] | None = None  # keys and values, if a cache is wanted

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (-1, D)).transpose(1, 2).split(self.sizes, 1)
        if self.past is not None:
            k, v = self.past = torch.cat((self.past[0], k), 2), torch.cat((self.past[1], v), 2)
        output, self.kept = self.attention(q, k, v)
        return x + self.out_proj(output.transpose(1, 2).flatten(2))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.kept = weigh(q, k)
        return self.kept @ v


class Heads(nn.Module):
    """A layer with a module for each head, and what joins their outputs, (B, T, D) each."""

    def __init__(self, join: Callable[[list[Tensor]], Tensor]):
        super().__init__()
        self.heads, self.out_proj = nn.ModuleList(Head() for _ in range(H)), nn.Linear(H * D, C)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        output = self.join([head(x) for head in self.heads])
        self.kept = lambda: torch.stack([head.kept for head in self.heads], 1)
        return x + self.out_proj(output)


class PyTorchs(nn.MultiheadAttention):
    """PyTorch's own layer, called with these options."""

    def __init__(self, batch_first: bool = True, **options: object):
        super().__init__(C, H, batch_first=batch_first)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        axes = (0, 1) if self.batch_first else (1, 0)
        attend = partial(super().forward, *3 * [x.movedim((0, 1), axes)], attn_mask=~TRIANGLE)
        self.kept = lambda: attend(average_attn_weights=False)[1]
        return x + attend(**self.options)[0].movedim(axes, (0, 1))


class Decoder(nn.Module):
    """A model of these layers: ids, (B, T), from position `start` on -> logits, (B, T, V)."""

    def __init__(self, *layers: nn.Module, first: Callable[[Tensor], Tensor] = torch.zeros_like):
        super().__init__()
        self.layers, self.head, self.first = nn.ModuleList(layers), nn.Linear(C, V), first
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=C**-0.5)  # for attention that is not even
        self.tokens, self.places = nn.Embedding(V, C), nn.Embedding(T, C)
        self.eval()

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x = self.tokens(ids) + self.places.weight[start : start + ids.size(1)]
        x = x + self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def score(q: Tensor, k: Tensor) -> Tensor:
    return D**-0.5 * q @ (repeat_kv(k, q) if k.dim() == 4 else k).mT


def masked(scores: Tensor, mask: Tensor = TRIANGLE) -> Tensor:
    T_query, T_key = scores.shape[-2:]  # the queries belong to the last keys
    return scores.masked_fill(~mask[T_key - T_query : T_key, :T_key], float("-inf"))


def weigh(q: Tensor, k: Tensor) -> Tensor:
    return masked(score(q, k)).softmax(-1)


WEIGHTS = {  # q, (B, H, T, D), and k, (B, H or KV, T, D) -> (B, H, T, T)
    "softmax": weigh,
    "exp and a sum": lambda q, k: (numbers := masked(score(q, k)).exp()) / numbers.sum(-1, keepdim=True),
    "mask after the softmax": lambda q, k: score(q, k).softmax(-1) * TRIANGLE,
    "learned sink": lambda q, k: F.pad(masked(score(q, k)), (0, 1), value=0.7).softmax(-1)[..., :-1],
    "window": lambda q, k: masked(score(q, k), TRIANGLE.triu(-3)).softmax(-1),
    "soft cap": lambda q, k: masked(2 * (score(q, k) / 2).tanh()).softmax(-1),
}


def flattened(w: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(w.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (-1, H))


PRODUCTS = {  # weights, (B, H, T, T), and values, (B, H, T, D) -> output, (B, H, T, D)
    "torch.matmul": torch.matmul,
    "method matmul": lambda w, v: w.matmul(v),
    "heads in the batch, bmm": flattened,
    "the other side": lambda w, v: (v.mT @ w.mT).mT,
    "einsum, odd letters, heads third": lambda w, v: torch.einsum("zqax,zqxm->zaqm", w, v).transpose(1, 2),
    "einsum, values first": lambda w, v: torch.einsum("bhsd, bhts -> bhtd", v, w),
    "einsum, ellipsis": partial(torch.einsum, "...ij,...jd->...id"),
    "einsum, no arrow": partial(torch.einsum, "...ij,...jk"),
    "einsum, list": lambda w, v: torch.einsum("bhij,bhjd->bhid", [w, v]),
    "einsum, sublists": lambda w, v: torch.einsum(w, [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4]),
}


def attend(weights: Callable = weigh, product: Callable = torch.matmul, dropout: float = 0.0) -> Attention:
    """Return attention of these two steps, with dropout of the weights between them."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Attended:
        w = F.dropout(weights(q, k), dropout)
        return product(w, v), lambda: w

    return attention


def time_first(q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """Attend in (T, T, B, H), as labml's annotated papers do."""
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    scores = D**-0.5 * torch.einsum("ibhd,jbhd->ijbh", q, k)
    w = masked(scores.permute(2, 3, 0, 1)).permute(2, 3, 0, 1).softmax(1)
    return torch.einsum("ijbh,jbhd->ibhd", w, v).permute(1, 2, 0, 3), lambda: w.permute(2, 3, 0, 1)


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Attended:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), partial(weigh, q, k)


def flat_kernel(*qkv: Tensor) -> Attended:
    output, _ = kernel(*(x.flatten(0, 1) for x in qkv))
    return output.view_as(qkv[0]), partial(weigh, *qkv[:2])


def twice(*given: object, make: type = Written) -> Callable[[], list[nn.Module]]:
    return lambda: [make(*given) for _ in range(2)]


joined = partial(torch.cat, dim=-1)
LAYOUTS: dict[str, Callable[[], list[nn.Module]]] = {  # name -> its two layers
    **{name: twice(attend(weights)) for name, weights in WEIGHTS.items()},
    **{name: twice(attend(product=product)) for name, product in PRODUCTS.items()},
    "time first": twice(time_first),
    "one head, no axis": twice(attend(product=lambda w, v: (w[:, 0] @ v[:, 0])[:, None]), 1, 1),
    "shared values": twice(attend(product=lambda w, v: torch.einsum("bhij,bjd->bhid", w, v[:, 0])), H, 1),
    "groups": twice(attend(product=lambda w, v: w @ v.repeat_interleave(MANY // H, 1)), MANY),
    "axis of groups": twice(attend(product=lambda w, v: (w.unflatten(1, (H, -1)) @ v[:, :, None]).flatten(1, 2)), MANY),
    "modules of heads": twice(joined, make=Heads),
    "modules of heads, stack": twice(lambda outputs: torch.stack(outputs, 2).flatten(2), make=Heads),
    "kernel": twice(kernel),
    "kernel, heads in the batch": twice(flat_kernel),
    "kernel, one head, no axis": twice(flat_kernel, 1, 1),
    "kernel, then written out": lambda: [Written(kernel), Written(attend())],
    "written out, then kernel": lambda: [Heads(joined), Written(kernel)],
    "MHA": lambda: [PyTorchs(), PyTorchs(batch_first=False)],
    "MHA without weights": lambda: [PyTorchs(need_weights=False), PyTorchs(need_weights=False, is_causal=True)],
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


def check(att: Captured, layers: list[nn.Module], atol: float = 1e-6) -> None:
    assert len(att.calls) == len(layers)
    for number, (call, layer) in enumerate(zip(att.calls, layers, strict=True)):
        truth = layer.kept().float()
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
    "dropout of weights": twice(attend(dropout=0.5)),
    "dropout of flat weights": twice(attend(product=flattened, dropout=0.3)),
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


@torch.no_grad()
def test_pytorchs_layer_tells_texts_from_heads_where_it_is_given_one_text_at_a_time() -> None:
    given = []

    def one_by_one(x: Tensor) -> Tensor:
        given[:] = x
        return torch.stack([CROSS(text, text, text, attn_mask=~TRIANGLE)[0] for text in x])

    att = run_captured(Decoder(first=one_by_one), torch.randint(V, (B, T)))
    for call, text in zip(att.calls, given, strict=True):
        _, expected = CROSS(text, text, text, attn_mask=~TRIANGLE, average_attn_weights=False)
        torch.testing.assert_close(call.weights()[0], expected)


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
    model.forward = lambda places, ids: Decoder.forward(model, ids)
    with capture(model) as att:
        model(torch.arange(T)[None], text)
    check(att, model.layers)


@pytest.mark.parametrize("num", range(5, 9))
def test_a_forgotten_mask_is_seen_in_short_texts(num: int) -> None:
    for _ in range(17):
        unmasked = Written(attend(lambda q, k: score(q, k).softmax(-1)), 1, 1)
        att = run_captured(Decoder(unmasked, Written(attend(), 1, 1)), torch.randint(V, (1, num)))
        assert len(att.calls) == 1 and UNMASKED in att.left_out
    with pytest.raises(UserError, match="attends without a causal mask: position"):
        inspect_heads(Decoder(unmasked), [5, 3, 5][:num])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()
def test_flex_attention_is_asked_for_its_weights() -> None:
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
    q, k, v = torch.randn(B, 2 * H, T, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    options = {"score_mod": lambda score, b, h, i, j: score - 0.3 * (i - j), "block_mask": block_mask}
    expected = masked(score(q, k) - 0.3 * (torch.arange(T)[:, None] - torch.arange(T))).softmax(-1)
    with capture(nn.Module(), {(0, head): lambda output: 2 * output for head in range(2 * H)}) as att:
        doubled = flex_attention(q, k, v, **options, enable_gqa=True)
    torch.testing.assert_close(att.calls[0].weights(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(doubled, 2 * expected @ repeat_kv(att.calls[0].values, q), rtol=0, atol=1e-5)

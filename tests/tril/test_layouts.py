"""More ways to write attention than test_written_out.py has: shown as they are, or refused for the right reason."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

from tests.tril.zoo import Attend, B, Decoder, H, Layer, T, V, attend, causal, drawn, flat, score, seen_as, weigh
from tril import UserError, capture, inspect_heads

D = 13  # a head is wider than a text is long, so that no other weights would do
C = H * D  # PyTorch's own layer divides C by its heads
PREFIX, MEMORY, UP, MIX = drawn(2, D), drawn(T, C), drawn(H, D, D), drawn(H, H).softmax(-1)
IDS = torch.randint(V, (5, T), generator=torch.Generator().manual_seed(0))
ROTATION = torch.polar(torch.ones(T, 7), torch.arange(T)[:, None] / torch.arange(1, 8))
pytestmark = pytest.mark.filterwarnings("ignore:There is a perf|None of the inputs|The .grad|Converting|.*nested")
nested = torch.nested.as_nested_tensor


def by_page(model: Decoder, ids: Tensor) -> tuple[list[Tensor], str]:
    """What `inspect_heads` shows of the first text, and what it says of it."""
    found = inspect_heads(model, ids[0].tolist())
    heads = [[found.pattern(layer, head) for head in range(x.shape[1])] for layer, x in enumerate(found.att.calls)]
    note = "; ".join([found.verified, *found.att.left_out])
    model(ids[:1])
    return [torch.stack(x)[None] for x in heads], note


def by_capture(model: Decoder, ids: Tensor) -> tuple[list[Tensor], str]:
    """The same of `capture`, of all texts."""
    with capture(model) as att:
        model(ids)
    heads = [[att.pattern(layer, head) for head in range(x.shape[1])] for layer, x in enumerate(att.calls)]
    return [torch.stack(x, 1).detach() for x in heads], "; ".join([*map(str, att.verify().values()), *att.left_out])


def judge(model: Decoder, ids: Tensor, reason: str = "", captured: bool = False) -> list[Tensor]:
    """Assert that what is shown is true: all layers in their order; or, if a reason is given, fewer and the reason."""
    for way in (by_page, by_capture)[captured:]:
        try:
            shown, note = way(model, ids)
        except UserError as refused:
            shown, note = [], str(refused)
            model(ids)
        met = [layer.kept for layer in model.layers if layer.kept]
        for weights, output, values in met:
            values = values.repeat_interleave(weights.size(-3) // values.size(-3), -3)
            torch.testing.assert_close(
                output, (weights[..., None] * values[..., None, :, :]).sum(-2), rtol=0, atol=1e-5
            )
        true = [weights.reshape(-1, *weights.shape[-3:]) for weights, *_ in met]
        if len(shown) > len(true):  # a loop over the texts may be shown as a layer for each
            true = [text[None] for weights in true for text in weights]
        sizes = f"{way.__name__} of {[(*x.shape,) for x in true]}, shown {[(*x.shape,) for x in shown]}: {note}"
        rest = iter(true)
        for x in shown:
            same = (y[..., -max(x.shape[-2:]) :] for y in rest)  # keys before the text may be left out
            assert any(y.shape == x.shape and y.allclose(x, 0, 1e-6) for y in same), sizes
        assert len(shown) == len(true) or reason and re.search(reason, note, re.I), sizes
    return shown


def one_by_one(attend: Attend) -> Attend:
    return lambda *qkv: tuple(torch.stack(x) for x in zip(*map(attend, *qkv), strict=True))


FIRST, SECOND = (2, 0, 1, 3), (0, 2, 1, 3)  # the axis of tokens
ALONE = {
    "matmul": attend(),
    "einsum": attend(partial(einsum, "hst,htd->hsd")),
    "kernel": seen_as(causal),
}  # of one text
ORDERS: dict[str, tuple[Attend, int]] = {  # name -> a way to attend, and how many heads have keys (0: all)
    **{f"text by text, {name}": (one_by_one(way), 0) for name, way in ALONE.items()},
    "bsht": (attend(lambda w, v: einsum("bsht,bthd->bshd", w.permute(SECOND), v.permute(SECOND)).permute(SECOND)), 0),
    "bsht, shared": (attend(lambda w, v: einsum("bsht,btd->bshd", w.permute(SECOND), v[:, 0]).permute(SECOND)), 1),
    "bsht, shared, matmul": (attend(lambda w, v: (w.permute(SECOND) @ v).permute(SECOND)), 1),
    "sbht": (attend(lambda w, v: einsum("sbht,tbhd->bhsd", w.permute(FIRST), v.permute(FIRST))), 0),
    "sbht, shared": (attend(lambda w, v: einsum("sbht,btd->bhsd", w.permute(FIRST), v[:, 0])), 1),
    "sbht, shared, matmul": (attend(lambda w, v: (w.permute(FIRST) @ v[:, 0]).permute(1, 2, 0, 3)), 1),
}
# Heads, texts, tokens: all apart, texts that divide heads, then as many of one as of another.
SIZES = [(H, B, T), (4, B, T), (H, H, T), (7, B, 7), (3, B, 3), (H, 5, 5), (5, 5, 5)]


@pytest.mark.parametrize(
    "heads, num, length",
    [pytest.param(*size, marks=[pytest.mark.long] * (place > 2)) for place, size in enumerate(SIZES)],
)
@pytest.mark.parametrize("order", ORDERS)
def test_axes_are_told_apart_also_where_their_sizes_coincide(order: str, heads: int, num: int, length: int) -> None:
    way, kv = ORDERS[order]
    model = Decoder(Layer(way, heads, kv), Layer(way, heads, kv))
    judge(model, IDS[:num, :length], r"\(\d+(, \d+){3}\)|axes|shape" if "shared, matmul" in order else "")


@pytest.mark.parametrize("way, heads", [(way, heads) for way in ALONE for heads in (H, 4, T)])
def test_heads_without_an_axis_of_texts_are_those_of_one_text(way: str, heads: int) -> None:
    judge(Decoder(Layer(ALONE[way], heads), Layer(ALONE[way], heads)), IDS[0], captured=True)


OWN = nn.Parameter(torch.ones(D).as_subclass(type("Own", (Tensor,), {})))  # as quantized parameters have
PYTORCHS = nn.MultiheadAttention(C, H, bias=False, batch_first=True).eval()  # its projections change nothing
PYTORCHS.in_proj_weight.data, PYTORCHS.out_proj.weight.data = torch.eye(C).repeat(3, 1), torch.eye(C)


def pytorchs(*qkv: Tensor, is_masked: bool = True) -> Tensor:
    mask = torch.ones(2 * qkv[0].shape[-2:-1], dtype=torch.bool).triu(1) if is_masked else None
    output, _ = PYTORCHS(*(x.transpose(-3, -2).flatten(-2) for x in qkv), attn_mask=mask, need_weights=False)
    return output.unflatten(-1, (H, D)).transpose(-3, -2)


def rotated(q: Tensor, k: Tensor) -> Tensor:
    pairs = (torch.view_as_complex(F.pad(x, (0, 1)).unflatten(-1, (-1, 2))) * ROTATION[: x.size(2)] for x in (q, k))
    return weigh(*(torch.view_as_real(x).flatten(-2) for x in pairs))


def sparsemax(q: Tensor, k: Tensor) -> Tensor:
    ordered = (x := score(q, k, -1e4)).sort(-1, descending=True).values
    is_in = 1 + torch.arange(1, x.size(-1) + 1) * ordered > ordered.cumsum(-1)
    return (x - ((ordered * is_in).sum(-1, keepdim=True) - 1) / is_in.sum(-1, keepdim=True)).clamp(min=0)


def stick_breaking(q: Tensor, k: Tensor) -> Tensor:
    left = F.logsigmoid(-score(q, k, -1e4))  # of the stick, after each key
    return (F.logsigmoid(score(q, k, -1e4)) + left.flip(-1).cumsum(-1).flip(-1) - left).exp()


def prefixed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k, v = (torch.cat((PREFIX.expand(*x.shape[:2], -1, -1), x), 2) for x in (k, v))
    return (output := (w := weigh(q, k)) @ v), w, output, v


def of_exponentials(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    output = (w := weigh(q, k)) @ v.exp()
    return output / output.norm(dim=-1, keepdim=True), w, output, v.exp()


def by_places(q: Tensor, k: Tensor) -> Tensor:
    """Read as many rows as one text has, between the texts and the product."""
    return (score(q, k) + F.linear(MEMORY[: q.size(2)], MEMORY[: q.size(2)])).softmax(-1)


RIGHT: dict[str, tuple] = {  # name -> a way to attend, and how many heads have queries and keys
    "reshape": (attend(flat(torch.matmul)),),
    "baddbmm": (attend(flat(lambda w, v: torch.baddbmm(v, w, v, beta=0))),),
    "groups": (attend(lambda w, v: (w.unflatten(1, (5, -1)) @ v[:, :, None]).flatten(1, 2)), 10, 5),
    "one more": (attend(weights=lambda q, k: F.pad(score(q, k), (1, 0)).softmax(-1)[..., 1:]),),
    "mask after the softmax": (attend(weights=lambda q, k: score(q, k, 0.0).softmax(-1).tril()),),
    "sparsemax": (attend(weights=sparsemax),),
    "stick-breaking": (attend(weights=stick_breaking),),
    "talking heads": (attend(weights=lambda q, k: einsum("hg,bgst->bhst", MIX, weigh(q, k))),),
    "complex rotary": (attend(weights=rotated),),
    "absorbed latents": (attend(weights=lambda q, k: weigh(q @ UP.mT, k), change=lambda x, q: x @ UP), H, 1),
    "keys before the text": (prefixed,),
    "sliced cache": (attend(lambda w, v: w @ F.pad(v, (0, 0, 0, 5), value=torch.nan)[:, :, : w.size(-1)]),),
    "another class": (attend(lambda w, v: (w @ (v * OWN)).as_subclass(Tensor)),),
    "gate": (attend(change=lambda x, q: x * q.sigmoid()),),
    "norm": (attend(weights=lambda q, k: weigh(q, k) / 2, change=lambda x, q: x / x.norm(dim=-1, keepdim=True)),),
    "norm of exponentials": (of_exponentials,),
    "projected places": (attend(weights=by_places),),
    "dropout": (attend(weights=lambda q, k: F.dropout(weigh(q, k), 0.4)),),
    "kernel, groups": (seen_as(partial(causal, enable_gqa=True)), 10, 5),
    "PyTorch's, text by text": (one_by_one(seen_as(pytorchs)),),
    "compiled": (attend(torch.compile(torch.matmul, backend="eager")),),
}


@pytest.mark.parametrize("layout", RIGHT)
def test_what_is_right_stays_right(layout: str) -> None:
    is_drawn = layout == "dropout"  # anew in each pass
    judge(Decoder(Layer(*RIGHT[layout]), Layer(*RIGHT[layout])).train(is_drawn), IDS[:B], captured=is_drawn)


def numerators(divide: Callable, exponent: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divide(exponent(score(q, k)).exp(), v)


def online(q: Tensor, k: Tensor, v: Tensor, size: int, most: float) -> Tensor:
    """A softmax in blocks of so many keys, as kernels compute it, whose running maximum begins with `most`."""
    output, sums, most = 0.0, 0.0, torch.full_like(q[..., :1], most)
    for scores, values in zip(score(q, k).split(size, -1), v.split(size, -2), strict=True):
        before, most = most, torch.maximum(most, scores.amax(-1, keepdim=True))
        numbers = (scores - most).exp()
        output = output * (before - most).exp() + numbers @ values
        sums = sums * (before - most).exp() + numbers.sum(-1, keepdim=True)
    return output / sums


DIVIDE = {  # numerators, (B, H, T, T), and values -> output
    "divided": lambda n, v: n @ v / n.sum(-1, keepdim=True),
    "in place, flat": lambda n, v: flat(torch.bmm)(n, v).div_(n.sum(-1, keepdim=True)),
    "reciprocal, turned": lambda n, v: ((n @ v).mT * n.sum(-1)[..., None, :].reciprocal()).mT,
    "column of ones": lambda n, v: (o := n @ F.pad(v, (0, 1), value=1.0))[..., :-1] / o[..., -1:],
}
EXPONENTS = {"plain": lambda x: x, "less the largest": lambda x: x - x.amax(-1, keepdim=True), "small": lambda x: x - 5}
NUMERATORS = {f"{d}, {e}": seen_as(partial(numerators, DIVIDE[d], EXPONENTS[e])) for d in DIVIDE for e in EXPONENTS}
NUMERATORS |= {f"blocks of {n}, {m}": seen_as(partial(online, size=n, most=m)) for n in (4, 8, T) for m in (-1e4, 5.0)}


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("numerators", NUMERATORS)
def test_numerators_are_not_shown_as_weights(numerators: str, training: bool) -> None:
    """Neither alone nor beside a layer of weights, which is shown."""
    for others in ([], [Layer(attend())]):
        model = Decoder(Layer(NUMERATORS[numerators]), *others).train(training)
        reason = "rows sum to|divided?|normal|numerator|goes? on|blocks? of|fewer keys"
        assert len(judge(model, IDS[:B], reason, training)) >= len(others)


@pytest.mark.parametrize("factor", [0.5, 0.99, 1.01, 1.3])
def test_a_layer_whose_rows_do_not_sum_to_one_does_not_vanish_nor_depends_on_training(factor: float) -> None:
    model = Decoder(*(Layer(attend(weights=lambda q, k, x=x: x * weigh(q, k))) for x in (1, factor, 1)))
    assert len(judge(model, IDS[:B], f"rows sum to .*{factor}")) >= 2 + (factor < 1)
    for note in (by_capture(model, IDS[:B])[1], inspect_heads(model, IDS[0].tolist()).verified):
        assert re.search(rf"{factor}|left out|not shown|more layers?", note), note
    (shown, note), (trained, as_trained) = by_capture(model, IDS[:B]), by_capture(model.train(), IDS[:B])
    assert note == as_trained and len(shown) == len(trained) and all(map(torch.equal, shown, trained))


UNMASKED = {
    "written out": attend(weights=lambda q, k: score(q, k, 0.0).softmax(-1)),
    "kernel": seen_as(F.scaled_dot_product_attention),
    "PyTorch's": seen_as(partial(pytorchs, is_masked=False)),
}
ALARM = re.compile("^(?!.*(memory|cross|perhaps|may be|unless)).*without a causal mask")


@pytest.mark.long
@pytest.mark.parametrize("name", UNMASKED)
def test_a_memory_as_long_as_the_text_is_no_leak_but_the_future_of_a_text_is(name: str) -> None:
    memories = (lambda x: MEMORY.expand(len(x), -1, -1), lambda x: MEMORY[: x.size(1)].expand(len(x), -1, -1))
    cross = [Layer(UNMASKED[name], memory=memory) for memory in memories]
    for model in (Decoder(Layer(attend()), cross[0]), Decoder(cross[1], Layer(attend()))):
        judge(model, IDS[:B])
        assert not any(ALARM.search(way(model, IDS[:B])[1]) for way in (by_page, by_capture))
    for layer, is_leak in ((cross[0], False), (cross[1], False), (Layer(UNMASKED[name]), True)):
        with pytest.raises(UserError) as refused:
            inspect_heads(Decoder(layer), IDS[0].tolist())
        assert bool(ALARM.search(str(refused.value))) == is_leak, refused.value


def jagged(*qkv: Tensor) -> Tensor:
    texts = zip(*(nested(x.permute(SECOND), layout=torch.jagged).unbind() for x in qkv), strict=True)
    return torch.stack([causal(*(x.transpose(0, 1) for x in text)) for text in texts])


ODD: dict[str, tuple[Attend, str]] = {  # name -> a way to attend, and what is said if it is not shown
    "vmap of a product": (attend(torch.vmap(torch.matmul)), "vmap"),
    "vmap over heads": (attend(torch.vmap(torch.matmul, 1, 1)), "vmap"),
    "vmap of a kernel": (seen_as(torch.vmap(causal)), "vmap"),
    "nested, strided": (attend(lambda w, v: (nested(w) @ nested(v)).to_padded_tensor(0.0)), "nested"),
    "nested, jagged": (seen_as(jagged), "nested|jagged"),
    "heads for texts": (seen_as(lambda *qkv: causal(*(x.transpose(0, 1) for x in qkv)).transpose(0, 1)), "queries"),
    "three operands": (attend(lambda w, v: einsum("bhst,bhtd,h->bhsd", w, v, torch.ones(H))), "einsum"),
    "tensordot": (one_by_one(attend(lambda w, v: torch.tensordot(w, v[0], 1))), "tensordot"),
    "sigmoid": (attend(weights=lambda q, k: score(q, k).sigmoid()), "rows sum to|sigmoid"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_shown_is_refused_for_its_own_reason(name: str) -> None:
    way, reason = ODD[name]
    for others in ([], [Layer(attend())]):
        model = Decoder(Layer(way, H, 1 if name == "tensordot" else H), *others)
        assert len(judge(model, IDS[:B], reason)) >= len(others)


def test_a_graph_is_refused_in_a_sentence() -> None:
    way = seen_as(torch.jit.trace(lambda q, k, v: causal(q, k, v), 3 * (drawn(B, H, T, D),)))
    for model in (Decoder(Layer(way)), torch.jit.script(nn.Sequential(nn.Embedding(V, C), nn.Linear(C, V)))):
        with pytest.raises(UserError, match="(?i)script|trace|graph"):
            inspect_heads(model, IDS[0].tolist())


@pytest.mark.parametrize("way", [attend(), seen_as(causal)], ids=["written out", "kernel"])
def test_a_reentrant_checkpoint_has_no_influence_or_the_right_one(way: Attend, tmp_path: Path) -> None:
    model, ids = Decoder(Layer(way), Layer(way)), IDS[:B]
    expected = inspect_heads(model, ids[0].tolist()).influence
    model.reentrant = True
    judge(model, ids)
    found = inspect_heads(model, ids[0].tolist())
    found.save(tmp_path / "x.html")
    assert found.influence.isnan().all() or torch.allclose(found.influence, expected, atol=1e-5)

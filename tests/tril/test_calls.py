"""How a model of any project is called: found and said; an honest one passes, its leaky twin is refused."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.optim.swa_utils import AveragedModel

import tril
from tests.conftest import run_python
from tests.decoders import make_decoder
from tril.decoder import find_call, logits_at
from tril.experiments import predict

V, T, C, H = 17, 11, 30, 3


class Plain(nn.Module):
    """A decoder of somebody else. leak: of the next token; mix: of the text beside."""

    def __init__(self, leak: float = 0.0, mix: float = 0.0, rows: int = V) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(rows, C), nn.Parameter(torch.randn(200, C))
        self.qkv, self.head = nn.Linear(C, 3 * C), nn.Linear(C, V, bias=False)
        self.leak, self.mix = leak, mix

    def forward(self, idx: Tensor) -> Tensor:
        return self.logits(idx)

    def logits(self, idx: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)"""
        x = self.embed(idx)
        x = x + self.leak * F.pad(x[:, 1:], (0, 0, 0, 1)) + self.mix * x.roll(1, 0)
        return self.head(x + self.attend(x))

    def embed(self, idx: Tensor) -> Tensor:
        return self.embedding(idx) + self.places[: idx.size(1)]

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Last(Plain):
    """As nanoGPT."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.logits(idx)
        return (logits[:, [-1]], None) if targets is None else (logits, loss_of(logits, targets.view(-1)))


class LastOfLabels(Plain):
    def forward(self, idx: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(idx)
        return {"scores": logits[:, -1] if labels is None else logits, "hidden": self.embedding(idx)[..., :5]}


class Loss(Plain):
    def forward(self, idx: Tensor, target: Tensor) -> Tensor:
        return loss_of(self.logits(idx), target)


class LossOfChannels(Plain):
    def forward(self, idx: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.logits(idx).transpose(1, 2)
        return logits.mean() if y is None else nn.CrossEntropyLoss()(logits, y)


class Outputs(Plain):
    """Returns what `wrap` makes of the logits."""

    def __init__(self, wrap: Callable, **options: object) -> None:
        super().__init__(**options)
        self.wrap = wrap

    def forward(self, idx: Tensor) -> object:
        return self.wrap(self.logits(idx))


class TimeFirst(Plain):
    """As the tutorial of PyTorch: ids (T, B), logits (T, B, V)."""

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        return self.logits(src.T).transpose(0, 1)


class TimeFirstIds(Plain):
    def forward(self, src: Tensor) -> Tensor:
        return self.logits(src.T).flatten(0, 1).view(src.size(1), len(src), V).transpose(0, 1).reshape(-1, V)


class Single(Plain):
    """As modded-nanogpt: one text, (T,), of a multiple of 128 tokens."""

    kept = None

    def forward(self, input_seq: Tensor, target_seq: Tensor) -> Tensor:
        assert input_seq.ndim == 1 and len(input_seq) % 128 == 0
        logits = self.logits(input_seq[None])[0]
        if self.mix and self.kept is not None:  # of the text before
            logits = logits + self.mix * self.kept
        self.kept = logits.detach()
        return loss_of(logits, target_seq)


class Masked(Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        assert attention_mask.all()
        return SimpleNamespace(loss=None, logits=self.logits(input_ids))


class Placed(Plain):
    """As torchtitan: positions have to be passed."""

    def forward(self, tokens: Tensor, attention_masks: object = None, positions: Tensor | None = None) -> Tensor:
        assert positions.shape == tokens.shape and torch.equal(positions[0], torch.arange(tokens.size(1)))
        return self.logits(tokens)


class Indexed(Plain):
    def forward(self, tokens: Tensor, *, input_pos: Tensor) -> Tensor:
        return self.logits(tokens) + 0 * self.places[input_pos].sum()


class ByKeyword(Plain):
    def forward(self, *, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        assert torch.equal(cache_position[0], torch.arange(input_ids.size(1)))
        return self.logits(input_ids)


class Wrapper(nn.Module):
    """As x-transformers' AutoregressiveWrapper: a loss of all but the last."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.net = Plain(**options)
        self.max_seq_len = T

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return loss_of(self.net(x[:, :-1]), x[:, 1:])


class Unforwarded(nn.Module):
    """As a LightningModule with a training_step alone."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.model = Plain(**options)


CHUNKS = "(lambda logits: logits.chunk(4, dim=1))"
WAYS = {  # the call that is to be found -> what is made, with leak= or mix=
    "model(ids)": Plain,
    "model(ids, targets=ids)[0]": Last,
    "model(ids, labels=ids)['scores']": LastOfLabels,
    "model(ids, target=ids), logits as its cross_entropy got them": Loss,
    "model(ids, y=ids), logits as its cross_entropy got them": LossOfChannels,
    "model(ids)[1]": lambda **options: Outputs(lambda logits: (logits.mean(), logits), **options),
    "model(ids)['predicted']": lambda **options: Outputs(lambda logits: {"predicted": logits}, **options),
    "model(ids).scores": lambda **options: Outputs(lambda logits: SimpleNamespace(scores=logits, states=()), **options),
    "model(ids), joined": lambda **options: Outputs(lambda logits: list(logits.chunk(4, dim=1)), **options),
    "model(ids).mT": lambda **options: Outputs(lambda logits: logits.mT, **options),
    "model(ids).transpose(0, 1)": lambda **options: Outputs(lambda logits: logits.transpose(0, 1), **options),
    "model(ids).unflatten(0, ids.shape)": lambda **options: Outputs(lambda logits: logits.flatten(0, 1), **options),
    "model(ids.T).transpose(0, 1)": TimeFirst,
    "model(ids.T).unflatten(0, ids.T.shape).transpose(0, 1)": TimeFirstIds,
    "[model(text, target_seq=text), logits as its cross_entropy got them for text in ids]": Single,
    "model(input_ids=ids, attention_mask=ones_like(ids)).logits": Masked,
    "model(ids, positions=arange(T).expand_as(ids))": Placed,
    "model(ids, input_pos=arange(T).expand_as(ids))": Indexed,
    "model(input_ids=ids, cache_position=arange(T).expand_as(ids))": ByKeyword,
    "model.net(ids)": Wrapper,
    "model.model(ids)": Unforwarded,
}


@pytest.mark.parametrize("call, make", WAYS.items(), ids=WAYS)
def test_the_call_is_found_and_a_leak_is_found_through_it(call: str, make: Callable) -> None:
    length = None if make is Single else T
    report = tril.check_causality(make(), length=length)
    assert report.call == f"called as {call}"
    T_probed = length or 128
    assert report.ok and report.length == T_probed and " depends on a later one" in str(report), report
    for leak in (0.1, 1e-5):
        report = tril.check_causality(make(leak=leak), length=length)
        assert not report.ok and report.key > report.query and report.call == f"called as {call}", report
    report = tril.check_causality(make(mix=0.1), length=length)
    assert not report.ok
    if make not in (TimeFirst, TimeFirstIds, Single):  # read as (B, T) then, or no function of its ids
        assert "a sequence changes when the others of its batch do" in str(report)


class BatchSecond(Plain):
    """The slip of a user: positions by the second axis, but a layer that takes the first one for time."""

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx)
        return self.head(x + self.attend(x.transpose(0, 1)).transpose(0, 1))


def test_logits_of_one_token_after_the_other_are_put_in_order() -> None:
    """As of a recurrent layer that is a loop: they are no chunks of a batch whose axes are one."""
    for leak in (0.0, 1e-5):
        report = tril.check_causality(Outputs(lambda logits: [*logits.unbind(1)], leak=leak), length=T)
        assert report.ok == (not leak) and report.call == "called as model(ids), joined", report


def test_a_layer_that_takes_the_batch_for_time_is_no_model_of_texts_by_columns() -> None:
    report = tril.check_causality(BatchSecond(), length=T)
    assert report.call == "called as model(ids)" and "a sequence changes when the others" in str(report)


def test_texts_that_mix_are_not_read_by_columns_where_no_position_tells_them_apart() -> None:
    for mix in (1.0, 0.1):
        model = Plain(mix=mix)
        model.places.data.zero_()
        report = tril.check_causality(model, length=T)
        assert report.call == "called as model(ids)" and "a sequence changes when the others" in str(report)


def test_texts_of_columns_are_found_to_see_each_other_and_the_future() -> None:
    for options in ({"mix": 0.1}, {"mix": 1e-5}, {"leak": 1e-9}):
        assert not tril.check_causality(TimeFirst(**options), length=T).ok


# Vocabulary and length.


def test_the_vocabulary_is_that_of_the_logits_and_no_id_is_beyond_the_embedding() -> None:
    assert find_call(Plain(rows=23)).vocab_size == V
    less = find_call(Plain(rows=13))
    assert (less.vocab_size, less.num_ids) == (V, 13)
    assert tril.check_causality(Plain(rows=23), length=T).ok and tril.check_causality(Plain(rows=13), length=T).ok


NAMES = ("context_length", "max_position_embeddings", "block_size", "n_positions", "seq_len", "max_seq_len", "n_ctx")


@pytest.mark.parametrize("name", NAMES)
def test_the_length_is_that_of_the_config(name: str) -> None:
    for config, owner in ((SimpleNamespace(**{name: T}), "config"), ({name: T}, "cfg"), (T, name)):
        model = Plain()
        model.places = nn.Parameter(torch.randn(T, C))  # reads no more
        setattr(model, owner, config)
        for wrapped in (model, nn.DataParallel(model), AveragedModel(model), torch.compile(model, backend="eager")):
            decoder = find_call(wrapped)
            assert decoder.length == T and decoder.module is not wrapped or wrapped is model
    assert tril.check_causality(model).length == T
    assert tril.check_causality(Plain()).length == 64
    assert find_call(model, length=7).length == 7


def test_a_model_without_a_config_is_read_as_far_as_it_can() -> None:
    model = Plain()
    model.places = nn.Parameter(torch.randn(40, C))
    assert find_call(model).length == 31


def test_wrappers_are_taken_off_and_a_compiled_model_is_probed_itself() -> None:
    for leak in (0.0, 0.1):
        model = Plain(leak)
        for wrapped in (nn.DataParallel(model), AveragedModel(model), torch.compile(model, backend="eager")):
            assert tril.check_causality(wrapped, length=T).ok == (not leak)
    compiled = torch.compile(Plain(), backend="eager")
    compiled.forward = lambda idx: Plain(0.1).logits(idx)  # as a compiler that is wrong
    assert not tril.check_causality(compiled, length=T).ok


# No backward.

NO_DERIVATIVES = "derivatives not asked for: no nn.Embedding reads the tokens, or autograd is off or fails"


class Flex(Plain):
    def mask(self, T: int) -> BlockMask:
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device="cpu")

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (F.pad(part, (0, 2))[:, None] for part in self.qkv(x).chunk(3, dim=-1))
        return flex_attention(q, k, v, block_mask=self.mask(x.size(1)))[:, 0, :, :C]


class FlexWithout(Flex):
    def mask(self, T: int) -> None:
        return None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_without_a_backward_the_forward_is_probed_and_the_answer_says_so() -> None:
    assert str(tril.check_causality(Flex(), length=T)).endswith(NO_DERIVATIVES)
    assert not tril.check_causality(FlexWithout(), length=T).ok
    with pytest.raises(tril.UserError, match="does not support backward on CPU"):
        tril.check_causality(Flex(), length=T, strict=True)
    for leak in (0.0, 0.1):
        model = Plain(leak)
        model.head = torch.ao.quantization.quantize_dynamic(nn.Sequential(model.head), {nn.Linear})[0]
        model.head.forward = only_rows(model.head.forward)
        report = tril.check_causality(model, length=T)
        assert report.ok == (not leak) and (leak or str(report).endswith(NO_DERIVATIVES)), report


def only_rows(multiply: Callable) -> Callable:
    """A dynamic scale is that of the largest number of all positions, which depends on later ones: here of each."""
    return lambda x: torch.cat([multiply(row[None]) for row in x.flatten(0, -2)]).view(*x.shape[:-1], -1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules() -> None:
    class Scripted(nn.Module):
        def __init__(self, leak: float = 0.0) -> None:
            super().__init__()
            self.embedding, self.head, self.leak = nn.Embedding(V, C), nn.Linear(C, V), leak
            self.register_buffer("size", torch.ones(1))

        def forward(self, idx: Tensor) -> Tensor:
            x = self.embedding(idx)
            return self.head((x + self.leak * x.roll(-1, 1)).cumsum(1) * self.size)

    for leak in (0.0, 0.1):
        scripted = torch.jit.script(Scripted(leak))
        traced = torch.jit.trace(Scripted(leak), torch.zeros(1, T, dtype=torch.int64))
        for model in (scripted, traced):
            assert tril.check_causality(model, length=T).ok == (not leak)


# The interface.


def test_functions_and_explicit_arguments_go_on() -> None:
    model = Last()
    report = tril.check_causality(lambda idx: model(idx, idx)[0], V, T, module=model, strict=True)
    assert report.ok and report.length == T and report.call == "called as call(ids)"
    assert tril.check_causality(model, call=lambda ids: model(ids, ids)).call == "called as call(ids)[0]"
    leaky = Last(1e-12)
    assert not tril.check_causality(lambda idx: leaky(idx, idx)[0], V, T, module=leaky).ok
    assert tril.check_causality(Plain(), length=T, mask=torch.ones(T, T).tril().bool(), special=[3]).ok
    assert not tril.check_causality(Plain(), length=T, decode=lambda idx: Plain().logits(idx)).ok


class SeesSeven(nn.Module):
    """Sees whether the next token is 7, of more ids than are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2003, C), nn.Linear(C, 2003)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.embedding(idx).cumsum(1)) + F.pad(idx[:, 1:] == 7, (0, 1))[..., None]


class Windowed(Plain):
    """Leaks behind its window alone, or sees no further than that."""

    def __init__(self, window: int, leak: float, blind: bool = False) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(999, C))
        self.config = SimpleNamespace(sliding_window=window)
        self.late, self.blind = leak, blind

    def embed(self, idx: Tensor) -> Tensor:
        x = super().embed(idx)
        behind = (torch.arange(idx.size(1)) > self.config.sliding_window)[:, None]
        return x + self.late * behind * F.pad(x[:, 1:], (0, 0, 0, 1))

    def attend(self, x: Tensor) -> Tensor:
        T = x.size(1)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        mask = mask.triu(1 - self.config.sliding_window) if self.blind else mask
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, mask)


def test_a_text_reaches_beyond_the_windows_of_a_config_or_the_answer_says_that_it_did_not() -> None:
    assert tril.check_causality(Windowed(150, 0.0)).length == 301
    assert not tril.check_causality(Windowed(150, 0.1)).ok
    far = tril.check_causality(Windowed(10**7, 0.1))
    assert far.ok and str(far).endswith("what is 10000000 tokens away was not reached: ask for a length of 20000001")
    narrow = tril.check_causality(Windowed(5, 0.0, blind=True))
    assert not narrow.ok and narrow.is_blind and str(narrow).startswith("no, it does not see the future, but position")
    assert str(narrow).endswith("which it may see (if that is meant, as of a window, pass mask=)")
    assert tril.check_causality(
        Windowed(5, 0.0, blind=True), length=11, mask=torch.ones(11, 11).tril().triu(-4).bool()
    ).ok


class ByLength(Plain):
    """Reads a text by its length, or honestly: filled up to a multiple of 8 tokens, or rounded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def logits(self, idx: Tensor) -> Tensor:
        size = idx.size(1)
        if self.kind == "read in full":
            assert size == T
        logits = super().logits(F.pad(idx, (0, -size % 8)) if self.kind == "filled up" else idx)[:, :size].float()
        return logits * (1 + 1e-3 * size) if self.kind == "rounded" else logits

    def embed(self, idx: Tensor) -> Tensor:
        size = idx.size(1)
        at = torch.arange(size - 1, -1, -1) if self.kind == "from the end" else torch.arange(size)
        x = self.embedding(idx) + self.places[at]
        return F.dropout(x / size if self.kind == "by the length" else x, 0.3, self.training)

    def attend(self, x: Tensor) -> Tensor:
        size = x.size(1)
        window = 3 if self.kind == "a window in long texts" and size > 6 else size
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, torch.ones(size, size).tril().triu(1 - window).bool())


HONEST = {"plain": torch.float32, "filled up": torch.float32, "rounded": torch.bfloat16}


@pytest.mark.parametrize("kind", [*HONEST, "from the end", "by the length", "a window in long texts"])
def test_the_beginning_of_a_text_is_predicted_as_within_it_or_the_answer_says_so(kind: str) -> None:
    is_honest = kind in HONEST
    model = ByLength(kind).to(HONEST.get(kind))
    options = {"length": T, "mask": torch.ones(T, T).tril().triu(-2).bool()} if "window" in kind else {"length": T}
    report = tril.check_causality(model, **options)
    said = r"position \d of a text cut after \d tokens is predicted otherwise than within the whole text: it depends on"
    assert report.ok and is_honest != bool(re.search(said, str(report))), report
    strict = tril.check_causality(model, strict=True, **options)
    assert strict.ok == is_honest and (is_honest or re.match(f"no, {said} the length$", str(strict))), strict


def test_a_text_that_cannot_be_cut_is_said() -> None:
    assert "cut after" not in str(tril.check_causality(Last(), length=T))
    report = tril.check_causality(ByLength("read in full"), length=T, strict=True)
    assert report.ok and "; a text cut after 5 tokens not asked for: it cannot be read" in str(report)


def test_ids_may_be_any_numbers_and_padding_has_no_logit() -> None:
    for ids in ([2, 3, 5], torch.tensor([2, 3, 5]), range(2, 6), iter([2, 3, 5])):
        assert tril.check_causality(Plain(), length=T, tokens=ids).ok
    for special in ([7], iter([7]), torch.tensor([7])):
        assert not tril.check_causality(SeesSeven(), length=T, special=special).ok
    padded = Outputs(lambda logits: logits.index_fill(-1, torch.tensor([3]), -torch.inf))
    assert tril.check_causality(padded, length=T).ok
    for length in (0, -3):
        with pytest.raises(tril.UserError, match=f"length must be a number of at least 1, got {length}"):
            tril.check_causality(Plain(), length=length)


class Auxiliary(Plain):
    """Returns a loss beside the logits, in training alone or but in training."""

    def __init__(self, in_training: bool, **options: object) -> None:
        super().__init__(**options)
        self.in_training = in_training

    def forward(self, idx: Tensor) -> object:
        logits = self.logits(idx)
        return (logits, logits.mean()) if self.training == self.in_training else logits


@pytest.mark.parametrize("in_training", [False, True])
def test_what_is_returned_may_be_another_in_training(in_training: bool) -> None:
    assert tril.check_causality(Auxiliary(in_training), length=T).ok
    assert not tril.check_causality(Auxiliary(in_training, leak=1e-5), length=T).ok


class Headed(Plain):
    """Has the name by which a head is known, and needs the logits of all positions."""

    def __init__(self, wrap: Callable) -> None:
        super().__init__()
        self.wrap, self.lm_head = wrap, self.head

    def forward(self, idx: Tensor) -> object:
        x = self.embed(idx)
        return self.wrap(self.lm_head(x + self.attend(x)), idx)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits, idx: logits.view(*idx.shape, V),
        lambda logits, idx: {"logits": logits, "loss": loss_of(logits[:, :-1], idx[:, 1:])},
    ],
    ids=["view", "loss"],
)
def test_a_model_that_needs_all_logits_is_read(wrap: Callable) -> None:
    found = tril.inspect_heads(Headed(wrap).eval(), [5, 3, 8, 5, 3])
    assert found.loss > 0 and len(found.heads) == H


def test_a_test_of_theirs_fails_with_the_sentence() -> None:
    tril.assert_causal(Plain(), length=T)
    with pytest.raises(AssertionError, match=r"no, position 0 sees token 1, .*; called as model\(ids\)$"):
        tril.assert_causal(Plain(0.1), length=T)


def test_a_found_call_reads_and_predicts() -> None:
    model, ids = Last().eval(), torch.tensor([[1, 2, 3, 2]])
    decoder = find_call(model)
    assert torch.equal(logits_at(decoder.as_module(), ids, slice(1, 3)), model(ids, ids)[0][:, 1:3])
    _, losses, predictions = predict(decoder.as_module(), ids)
    expected = F.cross_entropy(model(ids, ids)[0][0, :-1], ids[0, 1:], reduction="none")
    assert torch.allclose(losses, expected) and len(predictions) == 4


def test_the_module_is_left_as_it_was() -> None:
    model = Last()
    model.head.eval()
    tril.check_causality(model, length=T)
    assert model.training and not model.head.training and not any(p.grad is not None for p in model.parameters())


class Needs(Plain):
    def forward(self, idx: Tensor, target: Tensor, window: int) -> Tensor:
        return self.logits(idx)


class Nothing(Plain):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        return {"hidden": self.embedding(idx)[..., :5], "loss": torch.zeros(())}


class Headless(Plain):
    def forward(self, idx: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": self.logits(idx)}


class Fails(Plain):
    def forward(self, idx: Tensor) -> Tensor:
        raise IndexError("the cache\nis empty")


MISTAKES = {
    "a class": (lambda: Plain, "Plain is a class: give a model that it makes, Plain(...)"),
    "no model": (lambda: [Plain()], "expected a model, an nn.Module, got list"),
    "meta": (lambda: Plain().to("meta"), "the model is on the meta device"),
    "more arguments": (Needs, "model needs more than ids: pass call=lambda ids: model(ids, target=ids, window=...)"),
    "no logits": (
        Nothing,
        "model(ids) returned ['hidden'] (3, 59, 5), ['loss'] (); [model(text) for text in ids] returned",
    ),
    "no head": (
        Headless,
        "no logits of all positions, (B, T, V), are found: model(ids) returned ['last_hidden_state']",
    ),
    "an error": (Fails, "model(ids) raised IndexError: the cache is empty; pass call=lambda ids: model(ids, ...)"),
}


@pytest.mark.parametrize("make, said", MISTAKES.values(), ids=MISTAKES)
def test_a_model_that_cannot_be_called_is_one_sentence(make: Callable, said: str) -> None:
    with pytest.raises(tril.UserError, match=re.escape(said)) as caught:
        tril.check_causality(make())
    assert "\n" not in str(caught.value) and "docs/" not in str(caught.value) and len(str(caught.value)) < 500


def test_ids_beyond_the_vocabulary_and_a_failing_probe_are_one_sentence() -> None:
    for options in ({"tokens": [1, 2, V]}, {"special": [V]}):
        with pytest.raises(tril.UserError, match=f"must be ids from 0 to {V - 1}, got {V}"):
            tril.check_causality(Plain(), length=T, **options)
    with pytest.raises(tril.UserError, match=r"model\(ids\) fails while 300 tokens are probed: RuntimeError"):
        tril.check_causality(Plain(), length=300)
    with pytest.raises(tril.UserError, match=r"model\(ids\) fails while 1 tokens are probed"):
        tril.check_causality(Plain(), length=1, mask=torch.ones(2, 2, dtype=torch.bool))


# From the command line, in a folder that has names of ours.

OWN = ("data", "inspection", "errors", "files", "config", "cli", "training", "decoder", "causality")
MODEL = """
import errors, files, config, data, inspection, cli, training, decoder, causality
import torch.nn.functional as F
from torch import nn

assert errors.HERE and files.HERE and config.HERE and data.HERE and inspection.HERE and cli.HERE and training.HERE
assert decoder.HERE and causality.HERE

class Model(nn.Module):
    def __init__(self, size=1, ahead=False):
        super().__init__()
        self.embedding, self.head, self.ahead = nn.Embedding(17, 15), nn.Linear(15, 17), ahead

    def forward(self, idx):
        x = self.embedding(idx).unflatten(-1, (3, 5)).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x.roll(-1, 1) if self.ahead else x)

def make():
    return Model()

def leaking():
    return Model(ahead=True)

def needs(config):
    return Model()

def stops():
    raise SystemExit("usage: --data")

model = Model()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = Path(tril.__file__).parents[1]
    shadow = tmp_path / "path"  # has tril and nothing else of ours
    shadow.mkdir()
    (shadow / "tril").symlink_to(root / "tril")
    folder = tmp_path / "project"
    folder.mkdir()
    for name in OWN:
        (folder / f"{name}.py").write_text("HERE = True\n")
    (folder / "model.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(shadow))
    return folder


COMMANDS = {
    "model.py:make --length 11": (0, "yes, none of the 11 probed positions (of 11) depends on a later one; called as"),
    "model.py:Model --length 11 --strict": (0, "yes, none of the 11 probed"),
    "model.py:model": (0, "yes, none of the "),
    "model.py:leaking": (1, "no, position 0 sees token 1, which it must not see: "),
    "package/inner/model.py:make": (0, "yes, none of the "),
    "folder/model.py:make": (0, "yes, none of the "),
    "model.py:needs": (2, "model.py:needs() does not return a model: name a function without arguments: TypeError"),
    "model.py:stops": (2, "SystemExit: usage: --data"),
    "model.py:absent": (2, "model.py has no absent: write a function in it that returns a model, and name that"),
    "model.py:HERE": (2, "model.py has no HERE"),
    "model.py": (2, "say what makes the model: model.py:make"),
    "absent.py:make": (2, "there is no file absent.py"),
    "apart/random.py:make": (0, "yes, none of the "),
    "apart/my.model.py:make": (0, "yes, none of the "),
    "package/my.v2.py:make": (0, "yes, none of the "),
    "model:make": (2, "expected a function in a file, as mine.py:make, a directory, or OWNER/NAME"),
    "errors.py:HERE": (2, "expected a model, an nn.Module, got bool"),
    "absent/": (2, "absent/ cannot be opened by transformers: "),
}


@pytest.mark.long
@pytest.mark.parametrize("words, expected", COMMANDS.items(), ids=COMMANDS)
def test_the_command_line_in_a_folder_of_theirs(project: Path, words: str, expected: tuple[int, str]) -> None:
    inner = project / "package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "model.py").write_text("from package.inner.layers import make")
    (inner / "layers.py").write_text("from model import make")
    (project / "folder").mkdir()
    (project / "folder" / "model.py").write_text("from folder.layers import make")  # a package without __init__.py
    (project / "folder" / "layers.py").write_text(MODEL)
    (project / "apart").mkdir()
    (project / "apart" / "random.py").write_text(MODEL)  # has the name of a module of Python
    (project / "apart" / "my.model.py").write_text(MODEL)
    (project / "package" / "my.v2.py").write_text("from package.inner.layers import make")
    code, said = expected
    done = run_python("-m", "tril", "check", *words.split(), cwd=project)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert said in (done.stderr if code == 2 else done.stdout) and "docs/" not in done.stderr
    assert (done.stderr if code == 2 else done.stdout).count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.long
def test_the_command_line_opens_a_directory_by_transformers_and_no_other_file(project: Path) -> None:
    make_decoder("mistral").save_pretrained(project / "mistral")
    done = run_python("-m", "tril", "check", "mistral", cwd=project)
    assert done.returncode == 0 and "called as model(input_ids=ids)['logits']\n" in done.stdout, done.stderr
    (project / "mistral" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    done = run_python("-m", "tril", "check", "mistral", cwd=project)
    assert done.returncode == 2 and "names a file elsewhere, '../a.safetensors'" in done.stderr
    (project / "mistral" / "model.safetensors.index.json").unlink()
    (project / "mistral" / "adapter_config.json").write_text("{}")
    assert "merge the adapter" in run_python("-m", "tril", "check", "mistral", cwd=project).stderr


TOKENIZER = """

class Letters:
    def encode(self, text):
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids):
        return "".join(chr(97 + token) for token in ids)

letters = Letters()
"""


@pytest.mark.long
def test_heads_of_a_model_with_characters_of_its_own_from_the_command_line(project: Path) -> None:
    with open(project / "model.py", "a") as file:
        file.write(TOKENIZER)
    words = "heads model.py:make --text abcab --tokenizer model.py:letters -o a.html".split()
    done = run_python("-m", "tril", *words, cwd=project)
    assert done.returncode == 0 and done.stdout.endswith("\nwrote a.html\n"), done.stderr
    assert (
        done.stdout.startswith("text:   5 tokens\n") and '["a", "b", "c", "a", "b"]' in (project / "a.html").read_text()
    )
    done = run_python("-m", "tril", "heads", "model.py:make", "--text", "abcab", cwd=project)
    assert done.returncode == 2 and "a text needs a tokenizer" in done.stderr
    done = run_python("-m", "tril", *words[:5], "absent.json", cwd=project)
    assert done.returncode == 2 and "'absent.json' cannot be opened as a tokenizer (a tokenizer.json," in done.stderr


IMPORTS = """
import sys, torch, numpy, tqdm
before = {*sys.modules}
import tril
for name in tril.OFFERED:
    getattr(tril, name)
print(*{name.partition(".")[0] for name in {*sys.modules} - before})
import model
assert tril.check_causality(model.make()).ok and not tril.check_causality(model.leaking()).ok
found = tril.inspect_heads(model.make(), [1, 2, 3, 4, 5])
assert found.pattern(0, 2).shape == (5, 5) and "match the fused kernel" in found.verified
found.save("heads.html")
"""


@pytest.mark.long
def test_beside_their_files_theirs_are_imported_and_ours_are_not_missed(project: Path) -> None:
    """At import tril takes torch, numpy, tqdm and Python's own library: no jinja2, no matplotlib, nothing of ours."""
    done = run_python("-c", IMPORTS, cwd=project)
    assert done.returncode == 0, done.stderr
    assert {"tril"} <= {*done.stdout.split()} <= {"tril"} | sys.stdlib_module_names
    assert (project / "heads.html").stat().st_size > 30_000

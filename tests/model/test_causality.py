"""The certificate: it passes every causal model, names what another one does wrong, and changes nothing."""

import itertools
import json
import math
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from errors import UserError
from model import GPT, GPTConfig
from model.attention import Attend, make_causal_mask
from tests.conftest import make_gpt, often, tiny_run
from training.certificate import certify
from tril.causality import check_causality

V, T = 17, 11
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def certify_tiny(dtype: torch.dtype, loss: object = train.next_token_loss, **changes: object) -> dict:
    """The certificate as train.py asks for it."""
    return certify(make_gpt(**changes).train(), partial(loss, dtype=dtype), dtype, batch_size=5, special=())


def see(monkeypatch: pytest.MonkeyPatch, mask: Tensor) -> None:
    """Let every layer see what the mask says."""

    def forward(self: Attend, q: Tensor, k: Tensor, v: Tensor, own: Tensor | None, dropout: float = 0.0, **_) -> Tensor:
        rows = mask[k.size(2) - q.size(2) : k.size(2), : k.size(2)]
        return F.scaled_dot_product_attention(q, k, v, rows, dropout, enable_gqa=True)

    monkeypatch.setattr(Attend, "forward", forward)


# No false alarms, and nothing is changed.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("context_length, n_kv_head", often((T, 3), (1, 3), (2, 1), (67, 1)))
def test_what_is_causal_passes(context_length: int, n_kv_head: int, dtype: torch.dtype) -> None:
    certificate = certify_tiny(dtype, context_length=context_length, n_kv_head=n_kv_head)
    assert certificate["causal"].startswith("yes, none of the ")


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 64, 129, 257, 521])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]], ids=len)
def test_there_is_no_false_alarm(kernels: list[SDPBackend], dtype: torch.dtype, length: int) -> None:
    with sdpa_kernel(kernels):  # the second steps in where flash attention cannot, as with dropout on a CPU
        certify_tiny(dtype, context_length=length, n_kv_head=1)
        assert check_causality(make_gpt(context_length=length).to(dtype), V, length).ok


class Odd(nn.Module):
    """Replaces a buffer and writes to another; has a table of integers, and an embedding without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.unused = make_gpt(), nn.Embedding(V, 3)
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("running", torch.randn(3))

    def forward(self, idx: Tensor) -> Tensor:
        self.unused(idx)
        self.running.add_(1)
        if self.training:
            self.steps = self.steps + 1
        return self.gpt(idx) * (1 + self.steps)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_honest_oddity_passes_and_nothing_is_changed_by_asking(context: Callable) -> None:
    model = Odd().train()
    model.gpt.blocks[0].eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    modes = [module.training for module in model.modules()]
    random = torch.random.get_rng_state()
    with context():
        outcome = check_causality(model, V, T)
        with pytest.raises(ValueError, match="do not fit the context length"):
            check_causality(model, V, T + 1)
    assert outcome.ok and not outcome.remarks, outcome
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        same, value = before[name]
        assert tensor is same and torch.equal(tensor, value)
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(torch.random.get_rng_state(), random)


def test_every_position_of_a_short_text_is_asked_and_many_of_a_long_one() -> None:
    model = make_gpt()
    model.register_buffer("expanded", torch.ones(1).expand(5))  # which nothing can be written to
    assert check_causality(model, V, T).num_probed == T
    long = make_gpt(context_length=131)
    assert 5 < check_causality(long, V, 131).num_probed < check_causality(long, V, 131, strict=True).num_probed < 131


def test_a_sparse_choice_may_be_blind_and_still_sees_no_future() -> None:
    class Neighbour(nn.Module):
        """Sees itself, and one token before or behind it."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step
            self.embedding, self.head = nn.Embedding(V, 12), nn.Linear(12, V)

        def forward(self, idx: Tensor) -> Tensor:
            x = self.embedding(idx)
            other = x.roll(self.step, dims=1)
            other[:, 0 if self.step > 0 else -1] = 0
            return self.head(x + other)

    assert check_causality(Neighbour(1), V, T).is_blind and check_causality(Neighbour(1), V, T, sparse=True).ok
    assert not check_causality(Neighbour(-1), V, T, sparse=True).ok


def test_numbers_of_numpy_are_the_same_again_and_left_as_they_were() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = make_gpt()

        def forward(self, idx: Tensor) -> Tensor:
            return self.gpt(idx) * (1 + self.training * float(np.random.random()))

    before = np.random.get_state()[1].copy()
    assert check_causality(Noisy(), V, T).ok
    assert (np.random.get_state()[1] == before).all()


def test_after_some_seconds_few_positions_are_asked_and_the_answer_says_so() -> None:
    model = make_gpt(context_length=131)
    report = check_causality(model, V, 131, strict=True, seconds=0.0)
    assert report.ok and report.num_probed < 5 and "after 0.0 s few positions were probed" in str(report)
    assert "few positions" not in str(check_causality(model, V, 131, strict=True, seconds=1e6))


# Mistakes are found and named. tests/mutants.py has more of them.


def test_the_pair_and_the_size_of_a_leak_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = make_causal_mask(T)
    mask[3, 7] = True
    see(monkeypatch, mask)
    outcome = check_causality(make_gpt(n_layer=1), V, T)  # a second layer would bring what token 7 sees with it
    assert (outcome.ok, outcome.query, outcome.key) == (False, 3, 7)
    effect = r"its logits move by up to \d.* \(with the weights as they are\)"
    assert re.fullmatch(f"no, position 3 sees token 7, which it must not see: {effect}", str(outcome))


@pytest.mark.parametrize("zero", ["o_proj", "final_norm", "q_proj"])
def test_a_layer_of_zeros_neither_hides_a_leak_nor_looks_like_one(monkeypatch, zero: str) -> None:
    model = GPT(GPTConfig(n_layer=2, n_head=3, n_embd=15, context_length=T, vocab_size=V))
    for name, parameter in model.named_parameters():
        if zero in name:
            nn.init.zeros_(parameter)
    assert check_causality(model, V, T).ok
    see(monkeypatch, torch.ones(T, T, dtype=torch.bool))
    assert not check_causality(model, V, T).ok


BLIND = "no, it does not see the future, but position 4 is blind to token 4, which it may see"


def test_a_token_that_is_not_seen_is_named() -> None:
    model = make_gpt()
    model.token_embedding.register_forward_hook(lambda module, inputs, x: x * (torch.arange(x.size(1)) != 4)[:, None])
    assert str(check_causality(model, V, T)) == BLIND


def test_a_plain_function_is_asked_as_it_is() -> None:
    table = torch.randn(V, V)
    assert check_causality(lambda idx: table[idx].cumsum(1), V, T).ok
    ahead = check_causality(lambda idx: table[idx].cumsum(1) + 1e-3 * table[idx.roll(-1, 1)], V, T)
    assert (ahead.query, ahead.key) == (0, 1)
    for wrong, finding in (
        (lambda idx: table[idx].cumsum(1) + 5e-7 * table[idx.roll(-1, 1)], "position 0 sees token 1"),
        (lambda idx: table[idx].cumsum(1) + torch.rand(()), "do not give the same numbers again"),
        (lambda idx: table[idx].cumsum(1) + table[idx].mean(0), "a sequence changes when the others of its batch do"),
        (lambda idx: table[idx].cumsum(1) / (idx > 5)[..., None], "not finite"),
    ):
        assert finding in check_causality(wrong, V, T).finding
    assert check_causality(wrong, V, T, tokens=torch.arange(6, V)).ok


@pytest.mark.parametrize("length", [96, 61, 128])
def test_a_leak_that_one_token_of_a_small_vocabulary_opens_is_found(length: int) -> None:
    """Tokens are dealt like cards: each of 61 is once the first that is replaced, or replaces it."""
    table = torch.randn(61, 61)
    embedding = nn.Embedding(61, 61)
    for number in (7, *range(0, 61, 5)):

        def ahead(idx: Tensor, number: int = number) -> Tensor:
            return (F.pad(idx[:, 1:], (0, 1), value=-1) == number)[:, :, None].float()

        read = lambda idx, ahead=ahead: embedding(idx).cumsum(1) + ahead(idx)  # noqa: E731
        outcome = check_causality(read, 61, length, module=embedding)
        assert outcome.key == outcome.query + 1
        assert not check_causality(lambda idx, ahead=ahead: table[idx].cumsum(1) + ahead(idx), 61, length).ok


@pytest.mark.parametrize("length, block", [(64, 32), (256, 32), (256, 64), (256, 128)])
@pytest.mark.parametrize("with_autograd", [True, False])
def test_a_leak_at_the_border_of_blocks_is_found(monkeypatch, length: int, block: int, with_autograd: bool) -> None:
    mask = make_causal_mask(length)
    ends = torch.arange(block - 1, length - 1, block)
    mask[ends, ends + 1] = True
    see(monkeypatch, mask)
    model = make_gpt(n_layer=1, context_length=length)
    forward = model if with_autograd else torch.inference_mode()(model.forward)
    outcome = check_causality(forward, V, length, module=model)
    assert outcome.key == outcome.query + 1 and outcome.key % block == 0


def test_a_mask_is_checked_against_what_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 4 tokens in each of two layers: together they reach 6 back, no more and no less."""

    def window(width: int) -> Tensor:
        return make_causal_mask(67).triu(1 - width)

    see(monkeypatch, window(4))
    model = make_gpt(context_length=67)
    assert check_causality(model, V, 67, mask=window(7)).ok
    narrow = check_causality(model, V, 67, mask=window(6))
    assert not narrow.ok and narrow.query - narrow.key == 6
    wide = check_causality(model, V, 67, mask=window(8))
    assert "blind" in wide.finding and wide.query - wide.key == 7
    ahead = window(67)
    ahead[:, :23] = True  # a prompt that is read in both directions, and otherwise if it is cut
    see(monkeypatch, ahead)
    assert check_causality(model, V, 67, mask=ahead, strict=True).ok


class Documents(nn.Module):
    """Attends in two layers to the tokens of the same document: a document ends with the last id."""

    def __init__(self, vocab_size: int, mistake: str = "none") -> None:
        super().__init__()
        self.end, self.mistake = vocab_size - 1, mistake
        self.embedding, self.head = nn.Embedding(vocab_size, 15), nn.Linear(15, vocab_size)
        self.position = nn.Embedding(503, 15)
        self.layers = nn.ModuleList(nn.Linear(15, 45) for _ in range(2))

    def mask(self, idx: Tensor) -> Tensor:
        ends = (idx == self.end).long()
        number = ends.cumsum(1) - ends
        return (number[:, :, None] == number[:, None]) & make_causal_mask(idx.size(1))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding(idx) + self.position.weight[: idx.size(1)]
        mask = self.mask(idx.roll(-1, 1) if self.mistake == "ends a token early" else idx)
        if self.mistake == "ignored" or (self.mistake == "ignored in training" and self.training):
            mask = make_causal_mask(idx.size(1)).expand_as(mask)
        if self.mistake == "sees an end that follows":
            x = x + 0.1 * F.pad(idx[:, 1:] == self.end, (0, 1))[..., None].to(x)
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (3, 5)).transpose(1, 2) for y in layer(x).chunk(3, dim=-1))
            x = x + F.scaled_dot_product_attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(2)
        return self.head(x)


MISTAKES = ["none", "ignored", "ignored in training", "ends a token early", "sees an end that follows"]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("vocab_size, length", often((257, 31), (257, 251), (5003, 251), (50257, 251)))
def test_a_mask_that_depends_on_the_text_is_asked_for_without_luck(vocab_size: int, length: int, mistake: str) -> None:
    model, end = Documents(vocab_size, mistake), [vocab_size - 1]
    ways = itertools.product((False, True), (None, end, [5]))  # ids that move the mask are found
    for strict, special in ways if vocab_size < 50257 else [(True, end)]:
        options = {"special": special, "strict": strict, "batch_size": 3 if strict else 2}
        outcome = check_causality(model, vocab_size, length, mask=model.mask, **options)
        assert outcome.ok == (mistake == "none"), outcome
    if mistake == "none":  # nothing but a triangle is claimed
        assert "blind" in check_causality(model, vocab_size, length, special=end).finding
    if mistake == "sees an end that follows":
        assert not check_causality(model, vocab_size, length, special=end).ok


def test_a_loss_that_mixes_documents_is_found_where_logits_do_not() -> None:
    def loss(model: Documents, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")

    for mistake in ("none", "ignored"):
        trained, model = Documents(257, mistake), Documents(257)
        trained.load_state_dict(model.state_dict())
        options = {"loss_fn": partial(loss, trained), "mask": model.mask, "batch_size": 3}
        trained.embedding, trained.layers, trained.head = model.embedding, model.layers, model.head
        trained.position = model.position
        outcome = check_causality(model, 257, 31, **options)
        assert outcome.ok if mistake == "none" else "the loss moves" in outcome.finding


def test_a_model_says_its_mask_itself() -> None:
    model = make_gpt()
    for block in model.blocks:
        block.attention.causal_mask = make_causal_mask(T).triu(-3)
    loss_fn = partial(train.next_token_loss, dtype=torch.float32)
    with pytest.raises(UserError, match="blind to token .*; if that is meant, say so in `GPT.receptive_field`"):
        certify(model, loss_fn, torch.float32, batch_size=5, special=())
    model.receptive_field = make_causal_mask(T).triu(-6)  # through two layers
    assert certify(model, loss_fn, torch.float32, batch_size=5, special=())["causal"].startswith("yes")


def test_a_loss_that_leaks_is_found_where_logits_do_not() -> None:
    def peeking(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        return train.next_token_loss(model, inputs, targets, dtype) + 1e-3 * inputs[:, -1].sum()

    moves = "the loss moves by 0.0.* if tokens are replaced that positions .* must not see"
    with pytest.raises(UserError, match=moves):
        certify_tiny(torch.float32, peeking)

    def counting_all(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        z_loss = 1e-4 * model(inputs).logsumexp(-1).square().sum()
        return train.next_token_loss(model, inputs, targets, dtype) + z_loss

    with pytest.raises(UserError, match="the loss moves by .* whose targets alone it should count"):
        certify_tiny(torch.float32, counting_all)


def balancing(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype, ahead: float = 0.0) -> Tensor:
    """A loss with a term that spreads the tokens, as if the channels before an MLP were probabilities of experts."""
    seen = []
    with model.blocks[0].mlp_norm.register_forward_hook(lambda layer, x, y: seen.append(y.float().softmax(-1))):
        with model.token_embedding.register_forward_hook(lambda layer, x, y: y + ahead * y.roll(-1, 1)):
            loss = train.next_token_loss(model, inputs, targets, dtype)
    [gates] = seen
    counts = F.one_hot(gates.argmax(-1), gates.size(-1)).float().mean((0, 1))
    return loss + inputs.numel() * (counts * gates.mean((0, 1))).sum()


@pytest.mark.parametrize("dtype", often(*DTYPES), ids=str)
def test_a_term_that_counts_tokens_and_no_target_passes(dtype: torch.dtype) -> None:
    said = certify_tiny(dtype, balancing)["causal"]
    assert said.endswith("; the loss has a term that counts no target, as one that balances experts")

    def reading_its_inputs(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        return balancing(model, inputs, targets, dtype) + train.next_token_loss(model, inputs, inputs, dtype)

    for leaking in (partial(balancing, ahead=1e-3), reading_its_inputs):
        with pytest.raises(UserError, match="the loss moves by .* whose targets alone it should count"):
            certify_tiny(dtype, leaking)


@pytest.mark.parametrize("where", ["training", "autograd", "cache"])
@pytest.mark.parametrize("dtype", often(*DTYPES), ids=str)
def test_a_weak_mask_is_found_wherever_it_is(monkeypatch, dtype: torch.dtype, where: str) -> None:
    def forward(self: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_, **__) -> Tensor:
        mask = make_causal_mask(k.size(-2))[-q.size(-2) :]
        square = q.size(-2) == k.size(-2)
        weak = {"training": self.training, "autograd": torch.is_grad_enabled(), "cache": not square}[where]
        scores = q @ k.mT / math.sqrt(q.size(-1))
        return scores.masked_fill(~mask, -1e4 if weak else float("-inf")).softmax(-1) @ v

    monkeypatch.setattr(Attend, "forward", forward)
    with pytest.raises(UserError, match="with extreme weights"):
        certify_tiny(dtype, context_length=31, n_layer=5)  # a weak mask shows where a score is below -1e4


def test_a_weak_mask_is_found_in_the_formula_that_a_cpu_trains_by(monkeypatch) -> None:
    def weak(q: Tensor, k: Tensor, mask: Tensor, *_: object, **__: object) -> Tensor:
        return (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~mask, -1e4)

    monkeypatch.setattr("model.attention.attention_scores", weak)
    with pytest.raises(UserError, match="in training, with extreme weights"):
        certify_tiny(torch.bfloat16, context_length=31)


class Peeking(nn.Module):
    """Looks ahead through a gate, or through numbers that begin at zero; honest, if `leak` is 0."""

    def __init__(self, kind: str, leak: float) -> None:
        super().__init__()
        self.kind, self.leak = kind, leak
        self.embedding, self.head = nn.Embedding(V, 12), nn.Linear(12, V)
        gains = {"open": torch.ones(12), "shut": -torch.ones(12), "complex": torch.zeros(12, dtype=torch.complex64)}
        self.gain = nn.Parameter(gains.get(kind, torch.ones(12)))
        self.triangle = nn.Parameter(torch.ones(T, T).tril(), requires_grad=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding(idx)
        size = idx.size(1)
        past = self.triangle[:size, :size] @ x  # a mask that is kept as a frozen parameter
        ahead = F.pad(x[:, 1:], (0, 0, 0, 1))
        if self.kind == "complex":
            gate = (self.gain * (1 + 1j)).real
        elif self.kind == "in training":
            gate = self.training * self.gain.log().exp()
        else:
            gate = F.relu(self.gain if self.kind == "open" else -self.gain)
        noise = random.random() if self.training else 0.0
        return self.head(past + self.leak * gate * ahead + noise * self.gain.abs().sqrt() * x)


@pytest.mark.parametrize("kind", ["open", "shut", "complex", "in training"])
def test_a_leak_through_a_gate_is_found_and_an_honest_oddity_passes(kind: str) -> None:
    before = random.getstate()
    for seed in range(5):
        torch.manual_seed(seed)
        assert not check_causality(Peeking(kind, 1e-3), V, T).ok
        assert check_causality(Peeking(kind, 0.0), V, T).ok
    assert random.getstate() == before


@pytest.mark.long
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", ["q k v", "wq wk wv", "key_in q third"])
def test_a_weak_mask_is_found_without_luck(names: str, bias: bool) -> None:
    class Weak(nn.Module):
        def __init__(self, C: int) -> None:
            super().__init__()
            self.embedding, self.places = nn.Embedding(31, C), nn.Parameter(0.02 * torch.randn(67, C))
            self.parts = nn.ModuleDict({name: nn.Linear(C, C, bias=bias) for name in names.split()})
            self.head = nn.Linear(C, 31)

        def forward(self, idx: Tensor) -> Tensor:
            x = self.embedding(idx) + self.places[: idx.size(1)]
            q, k, v = (part(x) for part in self.parts.values())
            hidden = torch.full((idx.size(1), idx.size(1)), -1e4).triu(1)
            return self.head(x + (q @ k.mT / x.size(-1) ** 0.5 + hidden).softmax(-1) @ v)

    for C, length in itertools.product((7, 16, 31, 64), (7, 16, 37)):
        assert "extreme" in str(check_causality(Weak(C), 31, length, strict=True)), (C, length)


MIXING = {
    "first tokens": lambda x: x + 0.1 * x[:, :1].mean(0),
    "the next sequence": lambda x: x + 0.1 * F.pad(x[1:], (0, 0, 0, 0, 0, 1)),
    "the last of the next": lambda x: x + 0.1 * F.pad(x[1:, :1], (0, 0, x.size(1) - 1, 0, 0, 1)),
}


@pytest.mark.parametrize("length", [1, T])
@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_sequences_that_mix_are_found(mix: object, length: int) -> None:
    model = make_gpt()
    model.token_embedding.register_forward_hook(lambda module, inputs, x: mix(x))
    assert "a sequence changes when the others of its batch do" in check_causality(model, V, length).finding


def test_decoding_agrees_to_a_thousand_roundings() -> None:
    model = make_gpt()
    assert check_causality(model, V, T, decode=lambda idx: (1 + 1e-5) * model(idx)).ok
    outcome = check_causality(model, V, T, decode=lambda idx: (1 + 3e-4 * (torch.arange(T) > 4)[:, None]) * model(idx))
    assert outcome.finding.endswith(
        "gives other logits than the whole text: off by 0.0003 of their size, from token 5 on"
    )


def test_questions_without_an_answer_are_refused() -> None:
    for vocab_size, length, rows in ((1, T, T), (V, 0, 0), (V, T, 1)):
        with pytest.raises(ValueError, match=f"nothing to ask: {length} tokens of a vocabulary of {vocab_size}, "):
            check_causality(make_gpt(), vocab_size, length, mask=make_causal_mask(length)[:rows])
    with pytest.raises(ValueError, match="nothing to ask: 11 tokens of a vocabulary of 1"):
        check_causality(make_gpt(), V, T, tokens=torch.tensor([7, 7]))


# Training asks for it.


def test_no_run_begins_with_a_model_that_sees_the_future(run, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "run"
    begun = run(train, *tiny_run(corpus_file, out))
    assert begun.exit_code == 0 and "\ncausal: yes, none of the " in begun.out
    manifest = json.loads((out / "checkpoints" / "step-00000012" / "manifest.json").read_text())
    assert manifest["certificate"]["causal"].startswith("yes, none of the ")

    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*") if path.is_file())
    see(monkeypatch, torch.ones(T, T, dtype=torch.bool))
    refused = "refusing to train: position 0 sees token 1, which it must not see: "
    run(train, "--resume", out, "--train.max_steps", 14).refused(refused)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*") if path.is_file())
    run(train, *tiny_run(corpus_file, tmp_path / "refused")).refused(refused)
    assert not [path for path in (tmp_path / "refused").rglob("*") if path.is_file()]

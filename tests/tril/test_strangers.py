"""The certificate on models of others: no false alarm, no crash, and every leak is still found."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tril
from tests.decoders import DECODERS, DENSE, LEFT_OUT, MIXTURES, TYPES, make_decoder
from tests.decoders import T as LENGTH
from tests.decoders import V as VOCABULARY
from tests.tril.test_calls import NO_DERIVATIVES, C, Last, Plain, T, V
from tril.causality import check_causality, logits_of


def judge(model: Callable, **options: object) -> str:
    """The answer as a string."""
    return str(check_causality(model, V, T, **options))


YES = f"yes, none of the {T} probed positions (of {T}) depends on a later one"
NO = "no, position 0 sees token 1, which it must not see"


def test_a_stranger_passes_and_its_leak_is_found() -> None:
    """From gross to below rounding, where only the derivative has it."""
    assert judge(Plain()) == YES
    for leak in (1e-2, 1e-5, 1e-7, 1e-12):
        assert judge(Plain(leak)).startswith(NO)


# What a model returns.

OUTPUTS = (
    lambda logits: SimpleNamespace(loss=None, logits=logits),
    lambda logits: {"loss": None, "logits": logits},
    lambda logits: (logits, None),
    lambda logits: [logits.mean(), logits],
    lambda logits: (logits.new_zeros(*logits.shape[:2], C), logits),
)


def test_logits_are_found_in_what_a_model_returns() -> None:
    for wrap in OUTPUTS:
        for leak in (0.0, 0.1):
            model = Plain(leak)
            answer = judge(lambda idx, model=model, wrap=wrap: wrap(model(idx)), module=model)
            assert answer.startswith(NO) if leak else answer == YES
    logits = torch.randn(2, T, V)
    assert logits_of((logits.long(), logits)) is logits
    for output in (None, {"loss": logits}, SimpleNamespace(last_hidden_state=logits), (logits.long(), [])):
        with pytest.raises(ValueError, match=r"expected logits of shape \(B, T, V\), got tensors of shapes \[\]"):
            logits_of(output)
    with pytest.raises(ValueError, match=rf"expected logits of shape \(2, {T}, {V}\), got .* \[\(2, 1, {V}\)\]"):
        judge(Last())


# Embeddings.


class ByLength(nn.Embedding):
    """Positions of a text, given as such or as its shape: no more than its length is read."""

    def forward(self, text: Tensor | torch.Size) -> Tensor:
        shape = text.shape if isinstance(text, Tensor) else text
        return super().forward(torch.arange(shape[1]))


class Positions(Plain):
    """Learned positions in the shape of tokens, and what else an nn.Embedding is used for; tokens changed in place."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__(leak)
        self.position, self.kind, self.gains = nn.Embedding(V, C), nn.Embedding(2, C), nn.Embedding(V, T * C)
        self.by_length = ByLength(T, C)

    def embed(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.size(1)).expand_as(idx)
        gains = self.gains(idx[:, :1]).view(len(idx), -1, C)[:, : idx.size(1)]
        others = self.position(positions) + self.kind(idx * 0) + gains + self.by_length(idx) + self.by_length(idx.shape)
        return self.embedding(input=idx).add_(1.0).mul_(2.0) + others


@pytest.mark.parametrize("length", [1, 2, T])
def test_other_embeddings_are_no_tokens(length: int) -> None:
    assert check_causality(Positions(), V, length).ok
    if length > 1:
        assert not check_causality(Positions(1e-12), V, length).ok


# Where there is no derivative.


class OneHot(Plain):
    """Reads tokens without an nn.Embedding."""

    def embed(self, idx: Tensor) -> Tensor:
        return F.one_hot(idx, V).float() @ self.embedding.weight


def test_without_derivatives_the_answer_says_so_and_bits_decide() -> None:
    assert judge(OneHot()) == f"{YES}; {NO_DERIVATIVES}"
    assert judge(OneHot(1e-3)).startswith(NO)


# Rounding that depends on the company.


class Experts(Plain):
    """Each token goes to one expert of five, which multiplies as many rows as come."""

    def __init__(self, leak: float = 0.0, kernel: Callable = F.linear) -> None:
        super().__init__(leak)
        self.router, self.experts = nn.Linear(C, 5), nn.Parameter(torch.empty(5, C, C))
        nn.init.normal_(self.experts, std=C**-0.5)
        self.kernel = kernel

    def attend(self, x: Tensor) -> Tensor:
        x = x + super().attend(x)
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            factor = 1 + 3e-7 * torch.sin(rows.sum().double()).to(x.dtype) * (x.dtype == torch.float32)
            y[rows] = self.kernel(x[rows], expert) * factor  # as kernels differ by the number of their rows
        return y


class Fourier(Plain):
    """A convolution with a causal filter, by Fourier transforms of all tokens."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__(leak)
        self.filter = nn.Parameter(torch.randn(T, C))

    def attend(self, x: Tensor) -> Tensor:
        size = 2 * x.size(1)
        product = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(self.filter[: x.size(1)], size, dim=0)
        return torch.fft.irfft(product, size, dim=1)[:, : x.size(1)]


class Spectrum(Fourier):
    """The same by complex parameters, as in state space models: the spectrum of a filter is rounded as well."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__(leak)
        self.filter = nn.Parameter(torch.randn(T, C, dtype=torch.cfloat))

    def attend(self, x: Tensor) -> Tensor:
        size = 2 * x.size(1)
        product = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(self.filter.real[: x.size(1)], size, dim=0)
        return torch.fft.irfft(product, size, dim=1)[:, : x.size(1)]


class Cancels(Plain):
    """A sum of all tokens, from which the later ones are taken away: rounded as many layers round."""

    def attend(self, x: Tensor) -> Tensor:
        x = x + 2
        return x.sum(1, keepdim=True) - x.flip(1).cumsum(1).flip(1)


class Dropping(Experts):
    """Experts that end with dropout: how many numbers they draw depends on later tokens."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__(leak, lambda x, expert: F.dropout(input=F.linear(x, expert), p=0.3, training=self.training))


def only_float32(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError("expected float32")
    return F.linear(x, weight)


ROUNDED = "bits differ by rounding or dropout alone"
NO_FLOAT64 = "less than 0.0001, and no float64 to ask again in"
ROUNDING = {
    "experts": (Experts, "asked again in float64"),
    "no float64": (lambda leak=0.0: Experts(leak, only_float32), NO_FLOAT64),
    "Fourier": (Fourier, "asked again in float64"),
    "complex": (Spectrum, "asked again in float64"),
    "cancels": (Cancels, "asked again in float64"),
    "dropout": (Dropping, "asked again in float64"),
}


@pytest.mark.parametrize("make, how", ROUNDING.values(), ids=ROUNDING)
def test_rounding_is_no_leak_and_a_leak_is_no_rounding(make: Callable, how: str) -> None:
    model = make()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")

    assert judge(model, loss_fn=loss) == f"{YES}; {ROUNDED}: {how}"
    for name, tensor in model.state_dict().items():
        place, value = before[name]
        assert tensor.data_ptr() == place and tensor.dtype == value.dtype and torch.equal(tensor, value)
    assert check_causality(make(), V, T, strict=True).ok == (how != NO_FLOAT64)
    for leak in (1e-2, 1e-5, 1e-6, 1e-7, 1e-9, 1e-12):
        outcome = check_causality(make(leak), V, T)
        assert not outcome.ok and outcome.key > outcome.query, leak


def test_dropout_that_takes_a_mask_away_is_a_leak() -> None:
    """Of scores, before their softmax, as by mistake: what is hidden by a number is 0 where it is dropped."""
    model = Plain()

    def attend(x: Tensor) -> Tensor:
        q, k, v = model.qkv(x).chunk(3, dim=-1)
        future = torch.ones(x.size(1), x.size(1)).triu(1).bool()
        return F.dropout((q @ k.mT).masked_fill(future, -1e9), 0.1, model.training).softmax(-1) @ v

    model.attend = attend
    answer = judge(model)
    assert answer.startswith("no, position 0 sees token ") and "(in training" in answer
    model.eval().train = lambda mode: model
    assert judge(model) == YES


class OnApple(TorchFunctionMode):
    """Pretends that each tensor is on an Apple GPU, where none is of float64, but for those: they are on the CPU."""

    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        device = next((x for x in args[1:] if isinstance(x, torch.device)), None)
        if function is Tensor.to and device:
            args[0].is_moved = device.type == "cpu"
            return args[0]
        if function is Tensor.double and not getattr(args[0], "is_moved", False):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        if function is Tensor.device.__get__:
            return torch.device("cpu" if args[0].dtype == torch.float64 else "mps")
        return function(*args, **kwargs or {})


def test_a_device_without_float64_is_asked_again_on_the_cpu() -> None:
    for leak in (0.0, 1e-6, 1e-12):
        model = Fourier(leak)
        with OnApple():
            outcome = check_causality(model, V, T, strict=True)
        assert outcome.ok == (not leak) and outcome.remarks == {f"{ROUNDED}: asked again in float64"}, outcome


class Padded(Plain):
    """Logits of padding are the least number, as in models with a padded vocabulary."""

    amount = 0.0

    def forward(self, idx: Tensor) -> Tensor:
        logits = super().forward(idx)
        ahead = logits.detach().roll(-1, 1) if self.training else 0.0  # without a derivative
        return (logits + self.amount * ahead).index_fill(-1, torch.arange(13, V), torch.finfo(logits.dtype).min)


class Weak(Plain):
    """A mask that is weak in float32 alone."""

    amount = float("-inf")

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.layer_norm(x, (C,))).chunk(3, dim=-1)
        least = self.amount if x.dtype == torch.float32 else float("-inf")
        return F.scaled_dot_product_attention(q, k, v, torch.full((x.size(1), x.size(1)), least).to(x).triu(1))


@pytest.mark.parametrize("kind, leak", [(Padded, 1.0), (Padded, 1e-4), (Weak, -1e4)])
def test_nothing_large_hides_a_leak(kind: type, leak: float) -> None:
    """What is tiny is so beside the logits of its own position, and never for being large elsewhere."""
    model = kind()
    assert judge(model).startswith(YES)
    model.amount = leak
    assert judge(model).startswith("no, position ")


def test_an_error_in_the_backward_is_no_answer_of_a_strict_check() -> None:
    class Failing(Plain):
        def embed(self, idx: Tensor) -> Tensor:
            x = super().embed(idx)
            if x.requires_grad:
                x.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("out of memory")))
            return x

    assert NO_DERIVATIVES in judge(Failing())
    with pytest.raises(RuntimeError, match="out of memory"):
        judge(Failing(), strict=True)


# Layers that do not see each token of each text.


class TopK(Plain):
    """Each query sees the keys of its four largest scores, and itself. Positions would choose for all."""

    def embed(self, idx: Tensor) -> Tensor:
        return self.embedding(idx)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        scores = (q @ k.mT / C**0.5).masked_fill(~mask, -torch.inf)
        least = scores.topk(min(4, x.size(1)), dim=-1).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ v


def test_a_layer_that_selects_is_not_blind() -> None:
    assert judge(TopK()) == YES
    assert judge(TopK(1e-6)).startswith(NO)


# Decoders of all kinds.


QUICK = ("gpt2", "llama", "mixtral", "mamba", "openai-gpt", "prophetnet")
REFUSED = {
    "openai-gpt": "(in training, with extreme weights)",  # its published mask is -10,000
    "prophetnet": "(with the weights as they are)",  # gives the bias of a relative position to other positions
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in DECODERS]
)
def test_decoders_of_transformers_pass_but_for_two_and_none_without_its_mask(name: str, monkeypatch) -> None:
    answer = str(check_causality(make_decoder(name), VOCABULARY, LENGTH))
    if name in REFUSED:
        assert answer.endswith(REFUSED[name])
    else:
        assert answer.startswith(f"yes, none of the {LENGTH} probed positions (of {LENGTH})")
    kernel = F.scaled_dot_product_attention

    def unmasked(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> Tensor:
        return kernel(q, k, v, None, dropout_p, False, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", unmasked)
    if name in DENSE | MIXTURES:  # which attend through the kernel
        answer = check_causality(make_decoder(name, attn_implementation="sdpa"), VOCABULARY, LENGTH)
        assert str(answer).startswith(NO)


def test_positions_that_a_long_text_stretches_are_said_and_refused_in_strict() -> None:
    stretched = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 7}
    stretched |= {"factor": 13.9, "short_factor": [1.0] * 7, "long_factor": [2.0] * 7}
    for strict in (False, True):
        model = make_decoder("llama", rope_parameters=stretched)
        report = check_causality(model, VOCABULARY, LENGTH, strict=strict)
        assert report.ok != strict and str(report).endswith("than within the whole text: it depends on the length")


ASKED = "decoding with its cache was asked for"
DECODING = {  # one reads several tokens after others, one does not, one counts each part from 0, one mixes the texts
    "gpt2": ASKED,
    "mamba": ASKED,
    "bamba": f" of their size, from token {LENGTH - 5} on",
    "rwkv": "",
}


@pytest.mark.long
@pytest.mark.parametrize("name, said", DECODING.items(), ids=DECODING)
def test_decoding_of_transformers_is_asked_and_what_differs_is_a_no_in_strict_alone(name: str, said: str) -> None:
    report = tril.check_causality(make_decoder(name), length=LENGTH)
    assert report.ok and [remark.endswith(said) for remark in report.remarks] == [True] * bool(said)
    if said.endswith(" on"):
        assert tril.check_causality(make_decoder(name), length=LENGTH, strict=True).finding.endswith(said)


@pytest.mark.long
def test_no_type_of_decoder_is_forgotten() -> None:
    """A name that this version of `transformers` has is in the table, or there is a reason."""
    assert set(TYPES) - DECODERS.keys() - LEFT_OUT.keys() == set() == DECODERS.keys() & LEFT_OUT.keys()

"""Heads of models that others wrote: the weights are those of their eager twins, proved, and ablated as by hand."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import UserError
from inspection import NotTheKernels, ablate, capture, head_scores
from inspection.inputs import choose_inputs
from inspection.patterns import UNMASKED, Computed
from model.sampling import Sampler
from tests.decoders import DECODERS, STATE_ALONE, WRITTEN_OUT, make_decoder
from tests.inspection.test_capture import call_captured, run_captured

B, T, V, WINDOW = 2, 13, 61, 5
COMPUTE = Computed.kernel
WITHOUT_KERNEL = {*WRITTEN_OUT, *STATE_ALONE}
# Patches of tokens attend too; a call for each half of the values; two texts at once; keys of many tokens.
NOT_ONE_CALL_A_LAYER = {"blt", "diffllama", "prophetnet", "deepseek_v4"}
SLIDING = {"sliding_window": WINDOW}
IN_ONE_LAYER = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWS = {  # types with a sliding window -> what asks for one
    **dict.fromkeys(["mistral", "phi3", "starcoder2"], SLIDING),
    **dict.fromkeys(["gemma3_text", "cohere2", "olmo3"], IN_ONE_LAYER),
    "qwen2": SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
}
CASES = [(name, {}) for name in DECODERS if name not in WITHOUT_KERNEL | NOT_ONE_CALL_A_LAYER] + [*WINDOWS.items()]
QUICK = ["mistral", "gemma3_text", "falcon", "phi", "opt", "mixtral"]
QUICK_OUT = ["bloom", "gpt_oss", "gptj", "gpt_neo", "llama"]
WITH_ATTENTION = [name for name in DECODERS if name not in {*STATE_ALONE, *NOT_ONE_CALL_A_LAYER}]
by_case = pytest.mark.parametrize(
    "name, changes",
    [
        pytest.param(
            name, changes, marks=() if name in QUICK else pytest.mark.long, id=name + "-window" * bool(changes)
        )
        for name, changes in CASES
    ],
)


def twins(name: str, changes: dict) -> tuple[nn.Module, nn.Module]:
    """A model that attends through the kernel, and the same one with attention written out."""
    by_kernel, eager = (make_decoder(name, attn_implementation=way, **changes) for way in ("sdpa", "eager"))
    eager.load_state_dict(by_kernel.state_dict())
    return by_kernel, eager


@by_case
@torch.no_grad()
def test_weights_are_those_of_the_eager_twin_and_a_planted_error_is_found(
    name: str, changes: dict, monkeypatch
) -> None:
    model, eager = twins(name, changes)
    idx = torch.randint(2, V, (B, T))
    att = run_captured(model, idx)
    found = eager(idx, output_attentions=True).attentions
    expected = [weights for weights in found if weights is not None and weights.size(-1) == T]  # not of linear layers
    assert len(att.calls) == len(expected) > 0 and not att.left_out
    for layer, weights in enumerate(expected):
        atol = 3e-5 if name == "dory" else 1e-5  # four rounds of its layers add up their rounding
        torch.testing.assert_close(att.calls[layer].weights(), weights, rtol=0, atol=atol)
    assert max(att.verify().values()).error < 1e-5
    if changes:
        assert not att.pattern(0, 0)[:, WINDOW:, 0].any() or not att.pattern(1, 0)[:, WINDOW:, 0].any()

    honest = att.calls[0]
    monkeypatch.setattr(Computed, "kernel", lambda self, values: COMPUTE(honest, values))
    seen = honest.weights()[:, :1] > 0
    one_more_or_less = seen.clone()
    one_more_or_less[..., T // 2, T // 3] ^= True
    wrong = [{"mask": as_bias(one_more_or_less)}, {"mask": as_bias(seen.triu(-2))}]  # a key, a window
    wrong += [{"scale": 1.05 * (honest.scale or honest.q.size(-1) ** -0.5)}]
    for changed in wrong:
        att.calls[0] = dataclasses.replace(honest, **changed)
        with pytest.raises(NotTheKernels, match="layer 0: "):
            att.verify()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_OUT else pytest.mark.long) for name in WITH_ATTENTION]
)
@torch.no_grad()
def test_weights_that_are_written_out_are_those_that_the_model_returns(name: str) -> None:
    model = make_decoder(name, attn_implementation="eager")
    with capture(model) as att:
        found = model(torch.randint(2, V, (B, T)), output_attentions=True).attentions
    expected = [weights for weights in found if weights is not None and weights.size(-1) == T]
    assert len(att.calls) == len(expected) > 0
    for call, weights in zip(att.calls, expected, strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=0)
    assert all(0 <= proof.least <= proof.most < 1.001 and proof.later == 0 for proof in att.verify().values())


@by_case
def test_ablation_is_the_loss_with_the_output_zeroed_by_hand(name: str, changes: dict, monkeypatch) -> None:
    model = make_decoder(name, attn_implementation="sdpa", **changes)
    idx = torch.randint(2, V, (B, T))
    rises = ablate(model, idx, [(0, 1)])
    scores = head_scores(model, idx)
    kernel, calls = F.scaled_dot_product_attention, []

    def without_head(*args: object, **kwargs: object) -> Tensor:
        output = kernel(*args, **kwargs).clone()
        calls.append(output)
        if len(calls) == 1:
            output[:, 1] = 0
        return output

    def losses() -> Tensor:
        with torch.no_grad():
            logits = model(idx).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), idx[:, 1:], reduction="none").mean(1)

    before = losses()
    torch.testing.assert_close(scores.losses, before, rtol=0, atol=1e-5)
    monkeypatch.setattr(F, "scaled_dot_product_attention", without_head)
    torch.testing.assert_close(rises[:, 0, 1].float(), losses() - before, rtol=0, atol=1e-5)
    assert rises[:, 0, 1].abs().max() > 1e-4 and max(scores.proofs).error < 1e-5


def test_a_model_that_is_not_ours_writes_what_it_finds_likeliest() -> None:
    model = make_decoder("gpt_neo", attn_implementation="eager")
    text = torch.randint(2, V, (7,))
    whole = choose_inputs(model, text, None, (), num_tokens=5, sampler=Sampler(temperature=0)).shown
    assert whole[0, :7].equal(text) and whole.size(1) == 12
    with torch.no_grad():
        assert model(whole).logits[0, 6:-1].argmax(-1).equal(whole[0, 7:])


# What PyTorch's call can express, without a model.


def as_bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))


TRIANGLE = torch.ones(T, T, dtype=torch.bool).tril()
PADDED = TRIANGLE & (torch.arange(T) >= torch.tensor([0, 3])[:, None, None, None])  # the second text begins later
SLOPES = torch.tensor([0.5, 0.25, 0.125])[:, None, None] * (torch.arange(T) - torch.arange(T)[:, None])
WITH_SINK = F.pad(TRIANGLE, (1, 0), value=True)
LAST = torch.ones(T, T).tril()[-4:].bool()
OPTIONS = {  # name -> keys in front, query rows, options of the call, the bias that they mean
    "triangle of the kernel": (0, T, {"is_causal": True}, as_bias(TRIANGLE)),
    "a bias of each head": (0, T, {"attn_mask": SLOPES + as_bias(TRIANGLE).float()}, SLOPES + as_bias(TRIANGLE)),
    "padding, queries that see nothing": (0, T, {"attn_mask": PADDED}, as_bias(PADDED)),
    "the same in numbers": (0, T, {"attn_mask": as_bias(PADDED).float()}, as_bias(PADDED)),
    "the same in the least number": (0, T, {"attn_mask": as_bias(PADDED).float().clamp(min=-3e38)}, as_bias(PADDED)),
    "window": (0, T, {"attn_mask": TRIANGLE.triu(-4)}, as_bias(TRIANGLE.triu(-4))),
    "scale": (0, T, {"is_causal": True, "scale": 0.7}, as_bias(TRIANGLE)),
    "learned sink": (1, T, {"attn_mask": WITH_SINK}, as_bias(WITH_SINK)),
    "fewer queries": (0, 4, {"attn_mask": LAST}, as_bias(LAST)),
    "one query": (0, 1, {}, torch.zeros(1, T)),
}


@pytest.mark.parametrize("num_kv", [1, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_the_kernel_is_seen(option: str, num_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_front, rows, options, bias = OPTIONS[option]
    monkeypatch.setattr("inspection.patterns.BLOCK_SIZE", 5 * B * 3 * T)  # five rows at a time
    q = torch.randn(B, 3, rows, 7)
    k = torch.randn(B, num_kv, T + in_front, 7)
    v = torch.randn(B, num_kv, T + in_front, 5)
    att = call_captured(q, k, v, **options, enable_gqa=num_kv == 1)
    keys = k.repeat_interleave(3 // num_kv, dim=1).double()  # the formula of the kernel, in float64
    scores = options.get("scale", 7**-0.5) * q.double() @ keys.mT
    expected = (scores + bias).softmax(-1).nan_to_num(0.0).float()
    torch.testing.assert_close(att.calls[0].weights(), expected, rtol=0, atol=1e-6)
    for head in range(3):
        torch.testing.assert_close(att.pattern(0, head), expected[:, head], rtol=0, atol=1e-6)
    att.verify()
    call = att.calls[0]
    att.calls[0] = dataclasses.replace(call, q=call.q.roll(1, 1))
    monkeypatch.setattr(Computed, "kernel", lambda self, values: COMPUTE(call, values))
    with pytest.raises(NotTheKernels):
        att.verify()


BUFFER = torch.arange(2 * T) < T  # keys in the first half of a buffer, of which the rest is empty
NO_TEXT = {  # name -> the shapes of queries and keys, and options of the call
    "both directions": ((B, 3, T, 7), (B, 3, T, 7), {}),
    "one key of the future": ((B, 3, T, 7), (B, 3, T, 7), {"attn_mask": TRIANGLE.roll(1, 1)}),
    "a padded source": ((B, 3, T, 7), (B, 3, 2 * T, 7), {"attn_mask": BUFFER.expand(B, 1, T, 2 * T)}),
    "packed heads": ((1, 1, 3, 7), (1, 1, 2 * T, 7), {"attn_mask": BUFFER.expand(1, 1, 1, 2 * T)}),
    "a static cache": ((1, 3, T, 7), (1, 3, 2 * T, 7), {"attn_mask": F.pad(TRIANGLE, (0, T))}),
    "fewer keys": ((1, 3, T, 7), (1, 3, T - 2, 7), {"is_causal": True}),
}


@pytest.mark.parametrize("case", NO_TEXT)
def test_what_is_no_attention_of_a_text_to_its_past_is_left_out(case: str) -> None:
    of_q, of_k, options = NO_TEXT[case]
    att = call_captured(torch.randn(of_q), torch.randn(of_k), **options)
    is_square = of_q == of_k
    assert att.left_out == [UNMASKED if is_square else f"queries {of_q} of keys {of_k}"]
    with pytest.raises(UserError, match=UNMASKED if is_square else r"; others were: queries .* of keys"):
        att.scores()


# Modules that are no model of `transformers`. More are in test_written_out.py.


def test_what_a_model_overwrites_later_is_remembered() -> None:
    q, k, v = torch.randn(3, B, 3, T, 7)
    mask = TRIANGLE.clone()
    att = call_captured(q, k, v, attn_mask=mask)
    before = att.pattern(0, 1)
    for given in (q, k, mask):
        given.fill_(1)
    assert att.pattern(0, 1).equal(before)
    att.verify()


def test_layers_that_differ_cannot_be_compared() -> None:
    class Narrowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
            return F.scaled_dot_product_attention(x[:, :2], x[:, :2], x[:, :2], is_causal=True)

    att = run_captured(Narrowing(), torch.randn(B, 3, T, 7))
    att.verify()
    assert att.pattern(1, 1).shape == (B, T, T)
    with pytest.raises(UserError, match=r"not \[\(2, 3, 13, 13\), \(2, 2, 13, 13\)\]"):
        att.scores()

"""Heads of models that others wrote: the weights are those that they return, and they are proved."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import UserError
from inspection.checkpoints import continued
from model.sampling import Sampler
from tests.decoders import DECODERS, STATE_ALONE, WRITTEN_OUT, make_decoder
from tests.tril.test_capture import call_captured, run_captured
from tril import NotTheKernels, capture
from tril.decoder import find_call
from tril.look import UNMASKED
from tril.weights import Computed

B, T, V, WINDOW = 2, 13, 61, 5
COMPUTE = Computed.output
# Patches of tokens attend too; a call for each half of the values; two texts at once; keys of many tokens.
NOT_ONE_CALL_A_LAYER = {"blt", "diffllama", "prophetnet", "deepseek_v4"}
SLIDING = {"sliding_window": WINDOW}
IN_ONE_LAYER = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWS = {  # types with a sliding window -> what asks for one
    **dict.fromkeys(["mistral", "phi3", "starcoder2"], SLIDING),
    **dict.fromkeys(["gemma3_text", "cohere2", "olmo3"], IN_ONE_LAYER),
    "qwen2": SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
}
CASES = [(name, {}) for name in DECODERS if name not in {*STATE_ALONE, *NOT_ONE_CALL_A_LAYER}] + [*WINDOWS.items()]
QUICK = "mistral gemma3_text falcon phi opt mixtral bloom gpt_oss gptj gpt_neo llama".split()


@pytest.mark.parametrize(
    "name, changes", [pytest.param(*case, marks=[pytest.mark.long] * (case[0] not in QUICK)) for case in CASES]
)
@torch.no_grad()
def test_weights_are_those_that_the_model_returns(name: str, changes: dict) -> None:
    """Of a model that writes them out, to the last bit; and of the same one that attends through the kernel."""
    eager, idx = make_decoder(name, attn_implementation="eager", **changes), torch.randint(2, V, (B, T))
    with capture(eager) as att:
        found = eager(idx, output_attentions=True).attentions
    expected = [weights for weights in found if weights is not None and weights.size(-1) == T]  # not of linear layers
    assert len(att.calls) == len(expected) > 0
    for call, weights in zip(att.calls, expected, strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=0)
    assert all(0 <= proof.least <= proof.most < 1.001 and proof.later == 0 for proof in att.verify().values())
    if name in WRITTEN_OUT:
        return

    by_kernel = make_decoder(name, attn_implementation="sdpa", **changes)
    by_kernel.load_state_dict(eager.state_dict())
    att = run_captured(by_kernel, idx)
    assert len(att.calls) == len(expected) and not att.left_out
    for call, weights in zip(att.calls, expected, strict=True):
        atol = 3e-5 if name == "dory" else 1e-5  # four rounds of its layers add up their rounding
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=atol)
    assert max(att.verify().values()).error < 1e-5
    if changes:
        assert not att.pattern(0, 0)[:, WINDOW:, 0].any() or not att.pattern(1, 0)[:, WINDOW:, 0].any()


def test_a_model_that_is_not_ours_writes_what_it_finds_likeliest() -> None:
    model = make_decoder("gpt_neo", attn_implementation="eager")
    text = torch.randint(2, V, (7,)).tolist()
    whole = torch.tensor([text + continued(find_call(model), text, 5, Sampler(temperature=0))])
    assert whole.size(1) == 12
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
    monkeypatch.setattr("tril.weights.BLOCK_SIZE", 5 * B * 3 * T)  # five rows at a time
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
    att.layers[0] = [dataclasses.replace(call, q=call.q.roll(1, 1))]
    monkeypatch.setattr(Computed, "output", lambda self, values: COMPUTE(call, values))
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
    with pytest.raises(UserError, match=UNMASKED if is_square else r"was seen: queries .* of keys"):
        att.scores()


# Modules that are no model of `transformers`. More are in test_written_out.py.


@pytest.mark.parametrize("is_left", [True, False])
def test_scores_of_padded_texts_are_refused(is_left: bool) -> None:
    seen = torch.ones(B, 1, 1, T, dtype=torch.bool)
    call = partial(call_captured, torch.randn(B, 3, T, 7), torch.randn(B, 3, T, 7))
    assert call(attn_mask=TRIANGLE & seen).scores()["entropy"].shape == (B, 1, 3)
    seen[1, ..., slice(5) if is_left else slice(-5, None)] = False
    att = call(attn_mask=TRIANGLE & seen)
    att.verify()
    with pytest.raises(UserError, match="but no query may see padding: read each text alone"):
        att.scores()


def test_a_head_that_rests_on_one_token_reads_no_padding() -> None:
    weights = torch.zeros(1, 1, T, T, dtype=torch.float16)  # where others underflow
    weights[..., 0] = 1
    with capture(nn.Module()) as att:
        weights @ torch.randn(1, 1, T, 7).half()
    assert att.scores()["sink"].item() == 1


def test_what_a_model_overwrites_later_is_remembered() -> None:
    q, k, v = torch.randn(3, B, 3, T, 7)
    mask = TRIANGLE.clone()
    att = call_captured(q, k, v, attn_mask=mask)
    before = att.pattern(0, 1)
    for given in (q, k, mask):
        given.fill_(1)
    assert att.pattern(0, 1).equal(before)
    att.verify()

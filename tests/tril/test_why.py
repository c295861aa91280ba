"""Why a head looks where it does: parts that sum to scores, planted circuits, and models that cannot be followed."""

import math

import pytest
import torch
from torch import nn

import tril
import tril.why
from tests.conftest import make_gpt

V, T, L, H = 17, 11, 2, 3
IDS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0)).tolist()
NAMES = [str(token) for token in IDS]
FAMILIES = {
    "gpt2": {"n_embd": 15, "bias": True},
    "llama": {"n_embd": 18, "n_kv_head": 1},
    "qwen3": {"n_embd": 18, "n_kv_head": 1},
    "nanochat": {"n_embd": 18},
}


def inspect(family: str, **changes: object) -> tril.Inspection:
    """A model whose weights are large enough for sharp heads, and whose gains and biases are random."""
    model = make_gpt(family=family, **FAMILIES[family] | changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return tril.inspect_heads(model, IDS, NAMES)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_sum_to_the_advantage_of_the_score_of_the_kernel(family: str) -> None:
    found = inspect(family)
    for layer, head, query, key in ((0, 1, 5, 2), (1, 2, 10, 0), (1, 0, 7, 7)):
        why = found.why(layer, head, query, key)
        weights = found.pattern(layer, head)[query, : query + 1].double()
        assert why.weight == pytest.approx(weights[key].item())
        others = torch.arange(query + 1) != key
        rest = weights[others] / weights[others].sum()
        # A difference of scores is the logarithm of the ratio of the weights.
        expected = (rest * (weights[key] / weights[others]).log()).sum().item()
        assert why.advantage == pytest.approx(expected, rel=1e-3, abs=1e-3)
        for side in (why.by_query, why.by_key):
            assert sum(side.values()) == pytest.approx(why.advantage, rel=1e-4, abs=1e-4)
        earlier = {f"0.{number}" for number in range(H)} | {"mlp 0"} if layer else set()
        assert earlier <= why.by_key.keys() and "embedding" in why.by_key
        assert ("position" in why.by_key) == ("bias" in why.by_key) == (family == "gpt2")
        assert not {name for name in why.by_key if name.startswith("1.")}
        q, k = (x[0, head if x.size(1) == H else 0] for x in (found.att.calls[layer].q, found.att.calls[layer].k))
        assert why.score == pytest.approx((q[query] @ k[key]).item() / math.sqrt(q.size(-1)), rel=1e-4, abs=1e-4)


def test_a_part_is_what_the_score_loses_without_its_writer() -> None:
    """Of a gpt2 without norms, where nothing is frozen: a writer whose output is zero takes its part away."""
    model = make_gpt(n_embd=15, n_head=3, bias=True).eval()
    for block in model.blocks:
        block.attention_norm = nn.Identity()
        block.mlp = nn.Linear(15, 15, bias=False)
        nn.init.zeros_(block.mlp.weight)
    before = tril.inspect_heads(model, IDS, NAMES)
    query, key = 9, 4
    part = before.why(1, 1, query, key).by_key["0.2"]
    call = before.att.calls[1]
    q = call.q[0, 1, query]

    def advantage(k: torch.Tensor) -> float:
        scores = (k[0, 1] @ q)[: query + 1] / math.sqrt(q.numel())
        weights = before.pattern(1, 1)[query, : query + 1].clone()
        weights[key] = 0
        return (scores[key] - (weights / weights.sum() * scores).sum()).item()

    with torch.no_grad():
        model.blocks[0].attention.o_proj.weight[:, 10:] = 0
    after = tril.inspect_heads(model, IDS, NAMES).att.calls[1]
    assert part == pytest.approx(advantage(call.k) - advantage(after.k), rel=1e-3, abs=1e-6)
    assert abs(part) > 1e-4


def test_without_tokens_it_is_the_largest_weight_that_is_explained_and_80_columns_say_so() -> None:
    found = inspect("llama")
    why = found.why(1, 1)
    elsewhere = found.pattern(1, 1).tril(-1)
    elsewhere[:, 0] = 0
    assert (why.query, why.key) == divmod(elsewhere.argmax().item(), T)
    lines = repr(why).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith(f"token {why.query} «{NAMES[why.query]}» looks at ")


@pytest.mark.parametrize(
    "place, message",
    [
        ((2, 0, 1, 0), "no head 2.0"),
        ((1, 0, 11, 0), "the text has tokens 0 to 10, and no token 11"),
        ((1, 0, 4, 5), "token 4 sees tokens 0 to 4, and not another token 5"),
        ((1, 0, 0, 0), "token 0 sees tokens 0 to 0, and not another token 0"),
    ],
)
def test_a_pair_that_does_not_exist_is_refused(place: tuple, message: str) -> None:
    with pytest.raises(tril.UserError, match=message):
        inspect("llama").why(*place)


def test_what_cannot_be_followed_is_said_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect("llama")
    monkeypatch.setattr(tril.why, "MULTIPLY", ())  # a gate of an MLP is taken for linear, or for the scale of a norm
    monkeypatch.setattr(tril.why, "NOT_LINEAR", frozenset())
    with pytest.raises(tril.UserError, match="where heads look is known, why is not"):
        found.why(1, 1)


def test_a_writer_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tril.why.Writers.parts

    def fewer(self: tril.why.Writers, layer: int) -> tril.why.Parts:
        writers, *both = parts(self, layer)
        return tril.why.Parts(writers[1:], *(each[1:] for each in both))

    monkeypatch.setattr(tril.why.Writers, "parts", fewer)
    with pytest.raises(tril.UserError, match="a part cannot be followed"):
        inspect("qwen3").why(1, 1)

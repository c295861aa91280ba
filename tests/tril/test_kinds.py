"""A head gets a name where its score stands out from chance: planted heads do, those of random weights do not."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import GPT, GPTConfig
from tests.conftest import make_gpt
from tests.tril.test_capture import run_captured
from tril import capture, head_scores, repeat_probe, terminal
from tril.kinds import Kind, by_kind, kind_of, tag
from tril.metrics import HeadScores

V, PLACES = 211, 113
PLANTED = ("previous", "current", "sink", "induction")
FAMILIES = ("gpt2", "llama", "qwen3", "nanochat")


class PlantedHeads(nn.Module):
    """A decoder whose heads are exactly those of PLANTED; where one has nothing to look at, it attends evenly."""

    def forward(self, idx: Tensor) -> Tensor:
        places = torch.arange(idx.size(1)).expand_as(idx)
        at, is_token = F.one_hot(places, PLACES), F.one_hot(idx, V)
        after = F.pad(is_token, (0, 0, 1, 0))[:, :-1]  # what stands before each key
        queries = [F.one_hot((places - 1).clamp(min=0), PLACES), at, F.one_hot(0 * places, PLACES), is_token]
        keys = [at, at, at, after]
        q, k = (torch.stack([F.pad(x, (0, V - x.size(-1))) for x in each], 1).float() for each in (queries, keys))
        F.scaled_dot_product_attention(50 * q, k, k, is_causal=True, scale=1.0)
        return torch.zeros(*idx.shape, V)


@pytest.mark.parametrize("T", [6, 7, 11, 29, 101])
def test_planted_heads_have_their_names(T: int) -> None:
    text = torch.randperm(V)[None, :T]
    scores = head_scores(PlantedHeads(), text, repeat_probe(torch.arange(V - 1), V - 1, PLACES))
    kinds = [kind_of(scores, (0, head)) for head in range(len(PLANTED))]
    assert [kind.name for kind in kinds] == list(PLANTED)
    assert [kind.score for kind in kinds] == pytest.approx([1] * len(PLANTED), abs=1e-6)


def named(family: str, T: int, seed: int, gain: float) -> Counter:
    """Count the kinds of the 30 heads of a model of random weights, whose queries are so much larger."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(family=family, vocab_size=V, n_layer=3, n_head=10, n_embd=60, context_length=max(T, PLACES)))
    for block in model.blocks:
        block.attention.q_proj.weight.data *= gain
    probe = repeat_probe(torch.arange(V - 1), V - 1, PLACES, num=2)
    scores = head_scores(model, torch.randint(V, (1, T)), probe)
    return Counter(kind_of(scores, (layer, head)).name for layer in range(3) for head in range(10))


@pytest.mark.long
@pytest.mark.parametrize("gain", [1, 100])  # 100: a head looks at a few keys, not at all
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_random_heads_have_no_name(family: str, gain: float) -> None:
    found = sum((named(family, T, seed, gain) for T in (4, 6, 7, 13) for seed in range(2)), Counter())
    assert found.total() == 240 and found.total() - found["other"] <= 0.02 * 240, found


@pytest.mark.long
@pytest.mark.parametrize("T, most", [(4, 0), (5, 0), (6, 0.025), (11, 0.02), (29, 0.02)])
def test_luck_names_two_heads_in_a_hundred_at_most(T: int, most: float) -> None:
    """The worst case: each of 2,000 heads looks at one random key in each row. At T = 6, 1.9 % are expected."""
    weights = torch.randn(1, 2000, T, T).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf)
    q = 1e3 * weights.clamp(min=-1e3)
    att = run_captured(Fixed(q), torch.arange(T)[None])
    assert (att.pattern(0, 0).amax(-1) > 0.999).all()
    scores = head_scores(Fixed(q), torch.arange(T)[None])
    assert sum(kind_of(scores, (0, head)).name != "other" for head in range(2000)) <= most * 2000


class Fixed(nn.Module):
    """A decoder with these scores of queries and keys, (1, H, T, T), whatever it reads."""

    def __init__(self, scores: Tensor, mask: Tensor | None = None):
        super().__init__()
        self.scores, self.mask = scores, mask

    def forward(self, idx: Tensor) -> Tensor:
        keys = torch.eye(idx.size(1)).expand_as(self.scores)
        F.scaled_dot_product_attention(self.scores, keys, keys, self.mask, is_causal=self.mask is None, scale=1.0)
        return torch.zeros(*idx.shape, V)


@pytest.mark.parametrize("family", FAMILIES)
def test_chance_is_the_score_of_a_head_that_attends_evenly(family: str) -> None:
    model, text = make_gpt(family=family, n_embd=18, n_kv_head=1, bias=None), torch.randint(13, (3, 11))
    for block in model.blocks:
        for parameter in block.attention.q_proj.parameters():
            nn.init.zeros_(parameter)
    scores = head_scores(model, text, repeat_probe(torch.arange(16), 16, 11))
    assert scores.chance.keys() == scores.mean.keys() - {"induction_control", "duplicate_control"}
    for name, chance in scores.chance.items():
        torch.testing.assert_close(chance, scores.mean[name], rtol=0, atol=1e-6)


def test_chance_is_that_of_what_a_mask_lets_a_head_see() -> None:
    """A window of three keys for the first head, and of one, with a bias that is no mask, for the second."""
    T = 7
    seen = torch.stack([torch.ones(T, T).tril().triu(1 - width).bool() for width in (3, 1)])
    mask = torch.where(seen, torch.linspace(-2, 2, T), -math.inf)[None]
    with capture(model := Fixed(torch.randn(1, 2, T, T), mask)) as att:
        model(torch.arange(T)[None])
    found = att.scores_and_chance()[1]
    assert found["previous"][0, 0].tolist() == pytest.approx([1 / 3, 0])
    assert found["current"][0, 0].tolist() == pytest.approx([(1 / 2 + 5 / 3) / 6, 1])
    assert found["sink"][0, 0].tolist() == pytest.approx([(1 / 2 + 1 / 3) / 6, 0])
    assert kind_of(head_scores(model, torch.arange(T)[None]), (0, 1)).name == "other"  # it can look at itself only


def test_a_head_has_the_first_kind_that_stands_out() -> None:
    """An induction head rests on the first token where nothing repeats (Guo et al. 2024)."""
    rows = {
        "sink": [0.9, 0.1, 0.3, 0.9, 0.1, 0.3],
        "previous": [0.2, 0.1, 0.3, 0.0, 0.1, 0.2],
        "induction": [0.36, 0.0, 0.5, torch.nan, 0.19, 0.0],
        "induction_control": [0.1, 0.0, 0.45, 0.0, 0.0, 0.0],
        "entropy": [0.0, 0.9, 0.0, 0.0, 0.1, 0.96],
    }
    samples = {name: torch.tensor([[values]]).double() for name, values in rows.items()}
    chance = {name: torch.full((1, 6), 0.1).double() for name in rows}
    chance["sink"][0, 5] = 0.2  # so 0.3 is not enough
    queries = dict.fromkeys(("sink", "previous", "induction"), 101)
    scores = HeadScores(samples, torch.zeros(1), [], [], chance, queries)
    heads = [(0, head) for head in range(6)]
    groups = {kind: [head for (_, head), _ in group] for kind, group in by_kind(scores, heads).items()}
    assert groups == {"induction": [0], "previous": [2], "sink": [3], "other": [4, 1, 5]}
    lines = terminal.in_words(scores, heads).splitlines()
    assert [line.strip() for line in lines[1:]] == [
        "1  what followed the same token before: 0.0 .36 (.10)",
        "1  the token before: 0.2 .30 (.10)",
        "1  the first token of the text: 0.3 .90 (.10)",
        "3  nowhere in particular",
    ]
    assert [tag(kind_of(scores, head)) for head in heads] == ["ind .36", "", "prev .30", "sink .90", "", ""]
    few = HeadScores(samples, torch.zeros(1), [], [], chance, {"sink": 2})
    assert kind_of(few, (0, 0)) == Kind("other", 1.0, 0.0)  # two rows are too few for a name

"""Generation: the cache changes nothing, the filters keep what they say, and the same seed writes the same text."""

from functools import partial

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT, ModelError
from model.sampling import keep_min_p, keep_top_k, keep_top_p, next_token
from tests.conftest import make_gpt

T, V = 11, 17
ROTARY = ("llama", "qwen3", "nanochat")


def make_shape(changes: dict) -> GPT:
    """A tiny model in float64, where no rounding decides between two tokens."""
    return make_gpt(n_embd=18, **changes).double().eval()  # rotary positions need an even width of three heads


@pytest.mark.parametrize("n_kv_head", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 10, 11, 12, 25])
def test_cache_writes_the_same_text_also_past_the_context(length: int, n_kv_head: int) -> None:
    model, idx = make_gpt(n_kv_head=n_kv_head).double(), torch.randint(V, (3, length))
    greedy = [model.generate(idx, 3 * T, temperature=0, use_cache=use_cache) for use_cache in (True, False)]
    assert greedy[0].shape == (3, length + 3 * T)
    assert torch.equal(greedy[0][:, :length], idx)
    assert torch.equal(*greedy)


def test_a_single_layer_has_a_cache_too() -> None:
    model, idx = make_gpt(n_layer=1).double(), torch.randint(V, (2, 3))
    assert torch.equal(*(model.generate(idx, 9, temperature=0, use_cache=use_cache) for use_cache in (True, False)))


FAMILIES = pytest.mark.parametrize("changes", [{}, {"n_kv_head": 1}, *({"family": f} for f in ROTARY)], ids=str)


@FAMILIES
@pytest.mark.parametrize("lengths", [(3, 1, 7), (11, 2, 11, 5), (25, 1, 10, 12)])
def test_each_prompt_gets_the_tokens_that_it_gets_alone(changes: dict, lengths: tuple[int, ...]) -> None:
    model, prompts = make_shape(changes), [torch.randint(V, (length,)) for length in lengths]
    alone = [model.generate(prompt[None], 3 * T, temperature=0)[0] for prompt in prompts]
    for use_cache in (True, False):
        together = model.generate(prompts, 3 * T, temperature=0, use_cache=use_cache)
        for text, expected in zip(together, alone, strict=True):
            assert text.tolist() == expected.tolist()


@FAMILIES
def test_prompts_of_many_lengths_have_the_logits_they_have_alone(changes: dict) -> None:
    model, prompts, seen = make_shape(changes), [torch.randint(V, (length,)) for length in (2, 9, 5)], []
    logits = model.logits
    model.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    texts = model.generate(prompts, 2, seed=0)
    model.logits = logits
    for row, text in enumerate(texts):
        expected = model(text[None, :-1])[0, -2:]
        torch.testing.assert_close(torch.stack([step[row] for step in seen]), expected, rtol=1e-12, atol=1e-12)


def test_prompts_of_one_length_are_read_together_and_every_step_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = make_gpt(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, *caches: shapes.append(tuple(idx.shape)) or hidden(idx, *caches))
    model.generate([torch.randint(V, (length,)) for length in (4, 10, 4)], 4, temperature=0)
    assert shapes == [(2, 3), (1, 9), (3, 1), (3, 1), (1, 5), (3, 1), (3, 1)]  # the second is full, and read again


def test_a_seed_draws_for_prompts_of_many_lengths_too() -> None:
    model, prompts = make_gpt(), [torch.randint(V, (length,)) for length in (3, 1, 7)]
    first, second, other, slow = (
        torch.cat(model.generate(prompts, 30, seed=seed, use_cache=use_cache))
        for seed, use_cache in ((7, True), (7, True), (8, True), (7, False))
    )
    assert torch.equal(first, second) and torch.equal(first, slow)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("changes", [{}, {"family": "qwen3"}], ids=str)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_a_compiled_step_is_compiled_once_and_writes_the_same(
    monkeypatch: pytest.MonkeyPatch, changes: dict, backend: str
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model, prompts = make_shape(changes), [torch.randint(V, (length,)) for length in (3, 1, 7)]
    for seed in (1, 2):
        options = {"temperature": 0.9, "top_k": 13, "top_p": 0.9, "min_p": 0.01, "seed": seed}
        texts, expected = (model.generate(prompts, 2 * T, **options, compile=compile) for compile in (True, False))
        assert torch.equal(torch.cat(texts), torch.cat(expected))
    idx = torch.randint(V, (3, 5))  # prompts of one length have the same step
    assert torch.equal(*(model.generate(idx, 2 * T, **options, compile=compile) for compile in (True, False)))


def test_samples_are_drawn_at_temperature_one_unless_told_otherwise() -> None:
    model, idx = make_gpt(), torch.randint(V, (5, 3))
    assert torch.equal(model.generate(idx, 9, seed=7), model.generate(idx, 9, temperature=1.0, seed=7))


def test_greedy_takes_the_likeliest_token_of_the_full_context() -> None:
    model, idx = make_gpt().eval(), torch.randint(V, (2, T))
    assert torch.equal(model.generate(idx, 1, temperature=0)[:, -1], model(idx)[:, -1].argmax(-1))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_full_window_drops_its_older_half(monkeypatch: pytest.MonkeyPatch, use_cache: bool) -> None:
    model, seen = make_gpt(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, *caches: seen.append(idx[0].tolist()) or hidden(idx, *caches))
    text = model.generate(torch.randint(V, (1, 25)), 8, temperature=0, use_cache=use_cache)[0].tolist()
    if use_cache:  # all but the last token are read at once
        assert seen[:2] == [text[14:24], text[24:25]]  # a long prompt: its last 11 tokens
        assert seen[2:4] == [text[20:25], text[25:26]]  # 12 do not fit: the newer half, of 6
        assert seen[4:9] == [text[at : at + 1] for at in range(26, 31)]
        assert seen[9:] == [text[26:31], text[31:32]]  # full again
    else:
        assert seen[:3] == [text[14:25], text[20:26], text[20:27]]
        assert seen[7] == text[26:32]


def test_same_seed_same_text() -> None:
    model, idx = make_gpt(), torch.randint(V, (2, 3))
    first, second, other = (model.generate(idx, 30, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    model.generate(idx, 5, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)  # a seeded call leaves the global generator alone


def test_generation_leaves_the_mode_of_the_model_alone() -> None:
    model = make_gpt()
    model.train().generate(torch.zeros(1, 1, dtype=torch.long), 2)
    assert model.training
    model.eval().generate(torch.zeros(1, 1, dtype=torch.long), 2)
    assert not model.training


LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


@pytest.mark.parametrize(
    "kept, expected",
    [
        (keep_top_k(LOGITS, 2), [True, True, False, False]),
        (keep_top_k(LOGITS, 99), [True, True, True, True]),
        (keep_top_p(LOGITS, 0.5), [True, True, False, False]),
        (keep_top_p(torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log(), 0.5), [True, False, False, False]),
        (keep_top_p(LOGITS, 0.05), [True, False, False, False]),
        (keep_top_p(LOGITS.flip(-1), 0.71), [False, True, True, True]),
        (keep_min_p(LOGITS, 0.45), [True, True, True, False]),
    ],
)
def test_filters_worked_out_by_hand(kept: torch.Tensor, expected: list[bool]) -> None:
    assert kept.isfinite()[0].tolist() == expected


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 20), st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.1, 3), st.integers(0, 2**32))
def test_only_tokens_that_every_filter_keeps_are_chosen(k: int, p: float, m: float, temperature: float, s: int) -> None:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(s))
    noise = torch.empty(5, V).exponential_(generator=torch.Generator().manual_seed(s))
    token = next_token(logits, noise, temperature, k, p, m)
    scaled = keep_top_k(logits / temperature, k)
    scaled = keep_min_p(keep_top_p(scaled, p), m)
    assert token.shape == (5, 1)
    assert scaled.gather(1, token).isfinite().all()


def test_samples_follow_the_probabilities() -> None:
    logits = LOGITS.expand(20_000, 4)
    noise = torch.empty(20_000, 4).exponential_(generator=torch.Generator().manual_seed(0))
    tokens = next_token(logits, noise, 1.0)
    expected = torch.multinomial(logits.exp(), 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(tokens, expected)
    share = tokens.flatten().bincount(minlength=4) / len(tokens)
    torch.testing.assert_close(share, LOGITS[0].exp(), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature must be at least 0 and finite, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"min_p": 0.0}, "min_p must be above 0 and at most 1, got 0.0"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_gpt().generate(torch.zeros(1, 1, dtype=torch.long), 1, **options)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ModelError, match="the prompt is empty"):
        make_gpt().generate(torch.zeros(1, 0, dtype=torch.long), 1)


def test_prompts_of_many_lengths_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        longer, shorter = make_gpt().generate([torch.arange(5), torch.arange(3)], 4, seed=0)
    assert (len(longer), len(shorter)) == (9, 7)


def test_a_cache_counts_also_where_activations_are_computed_again() -> None:
    model, idx = make_gpt().eval(), torch.arange(7)[None]
    model.activation_checkpointing = True
    caches = model.new_cache(1, 11)
    chunks = [model.hidden(idx[:, :4], caches), model.hidden(idx[:, 4:], caches)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), model.hidden(idx))

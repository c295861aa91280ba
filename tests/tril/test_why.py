"""Why a head looks there: the parts of a score are what formulas, written out here, make of what was written."""

import itertools
import math
import zlib
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from errors import UserError
from model import GPT
from tests.conftest import make_gpt
from tests.tril.zoo import Decoder, Layer, attend, masked
from tril import __main__ as command
from tril import inspect_heads, why
from tril.look import look

IDS = [2, 3, 5, 7, 11, 13, 2]
T, L, H, V = 7, 3, 6, 17
FAMILIES = {"gpt2": {"n_embd": 30}, **dict.fromkeys(("llama", "qwen3", "nanochat"), {"n_embd": 36})}


def make(family: str, **changes: object) -> GPT:
    changes = {"n_layer": L, "n_head": H, "n_kv_head": 2, "bias": None, **FAMILIES[family], **changes}
    return make_gpt(family=family, **changes).eval()


def written(model: GPT, idx: Tensor, num_layers: int) -> dict[str, Tensor]:
    """Return what each part of a model of ours writes to the residual stream, (T, C), as its first modules say it."""
    found = {"bias": torch.zeros(model.config.n_embd)}
    hooks = []

    def note(module: nn.Module, name: str) -> None:
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            found[name] = output[0]

        hooks.append(module.register_forward_hook(hook))

    note(model.embedding_norm or model.token_embedding, "embedding")
    for layer, block in enumerate(model.blocks[:num_layers]):
        note(block.attention.attend, f"heads {layer}")
        note(block.mlp, f"mlp {layer}")
    model(idx)
    for hook in hooks:
        hook.remove()
    if model.position_embedding is not None:
        found["position"] = model.position_embedding.weight[:T]
    for layer, block in enumerate(model.blocks[:num_layers]):
        o_proj = block.attention.o_proj
        columns = o_proj.weight.chunk(H, dim=1)
        for head, output in enumerate(found.pop(f"heads {layer}")):
            found[f"{layer}.{head}"] = output @ columns[head].T
        for module in (o_proj, block.mlp.down_proj):
            if module.bias is not None:
                found["bias"] = found["bias"] + module.bias
        if block.mlp.down_proj.bias is not None:
            found[f"mlp {layer}"] = found[f"mlp {layer}"] - block.mlp.down_proj.bias
    return found


def through(norm: nn.Module | None, whole: Tensor, part: Tensor, with_bias: bool) -> Tensor:
    """Return what a norm makes of a part, with the scale that it has for the whole."""
    if norm is None:
        return part
    if isinstance(norm, nn.LayerNorm):
        whole, part = (x - x.mean(-1, keepdim=True) for x in (whole, part))
    part = part / (whole.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    part = part if norm.weight is None else part * norm.weight
    return part + norm.bias if with_bias and getattr(norm, "bias", None) is not None else part


def by_hand(model: GPT, layer: int, side: str, whole: Tensor, part: Tensor, with_bias: bool) -> Tensor:
    """Return what a writer has given to queries ("q") or keys ("k"), (heads, T, D)."""
    block = model.blocks[layer]
    projection = getattr(block.attention, f"{side}_proj")

    def project(x: Tensor, with_bias: bool) -> Tensor:
        x = x @ projection.weight.T
        x = x + projection.bias if with_bias and projection.bias is not None else x
        return block.attention.split_heads(x[None])[0]

    x = project(through(block.attention_norm, whole, part, with_bias), with_bias)
    of_whole = project(through(block.attention_norm, whole, whole, True), True)
    x = through(getattr(block.attention, f"{side}_norm"), of_whole, x, with_bias)
    return x if model.rotary is None else model.rotary(x[None], slice(T))[0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parts_are_those_of_the_formulas_and_sum_to_the_score_of_the_kernel(family: str) -> None:
    model, idx = make(family).double(), torch.tensor([IDS])
    found = inspect_heads(model, IDS)
    for layer in range(L):
        parts = {name: x.expand(T, -1) for name, x in written(model, idx, layer).items()}
        whole = sum(parts.values())
        q, k = ({n: by_hand(model, layer, s, whole, x, n == "bias") for n, x in parts.items()} for s in "qk")
        names, of_queries, of_keys = found.writers.parts(layer)
        assert {*names} | {"bias"} == {*parts}
        for place, name in enumerate(names):
            torch.testing.assert_close(of_queries[place], q[name], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(of_keys[place], k[name], rtol=1e-9, atol=1e-9)
        for head, query in itertools.product((0, 4), (1, 3, T - 1)):
            mine = head // 3  # of two heads of keys
            D = model.config.head_dim
            row = sum(q.values())[head, query] @ sum(k.values())[mine, : query + 1].T / math.sqrt(D)
            for key in range(query + 1):
                answer = found.why(layer, head, query, key)
                others = row.masked_fill(torch.arange(query + 1) == key, -torch.inf).softmax(0)
                assert answer.score == pytest.approx(row[key].item(), abs=1e-9)
                assert answer.weight == pytest.approx(row.softmax(0)[key].item(), abs=1e-9)
                assert answer.advantage == pytest.approx((row[key] - others @ row).item(), abs=1e-9)
                for side in (answer.by_query, answer.by_key):
                    assert sum(side.values()) == pytest.approx(answer.advantage, abs=1e-9)
                for name, part in answer.by_key.items():
                    scores = sum(q.values())[head, query] @ k[name][mine, : query + 1].T / math.sqrt(D)
                    assert part == pytest.approx((scores[key] - others @ scores).item(), abs=1e-9)
                for name, part in answer.by_query.items():
                    scores = q[name][head, query] @ sum(k.values())[mine, : query + 1].T / math.sqrt(D)
                    assert part == pytest.approx((scores[key] - others @ scores).item(), abs=1e-9)
                weights = found.pattern(layer, head)[query]
                ratio = (weights[key] / weights[0]).log().item()  # softmax feels differences
                assert answer.score - found.why(layer, head, query, 0).score == pytest.approx(ratio, abs=1e-9)


def test_a_part_is_what_the_score_loses_without_its_writer() -> None:
    """Of a gpt2 without norms, where nothing is frozen: a writer whose output is zero takes its part away."""
    model = make("gpt2", n_layer=2, n_head=3, n_kv_head=3, n_embd=15, bias=True).eval()
    for block in model.blocks:
        block.attention_norm = nn.Identity()
        block.mlp = nn.Linear(15, 15, bias=False)
        nn.init.zeros_(block.mlp.weight)
    before = inspect_heads(model, IDS)
    query, key = 5, 2
    part = before.why(1, 1, query, key).by_key["0.2"]
    call = before.att.calls[1]
    q = call.q[0, 1, query]

    def advantage(k: Tensor) -> float:
        scores = (k[0, 1] @ q)[: query + 1] / math.sqrt(q.numel())
        weights = before.pattern(1, 1)[query, : query + 1].clone()
        weights[key] = 0
        return (scores[key] - (weights / weights.sum() * scores).sum()).item()

    with torch.no_grad():
        model.blocks[0].attention.o_proj.weight[:, 10:] = 0
    after = inspect_heads(model, IDS).att.calls[1]
    assert part == pytest.approx(advantage(call.k) - advantage(after.k), rel=1e-3, abs=1e-6)
    assert abs(part) > 1e-4


SIZES = {"vocab_size": V, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
THEIRS = {
    "gpt2": transformers.GPT2Config(vocab_size=V, n_embd=24, n_layer=3, n_head=6, bos_token_id=0, eos_token_id=0),
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=10),
    "nanochat": transformers.NanoChatConfig(**SIZES),
    "gpt_neox, whose MLP stands beside the heads": transformers.GPTNeoXConfig(**SIZES),
    "gemma3, normed before and behind": transformers.Gemma3TextConfig(**SIZES, head_dim=10),
}


@pytest.mark.parametrize("name", THEIRS)
def test_models_of_transformers_are_followed_too(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(THEIRS[name], attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    found = inspect_heads(model, IDS)
    names, *parts = found.writers.parts(2)
    heads = {f"{layer}.{head}" for layer in range(2) for head in range(6)}
    assert (
        heads | {"embedding", "mlp 0", "mlp 1"}
        <= {*names}
        <= heads | {"embedding", "position", "bias", "mlp 0", "mlp 1"}
    )
    assert ("position" in names) == (name == "gpt2")
    for mine, theirs in zip(parts, (found.att.calls[2].q, found.att.calls[2].k), strict=True):
        torch.testing.assert_close(mine.sum(0), theirs[0], rtol=0, atol=2e-5)
    answer = found.why(2, 5, 6, 4)
    assert sum(answer.by_key.values()) == pytest.approx(answer.advantage, abs=1e-3)


def test_a_trace_leaves_no_trace() -> None:
    model, idx = make("qwen3").train(), torch.tensor([IDS])
    before = look(model, idx, positions=slice(None))[1]
    writers, _ = look(model, idx, kind=why.Writers)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(look(model, idx, positions=slice(None))[1], before)
    again = look(model, idx, kind=why.Writers)[0].parts(2)[1]
    assert torch.equal(writers.parts(2)[1], again)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_bfloat16_is_followed_where_it_would_train_by_the_formula(family: str) -> None:
    """Its layers look whether a gradient is wanted, and would leave the kernel."""
    found = inspect_heads(make(family).bfloat16(), IDS)
    assert found.att.calls[2].q.dtype == torch.bfloat16
    answer = found.why(2, 5, 6, 4)
    assert sum(answer.by_key.values()) == pytest.approx(
        answer.advantage, abs=0.1 * max(map(abs, answer.by_key.values()))
    )


def test_a_score_as_small_as_its_rounding_is_followed() -> None:
    """In bfloat16 one writer's part differs from such a score by more than a tenth."""
    for first in (4, 9):
        assert "why" in inspect_heads(make("qwen3").bfloat16(), [first, 3]).page_data().stored


def test_without_numbers_it_is_the_place_where_a_head_looks_most() -> None:
    found = inspect_heads(make("llama"), IDS)
    weights = found.pattern(1, 4).tril(-1)
    weights[:, 0] = 0
    query, key = divmod(weights.argmax().item(), T)
    assert found.why(1, 4) == found.why(1, 4, query, key) == found.why(-2, 4, query)
    text = str(found.why(1, 4))
    assert text.startswith(f"token {query} «{found.labels[query]}» looks at {key} «{found.labels[key]}»: weight 0.")
    assert max(map(len, text.splitlines())) <= 80 and " 3 others " in text
    assert inspect_heads(make("llama"), [3, 5]).why(1, 4)[:2] == (1, 0)  # there is nothing else
    long = inspect_heads(make("llama", context_length=41), list(IDS) * 5)
    assert all(long.why(*head).query >= 5 * T // 8 for head in long.heads)  # those before have few keys


def test_hard_attention_has_reasons_too() -> None:
    """A head may look at one key alone, and each other have a weight of exactly zero."""
    model = make("gpt2")
    model.blocks[1].attention.q_proj.weight.data *= 1e4
    found = inspect_heads(model, IDS)
    key = found.pattern(1, 4)[5].argmax().item()
    assert found.pattern(1, 4)[5].count_nonzero() == 1 and found.why(1, 4, 5, key).advantage > 100
    assert found.why(1, 4, 5, (key + 1) % 6).advantage < -100


def test_what_is_not_seen_is_refused() -> None:
    found = inspect_heads(make("llama"), IDS)
    for pair, words in {
        (5, 6): "token 5 sees tokens 0 to 5, not 6",
        (5, -1): "token 5 sees tokens 0 to 5, not -1",
        (0, 0): "token 0 sees itself alone",
        (7, 0): "the text has tokens 0 to 6, and no token 7",
        (-1, 0): "the text has tokens 0 to 6, and no token -1",
    }.items():
        with pytest.raises(UserError, match=words):
            found.why(1, 4, *pair)
    with pytest.raises(UserError, match="there is no head 3.0"):
        found.why(3, 0, 5, 4)


def test_the_command_line_asks_for_heads_a_query_and_a_key(run, monkeypatch) -> None:
    monkeypatch.setattr(command, "make_model", lambda _: make("llama"))
    words = ["heads", "a.py:b", "--ids", " ".join(map(str, IDS)), "--why"]
    torch.manual_seed(0)
    found = inspect_heads(make("llama"), IDS)
    for asked, heads in {"1.4 5 3": [4], "1.* 5 3": range(H)}.items():
        torch.manual_seed(0)
        out = run(command, *words, *asked.split()).ok().out
        expected = [f"\nhead 1.{head}\n{found.why(1, head, 5, 3)}\n" for head in heads]
        assert out.endswith("".join(expected)) and max(map(len, out.splitlines())) <= 80
    run(command, *words, "1.4", 3, 5).refused("token 3 sees tokens 0 to 3, not 5")
    for asked in ("1.4 5 b", "1.4 5 -1", "1.4 5 3 1"):
        run(command, *words, *asked.split()).refused("--why takes a head, and perhaps the numbers of a query and a key")


def windowed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Attend with a bias for distance, as ALiBi, and to three keys alone."""
    distances = (torch.arange(q.size(2))[:, None] - torch.arange(q.size(2))).double()
    mask = masked(-0.7 * distances).masked_fill(distances > 2, -torch.inf).to(q)
    output = F.scaled_dot_product_attention(q, k, v, mask, scale=0.11)
    return output, (0.11 * q @ k.mT + mask).softmax(-1)


def test_a_bias_of_the_mask_is_a_part_and_what_it_hides_is_not_seen() -> None:
    found = inspect_heads(Decoder(Layer(windowed), Layer(windowed)).double(), IDS)
    answer = found.why(1, 2, 5, 3)
    weights = found.pattern(1, 2)[5]
    others = weights.index_fill(0, torch.tensor([3]), 0.0)
    assert answer.by_key["mask"] == answer.by_query["mask"]
    distances = torch.arange(5, -2, -1).double()
    assert answer.by_key["mask"] == pytest.approx((-0.7 * (2 - others @ distances / others.sum())).item())
    assert sum(answer.by_query.values()) == pytest.approx(sum(answer.by_key.values()))
    with pytest.raises(UserError, match="token 5 sees tokens 3 to 5, not 2"):
        found.why(1, 2, 5, 2)


class Listed(nn.Module):
    """Heads in a list, with a call each, and a stream that is changed in place: (B, T, 39) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out_proj = nn.ModuleList(nn.Linear(39, 39) for _ in range(3)), nn.Linear(39, 39)

    def forward(self, x: Tensor) -> Tensor:
        heads = [F.scaled_dot_product_attention(*head(x).split(13, -1), is_causal=True) for head in self.heads]
        heads[0].mul_(2)
        x += self.out_proj(torch.cat(heads, -1))
        return x


def test_heads_with_a_call_each_are_told_apart_and_a_stream_may_be_changed_in_place() -> None:
    model = Decoder(Listed(), Listed(), first=lambda x: F.relu_(x)).double()
    found = inspect_heads(model, IDS)
    answer = found.why(1, 2, 5, 3)
    assert {*answer.by_key} == {"embedding", "position", "bias", "mlp -1", "0.0", "0.1", "0.2"}
    zeroed = replace(found, edits={(0, 1): torch.zeros_like}).why(1, 2, 5, 3)
    assert zeroed.by_key["0.1"] == 0 != answer.by_key["0.1"]
    assert sum(answer.by_query.values()) == pytest.approx(answer.advantage)


@pytest.mark.parametrize(
    "first",
    [
        lambda x: x / x.norm(),  # one number
        lambda x: F.relu(x - x.max(-1, keepdim=True).values),  # and where it is
        lambda x: F.relu(x + (x > 0)),
        torch.expm1,
    ],
)
def test_a_function_may_return_one_number_or_a_pair_and_read_truth_values(first) -> None:
    model = Decoder(Listed(), Listed(), first=first).double()
    answer = inspect_heads(model, IDS).why(1, 2, 5, 3)
    assert sum(answer.by_query.values()) == pytest.approx(answer.advantage)


class OneHot(nn.Module):
    """A decoder without an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Decoder(Layer(attend()), Layer(attend()))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.one_hot(ids, 39).float()
        for layer in self.inside.layers:
            layer.attend = lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, is_causal=True), None)
            x = layer(x)
        return self.inside.head(x)


def swapped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q = F.softsign(q)  # which is taken for linear
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), None


@pytest.mark.parametrize(
    "model, words",
    [
        (
            lambda: Decoder(Layer(attend()), Layer(attend())),
            "it needs F.scaled_dot_product_attention of",
        ),
        (OneHot, "it needs F.scaled_dot_product_attention of what the embedding writes"),
        (lambda: Decoder(Layer(swapped), Layer(swapped)), "what .* head 1.2 are made of cannot be followed"),
    ],
)
def test_where_it_cannot_be_followed_a_sentence_says_what_is_known(model, words: str, tmp_path) -> None:
    found = inspect_heads(model(), IDS)
    assert found.pattern(1, 2).shape == (T, T)
    with pytest.raises(UserError, match=f"where heads look is known, why is not: .*{words}"):
        found.why(1, 2, 5, 4)
    described = found.page_data()
    assert "why" not in described.stored and "why is not" in described.texts["unexplained"]


@pytest.mark.parametrize("missing", ["gelu", "tanh"])
def test_what_is_taken_for_linear_and_is_not_breaks_the_sum(missing: str, monkeypatch) -> None:
    monkeypatch.setattr(why.Writers, "not_linear", why.NOT_LINEAR - {missing})
    found = inspect_heads(make("gpt2"), IDS)
    if missing == "tanh":  # ours has none
        assert found.why(2, 5, 6, 4)
        return
    with pytest.raises(UserError, match="cannot be followed"):
        found.why(2, 5, 6, 4)


def test_a_changed_head_writes_nothing() -> None:
    model = make("llama")
    found = replace(inspect_heads(model, IDS), edits={(0, 4): torch.zeros_like})
    answer = found.why(1, 4, 5, 4)
    assert answer.by_key["0.4"] == answer.by_query["0.4"] == 0 != answer.by_key["0.5"]


def test_the_page_has_the_parts_of_the_largest_weights(monkeypatch) -> None:
    found = inspect_heads(make("gpt2").double(), IDS, heads=["2.5", "0.1", "1.*"])
    described = found.page_data()
    numbers = np.frombuffer(zlib.decompress(b64decode(described.stored["why"])), "<i4").reshape(
        22, len(found.heads), T, 3
    )
    names = described.texts["writers"]
    for place, head in enumerate(found.heads):
        for query in range(1, T):
            keys = numbers[0, place, query]
            assert found.pattern(*head)[query].topk(3).values.tolist() == [found.pattern(*head)[query, i] for i in keys]
            for n, key in enumerate(keys.tolist()):
                if key > query:
                    assert query == 1
                    continue
                answer = found.why(*head, query, key)
                assert numbers[1, place, query, n] == round(100 * answer.advantage)
                for first, side in ((2, answer.by_query), (12, answer.by_key)):
                    largest = sorted(side, key=lambda name: -abs(side[name]))[:5]
                    shown = [names[i] for i in numbers[first : first + len(largest), place, query, n]]
                    assert shown == largest
                    parts = numbers[first + 5 : first + 10, place, query, n]
                    assert np.abs(parts[: len(largest)] - [100 * side[name] for name in largest]).max() <= 0.5 + 1e-9
                    assert not parts[len(largest) :].any()
    monkeypatch.setattr(why, "CPU_FLOPS", 1)
    assert "too much to compute" in replace(found).page_data().texts["unexplained"]

"""inspect_attention.py and inspect_heads on models of others: their files, modules, texts and tokenizers; refusals."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import inspect_attention
import inspection
from errors import UserError
from inspection.checkpoints import load_decoder
from model import GPT
from model.attention import make_causal_mask
from tests.conftest import make_gpt
from tests.decoders import make_decoder
from tests.model.test_huggingface import save_foreign
from tests.tril.test_page import data_of
from tril import capture, inspect_heads
from tril.causality import check_causality

disable_progress_bar()
V, T = 61, 13
TEXT, IDS = "ABCDEFABCDEF", [32, 33, 34, 35, 36, 37] * 2


class Book(nn.Module):
    """A decoder as books write it: PyTorch's own layers, an encoder that is looked at, no names that are known."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(V, 21), nn.Embedding(97, 21), nn.Linear(21, V)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(21, 3, 31, 0.1, batch_first=True) for _ in range(2))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tokens(idx) + self.places.weight[: idx.size(1)]
        for layer in self.layers:
            x = layer(x, ~make_causal_mask(idx.size(1)))
        return self.out(x)


def write_tokenizer(directory: Path) -> None:
    """A token for each of sixty characters."""
    vocabulary = {chr(33 + number): number for number in range(60)} | {"<unk>": 60}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    """A directory of a type that is none of our families."""
    directory = tmp_path / "mistral"
    make_decoder("mistral").save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.mark.long
def test_a_directory_of_another_type_is_inspected(run, mistral: Path, tmp_path: Path) -> None:
    outputs = [word for end in ("html", "png", "svg", "npz") for word in ("-o", tmp_path / f"a.{end}")]
    words = ["--text", TEXT, "--heads", "1.*", "0.2", "--ablate", "mean"]
    result = run(inspect_attention, mistral, *words, *outputs).ok()
    assert max(map(len, result.out.splitlines())) <= 80 + len(str(tmp_path))
    assert result.out.startswith(
        "text:   12 tokens\nprobe:  8 x [start, 30 random tokens of the vocabulary, the same a"
    )
    assert "model:  mistral, loss " in result.out and "head 1.1, where it looks: a line is a query" in result.out
    model = make_decoder("mistral", attn_implementation="sdpa")
    with capture(model) as att, torch.no_grad():
        model(torch.tensor([IDS]))
    assert data_of(tmp_path / "a.html")["heads"] == ["1.0", "1.1", "1.2", "0.2"]
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["heads"].tolist() == [[1, 0], [1, 1], [1, 2], [0, 2]] and arrays["tokens"].tolist() == list(TEXT)
        assert np.abs(arrays["weights"][1] - att.pattern(1, 1)[0].numpy()).max() < 1e-6
        assert arrays["ablation"].shape == (2, 3) and arrays["losses"].shape == (1,)
    in_python = inspection.inspect_heads(mistral, TEXT, heads=["1.*", "0.2"], ablate="mean")
    assert in_python.table() in result.out
    assert torch.equal(in_python.pattern(1, 1), att.pattern(1, 1)[0])


def test_a_long_text_is_cut_and_an_old_tokenizer_is_read(run, tmp_path: Path) -> None:
    vocabulary = {chr(33 + number): number for number in range(59)} | {"<|endoftext|>": 59}
    make_decoder("opt").save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    result = run(inspect_attention, tmp_path, "--text", 20 * TEXT)
    assert result.exit_code == 0 and "text:   the first 97 of 240 tokens\n" in result.out, result.err


def test_a_module_a_text_and_labels_are_enough(tmp_path: Path) -> None:
    """A module that nobody knows, and ids; then a tokenizer of `transformers`; then our own model."""
    found = inspect_heads(Book().eval(), IDS, list(TEXT))
    assert found.name == "Book" and found.labels == list(TEXT) and len(found.scores.predictions) == 12
    assert all(proof.error < 1e-5 for proof in found.scores.proofs)
    assert found.pattern(1, 2).shape == (12, 12) and not found.influence.isnan().any()
    assert len(found.value_norms) == len(found.logit_attribution) == 6 and found.value_norms[1, 2].shape == (12,)
    assert found._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "Heads of Book" in found._repr_html_()
    write_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), unk_token="<unk>")
    phi = make_decoder("phi", attn_implementation="sdpa")
    by_text, by_ids = inspect_heads(phi, TEXT, tokenizer), inspect_heads(phi, torch.tensor([IDS]))
    assert by_text.labels == list(TEXT) and by_ids.labels[0] == "⟦32⟧"
    assert torch.equal(by_text.pattern(1, 1), by_ids.pattern(1, 1))
    assert torch.equal(by_text.scores.losses, by_ids.scores.losses)
    ours = inspect_heads(make_gpt(), [3, 5, 7, 3, 5, 7])
    assert len(ours.heads) == 6 and not ours.att.left_out
    assert inspect_heads(make_gpt(), [3, 5, 7], heads=ours.heads[4:]).heads == ours.heads[4:]


def test_names_are_visible_and_need_not_be_enough_for_all_ids(tmp_path: Path) -> None:
    found = inspect_heads(make_gpt(), [3, 5, 7], ["a b", "\n", b"\xe2"])
    assert found.labels == ["a␣b", "↵", "\\xe2"]
    few = tiktoken.Encoding("few", pat_str=".", mergeable_ranks={b"a": 0, b"b": 1}, special_tokens={})
    found = inspect_heads(make_gpt(), "abba", few)  # predicts others, and has no token that ends a text
    found.save(tmp_path / "a.html")
    assert found.labels == list("abba") and found.label(5) == "⟦5⟧"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"names": np.array(list("abc"))}, "names are a list, or a tokenizer, not ndarray"),
        ({"names": dict.fromkeys("abc")}, "names are a list, or a tokenizer, not dict"),
        ({"names": []}, "expected a name for each token, got 0 for 3"),
        ({"ablate": "zeros"}, "a head's output becomes zero or mean, got 'zeros'"),
    ],
)
def test_a_slip_is_one_sentence(options: dict, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        inspect_heads(make_gpt(), [3, 5, 7], **options)


def test_a_model_of_certain_lengths_has_no_probe_of_another(tmp_path: Path) -> None:
    model = Book().eval()
    forward = model.forward
    model.forward = lambda idx: forward(idx) if idx.size(1) % 4 == 0 else 1 / 0
    found = inspect_heads(model, IDS)
    found.save(tmp_path / "a.html")
    assert found.probe is None and "induction" not in found.scores.mean and found.pattern(1, 2).shape == (12, 12)


def test_a_probe_that_has_an_id_of_padding_is_left_out() -> None:
    model = Book().eval()

    def forward(idx: Tensor) -> Tensor:
        x = model.tokens(idx) + model.places.weight[: idx.size(1)]
        for layer in model.layers:
            x = layer(x, ~make_causal_mask(idx.size(1)), idx == 0)
        return model.out(x)

    model.forward = forward
    found = inspect_heads(model, IDS)
    assert found.probe is None and found.pattern(1, 2).shape == (12, 12) and found.verified


class OneByOne(nn.Module):
    """Heads that are modules, each with projections of its own, as in Karpathy's lecture."""

    def __init__(self):
        super().__init__()
        self.tokens, self.out, self.proj = nn.Embedding(V, 21), nn.Linear(21, V), nn.Linear(21, 21)
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(21, 7, bias=False) for _ in "qkv") for _ in range(3))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tokens(idx)
        hidden = ~make_causal_mask(idx.size(1))
        heads = []
        for query, key, value in self.heads:
            scores = query(x) @ key(x).mT
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value(x))
        return self.out(x + self.proj(torch.cat(heads, -1)))


def test_the_projection_of_heads_that_are_modules_is_found() -> None:
    model = OneByOne().eval()
    found = inspect_heads(model, IDS)
    assert found.heads == [(0, 0), (0, 1), (0, 2)]
    values = model.heads[1][2](model.tokens(torch.tensor(IDS)))
    torch.testing.assert_close(found.value_norms[0, 1], (values @ model.proj.weight[:, 7:14].T).norm(dim=-1).detach())


def test_attention_by_sums_of_products_is_said_to_be_left_out() -> None:
    class Summed(OneByOne):
        def forward(self, idx: Tensor) -> Tensor:
            x = self.tokens(idx)
            weights = torch.ones(idx.size(1), idx.size(1)).tril().log().softmax(-1)[None, :, :, None]
            return super().forward(idx) + self.out((weights * x[:, None]).sum(2))

    assert "not shown: 1 x a sum of products cannot be looked into" in inspect_heads(Summed().eval(), IDS).verified


def test_a_model_without_gradients_has_no_influence(tmp_path: Path) -> None:
    model = Book().eval()
    model.forward = torch.no_grad()(model.forward)
    found = inspect_heads(model, IDS)
    assert found.influence.isnan().all() and found.pattern(1, 2).shape == (12, 12)
    found.save(tmp_path / "a.html")


def test_a_layer_without_a_derivative_leaves_no_influence(tmp_path: Path) -> None:
    """As a quantized one."""
    model = Book().eval()
    model.out.register_forward_pre_hook(lambda _, inputs: inputs[0].detach())
    found = inspect_heads(model, IDS)
    assert found.influence.isnan().all() and found.pattern(1, 2).shape == (12, 12)
    found.save(tmp_path / "a.html")


def test_a_page_of_a_decoder_that_attends_twice_has_no_reasons_and_says_so(tmp_path: Path) -> None:
    model = Book().eval()
    model.layers = nn.ModuleList([nn.TransformerDecoderLayer(21, 3, 31, 0.1, batch_first=True)])

    def forward(idx: Tensor) -> Tensor:
        x = model.tokens(idx) + model.places.weight[: idx.size(1)]
        mask = ~make_causal_mask(idx.size(1))
        return model.out(model.layers[0](x, x, mask, mask))

    model.forward = forward
    found = inspect_heads(model, IDS)
    with pytest.raises(UserError, match="where heads look is known, why is not"):
        found.why(1, 2)
    found.save(tmp_path / "a.html")
    assert found.att.shape == (2, 1, 3, 12)


def test_a_model_is_inspected_in_eval_mode_and_each_part_is_in_its_own_afterwards() -> None:
    model = Book().train()
    model.layers[1].eval()
    modes = []  # a running mean changes in each forward pass of training mode
    model.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    inspect_heads(model, IDS)
    assert model.layers[0].training and not model.layers[1].training
    assert model.training and len(modes) > 3 and not any(modes)


def mistral_module() -> nn.Module:
    return make_decoder("mistral")


@pytest.mark.parametrize(
    "model, text, tokenizer, message",
    [
        (make_gpt, "abc", None, "a text needs a tokenizer: give one of tiktoken, transformers or tokenizers, or ids"),
        (mistral_module, IDS, ["a"], "expected a name for each token, got 1 for 12"),
        (lambda: nn.Embedding(V, 1), IDS, None, "no logits of all positions, (B, T, V), are found: "),
        (make_gpt, torch.ones(2, 5).long(), None, "a text is ids, (T,) whole numbers, got torch.int64 of shape (2, 5)"),
        (make_gpt, [0.5, 1.0], None, "a text is ids, (T,) whole numbers, got torch.float32 of shape (1, 2)"),
        (make_gpt, [3], None, "attention is between tokens: give a text of two or more"),
        (mistral_module, [3, 99], None, "expected tokens from 0 to 60, got"),
        (lambda: make_decoder("mamba"), IDS, None, "no attention of a text to itself and its past was seen"),
    ],
)
def test_what_cannot_be_inspected_is_refused_in_a_sentence(model, text, tokenizer, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        inspect_heads(model(), text, tokenizer)
    assert "\n" not in str(refused.value)


def test_a_directory_that_cannot_be_opened_is_refused(run, mistral: Path, tmp_path: Path, monkeypatch) -> None:
    def refused(message: str) -> None:
        result = run(inspect_attention, mistral, "--text", TEXT, "-o", tmp_path / "a.png")
        assert result.exit_code == 2 and len(result.err.strip().splitlines()) == 1 and not result.out, result.err
        assert message in result.err and not (tmp_path / "a.png").exists()

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        refused("for all other decoders: pip install -e '.[any]'")
    (mistral / "tokenizer.json").unlink()
    refused("has no tokenizer.json, and no tokenizer that transformers can read")
    tensors = load_file(mistral / "model.safetensors")
    tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, mistral / "model.safetensors", {"format": "pt"})
    refused("has no tensor model.layers.1.self_attn.q_proj.weight")
    config = json.loads((mistral / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoModelForCausalLM": "theirs.Model"}}
    (mistral / "config.json").write_text(json.dumps(config))
    (mistral / "theirs.py").write_text("raise SystemExit('the code of a stranger was run')")
    refused("; config.json has model_type 'theirs', this version reads gpt2")
    (mistral / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/elses"}')
    refused("has an adapter_config.json: merge the adapter, and take the file out")


def test_a_family_of_ours_that_we_cannot_compute_is_opened_by_transformers(run, tmp_path: Path) -> None:
    """A llama with biases in its attention; but not one with an option of another tree, which they would leave out."""
    make_decoder("llama", attention_bias=True).save_pretrained(tmp_path / "biased")
    write_tokenizer(tmp_path / "biased")
    with pytest.raises(UserError, match="attention_bias"):
        GPT.from_pretrained(tmp_path / "biased")
    result = run(inspect_attention, tmp_path / "biased", "--text", TEXT)
    assert result.exit_code == 0 and "model:  biased, loss" in result.out, result.err
    file = save_foreign(make_gpt(family="llama", n_embd=18, bias=None), tmp_path) / "config.json"
    file.write_text(file.read_text().replace('"tril": {', '"tril": {"of_another_tree": 16, '))
    with pytest.raises(UserError, match="of_another_tree"):
        load_decoder(file.parent)


def test_tensors_that_are_not_used_are_named_and_recurrent_models_open_too(mistral: Path, capsys) -> None:
    tensors = load_file(mistral / "model.safetensors")
    save_file(tensors | {"model.layers.7.q": torch.ones(3)}, mistral / "model.safetensors", {"format": "pt"})
    load_decoder(mistral)
    assert "has tensors that are not used, as 'model.layers.7.q'\n" in capsys.readouterr().err
    make_decoder("mamba").save_pretrained(mistral)
    assert check_causality(load_decoder(mistral), V, T).ok
    with pytest.raises(UserError, match="no attention of a text to itself and its past was seen"):
        inspection.inspect_heads(mistral, TEXT)

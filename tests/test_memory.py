"""Memory: less of it changes no number that it should not, and what a step needs is known before."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import train
import training.memory
from data.batches import IGNORE
from model import GPT, GPTConfig
from model.causality import check_causality
from tests.conftest import make_gpt, often, tiny_run, weights
from tests.test_distributed import trained
from train import next_token_loss
from training.config import TrainConfig
from training.memory import KEPT, OVERHEAD, describe_memory, memory_line, memory_of_step, memory_there, most_of_step

B, T, V = 3, 11, 17
CPU = torch.device("cpu")
FAMILIES = pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "nanochat"])


def loss_and_gradients(model: GPT, loss: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(V, (2, B, T))
    return inputs, targets.masked_fill(torch.rand(B, T) < 0.2, IGNORE)


@FAMILIES
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_computed_again_has_the_same_bits(family: str, dropout: float) -> None:
    model, (inputs, _) = make_gpt(family=family, n_embd=18, dropout=dropout).train(), batch()
    direction, results, calls = torch.randn(B, T, V), [], []
    model.blocks[0].mlp.register_forward_pre_hook(lambda *call: calls.append(call))
    for activation_checkpointing in (False, True):
        model.activation_checkpointing = activation_checkpointing
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, (model(inputs) * direction).sum()))
        results[-1].append(torch.rand(1))  # the random numbers that come next
    assert len(calls) == 1 + 2  # forward; forward and again
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


@FAMILIES
@pytest.mark.parametrize("logits", [V, 7 * V, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_chunks_is_the_loss(family: str, logits: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(training.memory, "LOGITS", logits)
    model, (inputs, targets), results = make_gpt(family=family, n_embd=18).train(), batch(), []
    sizes, head = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: sizes.append(hidden[..., 0].numel()) or head(hidden))
    for activation_checkpointing in (False, True):
        model.activation_checkpointing = activation_checkpointing
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, next_token_loss(model, inputs, targets, dtype)))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    plain, chunked = (torch.cat([tensor.flatten() for tensor in result]) for result in results)
    torch.testing.assert_close(chunked[0], plain[0], rtol=tolerance, atol=0)
    assert (plain - chunked).norm() <= tolerance * plain[1:].norm()
    largest = {V: 3, 7 * V: 7, 1 << 25: B * T}[logits]  # of 33 tokens there are at most 16 chunks
    assert max(sizes) == largest


@pytest.mark.parametrize("dropout", often(0.3, 0.0))
def test_a_compiled_loss_may_compute_again(dropout: float) -> None:
    torch.compiler.reset()
    model, (inputs, targets), results = make_gpt(dropout=dropout).train(), batch(), []
    model.activation_checkpointing = True
    for loss_fn in (next_token_loss, torch.compile(next_token_loss, dynamic=False, backend="aot_eager")):
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, loss_fn(model, inputs, targets, torch.float32)))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_the_certificate_asks_what_computes_again() -> None:
    model = make_gpt()
    model.activation_checkpointing = True

    def loss_fn(inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(model, inputs, targets, torch.float32)

    assert check_causality(model, V, T, loss_fn=loss_fn, batch_size=B).ok
    for block in model.blocks:
        block.attention.attend.forward = lambda q, k, v, mask, dropout=0.0: (
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        )
    assert not check_causality(model, V, T, loss_fn=loss_fn, batch_size=B).ok


def test_a_run_that_computes_again_learns_the_same(run, corpus_file: Path, straight: Path, tmp_path: Path) -> None:
    result = run(train, *tiny_run(corpus_file, tmp_path / "less", train__activation_checkpointing="true"))
    assert result.exit_code == 0 and "memory: less than 0.00 of " in result.out and "causal: yes" in result.out
    plain, less = (GPT.from_pretrained(out).state_dict() for out in (straight, tmp_path / "less"))
    for name in plain:
        torch.testing.assert_close(less[name], plain[name], rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_compute_again_learn_the_same(corpus_file: Path, tmp_path: Path, parallel: str) -> None:
    plain, less = (
        weights(
            trained(2, tmp_path, corpus_file, again, train__parallel=parallel, train__activation_checkpointing=again)
        )
        for again in ("false", "true")
    )
    for name, tensor in plain.items():
        torch.testing.assert_close(less[name], tensor, rtol=1e-3, atol=1e-4)


def needed(shape: dict, **options: object) -> int:
    config = TrainConfig(**options)
    return memory_of_step(GPTConfig(**shape), config, partial(next_token_loss, dtype=torch.float32), CPU)


SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "context_length": 32, "vocab_size": 257}


def test_state_and_gradients_are_counted() -> None:
    """With one token there is little else: weights, gradients and two moments."""
    shape = SHAPE | {"n_layer": 10, "context_length": 1}
    weights = 4 * sum(parameter.numel() for parameter in GPT(GPTConfig(**shape)).parameters())
    assert needed(shape, batch_size=1) == pytest.approx(OVERHEAD["cpu"] * 4 * weights, rel=0.02)


def test_activations_grow_with_the_batch_and_shrink_when_they_are_computed_again() -> None:
    few, many, less = (
        needed(SHAPE | {"n_layer": 12}, batch_size=size, activation_checkpointing=again)
        for size, again in ((8, False), (16, False), (16, True))
    )
    assert 1.5 < many / few < 2 and less < many / 2.5


def test_gradients_of_earlier_micro_batches_stay() -> None:
    one, two = (needed(SHAPE, batch_size=2, grad_accum_steps=number) for number in (1, 2))
    assert one < two == needed(SHAPE, batch_size=2, grad_accum_steps=5)


@pytest.mark.parametrize("family", often("nanochat", "gpt2", "llama", "qwen3"))
@pytest.mark.parametrize("optimizer", often("muon", "adamw"))
def test_a_glance_sees_more_than_there_is(family: str, optimizer: str) -> None:
    for shape in ({"n_layer": 7, "n_embd": 48}, {"n_layer": 1, "vocab_size": 5003}, {"n_embd": 240}):
        config = TrainConfig(batch_size=5, optimizer=optimizer)
        model = make_gpt(**{"family": family, "n_embd": 48, "context_length": 67, "dropout": 0.1, **shape})
        loss_fn = partial(next_token_loss, dtype=torch.float32)
        assert most_of_step(model, config) > memory_of_step(model.config, config, loss_fn, CPU)


def test_a_layer_that_cannot_be_counted_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.memory, "memory_there", lambda device: 2**12)

    def loss_fn(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
        return model(inputs).sum() * model.lm_head.weight.sum().item()

    line = memory_line(make_gpt(), TrainConfig(), loss_fn, CPU, compiled=False)
    assert line.startswith("not known before the first step (DataDependent")


def test_the_estimate_leaves_no_trace() -> None:
    before = torch.random.get_rng_state()
    needed(SHAPE | {"dropout": 0.1})
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "options, gib, compiled, line",
    [
        ({}, 9.12, False, "about 9.1 of 139.0 GiB"),
        ({}, 0.25, True, "up to 0.25 of 139.0 GiB"),
        (
            {},
            140,
            False,
            "about 140.0 of 139.0 GiB, which may not be enough: try --train.activation_checkpointing true "
            "and --train.batch_size 16 --train.grad_accum_steps 2",
        ),
        (
            {"activation_checkpointing": True, "batch_size": 1},
            140,
            True,
            "up to 140.0 of 139.0 GiB, which may not be enough: try a smaller --model.context_length or model",
        ),
    ],
)
def test_the_line(options: dict, gib: float, compiled: bool, line: str) -> None:
    assert describe_memory(int(gib * 2**30), 139 * 2**30, TrainConfig(**options), compiled) == line
    assert memory_there(CPU) > 2**28


PEAK = """
import sys
import torch
from functools import partial
from model import GPT, GPTConfig
from train import next_token_loss
from training.config import TrainConfig
from training.optimizer import make_optimizer

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def steps(shape, options, number):
    config = TrainConfig(**options)
    model = GPT(GPTConfig(**shape)).train()
    model.activation_checkpointing = config.activation_checkpointing
    optimizer = make_optimizer(model, config)
    idx = torch.randint(shape["vocab_size"], (2, config.batch_size, shape["context_length"]))
    for _ in range(number):
        for _ in range(config.grad_accum_steps):
            next_token_loss(model, *idx, torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()

shape, options = map(eval, sys.argv[1:])
torch.set_num_threads(1)
steps({"n_layer": 1, "n_head": 1, "n_embd": 16, "context_length": 4, "vocab_size": 7}, {"batch_size": 1}, 1)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak
steps(shape, options, 2)
print(status("VmHWM") - before)
"""


ONLY_LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux says what a process had at most"
)


def measured_peak(shape: dict, options: dict, script: str = PEAK) -> int:
    """The most bytes that steps of training had besides what was there before."""
    command = [sys.executable, "-c", script, repr(shape), repr(options)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    options = {"cwd": Path(train.__file__).parent, "env": environment, "capture_output": True, "text": True}
    return int(subprocess.run(command, check=True, **options).stdout)


@pytest.mark.long
@ONLY_LINUX
def test_what_malloc_keeps_is_less_than_is_said(figure) -> None:
    shape = {"n_head": 4, "n_embd": 128, "context_length": 128, "vocab_size": 4096, "family": "nanochat"}
    options = {"batch_size": 16, "optimizer": "muon"}
    keeps = PEAK.replace("    idx = ", "    keep_freed_memory(model, config, torch.device('cpu'))\n    idx = ")
    keeps = keeps.replace("options, 2)", "options, 9)").replace(
        "import sys", "from training.memory import keep_freed_memory\nimport sys"
    )
    plain, kept = (measured_peak(shape, options, script) for script in (PEAK, keeps))
    said = KEPT * most_of_step(GPT(GPTConfig(**shape)), TrainConfig(**options))
    figure(f"memory of a step: {plain / 2**20:.0f} MiB, if malloc keeps it {kept / 2**20:.0f}, said {said / 2**20:.0f}")
    assert plain < kept < said


@pytest.mark.long
@ONLY_LINUX
@pytest.mark.parametrize(
    "shape, options",
    [
        ({"n_layer": 6, "n_head": 4, "n_embd": 256, "context_length": 256, "vocab_size": 4096}, {"batch_size": 8}),
        (
            {"n_layer": 2, "n_head": 4, "n_embd": 256, "context_length": 256, "vocab_size": 50257, "dropout": 0.1},
            {"batch_size": 4},
        ),
        (
            {"n_layer": 2, "n_head": 4, "n_embd": 256, "context_length": 256, "vocab_size": 50257, "dropout": 0.1},
            {"batch_size": 8, "activation_checkpointing": True},
        ),
        (
            {"n_layer": 6, "n_head": 6, "n_kv_head": 2, "n_embd": 384, "context_length": 256, "vocab_size": 4096}
            | {"family": "qwen3"},
            {"batch_size": 6, "grad_accum_steps": 2},
        ),
        (
            {"n_layer": 6, "n_head": 4, "n_embd": 256, "context_length": 256, "vocab_size": 4096, "family": "nanochat"},
            {"batch_size": 8, "optimizer": "muon"},
        ),
    ],
)
def test_the_estimate_is_near_the_measured_peak(shape: dict, options: dict, figure) -> None:
    measured, estimated = math.inf, needed(shape, **options)
    for _ in range(4):  # what malloc cannot use again differs from run to run, and only adds
        measured = min(measured, measured_peak(shape, options))
        if abs(estimated / measured - 1) < 0.15:
            break
    assert measured > 200 * 2**20
    figure(f"memory of a step: {measured / 2**20:.0f} MiB, estimated {estimated / measured - 1:+.0%}")
    assert abs(estimated / measured - 1) < 0.15

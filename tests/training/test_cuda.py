"""A GPU computes the same layer, leaks nothing and resumes to the same bits. Run by `pytest -m cuda`."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train
from errors import UserError
from model import GPT, GPTConfig
from model.attention import Attend
from model.families import FAMILIES
from model.recorded import record
from model.sampling import Sampler
from tests.conftest import same_bits, tiny_run, weights
from training.certificate import certify
from training.config import TrainConfig
from training.device import compile_loss, record_loss, set_seed
from training.optimizer import set_schedule
from training.progress import Progress
from tril import capture

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, as make gpu does"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # PyTorch begins with such a one
]
DEVICE = "cuda"
ROUNDING = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative; float32 products are in TF32
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
SHAPE = {"n_layer": 2, "n_head": 6, "n_embd": 384, "context_length": 257, "vocab_size": 4099}


@pytest.fixture(autouse=True)
def settings() -> None:
    """The settings of training/device.py."""
    torch.compiler.reset()
    torch.set_float32_matmul_precision("high")


@DTYPES
@pytest.mark.parametrize("dropout, compiled", [(0.0, False), (0.0, True), (0.1, False), (0.1, True)])
def test_the_certificate_passes_the_layer_and_refuses_a_leak(
    dtype: torch.dtype, dropout: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        torch.compiler.reset()
        loss_fn = torch.compile(train.next_token_loss, dynamic=False) if compiled else train.next_token_loss
        certify(
            GPT(GPTConfig(**SHAPE, dropout=dropout)).to(DEVICE), partial(loss_fn, dtype=dtype), dtype, 8, special=()
        )

    def unmasked(self: Attend, q, k, v, mask, dropout: float = 0.0, **_) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=True)

    ask()
    monkeypatch.setattr(Attend, "forward", unmasked)
    with pytest.raises(UserError, match="refusing to train"):
        ask()


@DTYPES
@pytest.mark.parametrize("n_kv_head", [2, 6])
@torch.no_grad()
def test_the_weights_shown_are_the_kernels(dtype: torch.dtype, n_kv_head: int) -> None:
    model = GPT(GPTConfig(**SHAPE, n_kv_head=n_kv_head)).to(DEVICE, dtype).eval()
    with capture(model) as att:
        model(torch.randint(4099, (2, 257), device=DEVICE))
    att.verify()  # the kernel computes the formula: raises if it does not


@DTYPES
@pytest.mark.parametrize("n_kv_head, dropout", [(6, 0.0), (6, 0.1), (2, 0.0)])
def test_training_stores_no_weights(dtype: torch.dtype, n_kv_head: int, dropout: float) -> None:
    T = 4096
    shapes = [(1, heads, T, 64) for heads in (6, n_kv_head, n_kv_head)]
    qkv = [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = Attend()(*qkv, None, dropout)
    torch.autograd.grad(y, qkv, torch.ones_like(y))
    assert torch.cuda.max_memory_allocated() - before < 6 * T * T * dtype.itemsize / 2


@DTYPES
@pytest.mark.parametrize("optimizer, way", [("adamw", ""), ("muon", ""), ("muon", "compile"), ("muon", "record")])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_gpu(
    dtype: torch.dtype, optimizer: str, way: str, run: Callable, corpus_file: Path, tmp_path: Path, monkeypatch
) -> None:
    if dtype == torch.float16 and optimizer == "muon":
        pytest.skip("PyTorch's scaler asks the GPU in each step whether Muon's gradients are finite")
    made_step = Progress.made_step

    def begin(optimizer: torch.optim.Optimizer, step: int, *rest: object, **options: object) -> None:
        if step > (2 if way else 0):  # the first ones allocate, and record a CUDA graph
            torch.cuda.set_sync_debug_mode("error")
        set_schedule(optimizer, step, *rest, **options)

    def end(*rest: object, **options: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        made_step(*rest, **options)

    monkeypatch.setattr(train, "set_schedule", begin)
    monkeypatch.setattr(Progress, "made_step", end)
    options = ["--train.device", DEVICE, "--train.dtype", str(dtype).removeprefix("torch."), "--train.log_every", 99]
    options += [f"--train.{way}", "true"] if way else ["--train.grad_accum_steps", 2]
    try:
        result = run(train, *tiny_run(corpus_file, tmp_path / "run", train__optimizer=optimizer), *options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.exit_code == 0, result.err


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_kv_head", [2, 6])
@torch.no_grad()
def test_a_recorded_step_writes_what_its_kernels_do(family: str, n_kv_head: int, monkeypatch) -> None:
    torch.set_float32_matmul_precision("highest")
    model = GPT(GPTConfig(**SHAPE, family=family, n_kv_head=n_kv_head)).to(DEVICE).eval()
    weight = model.blocks[1].attention.v_proj.weight  # of which the graph has a copy
    launches, recordings = [], []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: launches.append(1) or replay(graph))
    monkeypatch.setattr("model.recorded.record", lambda work: recordings.append(1) or record(work))

    def check(recorded: int, length: int = 101) -> None:
        launches.clear()
        text = partial(model.generate, torch.randint(4099, (3, length), device=DEVICE), 300, temperature=0.5, seed=1)
        graph = text()  # more than the context
        assert len(launches) > 290 and len(recordings) == recorded
        with monkeypatch.context() as eager:
            eager.setattr("model.recorded.can_record", lambda model, token: False)
            assert graph.equal(text())

    check(1)
    weight.mul_(3)
    check(1, length=83)  # the graph of the first text
    weight.data = weight.roll(1)
    check(2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_a_recorded_step_rounds_as_its_kernels_do(family: str, autocast: bool, monkeypatch) -> None:
    """In half precision, also where weights are cast in each step."""
    model = GPT(GPTConfig(**SHAPE, family=family)).to(DEVICE, torch.float32 if autocast else torch.bfloat16)
    idx, seen = torch.randint(4099, (1, 101), device=DEVICE), []

    def choose(self: Sampler, logits: torch.Tensor, generator: object) -> torch.Tensor:
        seen.append(logits.float().clone())
        return idx[:, len(seen) % 50, None]

    monkeypatch.setattr(Sampler, "choose", choose)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        model.generate(idx, 50)
        monkeypatch.setattr("model.recorded.can_record", lambda model, token: False)
        model.generate(idx, 50)
    recorded, kernels = torch.stack(seen).split(50)
    assert (recorded - kernels).norm() < ROUNDING[torch.bfloat16] * kernels.norm()


@DTYPES
def test_compiling_changes_only_rounding(dtype: torch.dtype) -> None:
    model = GPT(GPTConfig(**SHAPE)).to(DEVICE)
    inputs, targets = torch.randint(4099, (2, 5, 257), device=DEVICE)
    losses, gradients = [], []
    for loss_fn in (train.next_token_loss, torch.compile(train.next_token_loss, dynamic=False)):
        losses.append(loss_fn(model, inputs, targets, dtype))
        found = torch.autograd.grad(losses[-1], [*model.parameters()])
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    for eager, compiled in (losses, gradients):
        assert (compiled - eager).norm() < ROUNDING[dtype] * eager.norm()


@pytest.mark.parametrize("way", ["false", "graph", "true"])
def test_a_resumed_run_ends_in_the_same_bits(run: Callable, corpus_file: Path, tmp_path: Path, way: str) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = ["--train.device", DEVICE, "--train.dtype", "auto", "--train.deterministic", "true"]
    options += ["--train.compile", way]
    run(train, *tiny_run(corpus_file, straight), *options).ok()
    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoints" / "step-00000012")
    result = run(train, "--resume", broken)
    assert result.exit_code == 0 and "resumed from" in result.out, result.err
    assert same_bits(weights(straight), weights(broken))


@DTYPES
@pytest.mark.parametrize("way", ["compile", "record"])
def test_a_cuda_graph_computes_what_its_kernels_do(dtype: torch.dtype, way: str) -> None:
    """For each seed of dropout, also when it comes again after others."""
    model = GPT(GPTConfig(**SHAPE, dropout=0.3)).to(DEVICE)
    if way == "record":
        kernels, bound = partial(train.next_token_loss, dtype=dtype), ROUNDING[dtype] / 10
        graph = record_loss(kernels, model, 5, 257)
    else:
        kernels, bound = torch.compile(train.next_token_loss, dynamic=False), ROUNDING[dtype]
        graph = compile_loss(train.next_token_loss, TrainConfig(), torch.device(DEVICE))
        graph, kernels = (partial(loss_fn, dtype=dtype) for loss_fn in (graph, kernels))
    inputs, targets = torch.randint(4099, (2, 5, 257), device=DEVICE)
    losses = []
    for seed in (1, 2, 3, 4, 1):  # the first calls run the kernels and record
        found = []
        for loss_fn in (graph, kernels):
            model.zero_grad()
            set_seed(torch.device(DEVICE), seed)
            loss = loss_fn(model, inputs, targets) / 1285
            loss.backward()
            found.append((loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
        for of_graph, of_kernels in zip(*found, strict=True):
            assert (of_graph - of_kernels).norm() < bound * of_kernels.norm()
        losses.append(found[0][0].item())
    assert len({*losses[:4]}) == 4 and losses[4] == pytest.approx(losses[0], rel=ROUNDING[dtype] / 10)

"""The compiled loss: one program for steps and one for evaluation, where it is the default, and a missing compiler."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch._inductor.exc import TritonMissing

import train
from model.families import FAMILIES
from tests.conftest import make_gpt, metrics, often, tiny_run
from training.config import TrainConfig
from training.device import ENOUGH_TO_COMPILE, choose_kernels, compile_loss, record_loss

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.parametrize("family, dtype", often(*product(list(FAMILIES)[::-1], ("float32", "bfloat16"))))
def test_a_run_compiles_two_programs_before_its_first_step_and_so_does_a_resumed_one(
    run: Callable, corpus_file: Path, tmp_path: Path, monkeypatch, family: str, dtype: str
) -> None:
    """They are those of the certificate. Samples, scores and a validation whose last batch is not full need no more."""
    out, certify_it = tmp_path / "run", train.certify
    programs = CompileCounterWithBackend("eager")  # which run without a code generator
    monkeypatch.setattr("train.choose_kernels", lambda *_, **__: "compiled")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=programs))

    def certify(*arguments: object, **options: object) -> dict:
        certificate = certify_it(*arguments, **options)
        assert programs.frame_count == 2
        return certificate

    monkeypatch.setattr(train, "certify", certify)
    changes = {"model__family": family, "model__n_embd": 18, "train__dtype": dtype}
    for arguments in (tiny_run(corpus_file, out, **changes), ["--resume", out, "--train.max_steps", 14]):
        torch.compiler.reset()  # as in a new process
        programs.clear()
        run(train, *arguments).ok()
        assert programs.frame_count == 2
    assert list(metrics(out, "val_loss")) == [0, 4, 8, 12, 14]


@pytest.mark.long
def test_a_missing_compiler_is_a_sentence(run: Callable, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with inductor.patch({"cpp.cxx": (None, str(tmp_path / "g++"))}):
        result = run(train, *tiny_run(corpus_file, out, train__compile="true"))
    assert result.exit_code == 2 and not out.exists()
    (said,) = result.err.splitlines()
    assert "the loss is not compiled" in said and "No working C++ compiler found" in said


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device of type cuda on which everything compiles, on any machine."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
    return torch.device("cuda")


def test_a_long_run_on_a_gpu_is_compiled_by_default(gpu: torch.device, capsys: pytest.CaptureFixture) -> None:
    long = TrainConfig(max_steps=ENOUGH_TO_COMPILE // 4, grad_accum_steps=4)
    short = replace(long, max_steps=long.max_steps - 1)
    assert choose_kernels(long, gpu) == choose_kernels(replace(short, compile="true"), gpu) == "compiled"
    assert choose_kernels(short, gpu) == choose_kernels(replace(long, compile="false"), gpu) == "eager"
    assert choose_kernels(long, CPU) == "eager" and choose_kernels(replace(long, compile="true"), CPU) == "compiled"
    graph = replace(long, compile="graph", grad_accum_steps=1)
    assert choose_kernels(graph, gpu) == "graph"
    assert choose_kernels(graph, CPU) == choose_kernels(replace(graph, grad_accum_steps=2), gpu) == "eager"
    assert not capsys.readouterr().out
    page = (Path(train.__file__).parent / "docs" / "machines.md").read_text(encoding="utf-8")
    assert f"at least {ENOUGH_TO_COMPILE:,} micro-batches" in " ".join(page.split())


@pytest.mark.parametrize(
    "changes, is_graph", [({}, True), ({"grad_accum_steps": 2}, False), ({"parallel": "fsdp"}, False)]
)
def test_the_loss_is_a_cuda_graph_if_a_step_is_one_micro_batch(monkeypatch, changes: dict, is_graph: bool) -> None:
    memory = torch.zeros(())  # into which a graph writes each result
    asked = []

    def compile(function: Callable, **options: object) -> Callable:
        asked.append(options)
        return lambda number: memory.fill_(number)

    monkeypatch.setattr(torch, "compile", compile)
    loss_fn = compile_loss(print, TrainConfig(**changes), torch.device("cuda"))
    first, second = loss_fn(3.0), loss_fn(5.0)
    compile_loss(print, TrainConfig(**changes), CPU)
    options = {"options": {"triton.cudagraphs": True}} if is_graph else {}
    assert asked == [{"dynamic": False, **options}, {"dynamic": False}]
    assert second == 5.0 and first == (3.0 if is_graph else 5.0)


def test_a_default_that_cannot_be_is_a_note(gpu: torch.device, monkeypatch, capsys) -> None:
    x, error = torch.zeros(2), BackendCompilerFailed(None, TritonMissing(None), None)
    compile = Mock(return_value=Mock(side_effect=[x, x, error]))  # it fails where a graph is replayed
    monkeypatch.setattr(torch, "compile", compile)
    assert choose_kernels(TrainConfig(max_steps=ENOUGH_TO_COMPILE), gpu) == "eager"
    assert compile.call_args.kwargs["options"] == {"triton.cudagraphs": True}
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith("note: the loss is not compiled") and "Cannot find a working triton" in note


def test_a_recorded_loss_is_a_graph_only_for_a_step_that_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes gradients over those of the micro-batch before, which kernels add up."""
    launches = []
    graph = Mock(side_effect=lambda loss, example: lambda *batch: launches.append(1) or loss(*batch))
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graph)
    model = make_gpt()
    kernels = partial(train.next_token_loss, dtype=torch.float32)
    loss_fn = record_loss(kernels, model, 3, 11)
    batch = torch.randint(17, (2, 3, 11))
    for launched in (1, 1):  # the second micro-batch of a step
        loss_fn(model, *batch).backward()
        assert len(launches) == launched
    model.zero_grad()
    loss_fn(model, *batch[:, :2])  # fewer sequences
    loss_fn(model.eval(), *batch)
    assert len(launches) == 1
    loss_fn(model.train(), *batch)
    assert len(launches) == 2

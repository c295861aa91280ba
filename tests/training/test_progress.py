"""Progress: the speed that a run prints, no waiting for a device between logs, and an output that nobody reads."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from tests.conftest import often, tiny_run
from training.progress import Progress


def test_speed_counts_training_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("training.progress.time.perf_counter", lambda: now[0])
    with Progress(0, 5.0, 10, tokens_per_step=7, device=torch.device("cpu")) as progress:
        for _ in range(4):
            now[0] += 2.0
            progress.made_step()
        with progress.paused("evaluating"):
            now[0] += 50.0
        speed = progress.speed(loss=1.0)
    assert (progress.step, progress.train_seconds) == (4, 13.0)
    assert speed == {"tokens": 28, "tokens_per_second": 3.5}


# What has to wait for a device; copies to the host, which a CPU does not make, are not seen here.
WAITING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}


class Operations(TorchDispatchMode):
    """Notes the names of the operations that PyTorch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, optimizer", often(("float16", "adamw"), ("bfloat16", "adamw"), ("float32", "muon")))
def test_no_step_reads_a_number_between_logs(
    run, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, optimizer: str
) -> None:
    set_schedule, made_step, operations, watching = train.set_schedule, Progress.made_step, [], ExitStack()

    def begin(*arguments: object) -> None:  # a step begins with its schedule
        operations.append(watching.enter_context(Operations()))
        set_schedule(*arguments)

    def end(self: Progress) -> None:
        made_step(self)
        watching.close()

    monkeypatch.setattr(train, "set_schedule", begin)
    monkeypatch.setattr(Progress, "made_step", end)
    options = {"train__optimizer": optimizer, "train__dtype": dtype, "model__family": "nanochat"}
    options |= {"model__n_embd": 18, "train__max_steps": 7, "train__log_every": 3}
    with watching:
        assert run(train, *tiny_run(corpus_file, tmp_path / "run", **options)).exit_code == 0
    seen = [{name.removeprefix("aten::").split(".")[0] for name in mode.names} for mode in operations]
    assert len(seen) == 7 and all(names >= {"embedding", "_fused_adamw_"} for names in seen)  # forward, and the update
    assert [names & WAITING for names in seen] == [set()] * 7

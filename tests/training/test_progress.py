"""Progress: the speed that a run prints."""

import pytest
import torch

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

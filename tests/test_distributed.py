"""Several ranks train the run that one would have trained."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
import training.run
from tests.conftest import metrics, often, same_bits, tiny_run, weights
from tests.ranks import train_on
from training.config import TrainConfig, TrainError
from training.distributed import Ranks

ROOT = Path(__file__).parent.parent
OPTIONS = {"train__grad_accum_steps": 4, "model__dropout": 0.1}


def trained(world: int, tmp_path: Path, corpus: Path, name: str, **changes: object) -> Path:
    """The directory of a run that ended well."""
    out = tmp_path / name
    arguments = tiny_run(corpus, out, **{**OPTIONS, **changes})
    for rank, end in enumerate(train_on(world, tmp_path / f"{name}.said", arguments).wait()):
        assert end.exit_code == 0, f"rank {rank}: {end.err}"
        assert rank == 0 or end.out == ""
    return out


def state(out: Path, step: int = 12) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")


LONG = OPTIONS | {"train__grad_accum_steps": 6, "train__max_steps": 9999, "train__checkpoint_every": 9999}
LONG |= {"train__eval_every": 9999}


def wait_for_step(out: Path, step: int) -> None:
    """Until a run has logged it."""
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or step not in metrics(out, "train_loss"):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("optimizer", often("muon", "adamw"))
def test_one_two_and_four_ranks_end_with_the_same_bits(tmp_path: Path, corpus_file: Path, optimizer: str) -> None:
    changes = {"train__optimizer": optimizer}
    one, *others = (trained(world, tmp_path, corpus_file, f"{world}", **changes) for world in (1, 2, 4))
    for other in others:
        assert same_bits(weights(one), weights(other))
        assert same_bits(state(one), state(other))
        for key in ("train_loss", "val_loss", "grad_norm"):
            assert metrics(one, key) == metrics(other, key)


@pytest.mark.long
@pytest.mark.parametrize("family, optimizer", [("nanochat", "muon"), ("llama", "adamw"), ("gpt2", "adamw")])
def test_two_ranks_with_fsdp_train_what_one_does(
    tmp_path: Path, corpus_file: Path, family: str, optimizer: str
) -> None:
    changes = {"model__family": family, "train__optimizer": optimizer, "model__n_embd": 18}
    one = trained(1, tmp_path, corpus_file, "one", **changes)
    two = trained(2, tmp_path, corpus_file, "two", **changes, train__parallel="fsdp")
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(one, key).keys() == metrics(two, key).keys()
        for step, value in metrics(one, key).items():
            assert metrics(two, key)[step] == pytest.approx(value, rel=1e-4), (key, step)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("first, then", [(2, 1), (1, 2), (4, 2)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, corpus_file: Path, first: int, then: int) -> None:
    straight = trained(1, tmp_path, corpus_file, "straight")
    out = trained(first, tmp_path, corpus_file, "out")
    for path in (out / "checkpoints").iterdir():
        if path.name > "step-00000004":
            shutil.rmtree(path)
    for end in train_on(then, tmp_path / "again", ["--resume", str(out)]).wait():
        assert end.exit_code == 0, end.err
    assert same_bits(weights(straight), weights(out)) and same_bits(state(straight), state(out))
    assert metrics(straight, "train_loss") == metrics(out, "train_loss")


@pytest.mark.long
def test_a_rank_that_lost_another_says_how_to_go_on(tmp_path: Path, corpus_file: Path) -> None:
    options = LONG | {"train__grad_accum_steps": 3}
    job = train_on(3, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **options))
    wait_for_step(tmp_path / "out", 2)
    os.kill(job.pids[2], signal.SIGKILL)
    ends = job.wait()
    assert [end.exit_code for end in ends] == [2, 2, 128 + signal.SIGKILL]
    said = [line for end in ends for line in end.err.splitlines() if line.startswith("train.py:")]
    assert len(said) == 1 and "lost the connection to another rank" in said[0] and "--resume" in said[0]


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_of_them_at_the_same_step(tmp_path: Path, corpus_file: Path) -> None:
    job = train_on(2, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **LONG))
    wait_for_step(tmp_path / "out", 2)
    os.kill(job.pids[1], signal.SIGTERM)
    ends = job.wait()
    assert [end.exit_code for end in ends] == [75, 75]
    said = [line for end in ends for line in end.err.splitlines() if line.startswith("train.py:")]
    assert len(said) == 1 and "saved step" in said[0]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"train__grad_accum_steps": 3}, "2 ranks cannot share the 3 micro-batches of a step"),
        ({"train__device": "cuda"}, "device 'cuda' cannot be used here"),
        ({"train__batch_size": 0}, "batch_size must be at least 1"),
        ({"model__context_length": 9999}, "the training split has"),
        ({"train__parallel": "fsdp", "train__dtype": "float16"}, "fsdp needs train.dtype bfloat16 or float32"),
        ({"train__learning_rate": 1e30, "train__warmup_steps": 0}, "is not finite in step"),
    ],
)
def test_an_error_of_all_is_said_once(tmp_path: Path, corpus_file: Path, changes: dict, sentence: str) -> None:
    ends = train_on(2, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **{**OPTIONS, **changes})).wait()
    assert {end.exit_code for end in ends} == {3 if "finite" in sentence else 2}
    said = [line for end in ends for line in end.err.splitlines() if line.startswith("train.py:")]
    assert len(said) == 1 and sentence in said[0]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.long
@pytest.mark.parametrize("by_itself", [True, False], ids=["max-restarts", "resume"])
def test_a_run_goes_on_after_a_rank_was_killed(tmp_path: Path, corpus_file: Path, by_itself: bool) -> None:
    out, options = tmp_path / "out", {"train__checkpoint_every": 1}
    arguments = tiny_run(corpus_file, out, **{**OPTIONS, **options, "train__max_steps": 30})
    command = [*TORCHRUN, f"--max-restarts={2 * by_itself}", "train.py", *arguments]
    with open(tmp_path / "said", "w") as said:
        job = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
        wait_for_step(out, 2)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        code = job.wait(100)
    text = (tmp_path / "said").read_text()
    if by_itself:
        assert code == 0 and "resumed from" in text, text
    else:
        assert code != 0 and "Signal 9 (SIGKILL)" in text, text
        for end in train_on(2, tmp_path / "again", ["--resume", str(out)]).wait():
            assert end.exit_code == 0, end.err
    straight = trained(1, tmp_path, corpus_file, "straight", **{**options, "train__max_steps": 30})
    assert same_bits(weights(straight, 30), weights(out, 30))


def test_all_wait_for_what_rank_0_saves(tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*rest: object) -> None:
        time.sleep(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("training.run.save_checkpoint", full)  # the ranks are forked
    arguments = tiny_run(corpus_file, tmp_path / "out", **OPTIONS, train__max_steps=2)
    ends = train_on(2, tmp_path / "said", arguments).wait()
    assert [end.exit_code for end in ends] == [2, 2]
    said = [line for end in ends for line in end.err.splitlines() if line.startswith("train.py:")]
    assert len(said) == 1 and "cannot save step 2" in said[0] and "No space left" in said[0]


def test_ranks_that_choose_different_precisions_are_refused(tmp_path: Path, corpus_file: Path, monkeypatch) -> None:
    choose = train.choose_device

    def by_rank(*arguments: object) -> tuple[torch.device, torch.dtype]:
        device, dtype = choose(*arguments)
        return device, torch.bfloat16 if os.environ["RANK"] == "1" else dtype

    monkeypatch.setattr("train.choose_device", by_rank)
    ends = train_on(2, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **OPTIONS)).wait()
    assert [end.exit_code for end in ends] == [2, 2]
    assert "the ranks would train in bfloat16 and float32" in "".join(end.err for end in ends)


def test_ranks_that_see_different_checkpoints_are_refused(tmp_path: Path, corpus_file: Path, monkeypatch) -> None:
    out = trained(2, tmp_path, corpus_file, "out")
    find = training.run.find_checkpoint

    def stale(path: Path) -> Path:
        found = find(path)
        return found if os.environ["RANK"] == "0" else found.with_name("step-00000004")

    shutil.rmtree(out / "checkpoints" / "step-00000012")
    monkeypatch.setattr("training.run.find_checkpoint", stale)
    ends = train_on(2, tmp_path / "again", ["--resume", str(out)]).wait()
    assert [end.exit_code for end in ends] == [2, 2]
    assert "the ranks would begin at different steps, 4 and 8" in "".join(end.err for end in ends)


@pytest.mark.long
def test_two_nodes_begin_again_together(tmp_path: Path, corpus_file: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, options = tmp_path / "out", {"train__checkpoint_every": 1, "train__max_steps": 40}
    node = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max-restarts=2"]
    node += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=7", "--local_addr=127.0.0.1"]
    command = [*node, "train.py", *tiny_run(corpus_file, out, **{**OPTIONS, **options})]
    with open(tmp_path / "said", "w") as said:
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # a new store for each attempt
        nodes = [subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, env=environment) for _ in range(2)]
        wait_for_step(out, 2)
        of_second = Path(f"/proc/{nodes[1].pid}/task/{nodes[1].pid}/children").read_text().split()
        os.kill(int(of_second[-1]), signal.SIGKILL)
        ends = [node.wait(100) for node in nodes]
    assert ends == [0, 0], (tmp_path / "said").read_text()
    assert "resumed from" in (tmp_path / "said").read_text()
    assert (out / "checkpoints" / "step-00000040").is_dir()


def test_ranks_cannot_share_one_gpu() -> None:
    ranks = Ranks()
    ranks.world = 2
    with pytest.raises(TrainError, match="each of 2 ranks has a GPU of its own"):
        ranks.check(TrainConfig(device="cuda:1", grad_accum_steps=2), step=0, dtype=torch.float32)

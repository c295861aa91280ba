"""Several ranks train the run that one would have trained."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import train
import training.run
from configs import ConfigError
from tests.conftest import metrics, often, same_bits, tiny_run, weights
from tests.ranks import train_on
from training.config import TrainConfig
from training.distributed import Ranks, said_by_first

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
    changes = {"train__deterministic": "true", "train__optimizer": optimizer}
    one, *others = (trained(world, tmp_path, corpus_file, f"{world}", **changes) for world in (1, 2, 4))
    for other in others:
        assert same_bits(weights(one), weights(other))
        assert same_bits(state(one), state(other))
        for key in ("train_loss", "val_loss", "grad_norm"):
            assert metrics(one, key) == metrics(other, key)


BOTH = [("nanochat", "fsdp", "muon"), ("qwen3", "ddp", "adamw"), ("llama", "fsdp", "adamw"), ("gpt2", "ddp", "muon")]
BOTH += [("gpt2", "fsdp", "adamw"), ("llama", "ddp", "muon")]


@pytest.mark.parametrize("family, parallel, optimizer", often(*BOTH))
def test_two_ranks_train_what_one_does(
    tmp_path: Path, corpus_file: Path, family: str, parallel: str, optimizer: str
) -> None:
    changes = {"model__family": family, "train__optimizer": optimizer, "model__n_embd": 18}
    one = trained(1, tmp_path, corpus_file, "one", **changes)
    two = trained(2, tmp_path, corpus_file, "two", **changes, train__parallel=parallel)
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(one, key).keys() == metrics(two, key).keys()
        for step, value in metrics(one, key).items():
            assert metrics(two, key)[step] == pytest.approx(value, rel=1e-4), (key, step)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first, then", often((2, 1), (1, 2), (4, 2)))
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, corpus_file: Path, first: int, then: int) -> None:
    changes = {"train__deterministic": "true"}
    straight = trained(1, tmp_path, corpus_file, "straight", **changes)
    out = trained(first, tmp_path, corpus_file, "out", **changes)
    for path in (out / "checkpoints").iterdir():
        if path.name > "step-00000004":
            shutil.rmtree(path)
    for end in train_on(then, tmp_path / "again", ["--resume", str(out)]).wait():
        assert end.exit_code == 0, end.err
    assert same_bits(weights(straight), weights(out)) and same_bits(state(straight), state(out))
    assert metrics(straight, "train_loss") == metrics(out, "train_loss")


def test_a_rank_that_is_killed_is_named(tmp_path: Path, corpus_file: Path) -> None:
    """With five ranks some do not notice: they wait for one that has noticed."""
    options = LONG | {"train__grad_accum_steps": 5}
    job = train_on(5, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **options))
    wait_for_step(tmp_path / "out", 2)
    os.kill(job.pids[2], signal.SIGKILL)
    began = time.monotonic()
    ends = job.wait()
    assert time.monotonic() - began < 30
    assert [end.exit_code for end in ends] == [2, 2, 128 + signal.SIGKILL, 2, 2]
    said = [line for end in ends for line in end.err.splitlines() if line.startswith("train.py:")]
    assert len(said) == 1 and "rank 2 of 5 is lost" in said[0]


def test_ranks_do_not_wait_for_ever_for_one_that_never_comes(tmp_path: Path, corpus_file: Path) -> None:
    arguments = tiny_run(corpus_file, tmp_path / "out", train__rank_timeout=2)
    (end,) = train_on(1, tmp_path / "said", arguments, WORLD_SIZE="3").wait()
    assert end.exit_code == 2 and "not all of the 3 ranks came within 2 s" in end.err and "Traceback" not in end.err


@pytest.mark.long
def test_a_rank_that_hangs_is_given_up(tmp_path: Path, corpus_file: Path) -> None:
    job = train_on(2, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **LONG, train__rank_timeout=4))
    wait_for_step(tmp_path / "out", 2)
    os.kill(job.pids[0], signal.SIGSTOP)
    time.sleep(10)
    os.kill(job.pids[0], signal.SIGKILL)
    ends = job.wait()
    assert ends[1].exit_code == 2 and "rank 0 of 2 is lost" in ends[1].err


@pytest.mark.long
def test_a_rank_that_lives_and_hangs_is_given_up(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(self: Ranks, model: object) -> Iterator[int]:
        if not self.is_first:
            time.sleep(99)
        yield from micro_batches(self, model)

    micro_batches = Ranks.micro_batches
    monkeypatch.setattr(Ranks, "micro_batches", hang)
    job = train_on(2, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **LONG, train__rank_timeout=4))
    code = os.waitstatus_to_exitcode(os.waitpid(job.pids[0], 0)[1])
    os.kill(job.pids[1], signal.SIGKILL)
    os.waitpid(job.pids[1], 0)
    assert code == 2 and "rank 1 of 2 is lost" in (tmp_path / "said" / "0.2").read_text()


@pytest.mark.long
def test_nobody_is_lost_if_all_are_alive(tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Ranks, model: object) -> Iterator[int]:
        if self.rank == 1:
            raise RuntimeError("connection reset by peer")
        yield from micro_batches(self, model)

    micro_batches = Ranks.micro_batches
    monkeypatch.setattr(Ranks, "micro_batches", fail)
    ends = train_on(3, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **LONG)).wait()
    assert [end.exit_code for end in ends] == [1, 1, 1]
    assert not any("lost" in end.err for end in ends) and "RuntimeError: connection reset by peer" in ends[1].err


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
        ({"train__device": "cuda:7"}, "each of 2 ranks has a GPU of its own"),
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
def test_torchrun_begins_again_by_itself(tmp_path: Path, corpus_file: Path) -> None:
    out, options = tmp_path / "out", {"train__deterministic": "true", "train__checkpoint_every": 1}
    arguments = tiny_run(corpus_file, out, **{**OPTIONS, **options, "train__max_steps": 30})
    command = [*TORCHRUN, "--max-restarts=2", "train.py", *arguments]
    with open(tmp_path / "said", "w") as said:
        job = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
        wait_for_step(out, 2)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert job.wait(100) == 0, (tmp_path / "said").read_text()
    text = (tmp_path / "said").read_text()
    assert "resumed from" in text
    straight = trained(1, tmp_path, corpus_file, "straight", **{**options, "train__max_steps": 30})
    assert same_bits(weights(straight, 30), weights(out, 30))


def test_another_job_does_not_go_on_with_a_run(tmp_path: Path, corpus_file: Path) -> None:
    job = {"TORCHELASTIC_RUN_ID": "one"}
    arguments = tiny_run(corpus_file, tmp_path / "out", train__grad_accum_steps=2, train__max_steps=4)
    assert [end.exit_code for end in train_on(2, tmp_path / "first", arguments, **job).wait()] == [0, 0]
    restarted = job | {"TORCHELASTIC_RESTART_COUNT": "1"}
    ends = train_on(2, tmp_path / "restarted", arguments, **restarted).wait()
    assert [end.exit_code for end in ends] == [0, 0] and "nothing to do" in ends[0].out
    other = {"TORCHELASTIC_RUN_ID": "two", "TORCHELASTIC_RESTART_COUNT": "1"}
    ends = train_on(2, tmp_path / "other", arguments, **other).wait()
    assert ends[0].exit_code == 2 and "already holds a run" in ends[0].err


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
def test_what_ended_for_good_is_not_begun_again(tmp_path: Path, corpus_file: Path) -> None:
    command = [*TORCHRUN, "--max-restarts=3", "train.py", *tiny_run(corpus_file, tmp_path / "out")]
    arguments = [*command, "--train.grad_accum_steps", "3"]
    done = subprocess.run(
        arguments, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT
    )
    assert done.returncode == 1 and done.stderr.count("2 ranks cannot share the 3 micro-batches") == 1
    assert "exitcode  : 2" in done.stderr


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
        nodes = [subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT) for _ in range(2)]
        wait_for_step(out, 2)
        of_second = Path(f"/proc/{nodes[1].pid}/task/{nodes[1].pid}/children").read_text().split()
        os.kill(int(of_second[-1]), signal.SIGKILL)
        ends = [node.wait(100) for node in nodes]
    assert ends == [0, 0], (tmp_path / "said").read_text()
    assert "resumed from" in (tmp_path / "said").read_text()
    assert (out / "checkpoints" / "step-00000040").is_dir()


@pytest.mark.parametrize(
    "options, order", [({}, "1"), ({"deterministic": True}, "any"), ({"deterministic": True, "parallel": "fsdp"}, "1")]
)
def test_what_decides_the_order_of_sums(options: dict, order: str) -> None:
    assert Ranks(TrainConfig(**options)).order() == order


@pytest.mark.parametrize("rank, said", [("0", True), ("1", False)])
def test_a_wrong_option_is_said_once_on_each_node(rank: str, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(ConfigError if said else SystemExit), said_by_first():
        raise ConfigError("no such file")

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

from errors import UserError
from tests.conftest import ROOT, Result, metrics, same_bits, tiny_run, weights
from tests.ranks import Job
from training.config import TrainConfig
from training.distributed import Ranks

OPTIONS = {"train__grad_accum_steps": 4, "model__dropout": 0.1}


def trained(world: int, tmp_path: Path, corpus: Path, name: str, **changes: object) -> Path:
    """The directory of a run that ended well."""
    out = tmp_path / name
    arguments = tiny_run(corpus, out, **{**OPTIONS, **changes})
    for rank, end in enumerate(Job(world, tmp_path / f"{name}.said", arguments).wait()):
        assert end.exit_code == 0, f"rank {rank}: {end.err}"
        assert rank == 0 or end.out == ""
    return out


def wait_for_step(out: Path, step: int) -> None:
    """Until a run has logged it."""
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or step not in metrics(out, "train_loss"):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_two_and_four_ranks_end_with_the_same_bits(tmp_path: Path, corpus_file: Path) -> None:
    one, *others = (trained(world, tmp_path, corpus_file, f"{world}", train__optimizer="muon") for world in (1, 2, 4))
    for other in others:
        assert same_bits(weights(one), weights(other))
        assert same_bits(weights(one, name="optimizer"), weights(other, name="optimizer"))
        for key in ("train_loss", "val_loss", "grad_norm"):
            assert metrics(one, key) == metrics(other, key)


def check_close(out: Path, expected: Path) -> None:
    """Assert that two runs are one within rounding, in metrics, weights and the state of the optimizer."""
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(out, key) == pytest.approx(metrics(expected, key), rel=1e-4), key
    for file in ("model", "optimizer"):
        torch.testing.assert_close(weights(out, name=file), weights(expected, name=file), rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "world, family, optimizer", [(4, "nanochat", "muon"), (2, "llama", "adamw"), (2, "gpt2", "muon")]
)
def test_fsdp_trains_what_one_rank_does(
    tmp_path: Path, corpus_file: Path, world: int, family: str, optimizer: str
) -> None:
    changes = {"model__family": family, "model__n_embd": 18, "train__optimizer": optimizer}  # 18 rows, on four ranks
    one = trained(1, tmp_path, corpus_file, "one", **changes)
    check_close(trained(world, tmp_path, corpus_file, "fsdp", **changes, train__parallel="fsdp"), one)


@pytest.mark.long
def test_muon_goes_on_with_its_shards_and_with_the_whole(tmp_path: Path, corpus_file: Path) -> None:
    def resumed(world: int, parallel: str, copied: Path) -> Path:
        out = shutil.copytree(copied, tmp_path / f"{copied.name}, {world} {parallel}")
        shutil.rmtree(out / "checkpoints" / "step-00000012")  # as if killed after the one of step 8
        for end in Job(world, tmp_path / "said", ["--resume", str(out), "--train.parallel", parallel]).wait():
            assert end.exit_code == 0, end.err
        return out

    muon = {"model__family": "nanochat", "model__n_embd": 18, "train__optimizer": "muon"}
    fsdp = trained(2, tmp_path, corpus_file, "fsdp", **muon, train__parallel="fsdp")
    again = resumed(2, "fsdp", fsdp)
    for name in ("model", "optimizer"):
        assert same_bits(weights(again, name=name), weights(fsdp, name=name))
    check_close(resumed(4, "ddp", fsdp), fsdp)
    check_close(resumed(4, "fsdp", trained(1, tmp_path, corpus_file, "ddp", **muon)), fsdp)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # inside torch.compile
def test_fsdp_compiled_trains_what_it_does_uncompiled(tmp_path: Path, corpus_file: Path) -> None:
    options = {"train__parallel": "fsdp", "train__grad_clip": 0.0, "train__max_steps": 4, "model__n_embd": 18}
    # Compiled dropout draws other numbers.
    options |= {"model__family": "llama", "model__n_layer": 1, "model__dropout": 0.0}
    plain = trained(2, tmp_path, corpus_file, "plain", **options)
    compiled = trained(2, tmp_path, corpus_file, "compiled", **options, train__compile="true")
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(compiled, key) == pytest.approx(metrics(plain, key), rel=1e-4), key


def test_ranks_that_cannot_train_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    ranks.world = 2
    fsdp, refused = {"parallel": "fsdp"}, "fsdp is for several processes, in bfloat16 or float32"
    for ranks.started, options, dtype, message in (
        (True, {"grad_accum_steps": 3}, torch.float32, "2 ranks cannot share the 3 micro-batches of a step"),
        (False, fsdp, torch.float32, refused),
        (True, fsdp, torch.float16, refused),
    ):
        with pytest.raises(UserError, match=message):
            ranks.check(TrainConfig(**{"grad_accum_steps": 4, **options}), step=3, dtype=dtype)

    def gather(begins: list, own: str) -> None:
        begins[:] = [own, "at step 7 in float32"]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(UserError, match="at step 3 in float32 and at step 7 in float32"):
        ranks.check(TrainConfig(grad_accum_steps=4), step=3, dtype=torch.float32)


def check_ends(ends: list[Result], exit_codes: list[int], *parts: str) -> None:
    """Assert how the ranks ended, that one of them printed a sentence, and these parts of it."""
    assert [end.exit_code for end in ends] == exit_codes
    (said,) = [line for end in ends for line in end.err.splitlines() if line.startswith("train.py:")]
    assert all(part in said for part in parts), said
    assert not any("Traceback" in end.err for end in ends)


@pytest.mark.long
@pytest.mark.parametrize(
    "number, exit_codes, sentence",
    [
        (signal.SIGKILL, [2, 2, 128 + signal.SIGKILL], "lost the connection to another rank"),
        (signal.SIGTERM, [75, 75, 75], "saved step"),
    ],
)
def test_a_signal_to_one_rank_ends_all_of_them(
    tmp_path: Path, corpus_file: Path, number: int, exit_codes: list[int], sentence: str
) -> None:
    never = {"train__max_steps": 9999, "train__checkpoint_every": 9999, "train__eval_every": 9999}
    job = Job(3, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **never, train__grad_accum_steps=3))
    wait_for_step(tmp_path / "out", 2)
    os.kill(job.pids[2], number)
    check_ends(job.wait(), exit_codes, sentence, "--resume")


@pytest.mark.long
def test_an_error_of_all_is_one_sentence(tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_of(**changes: object) -> list[Result]:
        return Job(2, tmp_path / "said", tiny_run(corpus_file, tmp_path / "out", **{**OPTIONS, **changes})).wait()

    def full(*_: object, **__: object) -> None:
        time.sleep(1)  # all wait for what rank 0 saves
        raise OSError(errno.ENOSPC, "No space left on device")

    check_ends(end_of(model__context_length=9999), [2, 2], "the training split has")
    check_ends(end_of(train__out_dir=Path("/dev/null/out")), [2, 2], "File exists")  # of rank 0 alone
    check_ends(end_of(train__learning_rate=1e30, train__warmup_steps=0), [3, 3], "is not finite in step")
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr("training.run.save_checkpoint", full)  # the ranks are forked
    check_ends(end_of(train__max_steps=2), [2, 2], "cannot save step 2", "No space left")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def children(process: subprocess.Popen) -> list[int]:
    """The ids of the processes that a process has started, on Linux."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.long
@pytest.mark.parametrize("by_itself", [True, False], ids=["max-restarts", "resume"])
def test_a_run_goes_on_after_a_rank_was_killed(tmp_path: Path, corpus_file: Path, by_itself: bool) -> None:
    options = {"train__checkpoint_every": 1, "train__max_steps": 30}
    arguments = tiny_run(corpus_file, tmp_path / "out", **{**OPTIONS, **options})
    restarts = f"--max-restarts={2 if by_itself else 0}"
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=2", restarts, "train.py", *arguments]
    with open(tmp_path / "said", "w") as said:
        job = subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT)
        wait_for_step(tmp_path / "out", 2)
        os.kill(children(job)[-1], signal.SIGKILL)
        code, text = job.wait(100), (tmp_path / "said").read_text()
    if by_itself:
        assert code == 0 and "resumed from" in text, text
    else:
        assert code != 0 and "Signal 9 (SIGKILL)" in text, text
        # Tests prepare data elsewhere than those processes, so here the run is one of another copy.
        again = ["--resume", str(tmp_path / "out"), "--data.source", str(corpus_file)]
        for end in Job(2, tmp_path / "again", again).wait():
            assert end.exit_code == 0, end.err
    straight = trained(1, tmp_path, corpus_file, "straight", **options)
    assert same_bits(weights(straight, 30), weights(tmp_path / "out", 30))


@pytest.mark.long
def test_two_nodes_begin_again_together(tmp_path: Path, corpus_file: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, options = tmp_path / "out", {"train__checkpoint_every": 1, "train__max_steps": 40}
    node = f"--nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:{port} --rdzv_id=7".split()
    node += ["--local_addr=127.0.0.1", "--max-restarts=2", "train.py"]
    command = [*TORCHRUN, *node, *tiny_run(corpus_file, out, **{**OPTIONS, **options})]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # a new store for each attempt
    with open(tmp_path / "said", "w") as said:
        nodes = [subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, env=environment) for _ in range(2)]
        wait_for_step(out, 2)
        os.kill(children(nodes[1])[-1], signal.SIGKILL)
        ends = [node.wait(100) for node in nodes]
    assert ends == [0, 0] and "resumed from" in (tmp_path / "said").read_text()
    assert (out / "checkpoints" / "step-00000040").is_dir()

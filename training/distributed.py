"""Many processes, one run: what `torchrun` starts, and what its ranks have to agree on.

A step is a list of micro-batches, and the ranks share it out: rank r of R takes the micro-batches r, r + R, r + 2 R and
so on. So the tokens of a step do not depend on how many ranks there are, and with one rank nothing here does anything.

    ddp    every rank has the whole model; gradients are added up while they are computed (Li et al. 2020), or, where
           the loss is compiled as one, after that
    fsdp   every rank has a part of each tensor, and the whole of one block at a time (Zhao et al. 2023)

With train.deterministic, ddp adds gradients in the order of the micro-batches: the same bits for any number of ranks.
"""

import contextlib
import os
import re
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import GPT
from training.config import TrainConfig, TrainError

T = TypeVar("T")
LossFn = Callable[[GPT, Tensor, Tensor], Tensor]

POLL_SECONDS = 0.1  # between two looks at what another rank has said
CALL_SECONDS = 1.0  # between two looks at whether one asks who is left; many ranks look, and one store answers
GRACE_SECONDS = 3.0  # in which the ranks that are left say so,
LATE_SECONDS = 10.0  # and in which they do if more than one seems to be lost: a machine may be busy
MORE_SECONDS = 60  # for collectives of a GPU, whose watchdog kills the process: so that hosts give up first, in words
LOST = re.compile("RemoteError|closed by peer|reset by peer|broken pipe|connectFullMesh|time(d )?out", re.IGNORECASE)
MEET = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # what torchrun says to a process


class Ranks:
    """The processes of a run, of which this is one; without `torchrun` the only one."""

    def __init__(self, config: TrainConfig):
        self.config, self.started = config, MEET <= os.environ.keys()
        place = os.environ if self.started else {}
        self.rank, self.local_rank = (int(place.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        self.world = int(place.get("WORLD_SIZE", "1"))
        self.is_first = self.rank == 0
        self.replica: DistributedDataParallel | None = None
        self.in_order = config.deterministic and config.parallel == "ddp" and self.world > 1
        self.times_waited = 0
        self.timeout = timedelta(seconds=config.rank_timeout)
        if self.started:
            self.all_attempts, _, _ = next(dist.rendezvous("env://", timeout=self.timeout))
            self.store = dist.PrefixStore(self.name_attempt(), self.all_attempts)

    def name_attempt(self) -> str:
        """A name that only the ranks of this attempt know: torchrun keeps one store through its restarts, with the
        addresses of the dead, and counts them on each node by itself."""
        store, me, others = self.all_attempts, uuid.uuid4().hex, range(1, self.world)
        store.set(f"new {self.rank}", me)
        end = time.monotonic() + self.config.rank_timeout
        if not self.is_first:
            while not store.check([f"attempt of {me}"]):
                self.sleep_until(end)
            name = store.get(f"attempt of {me}").decode()
            store.set(f"{name} has {self.rank}", "")
            return name
        while not all(store.check([f"{me} has {rank}"]) for rank in others):
            for rank in others:
                if store.check([f"new {rank}"]):
                    store.set(f"attempt of {store.get(f'new {rank}').decode()}", me)
            self.sleep_until(end)
        return me

    def sleep_until(self, end: float) -> None:
        """Sleep a moment. Raises TrainError when it is too late to wait for the others."""
        if time.monotonic() > end:
            seconds = self.config.rank_timeout
            raise TrainError(f"not all of the {self.world} ranks came within {seconds} s (train.rank_timeout)")
        time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise TrainError if they cannot share the micro-batches of a step, or are none and should be.

        Exits if an attempt before this one had ended for good: torchrun begins again whatever the reason was.
        """
        if self.started and self.all_attempts.check(["ended"]):
            sys.exit(int(self.all_attempts.get("ended")))
        sequences, accum = self.config.batch_size * self.config.grad_accum_steps, self.config.grad_accum_steps
        if accum % self.world:
            fit = next((n for n in range(self.world, sequences + 1, self.world) if sequences % n == 0), 0)
            less = next(n for n in range(self.world, 0, -1) if sequences % n == 0)
            advice = f"--train.batch_size {sequences // fit} --train.grad_accum_steps {fit}" if fit else f"{less} ranks"
            raise TrainError(
                f"{self.world} ranks cannot share the {accum} micro-batches of a step (train.grad_accum_steps); "
                f"what fits its {sequences} sequences: {advice}"
            )
        if self.config.parallel == "fsdp" and not self.started:
            raise TrainError("train.parallel fsdp is for several processes: torchrun --nproc_per_node=N train.py ...")
        if self.config.device.startswith("cuda:") and self.world > 1:
            raise TrainError(f"each of {self.world} ranks has a GPU of its own: --train.device cuda, not one of them")

    def join(self, device: torch.device, dtype: torch.dtype, step: int) -> None:
        """Meet the other ranks. Raises TrainError if they do not all begin at this step and in this precision."""
        if not self.started:
            return
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=self.timeout + timedelta(seconds=MORE_SECONDS if device.type == "cuda" else 0),
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            device_id=device if device.type == "cuda" else None,
        )
        self.device = device
        self.hosts = dist.new_group(backend="gloo", timeout=self.timeout) if device.type == "cuda" else dist.group.WORLD
        begins = [(step, dtype)] * self.world
        dist.all_gather_object(begins, (step, dtype), self.hosts)
        steps, dtypes = ({*values} for values in zip(*begins, strict=True))
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise TrainError(f"the ranks would train in {names}: choose one of them with --train.dtype")
        if len(steps) > 1:
            raise TrainError(
                f"the ranks would begin at different steps, {min(steps)} and {max(steps)}: train.out_dir must be on a "
                "disk that all of them see"
            )

    # What each rank computes of the one run.

    def place(self, model: GPT, device: torch.device, dtype: torch.dtype) -> None:
        """Put the model on the device: with fsdp only this rank's part of each parameter, block by block.

        Raises TrainError for fsdp with float16.
        """
        if self.config.parallel != "fsdp":
            model.to(device)
            return
        if dtype == torch.float16:  # whose loss scaling would need a verdict of all ranks
            raise TrainError("train.parallel fsdp needs train.dtype bfloat16 or float32, got float16")
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = dist.init_device_mesh(device.type, (self.world,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)  # the loss of a micro-batch is a share of the step's already
        for name in ("hidden", "logits"):
            register_fsdp_forward_method(model, name)
        model.fill_buffers()

    def sharing_gradients(self, model: GPT, loss_fn: LossFn) -> LossFn:
        """The loss as the training calls it: its backward pass adds up the gradients of all ranks."""
        if not self.started or self.in_order or self.config.parallel == "fsdp":
            return loss_fn
        gpu = [self.device] if self.device.type == "cuda" else None
        with warnings.catch_warnings():  # torch 2.13 has a new name for broadcast_buffers, which 2.11 does not know
            warnings.simplefilter("ignore", FutureWarning)
            self.replica = DistributedDataParallel(
                LossOf(model, loss_fn), device_ids=gpu, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self.replica.register_comm_hook(None, add_up)
        return lambda model, inputs, targets: self.replica(inputs, targets)

    def micro_batches(self, model: GPT) -> Iterator[int]:
        """The micro-batches of a step that are this rank's, each to be run forward and backward before the next."""
        mine = range(self.rank, self.config.grad_accum_steps, self.world)
        total: Tensor | None = None
        for micro_batch in mine:
            if self.replica is not None:
                self.replica.require_backward_grad_sync = micro_batch == mine[-1]
            yield micro_batch
            if self.in_order:
                total = self.add_in_order(model, total)
        if self.in_order:
            self.spread(model, total)

    def add_in_order(self, model: GPT, total: Tensor | None) -> Tensor:
        """Add the gradients of one micro-batch of each rank to `total`, this rank's part of their sum, one by one, as
        autograd does in a single process."""
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])
        model.zero_grad()
        size = -(-flat.numel() // self.world)
        sent = nn.functional.pad(flat, (0, size * self.world - flat.numel()))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        for gradient in received.view(self.world, size):
            total = gradient.clone() if total is None else total.add_(gradient)
        return total

    def spread(self, model: GPT, total: Tensor) -> None:
        """Give all parameters the sum of all micro-batches, of which each rank has a part."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        flat, sizes = total.new_empty(self.world, len(total)), [parameter.numel() for parameter in parameters]
        dist.all_gather(list(flat), total)
        parts = flat.flatten()[: sum(sizes)].split(sizes)
        for parameter, gradient in zip(parameters, parts, strict=True):
            parameter.grad = gradient.view_as(parameter)

    def collect(self, numbers: list[Tensor]) -> Tensor:
        """As many scalars from each rank -> all of them, in the order in which one rank would have made them."""
        mine = torch.stack(numbers)
        if self.world == 1:
            return mine
        every = mine.new_empty(self.world, len(mine))
        dist.all_gather(list(every), mine)
        return every.T.flatten()

    def order(self) -> str:
        """What decides in which order gradients are added: how many ranks, and which; "any" if it does not matter."""
        if self.config.deterministic and self.config.parallel == "ddp":
            return "any"
        return f"{self.world}, {self.config.parallel}" if self.world > 1 else "1"

    def any(self, condition: object) -> bool:
        """Whether it holds on at least one rank; the hosts agree, no device is waited for."""
        if self.world == 1:
            return bool(condition)
        answer = torch.tensor(bool(condition), dtype=torch.uint8)
        dist.all_reduce(answer, dist.ReduceOp.MAX, self.hosts)
        return bool(answer)

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Let rank 0 do it, which may take hours, then the others, who find what it has made."""
        if self.is_first:
            result = work()
            self.wait_for_first()
            return result
        self.wait_for_first()
        return work()

    def wait_for_first(self) -> None:
        """Go on when rank 0 has come here too, which does not wait; no collective runs out of time meanwhile."""
        if self.world == 1:
            return
        self.times_waited += 1
        here = f"first was here {self.times_waited}"
        if self.is_first:
            self.store.set(here, "")
        while not self.store.check([here]):
            self.follow_if_one_left()
            time.sleep(POLL_SECONDS)

    # How they end.

    def leave(self, error: BaseException) -> None:
        """End this rank with an error. What ends all of them is said by the first that knows.

        Raises TrainError if another rank is lost, SystemExit if another has said why, or returns if this one says it.
        """
        if not self.started or isinstance(error, SystemExit):
            return
        code, sentence = getattr(error, "exit_code", 1), f"{type(error).__name__}: {error}"
        lost = code == 1 and isinstance(error, RuntimeError) and LOST.search(str(error))
        with contextlib.suppress(RuntimeError):  # the store went with the rank that is lost
            which = self.name_the_lost("time" in lost.group().lower()) if lost else ""
            if which:
                code, sentence = TrainError.exit_code, which
            elif code != 1:
                self.all_attempts.set("ended", str(code))
            if self.store.compare_set("last words", "", f"{code} {sentence}").decode() != f"{code} {sentence}":
                self.follow_if_one_left()
            if self.store.add("said", 1) > 1:
                sys.exit(code)
        if code == TrainError.exit_code and lost:
            raise TrainError(sentence) from error

    def follow_if_one_left(self) -> None:
        """Exit without a word, and with its code, if another rank has ended with an error."""
        if self.store.check(["last words"]):
            sys.exit(int(self.store.get("last words").split()[0]))

    def name_the_lost(self, timed_out: bool) -> str:
        """Which ranks do not answer any more, in words; nothing if all do. One may also live and hang: then the others
        have run out of time, and it has not noticed."""
        self.store.set(f"noticed {self.rank}", "")
        self.store.set(f"alive {self.rank}", "")
        self.store.set("who is alive", "")
        began, lost = time.monotonic(), list(range(self.world))
        while (took := time.monotonic() - began) < GRACE_SECONDS or (len(lost) > 1 and took < LATE_SECONDS):
            self.follow_if_one_left()
            time.sleep(CALL_SECONDS)
            lost = self.silent("alive") or (self.silent("noticed") if timed_out else [])
        if not lost:
            return ""
        which = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost[:-1]))} and {lost[-1]}"
        return (
            f"{which} of {self.world} {'is' if len(lost) == 1 else 'are'} lost: killed, or silent for "
            f"{self.config.rank_timeout} s (train.rank_timeout); go on from the last checkpoint with "
            f"--resume {self.config.out_dir}, or let torchrun do so with --max-restarts"
        )

    def silent(self, word: str) -> list[int]:
        """The ranks that have not said this."""
        return [rank for rank in range(self.world) if not self.store.check([f"{word} {rank}"])]

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Say in a thread that this process is alive when one asks: it may itself be waiting in a collective, for the
        rank that asks."""
        if self.world == 1:
            yield
            return
        ended = threading.Event()

        def answer() -> None:
            with contextlib.suppress(RuntimeError):  # the store went with its rank
                store = self.store.clone()  # a connection of its own
                while not ended.wait(CALL_SECONDS):
                    if store.check(["who is alive"]):
                        store.set(f"alive {self.rank}", "")
                        return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(GRACE_SECONDS)


class LossOf(nn.Module):
    """A loss function and its model as the one module that DDP wants."""

    def __init__(self, model: GPT, loss_fn: LossFn):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, T), (B, T) -> the summed loss."""
        return self.loss_fn(self.model, inputs, targets)


def add_up(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication without its division: the loss of a micro-batch is a share of the step's already."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@contextlib.contextmanager
def said_by_first() -> Iterator[None]:
    """Before the ranks have met: an error of all of them, as in the options, is said by the first of each node."""
    try:
        yield
    except Exception as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and hasattr(error, "exit_code"):
            sys.exit(error.exit_code)
        raise


@contextlib.contextmanager
def joined(config: TrainConfig) -> Iterator[Ranks]:
    """The ranks of a run, of which only the first prints; at the end all leave together."""
    ranks = Ranks(config)
    with contextlib.ExitStack() as stack:
        if not ranks.is_first:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            ranks.check()
            with ranks.answering():
                yield ranks
        except BaseException as error:
            ranks.leave(error)
            raise
    if dist.is_initialized():
        dist.destroy_process_group()


def job() -> str | None:
    """What stays the same when torchrun or Slurm starts this run again by itself; None without them."""
    if "SLURM_JOB_ID" in os.environ:
        return f"Slurm job {os.environ['SLURM_JOB_ID']}"
    return (
        f"torchrun {os.environ['TORCHELASTIC_RUN_ID']} {os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else None
    )

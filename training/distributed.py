"""Many processes, one run: the ranks that `torchrun` starts.

A step is a list of micro-batches, and the ranks share it out: rank r of R takes the micro-batches r, r + R, r + 2 R and
so on. The tokens of a step therefore do not depend on the number of ranks.

    ddp    every rank has the whole model; gradients are added in the order of the micro-batches, so that any number of
           ranks ends with the bits of one (on GPUs only with train.deterministic); slower than
           DistributedDataParallel, which does not promise that
    fsdp   every rank has a shard of each tensor, and gathers one block at a time (Zhao et al. 2023)

If a rank dies, torchrun reports it and stops the others; with --max-restarts it starts all ranks again.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from errors import UserError, errors_as_user_error
from model import GPT
from model.device import dtype_name
from model.huggingface import Tensors
from training.config import TrainConfig

LONGEST_WAIT = timedelta(days=30)  # for rank 0, which prepares data for hours or saves


class Ranks:
    """Place of this process among the processes of a run. Without `torchrun` there is one process.

    Inside of the context only the first rank prints. The sentence that ends a run is printed by the rank that has it
    first; the others end without a word.
    """

    # The values of a single process.
    rank = 0
    local_rank: int | None = None  # on this machine
    world = 1  # the number of ranks
    may_resume = False  # without --resume, after a restart
    summed: Tensor | None = None  # this rank's share of the summed gradients, flat

    def __init__(self) -> None:
        self.started = "RANK" in os.environ
        if self.started:
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                print(f"ranks:  waiting for all {os.environ.get('WORLD_SIZE')}, since RANK is set without torchrun")
            with errors_as_user_error("RANK is set, and the ranks do not meet (unset it, or use torchrun)"):
                store, self.rank, self.world = next(dist.rendezvous("env://"))
            self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            self.may_resume = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
            # A store of torchrun serves all of its attempts, and still has the addresses of the dead.
            is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self.store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"] if is_shared else "0", store)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world)
            self.hosts = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)  # while the first prepares the text
        self.is_first = self.rank == 0

    def __enter__(self) -> "Ranks":
        if not self.is_first:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # `outlives_readers`, around it, gives the others back
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.started:
            return
        if error is None:
            dist.destroy_process_group()
        elif isinstance(error, RuntimeError) and "onnection" in str(error):  # gloo has no class for it
            error = UserError(
                "lost the connection to another rank; torchrun says which one ended, and how: go on with --resume, or "
                "let torchrun do so with --max-restarts"
            )
        if isinstance(error, OSError) or hasattr(error, "exit_code"):  # `run_script` prints these as sentences
            with contextlib.suppress(RuntimeError):  # the store has ended with rank 0, if that was its host
                if self.store.add("sentences", 1) > 1:
                    sys.exit(getattr(error, "exit_code", 2))
            raise error

    def check(self, config: TrainConfig, step: int, dtype: torch.dtype) -> None:
        """Raise UserError if the ranks cannot train as configured, or do not begin at the same step and precision."""
        accum = config.grad_accum_steps
        if accum % self.world:
            raise UserError(
                f"{self.world} ranks cannot share the {accum} micro-batches of a step: take as many ranks as divide "
                "--train.grad_accum_steps, or begin a run with more of these and a smaller --train.batch_size"
            )
        if config.parallel == "fsdp" and not (self.started and dtype != torch.float16):
            raise UserError(
                "--train.parallel fsdp is for several processes, in bfloat16 or float32: torchrun --nproc_per_node=N "
                "train.py ... --train.dtype float32"
            )
        if self.world == 1:
            return
        begins = [""] * self.world
        dist.all_gather_object(begins, f"at step {step} in {dtype_name(dtype)}")
        different = sorted({*begins})
        if len(different) > 1:
            raise UserError(
                f"the ranks would begin {' and '.join(different)}: --train.out_dir must be on a disk that all of them "
                "see, and the precision one that all have, as in --train.dtype float32"
            )
        print(f"ranks:  {self.world}, {config.parallel}, {accum // self.world} micro-batches of a step each")

    def add_gradients(self, model: nn.Module) -> None:
        """Add the gradients that each rank has of one micro-batch to their sum, in the order of the micro-batches.

        Floating point addition depends on the order, and this is the order of a single process. Each rank keeps the
        sum of an equal share of all gradients; `share_gradients` ends the step. fsdp adds its gradients by itself.
        """
        if self.world == 1 or is_sharded(next(model.parameters())):
            return
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad]
        padding = gradients[0].new_zeros(-sum(map(len, gradients)) % self.world)
        sent = torch.cat([*gradients, padding])
        del gradients
        model.zero_grad()  # frees memory for what is received
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        for gradient in received.view(self.world, -1):
            self.summed = gradient.clone() if self.summed is None else self.summed.add_(gradient)

    def share_gradients(self, model: nn.Module) -> None:
        """All-gather the summed gradients of the step into `parameter.grad`."""
        if self.summed is None:
            return
        gradients = self.all_gather(self.summed).flatten()
        self.summed = None
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = gradients[: parameter.numel()].view_as(parameter)
                gradients = gradients[parameter.numel() :]

    def collect(self, numbers: list[Tensor]) -> Tensor:
        """Return the numbers of all ranks, equally many from each and of one shape, in the order of one process."""
        mine = torch.stack(numbers)
        return mine if self.world == 1 else self.all_gather(mine).transpose(0, 1).flatten(0, 1)

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape: (n, ...) -> (world, n, ...)."""
        gathered = mine.new_empty(self.world, *mine.shape)
        dist.all_gather(list(gathered), mine)
        return gathered

    def any_rank(self, condition: bool) -> bool:
        """Return whether the condition holds on at least one rank. Only the hosts talk; no device is waited for."""
        return bool(self.collect([torch.tensor(condition, dtype=torch.uint8)]).any())

    @contextlib.contextmanager
    def first_then_others(self) -> Iterator[None]:
        """Let rank 0 do what is inside, which may take hours, then the others, who find the result on the disk."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.world > 1:
            dist.monitored_barrier(self.hosts, LONGEST_WAIT)


def place_model(model: GPT, parallel: str, device: torch.device) -> GPT:
    """Put the model on the device; with fsdp only this rank's shard of each parameter. Returns the same model."""
    if parallel != "fsdp":
        return model.to(device)
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # In the first step of Muon each rank would warn that gloo gathers where NCCL exchanges.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # The root is gathered again for the backward pass, which one could spare: but after a forward pass alone its
    # parameters would be whole copies, and what the certificate writes to those would be lost.
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)  # the loss of a micro-batch is a share of the step's already
    register_fsdp_forward_method(model, "hidden")
    register_fsdp_forward_method(model, "logits")
    return model


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, of which a rank may hold only a part. To import the class is slow."""
    return hasattr(tensor, "full_tensor")


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor. If it is sharded this is a collective: every rank has to call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather(tensors: Tensors, keep: bool) -> Tensors:
    """Return the whole tensors, those that were sharded on the CPU; an empty dict where `keep` is false.

    If a tensor is sharded this is a collective: every rank has to call it, with the same names in the same order.
    """
    gathered = {}
    for name, tensor in tensors.items():
        whole = gather_tensor(tensor)
        if keep:
            gathered[name] = whole.cpu() if is_sharded(tensor) else tensor
    return gathered

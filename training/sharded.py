"""Place a model on a device, with fsdp as shards over the ranks, and gather tensors that may be sharded."""

import torch
import torch.distributed as dist
from torch import Tensor

from model import GPT
from model.huggingface import Tensors


def place_model(model: GPT, parallel: str, device: torch.device) -> GPT:
    """Put the model on the device; with fsdp only this rank's shard of each parameter. Returns the same model."""
    if parallel != "fsdp":
        return model.to(device)
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

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


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Move a full tensor, which every rank holds, to the device and dtype of `like`, and shard it if that is sharded.

    A scalar stays whole.
    """
    tensor = tensor.to(like.device, like.dtype)
    if tensor.dim() == 0 or not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

"""Tensors that may be sharded over ranks: PyTorch's DTensors, recognised without their import, which is slow."""

from torch import Tensor

from model.huggingface import Tensors


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, of which a rank may hold only a part."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor. If it is sharded this is a collective: every rank has to call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather(tensors: Tensors, keep: bool) -> Tensors:
    """Return the whole tensors, those that were sharded on the CPU; an empty dict where `keep` is false.

    If a tensor is sharded this is a collective: every rank has to call it, with the same names in the same order.
    """
    gathered = {}
    for name, tensor in tensors.items():
        whole = full(tensor)
        if keep:
            gathered[name] = whole.cpu() if is_sharded(tensor) else tensor
    return gathered


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, or the tensor itself if it is not sharded. No memory is copied."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Move a full tensor, which every rank holds, to the device and dtype of `like`, and shard it if that is sharded.

    A scalar stays whole.
    """
    tensor = tensor.to(like.device, like.dtype)
    if tensor.dim() == 0 or not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

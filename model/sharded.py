"""Tensors of which a process may have one shard only: DTensors, recognised without importing them, which is slow."""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process has only a shard of the tensor."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor; all processes must ask for a sharded one together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return the shard of this process, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor like `like`, or just move it to its device and dtype."""
    tensor = tensor.to(like.device, like.dtype)
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

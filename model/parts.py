"""Tensors of which each process may have a part only: DTensors, known without their import, which is slow."""

from torch import Tensor


def is_part(tensor: Tensor) -> bool:
    """Whether this process has a part of the tensor only."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; if it is in parts, all processes have to ask for it together."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, as the same memory."""
    return tensor.to_local() if is_part(tensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, which each process has, what it keeps if `like` is in parts; on the device of that."""
    tensor = tensor.to(like.device, like.dtype)
    if not is_part(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

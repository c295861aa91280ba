"""Load a model: a checkpoint of ours or a Hugging Face model directory, checked before it is used.

    model = load_model("out/quickstart")

The files are memory-mapped, so that the system can drop pages that have been read. Each tensor is then copied, because
matrix products of memory that is not aligned to 64 bytes round differently: a loaded model must compute the bits of
the saved one.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from errors import UserError, errors_as_user_error
from model.checkpoint import Checkpoint, code_hash, find_checkpoint, read_json, tensor_files
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import HEAD, config_from_huggingface, tensors_from_huggingface

EMBEDDING = "token_embedding.weight"
POSITIONS = "position_embedding.weight"


class skip_parameter_init(TorchFunctionMode):
    """Create parameters without initialising them. Memory that is never written costs nothing.

    On the device "meta" the buffers would have no values either, also those that a layer of somebody's own computes.
    """

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and isinstance(kwargs["tensor"], nn.Parameter):
            return kwargs["tensor"]
        return func(*args, **kwargs)


def load_model(
    path: str | Path | Checkpoint,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    **changes: object,
) -> GPT:
    """Return a stored model in eval mode.

    Args:
        path: a checkpoint of ours, a run directory (its newest intact checkpoint), a Hugging Face model directory, or
            the name OWNER/NAME of a model on the Hugging Face hub. A `Checkpoint` is not verified once more.
        device: the device to load to.
        dtype: the dtype of the weights; None keeps that of the checkpoint.
        changes: fields of the configuration: another dropout or a smaller context_length than the stored model has.

    A line on stderr says if other files of this package trained it: they decide what its weights mean. Raises UserError
    if there is no intact checkpoint, or if its tensors are not those of its config.json.
    """
    checkpoint = find_checkpoint(path)
    directory = checkpoint.directory
    if checkpoint.manifest.get("environment", {}).get("code of model/") not in (None, code_hash()):
        said = f"note: {directory.name!r} was trained by another version of model/: its numbers may differ"
        print(said, file=sys.stderr)
    stored = load_config(directory)
    weights = {}
    with errors_as_user_error(f"{directory} is not the model that its config.json describes"):
        with skip_parameter_init():
            model = GPT(replace(stored, **changes))
        for name, tensor in tensors_from_huggingface(stored, model.state_dict(), read_tensors(directory, "model")):
            kept = dtype if tensor.is_floating_point() else None
            weights[name] = tensor.to(device, kept, copy=True, memory_format=torch.contiguous_format)
        if stored.tied and HEAD in weights:  # which is all that `save_model` of safetensors keeps of the two
            weights.setdefault(EMBEDDING, weights[HEAD])
        embedding = weights[EMBEDDING]
        if stored.tied and not weights.setdefault(HEAD, embedding).equal(embedding):  # some files have both
            raise UserError(
                f"{directory} has a head of its own, but config.json ties it: set tie_word_embeddings there to false"
            )
        if POSITIONS in weights:
            weights[POSITIONS] = weights[POSITIONS][: model.config.context_length]
        model.load_state_dict(weights, assign=True)
    return model.to(device, embedding.dtype).eval()


def load_config(directory: Path) -> GPTConfig:
    """Return the configuration of the model in a directory. Raises UserError if it describes no GPT."""
    return config_from_huggingface(read_json(directory / "config.json"))


def read_tensors(directory: Path, stem: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a "model" or an "optimizer", memory-mapped.

    Raises UserError for files that cannot be read, and for numbers that are not finite.
    """
    for path in tensor_files(directory, stem):
        with errors_as_user_error(f"{path} cannot be read"), safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if not tensor.isfinite().all():
                    raise UserError(f"{path}: {name} holds numbers that are not finite")
                yield name, tensor

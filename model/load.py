"""Load a model: a checkpoint of ours or a Hugging Face model directory, checked before it is used.

    model = load_model("out/quickstart")

The files are memory-mapped, so that the system can drop pages that have been read. Each tensor is then copied, because
matrix products of memory that is not aligned to 64 bytes round differently: a loaded model must compute the bits of
the saved one.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode

from errors import UserError
from model.checkpoint import Checkpoint, find_checkpoint
from model.config import GPTConfig
from model.elsewhere import read_json, tensor_files
from model.gpt import GPT
from model.huggingface import Tensors, config_from_huggingface, tensors_from_huggingface, tensors_to_huggingface

HEAD = "lm_head.weight"
UNUSED = re.compile(r"(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # masks and rotary tables in old files
PREFIXES = ("", "transformer.", "model.")
WRAPPERS = re.compile(r"\b(_orig_mod|module)\.")  # of torch.compile and DataParallel
Shapes = dict[str, tuple[int, ...]]


class skip_parameter_init(TorchFunctionMode):
    """Create parameters without initialising them. Memory that is never written costs nothing."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        tensor = kwargs.get("tensor")  # as the functions of torch.nn.init pass it on
        if getattr(func, "__module__", None) == "torch.nn.init" and isinstance(tensor, nn.Parameter):
            return tensor
        return func(*args, **kwargs)


def load_model(
    path: str | Path | Checkpoint,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    config: GPTConfig | None = None,
) -> GPT:
    """Return a stored model in eval mode.

    Args:
        path: a checkpoint of ours, a run directory (its newest intact checkpoint), a Hugging Face model directory, or
            the name OWNER/NAME of a model on the Hugging Face hub. A `Checkpoint` is not verified once more.
        device: the device to load to.
        dtype: the dtype of the weights; None keeps that of the checkpoint.
        config: may ask for another dropout, or for a smaller context_length, than the stored model has.

    Raises UserError if there is no intact checkpoint.
    """
    checkpoint = find_checkpoint(path)
    stored = load_config(checkpoint.directory)
    tensors = load_weights(checkpoint.directory, stored)
    dtype = dtype or tensors["token_embedding.weight"].dtype
    weights = {}
    for name in list(tensors):
        weights[name] = tensors.pop(name).to(device, dtype, copy=True)  # drops what it has copied
    weights.setdefault(HEAD, weights["token_embedding.weight"])  # tied
    with skip_parameter_init():
        model = GPT(config or stored)
    if model.position_embedding is not None:
        weights["position_embedding.weight"] = weights["position_embedding.weight"][: model.config.context_length]
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval()


def load_config(directory: Path) -> GPTConfig:
    """Return the configuration of the model in a directory. Raises UserError if it describes no GPT."""
    return config_from_huggingface(read_json(directory / "config.json"))


def load_weights(directory: Path, config: GPTConfig) -> Tensors:
    """Return the state dict of the model in a directory, memory-mapped and without a tied head.

    Raises UserError if the directory holds other tensors than a model with this configuration has.
    """
    with torch.device("meta"):  # without memory, for the shapes
        expected = GPT(config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_to_huggingface(config, expected).items()}
    embedding = next(iter(shapes))
    shapes[HEAD] = shapes[embedding]  # some files store a tied head as well
    tensors = load_tensors(directory, "model", shapes)
    if not config.tied and HEAD not in tensors:
        raise UserError(f"{directory} has no tensor {HEAD}")
    if config.tied and HEAD in tensors and not torch.equal(tensors[HEAD], tensors[embedding]):
        raise UserError(f"{directory} has a head of its own, and a config.json that says it is the embedding")
    weights = tensors_from_huggingface(config, tensors)
    if any(weights.pop(name).any() for name in weights.keys() - expected.keys()):
        raise UserError(f"{directory} has biases, and a config.json that says it has none")
    return weights


def load_tensors(directory: Path, stem: str, shapes: Shapes) -> Tensors:
    """Return the tensors of a "model" or an "optimizer" (the stem of the file names), memory-mapped.

    Raises UserError unless the files hold exactly the tensors that `shapes` names, with these shapes, and all numbers
    are finite. Only the head may be missing.
    """
    tensors = {}
    for path in tensor_files(directory, stem):
        tensors |= read_file(path, shapes)
    for name in shapes:
        if name not in tensors and name != HEAD:
            raise UserError(f"{directory} has no tensor {name}")
    return tensors


def read_file(path: Path, shapes: Shapes) -> Tensors:
    """Return the tensors of one safetensors file; see `load_tensors`. Shapes are checked before memory is allocated."""
    tensors = {}
    try:
        with safe_open(path, "pt") as file:
            for stored in sorted(file.keys()):
                # `transformers` saves a model without a head under names without the prefix of its body.
                names = [prefix + part for part in (stored, WRAPPERS.sub("", stored)) for prefix in PREFIXES]
                name = next((name for name in names if name in shapes), None)
                if name is None:
                    if UNUSED.search(stored):
                        continue
                    raise UserError(f"{path} has a tensor that is not expected: {stored!s:.60}")
                if name in tensors:
                    raise UserError(f"{path} has {name} twice, the second time as {stored!s:.60}")
                header = file.get_slice(stored)
                shape = tuple(header.get_shape())
                kind = header.get_dtype()
                if shape != shapes[name]:
                    raise UserError(f"{path}: {name} is {shape!s:.60}, expected {shapes[name]}")
                if kind not in ("F64", "F32", "F16", "BF16"):
                    raise UserError(f"{path}: {name} holds {kind}, expected floating-point numbers")
                tensors[name] = file.get_tensor(stored)
                if not tensors[name].isfinite().all():
                    raise UserError(f"{path}: {name} holds numbers that are not finite")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error!s:.200}") from error
    return tensors

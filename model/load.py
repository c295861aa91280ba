"""Loading weights: a checkpoint of ours or a Hugging Face model directory, checked before it is used.

The files are memory-mapped, so that the system can drop what has been read. Each tensor is then copied. A model could
use the mapped memory itself, but matrix products of memory that is not aligned to 64 bytes round differently, and a
loaded model must compute the bits of the saved one.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoint import read_json
from model.config import GPTConfig, ModelError
from model.huggingface import config_from_huggingface, tensors_from_huggingface, tensors_to_huggingface

HEAD = "lm_head.weight"
UNUSED = re.compile(r"(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # masks and rotary tables in old files
Shapes = dict[str, tuple[int, ...]]


def load_config(directory: Path) -> GPTConfig:
    """Return the configuration of the model in a directory. Raises ModelError if it describes no GPT."""
    return config_from_huggingface(read_json(directory / "config.json"))


def load_weights(
    directory: Path,
    config: GPTConfig,
    like: dict[str, Tensor],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the state dict of the model in a directory. dtype None keeps that of the stored embedding.

    `like` is the state dict of any model with this configuration: it gives the shapes. Raises ModelError if the
    directory holds other tensors.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_to_huggingface(config, like).items()}
    embedding = next(iter(shapes))
    shapes[HEAD] = shapes[embedding]  # some files store a tied head as well
    tensors = load_tensors(directory, "model", shapes)
    if not config.tied and HEAD not in tensors:
        raise ModelError(f"{directory} has no tensor {HEAD}")
    if config.tied and HEAD in tensors and not torch.equal(tensors[HEAD], tensors[embedding]):
        raise ModelError(f"{directory} has a head of its own, and a config.json that says it is the embedding")
    if not config.bias and any(tensor.any() for name, tensor in tensors.items() if name.endswith(".bias")):
        raise ModelError(f"{directory} has biases, and a config.json that says it has none")
    stored = tensors_from_huggingface(config, tensors)
    dtype = dtype or stored["token_embedding.weight"].dtype
    weights = {name: stored.pop(name).to(device, dtype, copy=True) for name in list(stored)}  # drops what it has copied
    weights.setdefault(HEAD, weights["token_embedding.weight"])  # tied
    return weights


def load_tensors(directory: Path, stem: str, shapes: Shapes) -> dict[str, Tensor]:
    """Return the tensors of a "model" or an "optimizer" (the stem of the file names), memory-mapped.

    Raises ModelError unless the files hold exactly the tensors that `shapes` names, with these shapes, and all numbers
    are finite. Only the head may be missing.
    """
    tensors = {}
    for file, expected in find_tensors(directory, stem, shapes).items():
        tensors |= read_file(directory / file, expected)
    return tensors


def find_tensors(directory: Path, stem: str, shapes: Shapes) -> dict[str, Shapes]:
    """Return {file name: shapes of the tensors in it}, for one file or several with an index."""
    index = directory / f"{stem}.safetensors.index.json"
    if (directory / f"{stem}.safetensors").is_file() or not index.is_file():
        return {f"{stem}.safetensors": shapes}
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ModelError(f"{index} does not say where the tensors of the {stem} are")
    prefix = omitted_prefix(shapes, set(places))
    files = {name: {} for name in map(str, places.values())}
    if not all(re.fullmatch(r"[\w.-]+\.safetensors", file) for file in files):
        raise ModelError(f"{index} names a file that is not a safetensors file beside it")
    for name, shape in shapes.items():
        place = places.get(name.removeprefix(prefix))
        if place is None and name != HEAD:
            raise ModelError(f"{index} does not say where {name} is")
        if place is not None:
            files[place][name] = shape
    return files


def omitted_prefix(expected: Shapes, stored: set[str]) -> str:
    """Return "transformer." or "model." if the stored names lack it: so `transformers` saves a model without a head."""
    body = [name for name in expected if name != HEAD]
    return "" if not body or stored & set(body) else body[0].split(".")[0] + "."


def read_file(path: Path, shapes: Shapes) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file; see `load_tensors`. Shapes are checked before memory is allocated."""
    if not path.is_file():
        raise ModelError(f"{path} is not a file")
    try:
        with safe_open(path, "pt") as file:
            stored, tensors = set(file.keys()), {}
            prefix = omitted_prefix(shapes, stored)
            wanted = {name.removeprefix(prefix): name for name in shapes}
            unexpected = [name for name in sorted(stored - wanted.keys()) if not UNUSED.search(name)]
            if unexpected:
                raise ModelError(f"{path} has a tensor that is not expected: {unexpected[0]}")
            for inside, name in wanted.items():
                if inside == HEAD and inside not in stored:
                    continue  # tied
                if inside not in stored:
                    raise ModelError(f"{path} has no tensor {name}")
                header = file.get_slice(inside)
                shape, kind = tuple(header.get_shape()), header.get_dtype()
                if shape != shapes[name]:
                    raise ModelError(f"{path}: {name} is {shape}, expected {shapes[name]}")
                if kind not in ("F64", "F32", "F16", "BF16"):
                    raise ModelError(f"{path}: {name} holds {kind}, expected floating-point numbers")
                tensors[name] = file.get_tensor(inside)
                if not tensors[name].isfinite().all():
                    raise ModelError(f"{path}: {name} holds numbers that are not finite")
            return tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error

"""Loading weights: a checkpoint of ours or a model of the Hugging Face hub, checked before it is believed.

The files are mapped into memory, so that the system can drop what was read, and the model has the only copy. (A model
made of what is mapped would have none; but products of memory that does not begin at a multiple of 64 bytes round
differently, and a loaded model is to have the bits of the one that was saved.)
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoint import find_checkpoint, read_json
from model.config import GPTConfig, ModelError
from model.gpt import GPT
from model.huggingface import config_from_huggingface, tensors_from_huggingface, tensors_to_huggingface

HEAD = "lm_head.weight"
UNUSED = re.compile(r"(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # masks and tables of old files
Shapes = dict[str, tuple[int, ...]]


def load_model(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> GPT:
    """See GPT.from_pretrained."""
    return read_model(find_checkpoint(Path(path)), device, dtype)


def read_model(directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> GPT:
    """The model of a directory that `find_checkpoint` has just found, whose files are not hashed once more."""
    with torch.device("meta"):  # no memory and no time for first weights that are not wanted
        model = GPT(load_config(directory))
    state = load_state(directory, model)
    dtype = dtype or state["token_embedding.weight"].dtype
    if model.config.tied:
        del state["lm_head.weight"]
    weights = {name: state.pop(name).to(device, dtype, copy=True) for name in list(state)}
    weights.setdefault("lm_head.weight", weights["token_embedding.weight"])
    model.load_state_dict(weights, assign=True)
    model.fill_buffers()
    return model.eval()


def load_config(directory: Path) -> GPTConfig:
    """The configuration of the model in a directory."""
    return config_from_huggingface(read_json(directory / "config.json"))


def load_state(directory: Path, model: GPT) -> dict[str, Tensor]:
    """The state dict of a model with the configuration of that in the directory, memory-mapped."""
    config = model.config
    shapes = {name: tuple(t.shape) for name, t in tensors_to_huggingface(config, model.state_dict()).items()}
    embedding = next(iter(shapes))
    shapes[HEAD] = shapes[embedding]  # may be stored although it is the embedding
    tensors = {}
    for file, inside in parts(directory, shapes).items():
        tensors |= load_tensors(directory / file, inside)
    if not config.tied and HEAD not in tensors:
        raise ModelError(f"{directory} has no tensor {HEAD}")
    if config.tied and HEAD in tensors and not torch.equal(tensors[HEAD], tensors[embedding]):
        raise ModelError(f"{directory} has a head of its own, and a config.json that says it is the embedding")
    if not config.bias and any(tensor.any() for name, tensor in tensors.items() if name.endswith(".bias")):
        raise ModelError(f"{directory} has biases, and a config.json that says it has none")
    return tensors_from_huggingface(config, tensors)


def parts(directory: Path, shapes: Shapes, stem: str = "model") -> dict[str, Shapes]:
    """The files of a model or an optimizer, one or several with an index, and which tensors each of them holds."""
    index = directory / f"{stem}.safetensors.index.json"
    if (directory / f"{stem}.safetensors").is_file() or not index.is_file():
        return {f"{stem}.safetensors": shapes}
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ModelError(f"{index} does not say where the tensors of the {stem} are")
    prefix = prefix_to_leave_out(shapes, set(places))
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


def prefix_to_leave_out(expected: Shapes, stored: set[str]) -> str:
    """A model that was saved without its head has names without "transformer." or "model."."""
    body = [name for name in expected if name != HEAD]
    return "" if not body or stored & set(body) else body[0].split(".")[0] + "."


def load_tensors(path: Path, shapes: Shapes | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file; with `shapes`, those are expected, and no others.

    Raises ModelError for another file, other shapes, or numbers that are not finite; sizes are checked before there is
    memory for them.
    """
    if not path.is_file():
        raise ModelError(f"{path} is not a file")
    try:
        with safe_open(path, "pt") as file:
            stored, tensors = set(file.keys()), {}
            names = dict.fromkeys(stored) if shapes is None else shapes
            prefix = prefix_to_leave_out(names, stored)
            wanted = {name.removeprefix(prefix): name for name in names}
            unexpected = [name for name in sorted(stored - wanted.keys()) if not UNUSED.search(name)]
            if unexpected:
                raise ModelError(f"{path} has a tensor that is not expected: {unexpected[0]}")
            for inside, name in wanted.items():
                if inside == HEAD and inside not in stored:
                    continue  # it may be tied
                if inside not in stored:
                    raise ModelError(f"{path} has no tensor {name}")
                header = file.get_slice(inside)
                shape, kind = tuple(header.get_shape()), header.get_dtype()
                if shapes is not None and shape != shapes[name]:
                    raise ModelError(f"{path}: {name} is {shape}, expected {shapes[name]}")
                if kind not in ("F64", "F32", "F16", "BF16"):
                    raise ModelError(f"{path}: {name} holds {kind}, expected floating-point numbers")
                tensors[name] = file.get_tensor(inside)
                if not tensors[name].isfinite().all():
                    raise ModelError(f"{path}: {name} holds numbers that are not finite")
            return tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error

"""Save checkpoints: a directory that is complete or not there at all. model/checkpoint.py says what is in it."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from data import disk
from data.disk import Pieces
from data.encoding import Tokenizer
from data.tokenizer import GENERATION_CONFIG
from model import GPTConfig
from model.checkpoint import FORMAT, TRAINER, to_json, with_own_hash
from model.huggingface import Tensors, config_to_huggingface

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # that are read


def checkpoint_files(
    config: GPTConfig,
    weights: Tensors,
    optimizer: Tensors,
    tokenizer: Tokenizer,
    trainer: dict,
) -> Iterator[tuple[str, Pieces]]:
    """Yield (name, pieces of the content) of the files of a checkpoint.

    Args:
        weights: the state dict of the model, as in a Hugging Face model. No tensor is sharded, here and in `optimizer`.
        optimizer: the state of the optimizer, as named tensors.
        tokenizer: gives its files, and the ids that begin and end a text.
        trainer: the rest of the state that a resumed run needs.
    """
    known = json.loads(tokenizer.files.get(GENERATION_CONFIG, b"{}"))  # tokenizers of ours have no such file
    ids = {key: known.get(key, tokenizer.end_of_text) for key in ("bos_token_id", "eos_token_id")}
    yield "config.json", [to_json(config_to_huggingface(config) | ids)]
    for name, content in tokenizer.files.items():
        yield name, [content]
    yield "model.safetensors", safetensors_pieces(weights)
    yield "optimizer.safetensors", safetensors_pieces(optimizer)
    yield TRAINER, [to_json(trainer)]


def safetensors_pieces(tensors: Tensors) -> Pieces:
    """Yield the content of a safetensors file: its header, then the memory of each tensor, one at a time.

    The bytes are those of `safetensors.torch.save`, which holds them all, up to three times. Its `save_file` does so
    once before version 0.8, and since then it writes to another name first and lets only the owner read the file.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        end += tensor.nbytes
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # so that the numbers are aligned
    yield len(content).to_bytes(8, "little") + content
    for name in names:
        yield tensors[name].cpu().ravel().view(torch.uint8).numpy().data


def save_checkpoint(parent: Path, step: int, files: Iterable[tuple[str, Pieces]], about: dict) -> Path:
    """Write parent/step-00000000 and return it once it is on the disk. After an OSError nothing of it is left.

    files: (name, pieces) of each file but the manifest. about: entries of the manifest about the session.
    """
    directory = parent / f"step-{step:08d}"
    temporary = parent / ".tmp"
    entries = {}
    disk.remove(temporary)  # of a killed session
    disk.make_directory(temporary)
    try:
        for name, pieces in files:
            path = temporary / name
            digest = disk.write_file(path, pieces)
            entries[name] = {"size": path.stat().st_size, "sha256": digest}
        manifest = {"format": FORMAT, "step": step, **about, "files": entries}
        disk.write_file(temporary / "manifest.json", [with_own_hash(manifest)])
        disk.sync(temporary)
        disk.remove(directory)  # a damaged checkpoint of this step
        disk.rename(temporary, directory)
    except BaseException:
        disk.remove(temporary)
        raise
    return directory


def keep_newest(checkpoints: list[Path], step: int, count: int, best_step: int) -> None:
    """Delete the checkpoints up to `step`, except the newest `count` and the best.

    checkpoints: newest first. best_step: 0 if no step is the best. Checkpoints of later steps stay: they are damaged,
    or the run would have resumed from them.
    """
    past = [directory for directory in checkpoints if directory.name <= f"step-{step:08d}"]
    for directory in past[count:]:
        if directory.name != f"step-{best_step:08d}":
            disk.remove(directory)

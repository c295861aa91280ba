"""Checkpoints: a directory without pickle, in the layout of a Hugging Face model, that is complete or not there at all.

config.json  model.safetensors  tokenizer.json  tokenizer_config.json    the model, as `transformers` reads it
optimizer.safetensors  trainer.json                                      the rest of a training run
manifest.json                            size and SHA-256 of each, and the certificate of causality; written last
"""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import ModelError
from model.gpt import GPT
from model.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    tensors_from_huggingface,
    tensors_to_huggingface,
)

FORMAT = 1
STEP = re.compile(r"step-\d{8}")


def save_checkpoint(
    parent: Path,
    step: int,
    model: GPT,
    end_of_text: int,
    tokenizer_files: dict[str, bytes],
    optimizer: dict[str, Tensor],
    trainer: dict,
    certificate: dict,
) -> Path:
    """Write parent/step-00000000 and return it once it is on the disk; an OSError leaves nothing behind."""
    directory, temporary = parent / f"step-{step:08d}", parent / ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_json(temporary / "config.json", config_to_huggingface(model.config, end_of_text))
        save_file(
            tensors_to_huggingface(model.config, model.state_dict()),
            temporary / "model.safetensors",
            metadata={"format": "pt"},
        )
        for name, content in tokenizer_files.items():
            (temporary / name).write_bytes(content)
        save_file(optimizer, temporary / "optimizer.safetensors")
        write_json(temporary / "trainer.json", {"step": step, **trainer})
        files = {}
        for path in sorted(temporary.iterdir()):
            path.chmod((temporary / "config.json").stat().st_mode)  # safetensors ignores the umask
            files[path.name] = {"size": path.stat().st_size, "sha256": sha256(path)}
            sync(path)
        manifest = {"format": FORMAT, "step": step, "certificate": certificate, "files": files}
        write_json(temporary / "manifest.json", manifest)
        sync(temporary / "manifest.json")
        sync(temporary)
        if directory.exists():  # a damaged one, or a resumed run that came by here again
            shutil.rmtree(directory)
        temporary.rename(directory)
        sync(parent)
    except SafetensorError as error:  # its way to say that a file cannot be written
        raise OSError(f"cannot save {directory}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def keep_newest(parent: Path, count: int, best_step: int | None) -> None:
    """Delete all checkpoints but the newest `count` and the best."""
    for directory in step_directories(parent)[count:]:
        if directory.name != f"step-{best_step or 0:08d}":
            shutil.rmtree(directory)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the newest intact one of a run. Raises ModelError if there is none."""
    if (path / "config.json").is_file():
        verify(path)
        return path
    for directory in step_directories(path / "checkpoints"):
        try:
            verify(directory)
            return directory
        except ModelError as error:
            print(f"skipping a damaged checkpoint: {error}", file=sys.stderr)
    raise ModelError(f"{path} is neither an intact checkpoint nor a run that has one")


def step_directories(parent: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [path for path in parent.iterdir() if STEP.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(found, reverse=True)


def verify(directory: Path) -> None:
    """Compare a checkpoint with its manifest, if it has one (a model from elsewhere has none).

    Raises ModelError naming the first file that differs.
    """
    if STEP.fullmatch(directory.name) and not (directory / "manifest.json").is_file():
        raise ModelError(f"{directory} has no manifest.json: it was not written to the end")
    if not (directory / "manifest.json").is_file():
        return
    manifest = read_json(directory / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise ModelError(f"{directory} has format {manifest.get('format')}, this version reads {FORMAT}")
    for name, expected in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            raise ModelError(f"{path} is missing")
        if path.stat().st_size != expected["size"]:
            raise ModelError(f"{path} has {path.stat().st_size} bytes instead of {expected['size']}")
        if sha256(path) != expected["sha256"]:
            raise ModelError(f"{path} is damaged: its SHA-256 is not the one in the manifest")


def read_certificate(directory: Path) -> str:
    """What training had found of the causality of this checkpoint's model, in a line."""
    path = directory / "manifest.json"
    found = read_json(path).get("certificate") if path.is_file() else None
    return str(found.get("causal")) if isinstance(found, dict) else "unknown, the checkpoint has no certificate"


def load_model(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> GPT:
    """See GPT.from_pretrained."""
    directory = find_checkpoint(Path(path))
    config = config_from_huggingface(read_json(directory / "config.json"))
    state = tensors_from_huggingface(config, load_tensors(directory / "model.safetensors"))
    with torch.device("meta"):  # no memory and no time for first weights that are not wanted
        model = GPT(config).to(dtype or state["token_embedding.weight"].dtype)
    for name, parameter in model.named_parameters():
        if state[name].shape != parameter.shape:
            raise ModelError(f"{directory}: {name} is {tuple(state[name].shape)}, expected {tuple(parameter.shape)}")
    model.to_empty(device=device).load_state_dict(state)
    return model.eval()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file. Raises ModelError if it is none."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict:
    """A JSON object. Raises ModelError if the file holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

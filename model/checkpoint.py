"""Checkpoints: a directory without pickle, in the layout of a Hugging Face model, that is complete or not there at all.

config.json  model.safetensors  tokenizer.json  tokenizer_config.json    the model, as `transformers` reads it
README.md                                                                what it is, for people, who may edit it
optimizer.safetensors  trainer.json                                      the rest of a training run
manifest.json                            size and SHA-256 of each, and the certificate of causality; written last

Tensors of more than 5 GB are in several files, with an index that says which is where.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from model import disk
from model.config import ModelError
from model.huggingface import config_to_huggingface, tensors_to_huggingface
from model.sharded import full

FORMAT = 3
MOST_JSON = 1 << 20  # bytes
MOST_IN_A_FILE = 5 * 10**9  # bytes, as `transformers` has it
CARD = "README.md"
STEP = re.compile(r"step-\d{8}")


def save_checkpoint(
    parent: Path,
    step: int,
    config: object,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    ends_of_text: tuple[int, int],
    texts: dict[str, bytes],
    trainer: dict,
    about: dict,
) -> Path:
    """Write parent/step-00000000 and return it once it is on the disk; an OSError leaves nothing behind.

    `ends_of_text` are the ids that a text begins and ends with, `texts` the tokenizer's files and the model card,
    `trainer` is what a resumed run needs, `about` what the manifest says of the model: certificate and environment.
    """
    directory, temporary = parent / f"step-{step:08d}", parent / ".tmp"
    disk.remove(temporary)  # of a session that was killed
    disk.make_directory(temporary)
    try:
        files = {}

        def write(name: str, content: bytes) -> None:
            disk.write(temporary / name, content)
            if name != CARD:
                files[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

        write("config.json", to_json(config_to_huggingface(config, *ends_of_text)))
        for name, content in texts.items():
            write(name, content)
        places: dict[str, dict[str, str]] = defaultdict(dict)
        for stem, name, tensors in tensor_files(config, weights, optimizer):
            write(name, save(tensors, metadata={"format": "pt"}))
            places[stem] |= dict.fromkeys(tensors, name)
        for stem, place in places.items():
            if len(set(place.values())) > 1:
                write(f"{stem}.safetensors.index.json", to_json({"metadata": {}, "weight_map": place}))
        write("trainer.json", to_json({"step": step, **trainer}))
        manifest = {"format": FORMAT, "step": step, **about, "files": files}
        disk.write(temporary / "manifest.json", with_own_hash(manifest))
        disk.sync(temporary)
        disk.remove(directory)  # a damaged one, whose step has come again
        disk.rename(temporary, directory)
    except BaseException:
        disk.remove(temporary)
        raise
    return directory


def tensor_files(
    config: object, weights: dict, optimizer: dict[str, Tensor]
) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """The tensors of a checkpoint file by file, as (model or optimizer, name of the file, tensors), whole.

    Where each process has a part of the tensors, all of them have to go through this together; a device has one tensor
    whole at a time, a host two files.
    """
    blocks: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        if name != "lm_head.weight" or not config.tied:
            block = re.match(r"blocks\.\d+|", name)[0]  # "" for what is in none
            blocks[block or name][name] = tensor
    for name, tensors in fill_files("model", list(blocks.values())):
        yield "model", name, tensors_to_huggingface(config, tensors)
    for name, tensors in fill_files("optimizer", [{name: tensor} for name, tensor in optimizer.items()]):
        yield "optimizer", name, tensors


def fill_files(stem: str, groups: list[dict[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Groups of tensors, which stay together, in as few files as their size allows: (name, all its tensors)."""
    files, room = [[]], MOST_IN_A_FILE
    for group in groups:
        size = sum(tensor.nbytes for tensor in group.values())
        if size > room and files[-1]:
            files.append([])
            room = MOST_IN_A_FILE
        files[-1].append(group)
        room -= size
    for number, file in enumerate(files):
        name = f"{stem}-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else f"{stem}.safetensors"
        yield name, {name: full(tensor).cpu() for group in file for name, tensor in group.items()}


def keep_newest(parent: Path, step: int, count: int, best_step: int | None) -> None:
    """Delete all checkpoints before `step` but the newest `count` and the best; what is later is damaged, and stays."""
    past = [directory for directory in step_directories(parent) if directory.name <= f"step-{step:08d}"]
    for directory in past[count:]:
        if directory.name != f"step-{best_step or 0:08d}":
            disk.remove(directory)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the newest intact one of a run, or a model OWNER/NAME of the Hugging Face hub.

    Raises ModelError if there is none.
    """
    if is_hub_name(path):
        return download(str(path))
    if (path / "config.json").is_file():
        verify(path)
        return path
    for directory in step_directories(path / "checkpoints"):
        try:
            verify(directory)
            return directory
        except ModelError as error:
            print(f"skipping a damaged checkpoint: {error}", file=sys.stderr)
    raise ModelError(f"{path} is neither an intact checkpoint nor a run that has one{runs_beside(path)}")


def runs_beside(path: Path) -> str:
    """For a message: which runs there are in the directory in which there is nothing of this name."""
    runs = sorted(path.absolute().parent.glob("*/checkpoints"), key=os.path.getmtime)
    names = ", ".join(found.parent.name for found in runs[-5:])
    return f"; the latest runs beside it are {names}" if runs and not path.exists() else ""


def is_hub_name(path: str | Path) -> bool:
    """Whether this is OWNER/NAME, and nothing here."""
    here = Path(path).exists() or Path(path).parent.exists()
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))) and not here


def download(name: str) -> Path:
    """A directory with a model of the Hugging Face hub, downloaded unless it is cached. Raises ModelError if not."""
    from huggingface_hub import snapshot_download  # slow to import, and few need it

    files = ["config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer*.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # whatever the network, the hub or the cache make of it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"{name} is not here, and not to be had from the Hugging Face hub: {reason:.200}") from error


def step_directories(parent: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = [path for path in parent.iterdir() if STEP.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(found, reverse=True)


def verify(directory: Path) -> None:
    """Compare a checkpoint with its manifest, if it has one (a model from elsewhere has none).

    Raises ModelError naming the first file that differs, is missing, is too many, or is a link to somewhere else.
    """
    if STEP.fullmatch(directory.name) and not (directory / "manifest.json").is_file():
        raise ModelError(f"{directory} has no manifest.json: it was not written to the end")
    if not (directory / "manifest.json").is_file():
        return
    manifest = read_json(directory / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise ModelError(f"{directory} has format {manifest.get('format')!r}, this version reads {FORMAT}")
    own_hash, files = manifest.pop("sha256", None), manifest.get("files")
    if not own_hash or with_own_hash(manifest) != (directory / "manifest.json").read_bytes():
        raise ModelError(f"{directory / 'manifest.json'} is damaged: its SHA-256 is not the one in it")
    if not isinstance(files, dict) or not all(isinstance(expected, dict) for expected in files.values()):
        raise ModelError(f"{directory / 'manifest.json'} does not say which files there are")
    paths = {path.name: path for path in directory.iterdir() if path.name not in ("manifest.json", CARD)}
    paths = {name: path for name, path in paths.items() if name in files or not name.startswith(".")}  # .DS_Store
    for name in sorted(paths.keys() | files.keys()):  # a name from the manifest alone is never opened
        if name not in files:
            raise ModelError(f"{directory} has {name!r}, which is not in the manifest: it does not belong there")
        if name not in paths:
            raise ModelError(f"{directory} has no {name!r}, which is in the manifest")
        if paths[name].is_symlink() or not paths[name].is_file():
            raise ModelError(f"{paths[name]} is not a file of this directory")
        size, expected = paths[name].stat().st_size, files[name]
        if size != expected.get("size"):
            raise ModelError(f"{paths[name]} has {size} bytes instead of {expected.get('size')}")
        if sha256(paths[name]) != expected.get("sha256"):
            raise ModelError(f"{paths[name]} is damaged: its SHA-256 is not the one in the manifest")


def read_certificate(directory: Path) -> str:
    """What training had found of the causality of this checkpoint's model, and where, in a line."""
    path = directory / "manifest.json"
    try:
        return describe_certificate(read_json(path) if path.is_file() else {})
    except (KeyError, TypeError, AttributeError):
        return "unknown, the checkpoint has no certificate"


def describe_certificate(manifest: dict) -> str:
    """The certificate and where it was given, from a manifest, in a line. Raises KeyError where there is none."""
    return "{}, {dtype} on {device}, torch {torch}".format(manifest["certificate"]["causal"], **manifest["environment"])


def read_json(path: Path) -> dict:
    """A JSON object. Raises ModelError if the file holds something else."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
        if path.stat().st_size > MOST_JSON:
            raise ModelError(f"{path} has {path.stat().st_size} bytes, at most {MOST_JSON} are read")
        content = json.loads(path.read_text(encoding="utf-8"))
    except ModelError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def told(path: Path, *keys: str) -> Any:
    """What training has left beside a model, or None: one from elsewhere has none of it, or something else."""
    value = None
    with contextlib.suppress(ModelError):
        value = read_json(path)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def to_json(content: dict) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def with_own_hash(manifest: dict) -> bytes:
    """A manifest as it is written, with the SHA-256 of what it would be without one."""
    return to_json({**manifest, "sha256": hashlib.sha256(to_json(manifest)).hexdigest()})


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

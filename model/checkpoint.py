"""Checkpoints: a directory without pickle, in the layout of a Hugging Face model, that is complete or not there at all.

config.json  model.safetensors  tokenizer.json  tokenizer_config.json    the model, as `transformers` reads it
optimizer.safetensors  trainer.json                                      the rest of a training run
manifest.json                       size and SHA-256 of every file, and the certificate of causality; written last

People may add a README.md, the model card of the Hugging Face hub, and edit it: the manifest never names it.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from errors import UserError
from model import disk
from model.config import GPTConfig
from model.huggingface import config_to_huggingface, tensors_to_huggingface

FORMAT = 3
MOST_JSON = 1 << 20  # bytes
CARD = "README.md"
STEP = re.compile(r"step-\d{8}")


def save_checkpoint(
    parent: Path,
    step: int,
    config: GPTConfig,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    ends_of_text: tuple[int, int],
    texts: dict[str, bytes],
    trainer: dict,
    about: dict,
) -> Path:
    """Write parent/step-00000000 and return it once it is on the disk. After an OSError nothing of it is left.

    `weights` is the state dict of the model, `optimizer` the state of its optimizer; no tensor is sharded.
    `ends_of_text` are the token ids that begin and end a text. `texts` are the files of the tokenizer, by name.
    `trainer` is the state that a resumed run needs, `about` the certificate and the environment.
    """
    directory, temporary = parent / f"step-{step:08d}", parent / ".tmp"
    files = {}

    def write(name: str, content: bytes) -> None:
        disk.write(temporary / name, content)
        files[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    disk.remove(temporary)  # of a killed session
    disk.make_directory(temporary)
    try:
        write("config.json", to_json(config_to_huggingface(config, *ends_of_text)))
        for name, content in texts.items():
            write(name, content)
        write("model.safetensors", save(tensors_to_huggingface(config, weights), metadata={"format": "pt"}))
        write("optimizer.safetensors", save(optimizer, metadata={"format": "pt"}))
        write("trainer.json", to_json({"step": step, **trainer}))
        manifest = {"format": FORMAT, "step": step, **about, "files": files}
        disk.write(temporary / "manifest.json", with_own_hash(manifest))
        disk.sync(temporary)
        disk.remove(directory)  # a damaged checkpoint of this step
        disk.rename(temporary, directory)
    except BaseException:
        disk.remove(temporary)
        raise
    return directory


def keep_newest(parent: Path, step: int, count: int, best_step: int | None) -> None:
    """Delete the checkpoints up to `step`, except the newest `count` and the best.

    Checkpoints of later steps are damaged, or the run would have resumed from them. They stay.
    """
    past = [directory for directory in step_directories(parent) if directory.name <= f"step-{step:08d}"]
    for directory in past[count:]:
        if directory.name != f"step-{best_step or 0:08d}":
            disk.remove(directory)


def find_checkpoint(path: Path) -> Path:
    """Return the directory of a verified checkpoint.

    `path` is a checkpoint, a run directory (its newest intact checkpoint is taken), a Hugging Face model directory, or
    the name OWNER/NAME of a model on the Hugging Face hub, which is downloaded unless it is in the cache; no directory
    OWNER may exist then.

    Raises UserError if there is none.
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists():
        return download(str(path))
    if (path / "config.json").is_file():
        verify(path)
        return path
    for directory in step_directories(path / "checkpoints"):
        try:
            verify(directory)
            return directory
        except (UserError, OSError) as error:
            print(f"skipping a damaged checkpoint: {error}", file=sys.stderr)
    if not path.exists():
        raise UserError(f"there is no {path}: give a run, a checkpoint, or OWNER/NAME of the Hugging Face hub")
    raise UserError(f"{path} is no intact checkpoint, nor a run that has one: a run saves each train.checkpoint_every")


def download(name: str) -> Path:
    """Return a directory with a model of the Hugging Face hub. Raises UserError if it cannot be downloaded."""
    from huggingface_hub import snapshot_download  # slow to import, and seldom needed

    files = ["config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer*.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # of the network, the hub or the cache: their libraries have no common error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{name} is not here, and not to be had from the Hugging Face hub: {reason:.200}") from error


def step_directories(parent: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    found = [path for path in parent.iterdir() if STEP.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(found, reverse=True)


def verify(directory: Path) -> None:
    """Compare a checkpoint with its manifest. A foreign model has no manifest, and passes.

    Raises UserError naming the first file that differs, is missing, is not in the manifest, or is a link.
    """
    if STEP.fullmatch(directory.name) and not (directory / "manifest.json").is_file():
        raise UserError(f"{directory} has no manifest.json: it was not written to the end")
    if not (directory / "manifest.json").is_file():
        return
    manifest = read_json(directory / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise UserError(f"{directory} has format {manifest.get('format')!r}, this version reads {FORMAT}")
    own_hash, files = manifest.pop("sha256", None), manifest.get("files")
    if not own_hash or with_own_hash(manifest) != (directory / "manifest.json").read_bytes():
        raise UserError(f"{directory / 'manifest.json'} is damaged: its SHA-256 is not the one in it")
    if not isinstance(files, dict):
        raise UserError(f"{directory / 'manifest.json'} does not say which files there are")
    paths = {path.name: path for path in directory.iterdir() if path.name not in ("manifest.json", CARD)}
    paths = {name: path for name, path in paths.items() if name in files or not name.startswith(".")}  # .DS_Store
    for name in sorted(paths.keys() | files.keys()):  # only names found in the directory are opened
        if name not in files:
            raise UserError(f"{directory} has {name!r}, which is not in the manifest: it does not belong there")
        if name not in paths:
            raise UserError(f"{directory} has no {name!r}, which is in the manifest")
        if paths[name].is_symlink() or not paths[name].is_file():
            raise UserError(f"{directory} has {name!r}, which is not a file of this directory")
        if {"size": paths[name].stat().st_size, "sha256": sha256(paths[name])} != files[name]:
            raise UserError(f"{name!r} in {directory} is damaged: its size or SHA-256 is not the one in the manifest")


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises UserError if the file cannot be read or holds something else."""
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > MOST_JSON:
            raise ValueError(f"it has more than {MOST_JSON} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it does not hold a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return content


def read_optional(path: Path, *keys: str) -> Any:
    """Return the value under nested keys of a JSON file beside a model; None if the file or a key is missing."""
    try:
        value = read_json(path)
    except UserError:
        return None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def to_json(content: dict) -> bytes:
    """Return the content of a JSON file as it is written here."""
    return (json.dumps(content, indent=2) + "\n").encode()


def with_own_hash(manifest: dict) -> bytes:
    """Return the content of manifest.json: the manifest, and the SHA-256 of the file without this last entry."""
    return to_json({**manifest, "sha256": hashlib.sha256(to_json(manifest)).hexdigest()})


def code_hash() -> str:
    """Return a short hash of the files of this package, which decide what the weights of a checkpoint mean."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def code_has_changed(directory: Path) -> bool:
    """Return whether a checkpoint was trained with other files of this package. A foreign model was with none."""
    return read_optional(directory / "manifest.json", "environment", "code of model/") not in (None, code_hash())


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

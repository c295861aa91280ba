"""Find a checkpoint and verify it: a directory without pickle, in the layout of a Hugging Face model.

config.json  model.safetensors  tokenizer.json  tokenizer_config.json    the model, as `transformers` reads it
optimizer.safetensors  trainer.json                                      the rest of a training run
manifest.json                       size and SHA-256 of every file, and the certificate of causality; written last

People may add a README.md, the model card of the Hugging Face hub, and edit it: the manifest never names it.
"""

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import UserError
from files import read_small
from model.elsewhere import HUB_NAME, download, parse_json, refuse_others

FORMAT = 3
TRAINER = "trainer.json"
CARD = "README.md"
STEP = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, or a model from elsewhere."""

    directory: Path
    manifest: dict = field(default_factory=dict)
    """The content of manifest.json; empty for a model from elsewhere."""
    trainer_json: bytes = b"{}"
    """The content of trainer.json, read once."""

    @property
    def trainer(self) -> dict:
        """The state of the training; empty for a model from elsewhere. Raises UserError if it cannot be read."""
        return parse_json(self.directory / TRAINER, self.trainer_json)

    @property
    def code_has_changed(self) -> bool:
        """Whether the model was trained by other files of this package; False for a model from elsewhere."""
        return nested(self.manifest, "environment", "code of model/") not in (None, code_hash())


def find_checkpoint(place: str | Path | Checkpoint) -> Checkpoint:
    """Find a checkpoint and verify it.

    `place` is a checkpoint, a run directory (its newest intact checkpoint is taken), a Hugging Face model directory, or
    the name OWNER/NAME of a model on the Hugging Face hub. A directory OWNER takes precedence, but never over
    hf:OWNER/NAME or hf:OWNER/NAME@REVISION. A `Checkpoint` is returned as it is.

    Raises UserError if there is none.
    """
    if isinstance(place, Checkpoint):
        return place
    name = str(place)
    path = Path(os.path.expanduser(name))
    of_hub, _, revision = name.removeprefix("hf:").partition("@")
    if HUB_NAME.fullmatch(of_hub) and (name.startswith("hf:") or name == of_hub and not os.path.exists(path.parent)):
        return Checkpoint(download(of_hub, revision or None))
    if not os.path.exists(path) or not name:
        advice = "give a run, a checkpoint, or OWNER/NAME of the Hugging Face hub, as openai-community/gpt2"
        if HUB_NAME.fullmatch(name):
            advice = f"the directory {path.parent} hides such a name of the Hugging Face hub, which hf:{name} asks for"
        raise UserError(f"there is no {name!r}: {advice}")
    if not (path / "config.json").is_file():
        for directory in step_directories(path / "checkpoints"):
            try:
                return verify(directory)
            except (UserError, OSError) as error:
                print(f"skipping a damaged checkpoint: {error}", file=sys.stderr)
    return verify(path)


def step_directories(parent: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    found = [path for path in parent.iterdir() if STEP.fullmatch(path.name)] if parent.is_dir() else []
    return sorted(found, reverse=True)


def verify(directory: Path) -> Checkpoint:
    """Compare a checkpoint with its manifest. A foreign model has no manifest, and passes.

    Raises UserError naming the first file that differs, is missing, is not in the manifest, or is a link.
    """
    path = directory / "manifest.json"
    if not path.is_file():
        if STEP.fullmatch(directory.name):
            raise UserError(f"{directory} has no manifest.json: it was not written to the end")
        refuse_others(directory, str(directory))
        trainer = directory / TRAINER
        return Checkpoint(directory, {}, read_small(trainer) if trainer.is_file() else b"{}")
    content = read_small(path)
    manifest = parse_json(path, content)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{directory} has format {manifest.get('format')!r:.60}, this version reads {FORMAT}")
    manifest.pop("sha256", None)
    files = manifest.get("files")
    if with_own_hash(manifest) != content or not isinstance(files, dict):
        raise UserError(f"{path} is damaged: its SHA-256 is not the one in it")
    found = {path.name for path in directory.glob("[!.]*")} - {"manifest.json", CARD}  # not .DS_Store
    trainer = b"{}"
    for name in sorted(found | files.keys()):
        path = directory / name  # which is only opened if it was found in the directory
        if name not in files:
            raise UserError(f"{directory} has {name!r:.60}, which is not in the manifest: it does not belong there")
        if name not in found or path.is_symlink() or not path.is_file():
            raise UserError(f"{directory} has no {name!r:.60} as a file of its own, which is in the manifest")
        if name == TRAINER:
            trainer = read_small(path)
            digest = hashlib.sha256(trainer).hexdigest()
        else:
            digest = sha256(path)
        if {"size": path.stat().st_size, "sha256": digest} != files[name]:
            raise UserError(f"{name!r} in {directory} is damaged: its size or SHA-256 is not the one in the manifest")
    return Checkpoint(directory, manifest, trainer)


def nested(content: object, *keys: str) -> Any:
    """Return the value under nested keys of JSON objects; None if a key is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def to_json(content: dict) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def with_own_hash(manifest: dict) -> bytes:
    """Return the content of manifest.json. Its last entry is the SHA-256 of the content without that entry."""
    return to_json({**manifest, "sha256": hashlib.sha256(to_json(manifest)).hexdigest()})


def code_hash() -> str:
    """Return a short hash of the files of this package, which decide what the weights of a checkpoint mean."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

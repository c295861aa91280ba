"""Write a checkpoint: a directory that is complete or not there at all. model/checkpoint.py says what is in it."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from files import publish
from model.checkpoint import FORMAT, sha256, with_own_hash
from model.huggingface import Tensors


def save_checkpoint(parent: Path, step: int, files: dict[str, bytes | Tensors], about: dict) -> None:
    """Write parent/step-00000000, and return once it is on the disk.

    files: the content of each file but the manifest; tensors become a file of safetensors. about: entries of the
    manifest about the session.

    Raises OSError or SafetensorError if it cannot be written. Nothing of it is left then.
    """
    temporary = parent / ".tmp"
    remove(temporary)  # of a killed session
    temporary.mkdir()
    try:
        entries = {}
        for name, content in files.items():
            path = temporary / name
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                save_file({key: tensor.contiguous() for key, tensor in content.items()}, path, {"format": "pt"})
                shutil.copymode(temporary / "config.json", path)  # the library lets only the owner read the file
            entries[name] = {"size": path.stat().st_size, "sha256": sha256(path)}  # of the file, whatever wrote it
        manifest = {"format": FORMAT, "step": step, **about, "files": entries}
        (temporary / "manifest.json").write_bytes(with_own_hash(manifest))
        remove(parent / f"step-{step:08d}")  # a damaged one
        publish(temporary, parent / f"step-{step:08d}")
    finally:
        remove(temporary)  # what is left of it


def remove(directory: Path) -> None:
    """Delete a directory, if it exists and as far as that is possible: what is left is in nobody's way."""
    shutil.rmtree(directory, ignore_errors=True)

"""Write a checkpoint: a directory that is complete or not there at all. model/checkpoint.py says what is in it."""

import os
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from safetensors.torch import save_file

from cli.script import visible
from files import publish
from model.checkpoint import FORMAT, MANIFEST, sha256, with_own_hash
from model.huggingface import Tensors

say_once = cache(print)  # a directory that is kept is met again by each save


def save_checkpoint(parent: Path, step: int, files: dict[str, bytes | Tensors], about: dict) -> None:
    """Write parent/step-00000000, and return once it is on the disk.

    files: the content of each file but the manifest; tensors become a file of safetensors. about: entries of the
    manifest about the session.

    Raises OSError or SafetensorError if it cannot be written. Nothing of it is left then.
    """
    temporary = parent / ".tmp"
    final = parent / f"step-{step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed session
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
        (temporary / MANIFEST).write_bytes(with_own_hash(manifest))
        remove(final, files)  # a damaged one
        if final.exists():
            os.replace(final, mkdtemp(prefix=f"damaged-{final.name}-", dir=parent))
        publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what is left of it


def remove(directory: Path, names: Iterable[str]) -> None:
    """Delete a checkpoint as far as that is possible. One that holds others than these files stays, with a note."""
    if others := {path.name for path in directory.glob("*")} - {*names, MANIFEST}:
        say_once(f"note: {directory} is kept, because of files that no run has written: {visible(min(others))}")
    else:
        shutil.rmtree(directory, ignore_errors=True)

"""Write a checkpoint, find one and verify it: a directory without pickle, in the layout of a Hugging Face model.

config.json  model.safetensors  tokenizer.json  tokenizer_config.json    the model, as `transformers` reads it
optimizer.safetensors  trainer.json                                      the rest of a training run
manifest.json                       size and SHA-256 of every file, and the certificate of causality; written last

Files that the manifest does not name, such as a README.md, are not looked at.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

from safetensors.torch import save_file
from torch import Tensor

from errors import UserError, errors_as_user_error
from files import expand, publish, read_small, refuse_formats, sha256

FORMAT = 3
MANIFEST = "manifest.json"
TRAINER = "trainer.json"
PROBE_TOKENS = "probe_tokens"  # in trainer.json: tokens to draw the probe of heads from
STEP = "step-" + 8 * "[0-9]"  # a pattern of names
HUB_NAME = re.compile(r"(hf:)?((?!out/)\w[\w.-]*/\w[\w.-]*)(?:@(.+))?", re.ASCII)  # out/ has our runs
FETCHED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "model*.safetensors")  # never a pickle
say_once = cache(print)  # a directory that is kept is met again by each save


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, or a model from elsewhere."""

    directory: Path
    manifest: dict
    """The content of manifest.json; empty for a model from elsewhere."""

    @property
    def trainer(self) -> dict:
        """The state of the training; empty for a model from elsewhere. Raises UserError if it cannot be read."""
        path = self.directory / TRAINER
        return read_json(path) if path.is_file() else {}


def find_checkpoint(place: str | Path | Checkpoint, to_resume: bool = False) -> Checkpoint:
    """Find a checkpoint and verify it: what is read of it, so the optimizer only to resume a run.

    `place` is a checkpoint, a run directory (its newest intact checkpoint is taken), a Hugging Face model directory, or
    the name OWNER/NAME or OWNER/NAME@REVISION of a model on the Hugging Face hub. A directory OWNER takes precedence,
    but never with hf: before the name; and out/NAME is never asked for. A `Checkpoint` is returned as it is.

    Raises UserError if there is none.
    """
    if isinstance(place, Checkpoint):
        return place
    name = str(place)
    path = expand(name)
    of_hub = HUB_NAME.fullmatch(name)
    if of_hub and (of_hub[1] or not path.parent.exists()):
        return verify(download(of_hub[2], of_hub[3]))
    if not name or not path.exists():
        raise UserError(f"there is no folder {name!r} of a run or model; one of the Hugging Face hub is hf:OWNER/NAME")
    for directory in step_directories(path):
        try:
            return verify(directory, to_resume)
        except (UserError, OSError) as error:
            print(f"skipping a damaged checkpoint: {str(error)!r}", file=sys.stderr)  # with names that it holds
    return verify(path, to_resume)


def step_directories(run: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted(run.glob(f"checkpoints/{STEP}"), reverse=True)


@cache
def download(name: str, revision: str | None) -> Path:
    """Return a directory with a model of the Hugging Face hub: the copy in the cache if the hub gives none.

    Raises UserError if there is neither.
    """
    from huggingface_hub import model_info, snapshot_download  # slow to import, and seldom needed

    print(f"there is no run {name} here: asking the Hugging Face hub", file=sys.stderr)
    fetch = partial(snapshot_download, name, revision=revision, allow_patterns=FETCHED)
    with errors_as_user_error(f"{name} is not here, and the Hugging Face hub did not give it"):
        try:
            model_info(name, revision=revision, timeout=10)  # seconds; the library itself waits for ever
            return Path(fetch())
        except Exception:  # of the network, the hub or the cache: their libraries have no common error
            with suppress(Exception):
                return Path(fetch(local_files_only=True))
            raise


def verify(directory: Path, to_resume: bool = False) -> Checkpoint:
    """Compare a checkpoint with its manifest. A model from elsewhere has none: it needs a config.json and weights.

    Raises UserError naming the first file that is missing or differs.
    """
    path = directory / MANIFEST
    if not path.is_file():
        if directory.match(STEP):
            raise UserError(f"{directory} has no manifest.json: it was not written to the end")
        if not (directory / "config.json").is_file():
            raise UserError(
                f"{directory} is no model, and no run with an intact checkpoint: it has no config.json (give the "
                "folder of a model, as checkpoint-500 of a Trainer; docs/other_tools.md makes one of a .gguf, a pickle "
                "or an adapter)"
            )
        tensor_files(directory, "model")
        return Checkpoint(directory, {})
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{directory} has format {manifest.get('format')!r:.60}, this version reads {FORMAT}")
    manifest.pop("sha256", None)
    if with_own_hash(manifest) != path.read_bytes():
        raise UserError(f"{path} is damaged: its SHA-256 is not the one in it")
    for name, expected in manifest["files"].items():
        path = directory / name
        is_read = to_resume or not name.startswith("optimizer")
        if is_read and (not path.is_file() or sha256(path) != expected["sha256"]):
            raise UserError(f"{path} is missing or damaged: its SHA-256 is not the one in the manifest")
    return Checkpoint(directory, manifest)


def save_checkpoint(parent: Path, step: int, files: dict[str, bytes | dict[str, Tensor]], about: dict) -> None:
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
            os.replace(final, Path(mkdtemp(prefix=f"damaged-{final.name}-", dir=parent), final.name))
        publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what is left of it


def remove(directory: Path, names: Iterable[str]) -> None:
    """Delete a checkpoint as far as that is possible. One that holds others than these files stays, with a note."""
    if others := {path.name for path in directory.glob("*")} - {*names, MANIFEST}:
        say_once(f"note: {directory} is kept, because of files that no run has written: {min(others)!r}")
    else:
        shutil.rmtree(directory, ignore_errors=True)


def tensor_files(directory: Path, stem: str) -> list[Path]:
    """Return the safetensors file of a "model" or an "optimizer", or the several files that an index names.

    Raises UserError for a file that is not there or elsewhere, or of another kind, as a pointer of Git LFS.
    """
    paths = [directory / f"{stem}.safetensors"]
    index = directory / f"{stem}.safetensors.index.json"
    if not paths[0].is_file() and index.is_file():
        with errors_as_user_error(f"{index} does not say in which files the tensors are"):
            paths = sorted({directory / str(name) for name in read_json(index)["weight_map"].values()})
    for path in paths:
        if path.parent != directory or path.suffix != ".safetensors" or not path.is_file():  # nor a pipe: it would wait
            raise UserError(
                f"{directory} has no safetensors file {path.name!r:.60}: fetch all files of the model "
                "(a pickle can run code: docs/other_tools.md says how to convert one that you trust)"
            )
        refuse_formats(path)
    return paths


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises UserError if the file cannot be read or holds something else."""
    with errors_as_user_error(f"{path} cannot be read as a JSON object"):
        return dict(json.loads(read_small(path)))


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

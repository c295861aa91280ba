"""Save checkpoints: a directory that is complete or not there at all. model/checkpoint.py says what is in it."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save

from data import disk
from data.encoding import Tokenizer
from model import GPTConfig
from model.checkpoint import FORMAT, TRAINER, to_json, with_own_hash
from model.huggingface import Tensors, config_to_huggingface, tensors_to_huggingface


def checkpoint_files(
    config: GPTConfig,
    weights: Tensors,
    optimizer: Tensors,
    tokenizer: Tokenizer,
    trainer: dict,
) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files of a checkpoint. A content is made when it is asked for.

    Args:
        weights: the state dict of the model. No tensor is sharded, here and in `optimizer`.
        optimizer: the state of the optimizer, as named tensors.
        tokenizer: gives its files, and the ids that begin and end a text.
        trainer: the rest of the state that a resumed run needs.
    """
    start = (tokenizer.document_start or [None])[-1]
    yield "config.json", to_json(config_to_huggingface(config, start, tokenizer.end_of_text))
    yield from tokenizer.files.items()
    yield "model.safetensors", save(tensors_to_huggingface(config, weights), metadata={"format": "pt"})
    yield "optimizer.safetensors", save(optimizer, metadata={"format": "pt"})
    yield TRAINER, to_json(trainer)


def save_checkpoint(parent: Path, step: int, files: Iterable[tuple[str, bytes]], about: dict) -> Path:
    """Write parent/step-00000000 and return it once it is on the disk. After an OSError nothing of it is left.

    files: (name, content) of each file but the manifest. about: entries of the manifest about the session.
    """
    directory = parent / f"step-{step:08d}"
    temporary = parent / ".tmp"
    entries = {}
    disk.remove(temporary)  # of a killed session
    disk.make_directory(temporary)
    try:
        for name, content in files:
            disk.write_file(temporary / name, content)
            entries[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = {"format": FORMAT, "step": step, **about, "files": entries}
        disk.write_file(temporary / "manifest.json", with_own_hash(manifest))
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

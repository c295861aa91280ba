"""Read what others wrote, with care: models of the Hugging Face hub, JSON, and places that hold no model we open."""

import fnmatch
import json
import re
import sys
from collections.abc import Iterable
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from errors import UserError

MOST_JSON = 1 << 24  # bytes; trainer.json may name a hundred thousand token files
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
PATIENCE = 10  # seconds that the hub has for its first answer
FETCHED = ("*config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
FETCHED += ("model*.safetensors", "model.safetensors.index.json")  # never a pickle
HUB_ERRORS = {  # names of classes, which are slow to import
    "GatedRepoError": "it is gated: accept its terms on its page, then hf auth login",
    "RepositoryNotFoundError": "there is no such model, or it is private: check the name, or hf auth login",
    "RevisionNotFoundError": "it has no such revision",
    "TimeoutError": f"no answer in {PATIENCE} seconds",
}
ADAPTER = "adapter_config.json"
POINTER = b"version https://git-lfs"
POINTERS = re.compile(r".+\.(json|txt)|tokenizer\.model|model.*\.safetensors")
PICKLE = "has its weights in {1:.60}, a pickle, which can run code: if you trust it, "
CONVERT = PICKLE + (
    'convert it by python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "[c.from_pretrained('{0}').save_pretrained('NEW') for c in (M, T)]\""
)
PICKLE += "save it in safetensors by the tool that it is of"
NO_STEP = "is a run without an intact checkpoint: a run saves each train.checkpoint_every"
# What a place may hold in place of weights in safetensors -> what the place is, and what to do.
# {0} is its name, {1} is the file that was found.
KINDS = {
    "model_index.json": "is a pipeline of diffusers, and no language model",
    "modules.json": "is a model of sentence-transformers, and no language model",
    "step-*": "holds the checkpoints of a run: give the run, or one of them",
    "checkpoints": NO_STEP,
    "config.toml": NO_STEP,
    "checkpoint-*": "holds the checkpoints of a Trainer of transformers: give one of them, as {0}/checkpoint-500",
    "snapshots": "is a folder of the hub's cache: give the name OWNER/NAME, or a folder in {0}/snapshots",
    "*.gguf": "is a GGUF, for llama.cpp: docs/other_tools.md says how to make a model directory of it",
    "*.h5": "holds weights of TensorFlow: convert them by transformers 4, from_pretrained('{0}', from_tf=True)",
    "*.msgpack": "holds weights of Flax: convert them by transformers 4, from_pretrained('{0}', from_flax=True)",
    "*.onnx": "is a model for ONNX: give the model that it was made of",
    "*.bin": CONVERT,
    "*.pt": PICKLE,
    "*.pth": PICKLE,
    "*.ckpt": PICKLE,
    "*.pkl": PICKLE,
}


@cache
def download(name: str, revision: str | None) -> Path:
    """Return a directory with a model of the Hugging Face hub. It is the copy in the cache if the hub does not answer.

    Raises UserError if there is none, or if it is no model that can be opened.
    """
    from huggingface_hub import model_info, snapshot_download  # slow to import, and seldom needed

    print(f"asking the hub for {name}", file=sys.stderr)
    fetch = partial(snapshot_download, name, revision=revision, allow_patterns=FETCHED)
    names = None
    try:
        with ThreadPool(1) as pool:  # the library waits longer: for each address, and for its own news
            asked = pool.apply_async(model_info, [name], {"revision": revision, "timeout": PATIENCE})
            names = [file.rfilename for file in asked.get(PATIENCE).siblings]
        directory = fetch()
    except Exception as error:  # of the network, the hub or the cache: their libraries have no common error
        kind = type(error).__name__
        said = f"{kind}: {error}".splitlines()[0]
        reason = HUB_ERRORS.get(kind, f"{said:.200}")
        try:
            directory = fetch(local_files_only=True)
        except Exception:
            message = f"{name} was not found locally, and the download from the Hugging Face hub failed: {reason}"
            raise UserError(message) from error
        print(f"note: {name} is the copy in the cache, because the hub failed: {reason}", file=sys.stderr)
    refuse_others(Path(directory), name, names)
    return Path(directory)


def refuse_others(path: Path, name: str, names: Iterable[str] | None = None) -> None:
    """Raise UserError if a place holds no model that can be opened. The message says what it holds, and what to do.

    name: what the user calls the place. names: what it holds, if that is more than is there.
    """
    files = [path] if path.is_file() else sorted(path.glob("*"))
    for file in files:
        if POINTERS.fullmatch(file.name) and file.is_file():  # a pipe would be waited for
            with open(file, "rb") as content:
                if content.read(len(POINTER)) == POINTER:
                    raise UserError(f"{file} is a pointer of Git LFS, not the file itself: fetch that by git lfs pull")
    names = names or [file.name for file in files]
    if ADAPTER in names and not path.is_file():
        base = read_json(path / ADAPTER).get("base_model_name_or_path")
        raise UserError(
            f"{name} is an adapter of peft: merge it into its model, {base!r:.60}, by merge_and_unload() first"
        )
    has_weights = fnmatch.filter(names, "model.safetensors*")
    if has_weights and "config.json" in names:
        tensor_files(path, "model")
        return
    for pattern, kind in KINDS.items():
        found = fnmatch.filter(names, pattern)
        if found and not has_weights:
            raise UserError(f"{name} {kind.format(path.parent if path.is_file() else name, found[0])}")
    if path.is_file():
        raise UserError(f"{name} is a file: give the directory of the model, which it is in")
    missing = "config.json" if has_weights else "model.safetensors"
    listed = ", ".join(names) or "nothing"
    raise UserError(f"{name} has no {missing}, it holds {listed:.60}: give a model, or ask the hub as hf:OWNER/NAME")


def tensor_files(directory: Path, stem: str) -> list[Path]:
    """Return the safetensors file of a "model" or an "optimizer", or the several files that an index names.

    Raises UserError for an index that names something else, or a file that is not there.
    """
    single = directory / f"{stem}.safetensors"
    index = directory / f"{stem}.safetensors.index.json"
    paths = [single]
    if index.is_file() and not single.is_file():
        places = read_json(index).get("weight_map")
        names = {str(name) for name in places.values()} if isinstance(places, dict) else {""}
        if not all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
            raise UserError(f"{index} names a file that is not a safetensors file beside it")
        paths = [directory / name for name in sorted(names)]
    for path in paths:
        if not path.is_file():  # a pipe would be waited for
            raise UserError(f"{path} is not a file, and {directory} needs it: fetch all its files again")
    return paths


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises UserError if the file cannot be read or holds something else."""
    return parse_json(path, read_small(path))


def read_small(path: Path) -> bytes:
    """Return the content of a file. Raises UserError if it cannot be read, or has more than MOST_JSON bytes."""
    try:
        if path.is_file() and path.stat().st_size <= MOST_JSON:
            return path.read_bytes()
        reason = f"it is not a file of at most {MOST_JSON} bytes"
    except OSError as error:
        reason = error
    raise UserError(f"{path} cannot be read: {reason}")


def parse_json(path: Path, content: bytes) -> dict:
    """Return the JSON object that a file contains. Raises UserError if its content is something else."""
    try:
        parsed = json.loads(content.decode())
        if not isinstance(parsed, dict):
            raise ValueError("it does not hold a JSON object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return parsed

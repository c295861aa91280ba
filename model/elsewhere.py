"""Read what others wrote, with care: models of the Hugging Face hub, JSON, and places that hold no model we open."""

import fnmatch
import json
import re
import sys
import textwrap
from collections.abc import Iterable
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from errors import UserError
from files import read_small, refuse_pointer

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
PATIENCE = 10  # seconds that the hub has for its first answer
FETCHED = (  # never a pickle
    "*config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "model*.safetensors",
    "model.safetensors.index.json",
)
HUB_ERRORS = {  # names of classes, which are slow to import
    "GatedRepoError": "it is gated: accept its terms on its page, then hf auth login",
    "RepositoryNotFoundError": "there is no such model, or it is private: check the name, or hf auth login",
    "RevisionNotFoundError": "it has no such revision",
    "TimeoutError": f"no answer in {PATIENCE} seconds",
}
ADAPTER = "adapter_config.json"
POINTERS = re.compile(r".+\.(json|txt)|tokenizer\.model|model.*\.safetensors")
# What a place may hold in place of weights in safetensors, in small letters -> what that is, and what to do.
KINDS = {
    r"(train|val)\.bin": "so it is a prepared corpus, and no model",
    r"step-\d+|checkpoints|config\.toml": "part of a run: give a run with an intact checkpoint, or the checkpoint; one "
    "is saved each train.checkpoint_every",
    r"adapter_model\..+": "an adapter of peft: merge it into its model by merge_and_unload() first",
    r".+\.gguf": "a GGUF, for llama.cpp: docs/other_tools.md says how to make a model directory of it",
    r".+\.(h5|msgpack)": "weights of TensorFlow or Flax: convert them by transformers 4",
    r"(?!training_args|optimizer|scheduler|scaler|rng_state).+\.(bin|pt|pth|ckpt|pkl)": "a pickle, which can run code: "
    "if you trust it, save it in safetensors by the tool that wrote it, or by "
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "[c.from_pretrained('DIRECTORY').save_pretrained('NEW') for c in (M, T)]\"",
}


@cache
def download(name: str, revision: str | None) -> Path:
    """Return a directory with a model of the Hugging Face hub. It is the copy in the cache if the hub does not answer.

    The hub has PATIENCE for the list of its files, and for a word about one of them. If it falls silent later, the
    library gives up after 10 seconds too, but tries again a few times.

    Raises UserError if there is none, or if it is no model that can be opened.
    """
    from huggingface_hub import file_exists, list_repo_files, snapshot_download  # slow to import, and seldom needed

    print(f"asking the hub for {name}", file=sys.stderr)
    fetch = partial(snapshot_download, name, revision=revision, allow_patterns=FETCHED)
    names = None
    try:
        with ThreadPool(1) as pool:  # the library waits longer: for each address, and it tries again
            of_hub = {"repo_id": name, "revision": revision}
            asked = pool.apply_async(lambda: (list_repo_files(**of_hub), file_exists(**of_hub, filename="config.json")))
            names, _ = asked.get(PATIENCE)
        directory = fetch()
    except Exception as error:  # of the network, the hub or the cache: their libraries have no common error
        kind = type(error).__name__
        reason = HUB_ERRORS.get(kind, f"{kind}: {error}".splitlines()[0])
        try:
            directory = fetch(local_files_only=True)
        except Exception:
            raise UserError(
                f"{name} was not found locally, and the download from the Hugging Face hub failed: {reason}"
            ) from error
        print(f"note: {name} is the copy in the cache, because the hub failed: {reason}", file=sys.stderr)
    refuse_others(Path(directory), name, names)
    return Path(directory)


def refuse_others(path: Path, name: str, names: Iterable[str] | None = None) -> None:
    """Raise UserError if a place holds no model that can be opened. The message says what it holds, and what to do.

    name: what the user calls the place. names: what it holds, if that is more than is there.
    """
    files = [path] if path.is_file() else sorted(path.glob("*"))
    names = names or [file.name for file in files]
    has_weights = fnmatch.filter(names, "model*.safetensors*")
    for file in files:
        may_be_pointer = POINTERS.fullmatch(file.name) or not has_weights
        if may_be_pointer and file.is_file() and 0 < file.stat().st_size < 1024:  # a pipe would be waited for
            refuse_pointer(file)
    if has_weights and "config.json" in names:
        tensor_files(path, "model")
        return
    if ADAPTER in names and not path.is_file():
        base = read_json(path / ADAPTER).get("base_model_name_or_path")
        raise UserError(
            f"{name} is an adapter of peft: merge it into its model, {base!r:.60}, by merge_and_unload() first"
        )
    for pattern, kind in KINDS.items():
        for found in names:
            if re.fullmatch(pattern, found.lower()) and not has_weights:
                raise UserError(f"{path.parent if path.is_file() else name} holds {found:.60}, {kind}")
    if path.is_file():
        raise UserError(f"{name} is a file: give the directory of the model, which it is in")
    listed = textwrap.shorten(", ".join(names) or "nothing", 60, placeholder=" ...")
    missing = "config.json" if has_weights else "model.safetensors"
    raise UserError(f"{name} has no {missing}, so it is no model: it holds {listed}")


def tensor_files(directory: Path, stem: str) -> list[Path]:
    """Return the safetensors file of a "model" or an "optimizer", or the several files that an index names.

    Raises UserError for an index that names something else, or a file that is not there.
    """
    single = directory / f"{stem}.safetensors"
    index = directory / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    paths = [index if any(directory.glob(f"{stem}-*.safetensors")) else single]
    if index.is_file():
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


def parse_json(path: Path, content: bytes) -> dict:
    """Return the JSON object that a file contains. Raises UserError if its content is something else."""
    try:
        parsed = json.loads(content)
        if not isinstance(parsed, dict):
            raise ValueError("it does not hold a JSON object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return parsed

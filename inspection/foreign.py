"""Open any decoder: a model of our four families by our own classes, and every other type by `transformers`."""

import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from errors import UserError, errors_as_user_error
from model.checkpoint import Checkpoint, find_checkpoint, read_json, tensor_files
from model.huggingface import OWN_KEY
from model.load import load_config, load_model


def load_decoder(path: str | Path | Checkpoint, device: str | torch.device = "cpu") -> nn.Module:
    """Return a stored causal language model in eval mode: of our classes, or of those of `transformers`.

    path and device are those of `load_model`; the model may be of any type. Raises UserError if there is none, or if it
    is of another type and `transformers` is not installed or cannot open it without running code of its own.
    """
    checkpoint = find_checkpoint(path)
    try:
        load_config(checkpoint.directory)
    except UserError as ours:
        if OWN_KEY in read_json(checkpoint.directory / "config.json"):  # `transformers` would leave out what that says
            raise
        return load_by_transformers(checkpoint.directory, str(ours)).to(device)
    return load_model(checkpoint, device)


def load_by_transformers(directory: Path, ours: str) -> nn.Module:
    """Return the model in a directory as `transformers` opens it, with attention by PyTorch's kernel.

    ours: the reason why it is none of our families. Raises UserError as `load_decoder` does.
    """
    tensor_files(directory, "model")  # an index would make `transformers` open what it names
    if (directory / "adapter_config.json").exists():  # and so would this
        raise UserError(f"{directory} has an adapter_config.json: merge the adapter, and take the file out")
    with errors_as_user_error(f"{ours}; for all other decoders: pip install -e '.[any]'"):
        import transformers  # an extra, and slow to import
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with errors_as_user_error(f"{directory} cannot be opened by transformers; {ours}"):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype="auto",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        with suppress(ValueError):  # attention may be written out there
            model.set_attn_implementation("sdpa")
    if found["missing_keys"]:
        raise UserError(f"{directory} has no tensor {min(found['missing_keys'])}, which its config.json asks for")
    if found["unexpected_keys"]:
        name = min(found["unexpected_keys"])
        print(f"note: {directory} has tensors that are not used, as {name!r:.60}", file=sys.stderr)
    return model.eval()

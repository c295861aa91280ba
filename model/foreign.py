"""Open any decoder: a model of our four families by our own classes, and every other type by `transformers`."""

from pathlib import Path

import torch
from torch import nn

from errors import UserError
from model.checkpoint import Checkpoint, find_checkpoint
from model.load import load_config, load_model


def load_decoder(
    path: str | Path | Checkpoint, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a stored causal language model in eval mode: of our classes, or of those of `transformers`.

    path, device and dtype are those of `load_model`; the model may be of any type. Raises UserError if there is none,
    or if it is of another type and `transformers` is not installed or cannot open it without running code of its own.
    """
    checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(Path(path))
    try:
        load_config(checkpoint.directory)
    except UserError as ours:
        return load_by_transformers(checkpoint.directory, dtype, str(ours)).to(device)
    return load_model(checkpoint, device, dtype)


def load_by_transformers(directory: Path, dtype: torch.dtype | None, ours: str) -> nn.Module:
    """Return the model in a directory as `transformers` opens it, with attention by PyTorch's kernel.

    ours: the reason why it is none of our families. Raises UserError as `load_decoder` does.
    """
    try:
        import transformers  # an extra, and slow to import
    except ImportError as error:
        raise UserError(f"{ours}; for all other decoders: pip install -e '.[any]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype or "auto",
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # of many libraries, without a common class
        reason = " ".join(str(error).split()).split(". ")[0]
        if "does not support an attention implementation through torch.nn.functional" in reason:
            reason = "its attention is written out there, not computed by PyTorch's kernel"
        raise UserError(f"{directory} cannot be opened by transformers: {reason:.300}") from error
    if missing := [*found["missing_keys"], *found["mismatched_keys"]]:
        raise UserError(f"{directory} has no tensor {missing[0]} of the right shape, which its config.json asks for")
    return model.eval()

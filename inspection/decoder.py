"""Run any decoder: a module that takes token ids, (B, T), and returns logits, (B, T, V), or something that has them.

Ours, those of `transformers` and a stranger's own are run alike. Shapes are named as in model/attention.py.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import UserError, errors_as_user_error
from model.causality import logits_of

POSITIONS = 1024  # logits are computed for so many positions of a sequence at a time: V numbers each
IGNORE = -100  # the target that F.cross_entropy skips


def find_head(model: nn.Module) -> nn.Linear | None:
    """Return the layer that makes logits, (B, T, C) -> (B, T, V), if the model names one."""
    named = getattr(model, "get_output_embeddings", None)
    head = named() if named else getattr(model, "lm_head", None)
    return head if isinstance(head, nn.Linear) else None  # another may mix the positions


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the weights."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the `with` block, and each of its parts back into its mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def read(model: nn.Module, idx: Tensor, positions: slice | Tensor = slice(None)) -> Tensor:
    """Return the logits of some positions of a text, (B, T) -> (B, positions, V). A known head computes no others.

    Raises UserError if the model cannot read the text, or returns no logits of all positions.
    """
    idx = idx.to(device_of(model))
    T = idx.size(1)
    was_cut = []

    def cut(head: nn.Module, inputs: tuple) -> tuple | None:
        """Hand on the hidden states of these positions alone, as a hook before the head."""
        if inputs and inputs[0].shape[:-1] == idx.shape:
            was_cut.append(True)
            return (inputs[0][:, positions], *inputs[1:])

    head = find_head(model)
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with errors_as_user_error(f"the model cannot read {T} tokens, given as model(idx)"):
        with head.register_forward_pre_hook(cut) if head is not None else nullcontext():
            output = model(idx, **options)
    with errors_as_user_error("the model has to return logits"):
        logits = logits_of(output)
    if was_cut:
        return logits
    if logits.size(1) != T:
        wrap = "wrap it in a module whose forward does"
        raise UserError(f"of {T} tokens the model returns logits of {logits.size(1)}, not of all: {wrap}")
    return logits[:, positions]


def logits_in_parts(model: nn.Module, idx: Tensor) -> Iterator[Tensor]:
    """Yield the logits of a text in float32: (1, T) -> (positions, V), in order. For each part the model runs again."""
    for start in range(0, idx.size(1), POSITIONS):
        yield read(model, idx, slice(start, start + POSITIONS))[0].float()


def sequence_losses(model: nn.Module, idx: Tensor) -> Tensor:
    """Return each sequence's mean cross-entropy in nats a token: (B, T) -> (B,). For T = 1 it is nan."""
    losses = []
    for text in idx.split(1):
        targets = F.pad(text[0, 1:], (0, 1), value=IGNORE).split(POSITIONS)  # the last position has no next token
        parts = zip(logits_in_parts(model, text), targets, strict=True)
        losses.append(sum(F.cross_entropy(logits, part.to(logits.device), reduction="sum") for logits, part in parts))
    return torch.stack(losses) / (idx.size(1) - 1)


@torch.no_grad()
def predictions(model: nn.Module, idx: Tensor) -> list[tuple[int, float]]:
    """Return the likeliest next token at each position of a text (1, T), and its probability."""
    found = []
    with evaluating(model):
        for logits in logits_in_parts(model, idx):
            probabilities, tokens = logits.softmax(-1).max(-1)
            found += zip(tokens.tolist(), probabilities.tolist(), strict=True)
    return found

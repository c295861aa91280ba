"""Run any decoder: a module that takes token ids, (B, T), and returns logits, (B, T, V), or something that has them.

Ours, those of `transformers` and a stranger's own are run alike. Shapes are named as in model/attention.py.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import errors_as_user_error
from errors import UserError
from model import GPT
from model.causality import logits_of

POSITIONS = 256  # logits are computed for so many positions of a sequence at a time: V numbers each


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


def read(
    model: nn.Module, idx: Tensor, positions: slice | Tensor = slice(None), hidden: list[Tensor] | None = None
) -> Tensor:
    """Return the logits of some positions of a text: (B, T) -> (B, positions, V). The head computes no others.

    hidden: a list that receives what all the logits would be made of, (B, T, C), if the model names its head.

    Raises UserError if the model cannot read the text, or returns no logits of all positions.
    """
    T = idx.size(1)
    hidden = [] if hidden is None else hidden

    def cut(head: nn.Module, inputs: tuple) -> tuple | None:
        """Keep the hidden states of these positions, as a hook before the head."""
        if inputs and inputs[0].shape[:-1] == idx.shape:
            hidden.append(inputs[0])
            return (inputs[0][:, positions], *inputs[1:])

    head = find_head(model)
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    guard = errors_as_user_error(f"the model cannot read {T} tokens, given as model(idx)")
    if isinstance(model, GPT):  # a fault of ours has a traceback
        guard = nullcontext()
    with guard, head.register_forward_pre_hook(cut) if head is not None else nullcontext():
        output = model(idx, **options)
    with errors_as_user_error("the model has to return logits"):
        logits = logits_of(output)
    if hidden:
        return logits
    if logits.size(1) != T:
        wrap = "wrap it in a module whose forward does"
        raise UserError(f"of {T} tokens the model returns logits of {logits.size(1)}, not of all: {wrap}")
    return logits[:, positions]


def logits_in_parts(model: nn.Module, idx: Tensor) -> Iterator[Tensor]:
    """Yield the logits of a text in float32, some positions at a time, in order: (B, T) -> (B, positions, V).

    If they are what the head returns, the model runs once. If it scales or caps them, it runs again for the rest.
    """
    hidden = []
    logits = read(model, idx, slice(POSITIONS), hidden)
    yield logits.float()
    if idx.size(1) <= POSITIONS:
        return
    head = model.logits if isinstance(model, GPT) else find_head(model)
    if hidden and head(hidden[0][:, :POSITIONS]).equal(logits):
        rest = hidden[0][:, POSITIONS:].split(POSITIONS, dim=1)
        yield from (head(states).float() for states in rest)
    else:
        yield from (rows.float() for rows in read(model, idx, slice(POSITIONS, None)).split(POSITIONS, dim=1))


def sequence_losses(model: nn.Module, idx: Tensor) -> Tensor:
    """Return each sequence's mean cross-entropy in nats a token: (B, T) -> (B,). For T = 1 it is nan."""
    losses = []
    following = idx[:, 1:]  # the last position has no next token
    for logits in logits_in_parts(model, idx):
        targets = following[:, : logits.size(1)]
        following = following[:, logits.size(1) :]
        # As rows: CUDA's kernel for (B, V, T) is not deterministic, and refuses where that is asked for.
        rows = logits[:, : targets.size(1)].flatten(0, 1)
        losses.append(F.cross_entropy(rows, targets.flatten(), reduction="none").view(targets.shape))
    return torch.cat(losses, dim=1).mean(1)


@torch.no_grad()
def predictions(model: nn.Module, idx: Tensor) -> list[tuple[int, float]]:
    """Return the likeliest next token at each position of a text (1, T), and its probability."""
    found = []
    with evaluating(model):
        for logits in logits_in_parts(model, idx):
            probabilities, tokens = logits[0].softmax(-1).max(-1)
            found += zip(tokens.tolist(), probabilities.tolist(), strict=True)
    return found

"""Run any decoder: a module that takes token ids, (B, T), and returns logits, (B, T, V), or something that has them.

Ours, those of `transformers` and a stranger's own are run alike. Shapes are named as in model/attention.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.causality import logits_of
from tril.errors import UserError, errors_as_user_error

POSITIONS = 1024  # logits are computed for so many positions of a sequence at a time: V numbers each


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the weights; the CPU if there are none."""
    return next(model.parameters(), torch.empty(0)).device


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

    named = getattr(model, "get_output_embeddings", None)
    head = named() if named else getattr(model, "lm_head", None)
    can_cut = isinstance(head, nn.Linear)  # another may mix the positions
    with errors_as_user_error(f"the model cannot read {T} tokens, given as model(idx)"):
        with head.register_forward_pre_hook(cut) if can_cut else nullcontext():
            output = model(idx)
    with errors_as_user_error("the model has to return logits"):
        logits = logits_of(output)
    if was_cut:
        return logits
    if logits.size(1) != T:
        wrap = "wrap it in a module whose forward does, as in docs/inspect.md"
        raise UserError(f"of {T} tokens the model returns logits of {logits.size(1)}, not of all: {wrap}")
    return logits[:, positions]


def predict(model: nn.Module, idx: Tensor) -> tuple[Tensor, list[tuple[int, float, float | None]]]:
    """Return what a model makes of a text (1, T): its loss, and its prediction at each token.

    A prediction is the likeliest next token, its probability, and the cross-entropy of the token that does follow, in
    nats; of the last token None. The loss is the mean of these, (), for T = 1 nan. For each part of the logits the
    model runs again.
    """
    loss = 0.0
    predictions = []
    T = idx.size(1)
    for start in range(0, T, POSITIONS):
        part = slice(start, start + POSITIONS)
        logits = read(model, idx, part)[0].float().log_softmax(-1)
        targets = idx[0, 1:][part].to(logits.device)  # the last position has no next token
        losses = F.nll_loss(logits[: len(targets)], targets, reduction="none")
        loss += losses.sum().cpu()
        values, tokens = logits.max(-1)
        predictions += zip_longest(tokens.tolist(), values.exp().tolist(), losses.tolist())
    return loss / (T - 1), predictions

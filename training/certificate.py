"""The certificate of a run: a proof that the model, as it will be trained, does not see the future."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from cli.bars import progress_bar
from errors import UserError
from model import GPT
from model.causality import check_causality
from model.device import autocast

LossFn = Callable[[GPT, Tensor, Tensor], Tensor]  # (model, inputs, targets) -> the summed loss


def certify(model: GPT, loss_fn: LossFn, dtype: torch.dtype, batch_size: int) -> dict:
    """Probe the loss as it will be trained, the logits in `dtype`, and decoding with a cache; print the outcome.

    loss_fn: the loss of inputs and targets, both (batch_size, T). Returns a record for checkpoints. Raises UserError if
    a position sees a token that it may not see, or the loss does not use a parameter that is to be trained.
    """
    T = model.config.context_length

    calls = progress_bar(desc="causal: probing", unit=" calls", leave=False, delay=1)

    def forward(idx: Tensor) -> Tensor:
        calls.update()
        with autocast(model.device, dtype):
            return model(idx)

    def decode(idx: Tensor) -> Tensor:
        calls.update()
        caches = model.new_cache(len(idx), T)
        chunks = idx.tensor_split((T // 2, T // 2 + 1, T // 2 + 3), dim=1)  # long, single, short, long
        return model.logits(torch.cat([model.hidden(chunk, caches) for chunk in chunks if chunk.size(1)], dim=1))

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        calls.update()
        return loss_fn(model, inputs, targets)

    began = time.perf_counter()
    outcome = check_causality(
        forward,
        model.config.vocab_size,
        T,
        module=model,
        decode=decode,
        loss_fn=loss,
        exact=model,
        strict=True,
        extreme=[forward] if dtype == torch.bfloat16 else [],
        batch_size=batch_size,
        mask=None,  # the triangle; a layer with a window has another: see `check_causality`
    )
    calls.close()
    if not outcome.ok:
        meant = "; if that is meant, see `mask` in training/certificate.py" if "blind" in outcome.finding else ""
        raise UserError(f"refusing to train: {outcome.finding}{meant}")
    # A step without its update: no optimizer could make one, or resume, without all of the gradients.
    tokens = torch.randint(model.config.vocab_size, (batch_size, T), device=model.device)
    loss_fn(model, tokens, tokens.clone()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            use = "the loss does not use it; use it, or freeze it with requires_grad_(False)"
            raise UserError(f"refusing to train: {name} gets no gradient: {use}")
    model.zero_grad()
    print(f"causal: {outcome}, {time.perf_counter() - began:.1f} s")
    return {"causal": str(outcome), "length": T, "num_probed": outcome.num_probed}

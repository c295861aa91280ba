"""The certificate of a run: proofs that the model, as it will be trained, does not see the future, and that its device
computes what a CPU does."""

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli.script import progress_bar
from errors import UserError
from model import GPT
from model.device import autocast, dtype_name
from model.load import skip_parameter_init
from training.distributed import gather, gather_tensor
from tril.causality import check_causality, watched
from tril.decoder import evaluating
from tril.weights import exact_products

COMPARED_TOKENS = 200  # more than a tile of a kernel
LEAST_LIMIT = 0.02  # of the size of all numbers together
TINY = torch.finfo(torch.float32).tiny
LossFn = Callable[[GPT, Tensor, Tensor], Tensor]  # (model, inputs, targets) -> the summed loss


def certify(model: GPT, loss_fn: LossFn, dtype: torch.dtype, batch_size: int, special: Iterable[int]) -> dict:
    """Probe the loss as it will be trained, the logits in `dtype`, and decoding with a cache; print the outcome.

    loss_fn: the loss of inputs and targets, both (batch_size, T). special: ids that a model may treat apart. Returns a
    record for checkpoints. Raises UserError if a position sees a token that it may not see, or misses one that it may
    see.
    """

    def forward(idx: Tensor) -> Tensor:
        with autocast(model.device, dtype):
            return model(idx)

    exact = exact_products(model.device)(model.__call__)  # in this context
    decode = exact_products(model.device)(partial(read_in_parts, model))
    began = time.perf_counter()
    with progress_bar(desc="asking whether the model sees the future", unit=" texts", leave=False, delay=1) as bar:
        outcome = check_causality(
            forward,
            model.config.vocab_size,
            model.config.context_length,
            module=model,
            decode=decode,
            loss_fn=partial(loss_fn, model),
            strict=True,
            extreme=[exact, forward] if dtype == torch.bfloat16 else [exact],
            batch_size=batch_size,
            mask=model.receptive_field,
            special=special,
            progress=bar.update,
        )
    if not outcome.ok:
        meant = "; if that is meant, say so in `GPT.receptive_field`" if "blind" in outcome.finding else ""
        raise UserError(f"refusing to train: {outcome.finding}{meant}")
    print(f"causal: {outcome}, {time.perf_counter() - began:.1f} s")
    record = {"causal": str(outcome)}
    return record if model.device.type == "cpu" else record | compare_with_cpu(model, dtype)


def read_in_parts(model: nn.Module, idx: Tensor) -> Tensor:
    """Return the logits of a text that a `GPT` reads in four parts, with a cache: (B, T) -> (B, T, V)."""
    T = idx.size(1)
    caches = model.new_cache(len(idx), T)
    parts = idx.tensor_split((T // 2, T // 2 + 1, T // 2 + 3), dim=1)  # long, single, short, long
    return model.logits(torch.cat([model.hidden(part, caches) for part in parts if part.size(1)], dim=1))


def compare_with_cpu(model: GPT, dtype: torch.dtype) -> dict[str, str]:
    """Compare logits and gradients of the device with those of a CPU in float32, and print the difference.

    Backends have had kernels that were wrong (PyTorch issue 195910). The limit is ten times what the CPU is off by
    itself in `dtype`, which in trained models may be much. Returns a record for checkpoints. Raises UserError beyond
    the limit.

    While they are compared, matrices of zeros are random, on both: they would hide what is behind them.
    """
    T = min(model.config.context_length, COMPARED_TOKENS)
    idx = torch.randint(model.config.vocab_size, (1, T), generator=torch.Generator().manual_seed(0))
    zeros = [p for p in model.parameters() if p.dim() > 1 and not gather_tensor(p).any()]
    for parameter in zeros:
        nn.init.normal_(parameter, std=0.02)
    with skip_parameter_init():
        on_cpu = GPT(model.config)
    weights = {name: tensor.cpu() for name, tensor in gather(model.state_dict(), keep=True).items()}
    on_cpu.load_state_dict(weights, assign=True)
    expected = compute(on_cpu, idx, torch.float32)

    def error(numbers: list[Tensor]) -> float:
        """Return how much numbers differ from the expected ones, as a part of their size, which may be zero."""
        pairs = zip(numbers, expected, strict=True)
        return max(((own - right).norm() / right.norm().clamp_min(TINY)).item() for own, right in pairs)

    limit = max(LEAST_LIMIT, 10 * error(compute(on_cpu, idx, dtype)))
    found = error(compute(model, idx, dtype))
    for parameter in zeros:
        nn.init.zeros_(parameter)
    how_far = f"to {found:.1e} (limit {limit:.1e} in {dtype_name(dtype)})"
    if not found <= limit:
        agrees = f"{model.device} agrees with a CPU in float32 only {how_far}"
        raise UserError(f"refusing to train: {agrees}: use another device or dtype")
    print(f"kernels: agree with a CPU in float32 {how_far}")
    return {"agrees_with_cpu": how_far}


def compute(model: GPT, idx: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the logits of a text, and the gradients of its loss by the embeddings of its tokens, on the CPU."""
    idx = idx.to(model.device)
    products = exact_products(model.device) if dtype == torch.float32 else autocast(model.device, dtype)
    with evaluating(model), watched(model, idx) as embedded, products:  # without TF32
        logits = model(idx).float()
        loss = F.cross_entropy(logits[0, :-1], idx[0, 1:], reduction="sum")
        gradients = torch.autograd.grad(loss, embedded)
    return [numbers.detach().float().cpu() for numbers in (logits, *gradients)]

"""The certificate of a run: proofs that the model, as it will be trained, does not see the future, and that its device
computes what a CPU does."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cli.bars import progress_bar
from errors import UserError
from inspection.decoder import evaluating
from model import GPT
from model.causality import check_causality, watched
from model.device import autocast, dtype_name
from model.load import skip_parameter_init
from training.sharded import gather

COMPARED_TOKENS = 200  # more than a tile of a kernel
# Five times what fresh models of all families, of 2 to 24 layers, were off by; float32 may be TF32 on a GPU.
ROUNDING = {torch.float32: 0.01, torch.float16: 0.01, torch.bfloat16: 0.1}
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
    record = {"causal": str(outcome), "length": T, "num_probed": outcome.num_probed}
    return record if model.device.type == "cpu" else {**record, **compare_with_cpu(model, dtype)}


def compare_with_cpu(model: GPT, dtype: torch.dtype) -> dict[str, str]:
    """Compare logits and a gradient of the device, in `dtype`, with those of a CPU in float32; print the difference.

    Backends have had kernels that were wrong (PyTorch issue 195910). Returns a record for checkpoints. Raises UserError
    if a difference is larger than the precision explains.
    """
    idx = torch.randint(model.config.vocab_size, (1, min(model.config.context_length, COMPARED_TOKENS)))
    weights = {name: tensor.cpu() for name, tensor in gather(model.state_dict(), keep=True).items()}
    with skip_parameter_init():
        on_cpu = GPT(model.config)
    on_cpu.load_state_dict(weights)
    largest = 0.0
    for found, expected in zip(compute(model, idx, dtype), compute(on_cpu, idx, torch.float32), strict=True):
        largest = max(largest, ((found - expected).norm() / expected.norm()).item())
    most = ROUNDING[dtype]
    sentence = f"off by {largest:.1e} from a CPU in float32 (at most {most:g} in {dtype_name(dtype)})"
    if not largest <= most:
        raise UserError(f"refusing to train: the kernels of {model.device} are {sentence}: use another device or dtype")
    print(f"device: {sentence}")
    return {"beside_cpu": sentence}


def compute(model: GPT, idx: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the logits of a text, and the gradient of its loss by the embeddings of its tokens, both on the CPU."""
    idx = idx.to(model.device)
    with evaluating(model), watched(model, idx) as embedded:
        with autocast(model.device, dtype):
            logits = model(idx).float()
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits[0, :-1], idx[0, 1:], reduction="sum"), embedded)
    return logits.detach().cpu(), gradient.float().cpu()

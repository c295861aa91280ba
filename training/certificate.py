"""The certificate of a run: proofs that the model, as it will be trained, does not see the future, and that what is
trained is the loss that train.py has."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cli.script import progress_bar
from errors import UserError
from model import GPT
from model.device import autocast
from model.load import skip_parameter_init
from training.distributed import gather, gather_tensor, is_sharded
from tril.causality import check_causality
from tril.decoder import evaluating
from tril.weights import exact_products

PATIENCE = 60  # seconds of probes at many positions
COMPARED_TOKENS = 200  # of a sequence: more than a tile of a kernel
LEAST_LIMIT = 0.02  # of the size of what is compared
SMALL = 0.001  # of the size of all gradients together
TINY = torch.finfo(torch.float32).tiny
MOST_NOISE = 0.5  # of the size of a gradient, with dropout
MOST_LESS = 0.05  # of a cross-entropy
ROUNDED = 1e-3
Limits = list[float]  # of losses, and of gradients
LossFn = Callable[[GPT, Tensor, Tensor], Tensor]  # (model, inputs, targets) -> the summed loss


def certify(model: GPT, loss_fn: LossFn, dtype: torch.dtype, batch_size: int, special: Iterable[int]) -> dict:
    """Probe the loss as it will be compiled, the logits in `dtype`, and decoding with a cache; print the outcome.

    loss_fn: the loss of inputs and targets, both (batch_size, T). special: ids that a model may treat apart. Returns a
    record for checkpoints. Raises UserError if a position sees a token that it may not see, or misses one that it may
    see.
    """

    def forward(idx: Tensor) -> Tensor:
        with autocast(model.device, dtype):
            return model(idx)

    exact = exact_products(model.device)(model.__call__)  # in this context
    began = time.perf_counter()
    with progress_bar(desc="asking whether the model sees the future", unit=" texts", leave=False, delay=1) as bar:
        outcome = check_causality(
            forward,
            model.config.vocab_size,
            model.config.context_length,
            module=model,
            decode=exact_products(model.device)(partial(decode_in_parts, model)),
            loss_fn=partial(loss_fn, model),
            strict=True,
            seconds=math.inf if is_sharded(model.lm_head.weight) else PATIENCE,
            extreme=[exact, forward] if dtype == torch.bfloat16 else [exact],
            batch_size=batch_size,
            mask=model.receptive_field,
            special=special,
            progress=bar.update,
        )
    if not outcome.ok:
        meant = "; if that is meant, say so in `GPT.receptive_field`" if outcome.is_blind else ""
        raise UserError(f"refusing to train: {outcome.finding}{meant}")
    print(f"causal: {outcome}, {time.perf_counter() - began:.1f} s")
    return {"causal": str(outcome)}


def decode_in_parts(model: nn.Module, idx: Tensor) -> Tensor:
    """Return the logits of a text that a `GPT` reads in four parts, with a cache: (B, T) -> (B, T, V)."""
    T = idx.size(1)
    caches = model.new_cache(len(idx), T)
    parts = idx.tensor_split((T // 2, T // 2 + 1, T // 2 + 3), dim=1)  # long, single, short, long
    return model.logits(torch.cat([model.hidden(part, caches) for part in parts if part.size(1)], dim=1))


def prove_loss(model: GPT, loss_fn: LossFn, eager: partial, dtype: torch.dtype, batches: Callable) -> dict[str, str]:
    """Compare the loss as it is trained with its source, its source with a CPU, and its value with a cross-entropy.

    Compilers and backends have had kernels that were wrong (PyTorch issues 191976 and 195910). While they are compared,
    matrices of zeros are random: they would hide what is behind them. No proof of the loss knows its targets: those of
    the first batch must not be what each position has read.

    loss_fn: the loss as it is trained, perhaps compiled or recorded; eager: its source, with the keyword `dtype`;
    batches: those of the training, (number, device) -> inputs and targets, (B, T) each. Prints how far they agree, and
    returns it for checkpoints. Raises UserError beyond a limit.
    """
    inputs, targets = batches(0, torch.device("cpu"))
    if targets.equal(inputs) and inputs.unique().numel() > 1:  # of one token alone it cannot be told
        raise UserError(
            "refusing to train: the targets are the inputs, which each position has read: shift them by a token"
        )
    batch = torch.randint(model.config.vocab_size, (2, *inputs.shape), generator=torch.Generator().manual_seed(0))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.dtype != torch.bool]  # masks stay
    zeros = [p for p in model.parameters() if p.dim() > 1 and not gather_tensor(p).any()]
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        for parameter in zeros:
            nn.init.normal_(parameter, std=0.02)
        record = {"loss": compare_with_cross_entropy(model, eager, batch, dtype)}
        if model.device.type != "cpu" or loss_fn is not eager:
            limits, record["agrees_with_cpu"] = compare_with_cpu(model, eager, dtype)
        if loss_fn is not eager:
            record["agrees_with_source"] = compare_with_source(model, loss_fn, eager, batch, limits)
    for parameter in zeros:
        nn.init.zeros_(parameter)
    for buffer, value in buffers:
        buffer.data.copy_(value)
    return record


def compare_with_cpu(model: GPT, eager: partial, dtype: torch.dtype) -> tuple[Limits, str]:
    """Compare a loss, in evaluation and of few tokens, with that of a CPU in float32.

    Returns limits, and how far the two agree. A limit is ten times what the CPU is off by itself in `dtype`, which in
    trained models may be much.
    """
    T = min(model.config.context_length, COMPARED_TOKENS)
    # Two sequences: of transposed views a kernel was wrong for all but the first (PyTorch issue 181133).
    batch = torch.randint(model.config.vocab_size, (2, 2, T), generator=torch.Generator().manual_seed(0))
    with skip_parameter_init():
        on_cpu = GPT(model.config).eval()
    on_cpu.load_state_dict(gather(model.state_dict(), keep=True))
    expected = compute(on_cpu, partial(eager, dtype=torch.float32), batch)
    limits = [max(LEAST_LIMIT, 10 * error) for error, _ in differences(compute(on_cpu, eager, batch), expected)]
    products = exact_products(model.device) if dtype == torch.float32 else nullcontext()  # without TF32
    with evaluating(model), products:
        found = differences(compute(model, eager, batch), expected)
    how_far = refuse(found, limits, f"{model.device} agrees with a CPU in float32", "use another device or dtype")
    print(f"kernels: agree with a CPU in float32 {how_far}")
    return limits, how_far


def compare_with_source(model: GPT, loss_fn: LossFn, eager: partial, batch: Tensor, limits: Limits) -> str:
    """Compare a loss as it is trained, of a batch as in training, with its source. Return how far they agree.

    A compiler draws its own random numbers: with dropout, only the sizes of gradients are alike.
    """
    for each in (batch.flip(0), batch.flip(1), batch):  # a CUDA graph is recorded in the second call, and then replayed
        trained = compute(model, loss_fn, each)
    source = compute(model, eager, batch)
    if max(differences(compute(model, eager, batch, seed=1), source))[0] > 0:
        limits = [limits[0], MOST_NOISE]
        for found in (trained, source):
            del found["the loss"]
            found |= {name: x.norm()[None] for name, x in found.items() if x.dim()}
    advice = "train with --train.compile false"
    how_far = refuse(differences(trained, source), limits, "the loss as it is trained agrees with its source", advice)
    print(f"loss:   agrees with its source {how_far}")
    return how_far


def refuse(found: list[tuple[float, str]], limits: Limits, agrees: str, advice: str) -> str:
    """Return how far what was found is beside its limits. Raises UserError beyond one of them."""
    (error, name), limit = max(zip(found, limits, strict=True), key=lambda pair: pair[0][0] / pair[1])
    how_far = f"to {error:.1e} (limit {limit:.1e})"
    if error > limit:
        raise UserError(f"refusing to train: {agrees} only {how_far}, in {name}: {advice}")
    return how_far


@torch.no_grad()
def compare_with_cross_entropy(model: GPT, eager: partial, batch: Tensor, dtype: torch.dtype) -> str:
    """Compare the loss of random targets with the cross-entropy of the logits. Return what it is.

    More is an auxiliary term, or the like. Less is a loss that knows its targets: nothing can predict these.
    """
    inputs, targets = batch.to(model.device)
    torch.manual_seed(0)  # dropout
    loss = eager(model, inputs, targets)
    torch.manual_seed(0)
    with autocast(model.device, dtype):
        logits = model(inputs)
    more = (loss / F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") - 1).item()
    if more < -MOST_LESS:
        raise UserError(
            f"refusing to train: of random targets the loss is {-more:.0%} less than the cross-entropy of the logits, "
            "so it knows them (if it is meant to be less, raise MOST_LESS in training/certificate.py)"
        )
    beside = "" if abs(more) < ROUNDED else f"{abs(more):.1%} {'more' if more > 0 else 'less'} than "
    said = f"is {beside}the cross-entropy of the logits"
    print(f"loss:   {said}")
    return said


def compute(model: GPT, loss_fn: LossFn, batch: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Return a loss, also in evaluation, and the gradients of all weights, on the CPU, by name.

    batch: inputs and targets, (2, B, T).
    """
    inputs, targets = batch.to(model.device)
    with evaluating(model), torch.no_grad():
        in_evaluation = loss_fn(model, inputs, targets)
    torch.manual_seed(seed)  # dropout
    loss = loss_fn(model, inputs, targets)
    copies = dist.get_world_size() if is_sharded(next(model.parameters())) else 1  # of gradients, which are added up
    (loss / (targets.numel() * copies)).backward()
    found = {"the loss": loss, "the loss in evaluation": in_evaluation}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found = {name: gather_tensor(tensor.detach()).float().cpu() for name, tensor in found.items()}
    model.zero_grad()
    return found


def differences(computed: dict[str, Tensor], expected: dict[str, Tensor]) -> list[tuple[float, str]]:
    """Return how much losses differ, and gradients, as a part of their size, at the most, and the name of each.

    A gradient that is small beside all others may be rounding alone.
    """
    size = math.hypot(*(expected[name].norm().item() for name in computed if expected[name].dim()))
    errors = [[(0.0, "")], [(0.0, "")]]
    for name, tensor in computed.items():
        least = SMALL * size if tensor.dim() else 0.0
        error = (tensor - expected[name]).norm() / expected[name].norm().clamp_min(max(least, TINY))
        errors[bool(tensor.dim())].append((error.nan_to_num(nan=math.inf).item(), name))
    return [*map(max, errors)]

"""Proof of causality: probes of the very function that is to be trained, compared bit by bit.

    report = check_causality(model, vocab_size=50257, length=1024)
    assert report.ok, report

A language model is trained to predict tokens that are in its own input, one place further on. If a position can see
them, however faintly, the loss falls and means nothing. So the probes compare without a tolerance:

    hidden      replace all tokens that a position may not see: no bit of its logits may change
    seen        replace one token: all positions that should see it must change, or the probe "hidden" proves nothing
    gradient    the same two as derivatives: exactly zero, and not zero
    alone       the logits of a sequence must not change when the others of its batch do
    repeatable  the same tokens must give the same logits again, also after other tokens in between
    agrees      decoding must give the logits of the whole text at once; the one comparison with a tolerance

A module is probed in evaluation and in training mode. It is probed with its own weights, with random ones (a layer
initialised to zero hides every leak), and with huge ones (a mask of -10,000 leaks only where scores are larger). Its
weights, buffers and mode, and the caller's random state, are restored afterwards.

This file needs PyTorch alone, and can be copied into any project. The suspect must not define what is right.

Shapes: B batch, T time (tokens), V vocabulary, C channels.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

IGNORE = -100  # a target that F.cross_entropy skips
NUM_POSITIONS = 12  # the least number of positions of a probe, if the length allows
EXTREME = 100.0  # scales queries and keys, so that scores exceed 1e4 and a mask of -1e4 no longer hides anything
MOST_ROUNDING = 1e-3  # of the size of logits, between decoding and all at once; it was below 1e-6, also in 48 layers
FOR_SCORES = re.compile(r"(^|[._])(q|k|qkv|query|key)([._]|$)|c_attn|in_proj")  # names of weights of queries and keys

Forward = Callable[[Tensor], Tensor]  # idx, (B, T) int64 -> logits, (B, T, V)
Loss = Callable[[Tensor, Tensor], Tensor]  # inputs and targets, (B, T) int64 each -> ()


@dataclass(frozen=True)
class Causality:
    """The result of the probes: `ok`, or the first fault found. `str` describes it."""

    length: int
    """The number of tokens in a probed sequence."""
    num_probed: int
    """The number of different positions probed."""
    finding: str | None = None
    """A description of the fault."""
    query: int | None = None
    """The position that sees a token it must not see, or misses one it must see."""
    key: int | None = None
    """The position of that token."""

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return self.finding is None

    def __str__(self) -> str:
        if self.finding:
            return f"no, {self.finding}"
        return f"yes, no position depends on a later one ({self.num_probed} of {self.length} probed)"


class Finding(Exception):
    """Ends the probing. Its arguments are the last three fields of `Causality`."""


def check_causality(
    forward: Forward,
    vocab_size: int,
    length: int,
    *,
    module: nn.Module | None = None,
    decode: Forward | None = None,
    loss_fn: Loss | None = None,
    extreme: Sequence[Forward] = (),
    batch_size: int | None = None,
    mask: Tensor | None = None,
) -> Causality:
    """Check that each position of `forward` sees exactly the tokens that it may see.

    Args:
        forward: any callable, (B, T) int64 -> logits (B, T, V).
        vocab_size: V, at least 2.
        length: T. Kernels may differ by length: give the length of the training.
        module: the module that has the weights of `forward`, if `forward` is not a module itself; module(idx) must
            return the same logits. Without a module the tokens are on the CPU, and there are no derivatives and no
            random or extreme weights.
        decode: a function like `module` that reads the tokens part by part, with a cache.
        loss_fn: a loss of the module that hides its logits, such as a compiled one: inputs and targets, (B, T) int64
            each -> the sum over all targets except those of -100. It is called with autograd in training mode only.
        extreme: functions like `forward`, also probed with weights scaled by EXTREME. None of them may compute in
            float16, which would overflow.
        batch_size: B, the most sequences in a call, and the exact number in a call of `loss_fn`. None: T.
        mask: (T, T) bool, True where the position (row) may depend on the token (column), through all layers: windows
            of w tokens in L layers reach L (w - 1) back. None: itself and everything before it. A dependence too faint
            for the precision counts as none.

    Raises ValueError if length, vocab_size or mask are impossible, or if a module is missing.
    """
    if module is None and isinstance(forward, nn.Module):
        module = forward
    if module is None and (decode or loss_fn or extreme):
        raise ValueError("decode, loss_fn and extreme are functions of a module: give it too")
    if vocab_size < 2 or length < 1:
        raise ValueError(f"nothing to ask: {length} tokens of a vocabulary of {vocab_size}")
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
    if mask.shape != (length, length):
        raise ValueError(f"the mask must be ({length}, {length}), got {tuple(mask.shape)}")
    prober = Prober(vocab_size, length, batch_size or length, mask, module)
    finding = ()
    try:
        with prober.restoring():
            prober.run(forward, decode, loss_fn, extreme)
    except Finding as found:
        finding = found.args
    return Causality(length, len(prober.probed), *finding)


@dataclass
class Prober:
    """Tokens, positions and weights to probe with. Each probe raises `Finding` if it finds a fault."""

    vocab_size: int
    length: int
    batch_size: int
    mask: Tensor
    module: nn.Module | None

    def __post_init__(self) -> None:
        self.is_function = self.module is None
        if self.is_function:
            self.module = nn.Module()  # without weights, so that there is nothing to restore
        self.device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        self.mask = self.mask.to(self.device)
        self.places = torch.arange(self.length, device=self.device)
        self.random = torch.Generator().manual_seed(0)  # for tokens, positions and random weights
        self.probed = set()
        self.parts = [(part, part.training, dict(part._buffers)) for part in self.module.modules()]
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn autograd on inside the `with` block. After it, restore the module and the random state."""
        weights = [(parameter, parameter.detach().clone()) for parameter in self.module.parameters()]
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                with torch.inference_mode(False), torch.enable_grad():
                    yield
        finally:
            with torch.no_grad():
                for parameter, value in weights:
                    parameter.copy_(value)
            self.restore_buffers()
            for part, training, _ in self.parts:
                part.training = training

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Give each buffer its first tensor and value, also if the module has assigned another tensor."""
        for part, _, buffers in self.parts:
            part._buffers.update(buffers)
        for buffer, value in self.buffers:
            if not torch.equal(buffer, value):  # an expanded buffer cannot be written to
                buffer.copy_(value)

    def run(self, forward: Forward, decode: Forward | None, loss_fn: Loss | None, extreme: Sequence[Forward]) -> None:
        """Run all probes. Without a module, run those of `forward` as it is."""
        as_it_is = "with the weights as they are"
        self.module.eval()
        with torch.no_grad():
            self.alone(forward, as_it_is)
            self.hidden(forward, as_it_is, seen=self.is_function, few=not self.is_function)
        if self.is_function:
            return

        self.randomize()
        with torch.no_grad():
            self.alone(forward, "in evaluation")
            self.hidden(forward, "in evaluation", seen=True)
            if decode:
                self.alone(decode, "in decoding")
                self.hidden(decode, "in decoding", seen=True)
                self.agrees(decode)
            if loss_fn:
                self.hidden_from_loss(loss_fn, "in evaluation")
        self.gradient()
        self.module.train()
        self.alone(forward, "in training")
        self.hidden(forward, "in training")
        if loss_fn:
            self.hidden_from_loss(loss_fn, "in training")

        self.randomize(EXTREME)
        for function in (self.module, *extreme):  # not `forward`: an autocast to float16 would overflow
            self.hidden(function, "in training, with extreme weights", few=True)
        self.module.eval()
        with torch.no_grad():
            self.hidden(self.module, "in evaluation, with extreme weights", few=True)
            if decode:
                self.hidden(decode, "in decoding, with extreme weights", few=True)

    @torch.no_grad()
    def randomize(self, scale: float = 1.0) -> None:
        """Give every weight a random value, so that each part of the model matters. Scale those of queries and keys."""
        torch.manual_seed(int(torch.randint(2**31, (), generator=self.random)))
        weights = {name: p for name, p in self.module.named_parameters() if p.is_floating_point()}
        for_scores = [name for name in weights if FOR_SCORES.search(name)] or weights
        for name, parameter in weights.items():
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
            if parameter.dim() < 2:  # gains and biases
                values.uniform_(0.5, 1.5).mul_(torch.randint_like(values, 2) * 2 - 1)
            else:
                values.normal_(std=parameter.size(-1) ** -0.5)
            if name in for_scores:
                values.mul_(scale)
            parameter.copy_(shard_like(values, parameter))

    def positions(self, few: bool = False) -> Tensor:
        """Return ascending positions: both ends, the last before each power of two (a tile's edge), and random ones."""
        chosen = {0, self.length - 2, self.length - 1}
        count = NUM_POSITIONS // 2
        if not few:
            chosen |= {2**n - 1 for n in range(self.length.bit_length())}
            count = NUM_POSITIONS
        chosen &= set(range(self.length))
        for position in torch.randperm(self.length, generator=self.random).tolist():
            if len(chosen) < count:
                chosen.add(position)
        self.probed |= chosen
        return torch.tensor(sorted(chosen), device=self.device)

    def tokens(self, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Return two (num_sequences, T) of random tokens that differ everywhere. The first sequence is all zeros."""
        idx = torch.randint(self.vocab_size, (num_sequences, self.length), generator=self.random)
        idx[0] = 0
        other = (idx + torch.randint(1, self.vocab_size, idx.shape, generator=self.random)) % self.vocab_size
        return idx.to(self.device), other.to(self.device)

    def call(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """Call a function; in training mode with the same dropout and the same buffers each time."""
        if self.module.training:
            torch.manual_seed(0)
            self.restore_buffers()
        return function(*arguments).detach()

    def logits(self, forward: Forward, idx: Tensor) -> Tensor:
        """Call `forward`: (B, T) -> (B, T, V)."""
        logits = self.call(forward, idx)
        expected = (*idx.shape, self.vocab_size)
        if logits.shape != expected:
            raise Finding(f"expected logits of shape {expected}, got {tuple(logits.shape)}")
        return logits

    def alone(self, forward: Forward, where: str) -> None:
        """Run the probes "alone" and "repeatable"."""
        idx, other = self.tokens(2)
        before = self.logits(forward, idx)
        if not before.isfinite().all():
            raise Finding(f"its logits are not finite numbers ({where})")
        first = self.logits(forward, torch.stack((idx[0], other[1])))[0]
        second = self.logits(forward, torch.stack((other[0], idx[1])))[1]
        if differs(before, self.logits(forward, idx)).any():
            raise Finding(f"the same tokens do not give the same logits again ({where})")
        if differs(before, torch.stack((first, second))).any():
            raise Finding(f"a sequence changes when the others of its batch do ({where})")

    def hidden(self, forward: Forward, where: str, seen: bool = False, few: bool = False) -> None:
        """Run the probe "hidden", and "seen" if asked to. Each position probed has a sequence of its own."""
        for positions in self.positions(few).split(self.batch_size):
            hide = ~self.mask[positions]  # (B, T)
            idx, other = self.tokens(len(hide))
            changed = torch.where(hide, other, idx)
            before = self.logits(forward, idx)
            after = self.logits(forward, changed)
            leaks = differs(before, after) & ~self.sees_any(hide)
            for query, row in first_true(leaks.T):
                _, key = first_cause(lambda tokens, at=(row, query): self.call(forward, tokens)[at], idx, changed)
                logits = torch.stack((before[row, query], after[row, query])).float()
                size = logits.diff(dim=0).abs().max()
                share = logits.softmax(-1).diff(dim=0).abs().max()
                effect = f"moves its logits by up to {size:.2g} and a probability by up to {share:.2g}"
                raise leak(query, key, f", which {effect} ({where})")
            if seen and before.dtype.itemsize >= 4:  # half precision rounds away one token among many
                replaced = torch.where(self.places == positions[:, None], other, idx)
                moved = differs(before, self.logits(forward, replaced))  # (key, query)
                for query, column in first_true(self.mask[:, positions] & ~moved.T):
                    raise blindness(query, positions[column].item())

    def agrees(self, decode: Forward) -> None:
        """Run the probe "agrees", with products in full precision."""
        idx = torch.randint(self.vocab_size, (2, self.length)).to(self.device)
        with exact_products(self.device):
            expected = self.logits(self.module, idx)
            decoded = self.logits(decode, idx)
        error = ((decoded.float() - expected).norm() / expected.norm()).item()
        if expected.dtype.itemsize >= 4 and not error <= MOST_ROUNDING:
            raise Finding(f"read part by part with a cache, a text gets other logits: off by {error:.1%} of their size")

    def gradient(self) -> None:
        """Run the probe "gradient", if an nn.Embedding reads the tokens: its output is the input of the derivative."""
        plain = getattr(self.module, "_orig_mod", self.module)  # a compiled module would ignore new hooks
        for queries in self.positions().split(max(1, self.batch_size // 4)):  # autograd without autocast takes memory
            idx, _ = self.tokens(len(queries))
            logits, embedded = watch_embedding(plain, idx)
            if not embedded:
                return
            of_queries = logits[range(len(idx)), queries]  # (B, T, V) -> (B, V)
            score = (of_queries * torch.randn_like(of_queries)).sum()
            gradients = torch.autograd.grad(score, embedded, allow_unused=True, materialize_grads=True)
            influence = sum(gradient.abs().amax(-1) for gradient in gradients)  # (B, T)
            allowed = self.mask[queries]
            for row, key in first_true((influence != 0) & ~allowed):
                effect = f": the derivative of its logits to it is {influence[row, key]:.2g} and must be exactly 0"
                raise leak(queries[row].item(), key, effect)
            for row, key in first_true((influence == 0) & allowed):
                raise blindness(queries[row].item(), key)

    def hidden_from_loss(self, loss_fn: Loss, where: str) -> None:
        """Run the probe "hidden" on a loss, which is one sum over a batch.

        Few targets are counted, because a small sum shows small changes: in each sequence that of one position, and
        those of some positions that see none of the replaced tokens.
        """
        for positions in self.positions().split(self.batch_size):
            positions = positions.repeat(self.batch_size)[: self.batch_size]
            hide = ~self.mask[positions]
            idx, other = self.tokens(self.batch_size)
            targets, _ = self.tokens(self.batch_size)
            counted = torch.rand(targets.shape, generator=self.random).to(self.device) < 4 / self.length
            counted &= ~self.sees_any(hide)
            counted |= self.places == positions[:, None]
            targets = targets.masked_fill(~counted, IGNORE)
            changed = torch.where(hide, other, idx)

            def loss(tokens: Tensor, targets: Tensor = targets) -> Tensor:
                return self.call(loss_fn, tokens, targets)

            before = loss(idx)
            after = loss(changed)
            if differs(before, after):
                if differs(before, loss(idx)):
                    raise Finding(f"the same tokens do not give the same loss again ({where})")
                nothing = torch.full_like(targets, IGNORE)
                another_start = torch.where(self.places == 0, other, idx)
                if differs(loss(idx, nothing), loss(another_start, nothing)):
                    rule = f"whose target is {IGNORE} and must be skipped, as F.cross_entropy skips them"
                    raise Finding(f"the loss counts positions {rule} ({where})")
                row, key = first_cause(loss, idx, changed)
                size = (after - before).abs()
                raise leak(positions[row].item(), key, f": the loss moves by {size:.2g} ({where})")
        if self.module.training and not differs(before, loss(other)):
            raise Finding(f"the loss does not depend on the tokens ({where})")

    def sees_any(self, tokens: Tensor) -> Tensor:
        """Mark the positions that may see at least one of the marked tokens: (B, T) -> (B, T), both bool."""
        return tokens.float() @ self.mask.float().T > 0


def leak(query: int, key: int, effect: str) -> Finding:
    """Return the fault that a position sees a token that it must not see."""
    where = f"{key - query} ahead of it" if key > query else "which its mask hides"
    return Finding(f"position {query} sees token {key}, {where}{effect}", query, key)


def blindness(query: int, key: int) -> Finding:
    """Return the fault that a position does not see a token that it should see."""
    return Finding(f"position {query} is blind to token {key}, which it may see", query, key)


def watch_embedding(module: nn.Module, idx: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return module(idx), and each output (B, T, C) of an nn.Embedding that read idx, (B, T), as a leaf of autograd."""
    embedded = []

    def watch(part: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if torch.equal(inputs[0], idx):
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

    with hooked((part for part in module.modules() if isinstance(part, nn.Embedding)), watch):
        return module(idx), embedded


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable) -> Iterator[None]:
    """Register a forward hook, hook(module, inputs, output), on each of the modules inside the `with` block."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(hook))
        yield


def differs(before: Tensor, after: Tensor) -> Tensor:
    """Return whether any of V numbers differs: (..., V) twice -> (...,) bool. nan counts as equal to nan."""
    return ((before != after) & ~(before.isnan() & after.isnan())).any(-1)


def first_true(found: Tensor) -> list[list[int]]:
    """Return the indices of the first True in a list, which is empty if there is none."""
    return found.nonzero()[:1].tolist()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Multiply matrices in the precision of their factors: without a GPU's TF32, and without autocast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def shard_like(values: Tensor, parameter: Tensor) -> Tensor:
    """Shard values, which every rank holds, like a parameter of FSDP; return them as they are for any other."""
    if not hasattr(parameter, "placements"):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


def first_cause(read: Forward, idx: Tensor, changed: Tensor) -> tuple[int, int]:
    """Return (sequence, position) of the first token whose replacement changes `read`, found by bisection.

    The tokens of idx, (B, T), are replaced by those of `changed` in their order, as many as it takes.
    """
    before = read(idx)

    def changes(count: int) -> bool:
        """Return whether replacing the first `count` tokens changes `read`."""
        partly = torch.cat((changed.flatten()[:count], idx.flatten()[count:]))
        return bool(differs(before, read(partly.view_as(idx))))

    place = bisect_left(range(1, idx.numel()), True, key=changes)
    return divmod(place, idx.size(1))

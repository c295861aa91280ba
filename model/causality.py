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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

    Raises ValueError if length, vocab_size or mask are impossible, if a module is missing, or if `forward` returns no
    logits.
    """
    module = forward if module is None and isinstance(forward, nn.Module) else module
    if module is None and (decode or loss_fn or extreme):
        raise ValueError("decode, loss_fn and extreme are functions of a module: give it too")
    without = nn.Module().eval()  # stands for the module of a plain function: no weights, nothing to restore
    prober = Prober(vocab_size, length, without if module is None else module, batch_size, mask)
    decoding = [(decode, "in decoding")] if decode else []

    def probes() -> None:
        if module is not None:
            module.eval()
        with torch.no_grad():
            prober.alone(forward, "with the weights as they are")
            prober.hidden(forward, "with the weights as they are", seen=module is None, few=module is not None)
        if module is None:
            return
        prober.randomize()
        module.eval()
        with torch.no_grad():
            for function, where in ((forward, "in evaluation"), *decoding):
                prober.alone(function, where)
                prober.hidden(function, where, seen=True)
            if decode:
                prober.agrees(module, decode)
            if loss_fn:
                prober.hidden_from_loss(loss_fn, "in evaluation")
        prober.gradient()
        module.train()
        prober.alone(forward, "in training")
        prober.hidden(forward, "in training")
        if loss_fn:
            prober.hidden_from_loss(loss_fn, "in training")

        prober.randomize(EXTREME)  # probes the module without autocast: float16 would overflow
        for function in (module, *extreme):
            prober.hidden(function, "in training, with extreme weights", few=True)
        module.eval()
        with torch.no_grad():
            for function, where in ((module, "in evaluation"), *decoding):
                prober.hidden(function, f"{where}, with extreme weights", few=True)

    return prober.run(probes)


class Prober:
    """Tokens, positions and weights to probe with. Each probe raises `Finding` if it finds a fault."""

    def __init__(self, vocab_size: int, length: int, module: nn.Module, batch_size: int | None, mask: Tensor | None):
        if vocab_size < 2 or length < 1:
            raise ValueError(f"nothing to ask: {length} tokens of a vocabulary of {vocab_size}")
        if mask is not None and mask.shape != (length, length):
            raise ValueError(f"the mask must be ({length}, {length}), got {tuple(mask.shape)}")
        self.vocab_size = vocab_size
        self.length = length
        self.module = module
        self.batch_size = batch_size or length
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self.random = torch.Generator().manual_seed(0)  # for tokens, positions and random weights
        places = torch.arange(length, device=self.device)
        self.mask = places <= places[:, None] if mask is None else mask.to(self.device)
        self.probed: set[int] = set()

    def run(self, probes: Callable[[], None]) -> Causality:
        """Call `probes` and return the result; restore the module and the random state."""
        modes = [(part, part.training) for part in self.module.modules()]
        weights = [(parameter, parameter.detach().clone()) for parameter in self.module.parameters()]
        copies = {id(buffer): buffer.detach().clone() for buffer in self.module.buffers()}  # layers may share a mask
        self.buffers = [
            (part, name, buffer, copies[id(buffer)])
            for part in self.module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        found: tuple = ()
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                with torch.inference_mode(False), torch.enable_grad():
                    probes()
        except Finding as finding:
            found = finding.args
        finally:
            with torch.no_grad():
                for parameter, value in weights:
                    parameter.copy_(value)
            self.restore_buffers()
            for part, training in modes:
                part.training = training
        return Causality(self.length, len(self.probed), *found)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Give each buffer its first tensor and value, also if the module has assigned another tensor."""
        for part, name, buffer, value in self.buffers:
            part._buffers[name] = buffer
            if not torch.equal(buffer, value):  # an expanded buffer cannot be written to
                buffer.copy_(value)

    @torch.no_grad()
    def randomize(self, scale: float = 1.0) -> None:
        """Give every weight a random value, so that each part of the model matters. Scale those of queries and keys."""
        torch.manual_seed(int(torch.randint(2**31, (), generator=self.random)))
        named = [(name, p) for name, p in self.module.named_parameters() if p.is_floating_point()]
        for_scores = {name for name, _ in named if FOR_SCORES.search(name)} or {name for name, _ in named}
        for name, parameter in named:
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
        ends = {0, self.length - 2, self.length - 1}
        chosen = ends if few else ends | {2**n - 1 for n in range(self.length.bit_length())}
        chosen &= set(range(self.length))
        others = [n for n in torch.randperm(self.length, generator=self.random).tolist() if n not in chosen]
        chosen |= set(others[: max(0, (NUM_POSITIONS // 2 if few else NUM_POSITIONS) - len(chosen))])
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
        """Call `forward`: (B, T) -> (B, T, V). Raises ValueError for another shape."""
        logits = self.call(forward, idx)
        expected = (*idx.shape, self.vocab_size)
        if logits.shape != expected:
            raise ValueError(f"expected logits of shape {expected}, got {tuple(logits.shape)}")
        return logits

    def alone(self, forward: Forward, where: str) -> None:
        """Run the probes "alone" and "repeatable"."""
        idx, other = self.tokens(2)
        before = self.logits(forward, idx)
        if not before.isfinite().all():
            raise Finding(f"its logits are not finite numbers ({where})")
        with_other = [self.logits(forward, torch.stack(pair)) for pair in ((idx[0], other[1]), (other[0], idx[1]))]
        if not same_bits(before, self.logits(forward, idx)).all():
            raise Finding(f"the same tokens do not give the same logits again ({where})")
        if not all(same_bits(before[row], with_other[row][row]).all() for row in (0, 1)):
            raise Finding(f"a sequence changes when the others of its batch do ({where})")

    def hidden(self, forward: Forward, where: str, seen: bool = False, few: bool = False) -> None:
        """Run the probe "hidden", and "seen" if asked to. Each position probed has a sequence of its own."""
        for positions in self.positions(few).split(self.batch_size):
            hide = ~self.mask[positions]  # (B, T)
            idx, other = self.tokens(len(hide))
            changed = torch.where(hide, other, idx)
            before = self.logits(forward, idx)
            after = self.logits(forward, changed)
            leaks = ~same_bits(before, after) & ~self.sees_any(hide)
            for query, row in leaks.T.nonzero()[:1].tolist():
                _, key = first_cause(lambda tokens, at=(row, query): self.call(forward, tokens)[at], idx, changed)
                logits_before = before[row, query].float()
                logits_after = after[row, query].float()
                size = largest_change(logits_before, logits_after)
                share = largest_change(logits_before.softmax(-1), logits_after.softmax(-1))
                effect = f"moves its logits by up to {size:.2g} and a probability by up to {share:.2g}"
                raise Finding(f"{sees(query, key)}, which {effect} ({where})", query, key)
            if seen and before.dtype.itemsize >= 4:  # half precision rounds away one token among many
                replaced = torch.where(self.one_hot(positions), other, idx)
                moved = ~same_bits(before, self.logits(forward, replaced))  # (key, query)
                refuse_blindness(self.mask[:, positions] & ~moved.T, torch.arange(self.length), positions)

    def agrees(self, forward: Forward, decode: Forward) -> None:
        """Run the probe "agrees", with products in full precision."""
        idx = torch.randint(self.vocab_size, (2, self.length)).to(self.device)
        with exact_products(self.device):
            expected = self.logits(forward, idx)
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
            of_queries = logits[torch.arange(len(idx), device=self.device), queries]  # (B, T, V) -> (B, V)
            score = (of_queries * torch.randn_like(of_queries)).sum()
            gradients = torch.autograd.grad(score, embedded, allow_unused=True, materialize_grads=True)
            influence = sum(gradient.abs().amax(-1) for gradient in gradients)  # (B, T)
            allowed = self.mask[queries]
            for row, key in ((influence != 0) & ~allowed).nonzero()[:1].tolist():
                query = queries[row].item()
                size = influence[row, key].item()
                effect = f"the derivative of its logits to it is {size:.2g} and must be exactly 0"
                raise Finding(f"{sees(query, key)}: {effect}", query, key)
            refuse_blindness((influence == 0) & allowed, queries, torch.arange(self.length))

    def hidden_from_loss(self, loss_fn: Loss, where: str) -> None:
        """Run the probe "hidden" on a loss, whose one sum over a batch counts few targets.

        Each sequence counts the target of one position, and of some positions that see none of the replaced tokens.
        """
        for positions in self.positions().split(self.batch_size):
            positions = positions.repeat(self.batch_size)[: self.batch_size]
            hide = ~self.mask[positions]
            idx, other = self.tokens(self.batch_size)
            targets, _ = self.tokens(self.batch_size)
            some = torch.rand(targets.shape, generator=self.random).to(self.device) < 4 / self.length
            counted = self.one_hot(positions) | some & ~self.sees_any(hide)  # a small sum shows small changes
            targets = targets.masked_fill(~counted, IGNORE)
            changed = torch.where(hide, other, idx)

            def loss(tokens: Tensor, targets: Tensor = targets) -> Tensor:
                return self.call(loss_fn, tokens, targets)

            before = loss(idx)
            after = loss(changed)
            if not same_bits(before, after):
                if not same_bits(before, loss(idx)):
                    raise Finding(f"the same tokens do not give the same loss again ({where})")
                nothing = torch.full_like(targets, IGNORE)
                another_start = torch.cat((other[:, :1], idx[:, 1:]), dim=1)
                if not same_bits(loss(idx, nothing), loss(another_start, nothing)):
                    rule = f"whose target is {IGNORE} and must be skipped, as F.cross_entropy skips them"
                    raise Finding(f"the loss counts positions {rule} ({where})")
                row, key = first_cause(loss, idx, changed)
                query = positions[row].item()
                size = largest_change(before, after)
                raise Finding(f"{sees(query, key)}: the loss moves by {size:.2g} ({where})", query, key)
        if self.module.training and same_bits(before, loss(other)):
            raise Finding(f"the loss does not depend on the tokens ({where})")

    def one_hot(self, positions: Tensor) -> Tensor:
        """Mark the position of each sequence: (B,) -> (B, T) bool."""
        return torch.arange(self.length, device=self.device) == positions[:, None]

    def sees_any(self, tokens: Tensor) -> Tensor:
        """Mark the positions that may see at least one of the marked tokens: (B, T) -> (B, T), both bool."""
        return tokens.float() @ self.mask.float().T > 0


def sees(query: int, key: int) -> str:
    """Describe the fault that a position sees a token."""
    where = f"{key - query} ahead of it" if key > query else "which its mask hides"
    return f"position {query} sees token {key}, {where}"


def refuse_blindness(blind: Tensor, queries: Tensor, keys: Tensor) -> None:
    """Raise `Finding` for the first True in `blind`, (queries, keys): a token that should be seen and is not."""
    for query, key in blind.nonzero()[:1].tolist():
        blind_query = queries[query].item()
        unseen_key = keys[key].item()
        fault = f"position {blind_query} is blind to token {unseen_key}, which it may see"
        raise Finding(fault, blind_query, unseen_key)


def watch_embedding(module: nn.Module, idx: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return module(idx), and each output (B, T, C) of an nn.Embedding that read idx, (B, T), as a leaf of autograd."""
    embedded = []

    def watch(part: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if torch.equal(inputs[0], idx):
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

    hooks = [part.register_forward_hook(watch) for part in module.modules() if isinstance(part, nn.Embedding)]
    try:
        return module(idx), embedded
    finally:
        for hook in hooks:
            hook.remove()


def same_bits(before: Tensor, after: Tensor) -> Tensor:
    """Return whether all V numbers are the same: (..., V) twice -> (...,) bool. nan counts as equal to nan."""
    return ((before == after) | (before.isnan() & after.isnan())).all(-1)


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


def largest_change(before: Tensor, after: Tensor) -> float:
    """Return the largest absolute difference."""
    return (after.float() - before.float()).abs().max().item()


def first_cause(read: Forward, idx: Tensor, changed: Tensor) -> tuple[int, int]:
    """Return (sequence, position) of the first token whose replacement changes `read`, found by bisection.

    The tokens of idx, (B, T), are replaced by those of `changed` in their order, as many as it takes.
    """
    places = (idx != changed).nonzero()
    before = read(idx)
    low = 0  # replacing so many places changes nothing
    high = len(places)  # replacing so many does
    while high - low > 1:
        middle = (low + high) // 2
        sequences, tokens = places[:middle].T
        partly = idx.index_put((sequences, tokens), changed[sequences, tokens])
        if same_bits(before, read(partly)):
            low = middle
        else:
            high = middle
    return tuple(places[high - 1].tolist())

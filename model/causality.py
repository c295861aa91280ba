"""Proof of causality: probes of the very function that is to be trained, compared bit by bit.

    report = check_causality(model, vocab_size=50257, length=1024)
    assert report.ok, report

    python -m model.causality openai-community/gpt2       a name on the Hugging Face hub, or a model directory
    python causality.py package.module:factory            a callable that returns a model; also file.py:factory

A language model is trained to predict tokens that are in its own input, one place further on. If a position can see
them, however faintly, the loss falls and means nothing. So the probes compare without a tolerance:

    hidden      replace all tokens that a position may not see: no bit of its logits may change
    seen        replace one token: all positions that should see it must change, or the probe "hidden" proves nothing
    gradient    the same two as derivatives: exactly zero, and not zero
    alone       the logits of a sequence must not change when the others of its batch do
    repeatable  the same tokens must give the same logits again, also after other tokens in between
    agrees      decoding must give the logits of the whole text at once; the one comparison with a tolerance

Experts and Fourier transforms round the same numbers differently in other company. Bits that differ as little as that
are asked for again in float64, where rounding vanishes and a leak does not; not so in a strict check.

A module is probed in evaluation and in training mode. It is probed with its own weights, with random ones (a layer
initialised to zero hides every leak), and with huge ones (a mask of -10,000 leaks only where scores are larger). Its
weights, buffers and mode, and the caller's random states, are restored afterwards.

This file needs PyTorch alone, and can be copied into any project. The suspect must not define what is right.

Shapes: B batch, T time (tokens), V vocabulary, C channels.
"""

import argparse
import importlib
import itertools
import random
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

IGNORE = -100  # a target that F.cross_entropy skips
NUM_POSITIONS = {(True, False): 12, (True, True): 6, (False, False): 5, (False, True): 3}  # strict, few -> the least
SHORT = 16  # tokens of a text in which all positions are probed
TOGETHER = 1024  # positions whose logits are compared at once
NUM_DRAWS = 8  # texts in which a token may be seen: a layer that selects does not see each token in each text
EXTREME = 300.0  # scales queries and keys, so that scores exceed 1e4 and a mask of -1e4 no longer hides anything
TINY = 1e-5  # of the size of logits: a smaller difference may be one of rounding
VANISHED = 1e-7  # the part of a difference that may be left in float64: of rounding 2e-9 is, of a leak all
FOR_SCORES = re.compile(r"(^|[._])(q|k|qkv|query|key)([._]|$)|c_attn|in_proj")  # names of weights of queries and keys

Forward = Callable[[Tensor], object]  # idx, (B, T) int64 -> logits, (B, T, V), as `logits_of` finds them
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
    rounding: str | None = None
    """How bits that differ were found to differ by rounding alone."""
    no_derivative: str | None = None
    """Why there were no derivatives to ask for."""

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return self.finding is None

    def __str__(self) -> str:
        if self.finding:
            return f"no, {self.finding}"
        text = f"yes, no position depends on a later one ({self.num_probed} of {self.length} probed)"
        if self.rounding:
            text += f"; bits differ by rounding alone: {self.rounding}"
        if self.no_derivative:
            text += f"; derivatives not asked for: {self.no_derivative}"
        return text


class Finding(Exception):
    """Ends the probing. Its arguments are three fields of `Causality`: `finding`, `query` and `key`."""


def check_causality(
    forward: Forward,
    vocab_size: int,
    length: int,
    *,
    module: nn.Module | None = None,
    decode: Forward | None = None,
    loss_fn: Loss | None = None,
    exact: Forward | None = None,
    extreme: Sequence[Forward] = (),
    batch_size: int = 2,
    mask: Tensor | None = None,
    tokens: Sequence[int] | Tensor | None = None,
    strict: bool = False,
) -> Causality:
    """Check that each position of `forward` sees exactly the tokens that it may see.

    Args:
        forward: any callable, (B, T) int64 -> logits (B, T, V), or what contains them: see `logits_of`.
        vocab_size: V, at least 2.
        length: T. Kernels may differ by length: give the length of the training.
        module: the module that has the weights of `forward`, if `forward` is not a module itself. Without a module the
            tokens are on the CPU, and there are no derivatives and no random or extreme weights.
        decode: a function like `forward` that reads the tokens part by part, with a cache.
        loss_fn: a loss of the module that hides its logits, such as a compiled one: inputs and targets, (B, T) int64
            each -> the sum over all targets except those of -100. It is called with autograd in training mode only.
        exact: `forward` without autocast, if `forward` has one: for derivatives, extreme weights and decoding.
        extreme: further functions like `forward`, also probed with weights scaled by EXTREME. None of them may compute
            in float16, which would overflow.
        batch_size: B, the most sequences in a call, and the exact number in a call of `loss_fn`.
        mask: (T, T) bool, True where the position (row) may depend on the token (column), through all layers: windows
            of w tokens in L layers reach L (w - 1) back. None: itself and everything before it. A dependence too faint
            for the precision counts as none.
        tokens: (N,), the ids to draw texts from, such as all but that of padding. None: all of the vocabulary.
        strict: probe more positions, and take no difference for one of rounding, as before a training.

    Raises ValueError if length, vocab_size, mask or tokens are impossible, or if a module is missing.
    """
    if module is None and isinstance(forward, nn.Module):
        module = forward
    if module is None and (decode or loss_fn or extreme):
        raise ValueError("decode, loss_fn and extreme are functions of a module: give it too")
    pool = torch.arange(vocab_size) if tokens is None else torch.as_tensor(tokens).unique()
    if len(pool) < 2 or length < 1:
        raise ValueError(f"nothing to ask: {length} tokens of a vocabulary of {len(pool)}")
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
    if mask.shape != (length, length):
        raise ValueError(f"the mask must be ({length}, {length}), got {tuple(mask.shape)}")
    prober = Prober(vocab_size, length, batch_size, mask, pool, module, strict)
    finding = ()
    try:
        with prober.restoring():
            prober.run(forward, exact or forward, decode, loss_fn, extreme)
    except Finding as found:
        finding = found.args
    reasons = {"rounding": prober.rounding, "no_derivative": prober.no_derivative}
    return Causality(length, len(prober.probed), *finding, **reasons)


def logits_of(output: object, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return the logits, (B, T, V), of what a model returns: a tensor, a tuple or list with one, or `logits` in it.

    shape: that of the logits, if it is known. Raises ValueError if there are none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    parts = logits if isinstance(logits, tuple | list) else [logits]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    for tensor in tensors:
        if tensor.shape == shape or shape is None and tensor.dim() == 3:
            return tensor
    got = " and ".join(str(tuple(tensor.shape)) for tensor in tensors) or f"{type(output).__name__}, which has none"
    raise ValueError(f"expected logits of shape {shape or '(B, T, V)'}, got {got}")


@dataclass
class Prober:
    """Tokens, positions and weights to probe with. Each probe raises `Finding` if it finds a fault."""

    vocab_size: int
    length: int
    batch_size: int
    mask: Tensor
    pool: Tensor
    module: nn.Module | None
    strict: bool

    def __post_init__(self) -> None:
        self.is_function = self.module is None
        if self.is_function:
            self.module = nn.Module()  # without weights, so that there is nothing to restore
        self.device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        self.mask = self.mask.to(self.device)
        self.pool = self.pool.to(self.device)
        self.places = torch.arange(self.length, device=self.device)
        self.random = torch.Generator().manual_seed(0)  # for tokens, positions and random weights
        self.deck = itertools.cycle(torch.randperm(self.length, generator=self.random).tolist())
        self.is_extreme = False
        self.where = ""  # how the module is probed
        self.probed = set()
        self.rounding = self.no_derivative = None
        self.parts = [(part, part.training, dict(part._buffers)) for part in self.module.modules()]
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn autograd on inside the `with` block. After it, restore the module and the random states."""
        weights = [(parameter, parameter.detach().clone()) for parameter in self.module.parameters()]
        numpy = sys.modules.get("numpy")
        states = random.getstate(), numpy and numpy.random.get_state()
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                with torch.inference_mode(False), torch.enable_grad():
                    yield
        finally:
            random.setstate(states[0])
            if numpy:
                numpy.random.set_state(states[1])
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
            part._buffers.clear()
            part._buffers.update(buffers)
        for buffer, value in self.buffers:
            if not torch.equal(buffer, value.to(buffer.dtype)):  # an expanded buffer cannot be written to
                buffer.copy_(value)

    def run(
        self, forward: Forward, exact: Forward, decode: Forward | None, loss_fn: Loss | None, extreme: Sequence[Forward]
    ) -> None:
        """Run all probes. Without a module, run those of `forward` as it is."""
        # In float32 a quarter of the batch needs less memory than a training step in half precision.
        exact_size = max(1, self.batch_size // 4) if self.strict else self.batch_size
        self.module.eval()
        with torch.no_grad():
            self.where = "with the weights as they are"
            if self.strict or self.is_function:
                self.alone(forward)
            positions = self.hidden(forward, few=not self.is_function)
            if self.is_function:
                self.no_derivative = "there is no module"
                self.seen(forward, positions, self.batch_size)
                return

        self.randomize()
        with torch.no_grad():
            self.where = "in evaluation"
            positions = self.hidden(forward, known=self.alone(forward))
            if loss_fn:
                self.hidden_from_loss(loss_fn)
            if decode:
                self.where = "in decoding"
                self.alone(decode)
                self.seen(decode, self.hidden(decode, batch_size=exact_size), exact_size)
                self.agrees(exact, decode)
        self.gradient(exact)
        if self.strict or self.no_derivative:
            with torch.no_grad():
                self.seen(forward, positions, self.batch_size)
        self.module.train()
        self.where = "in training"
        if self.strict:
            self.alone(forward)
        self.hidden(forward)
        if loss_fn:
            self.hidden_from_loss(loss_fn)

        self.enlarge()
        self.where = "in training, with extreme weights"
        self.hidden(exact, few=True, batch_size=exact_size)
        for function in extreme:
            self.hidden(function, few=True)
        self.module.eval()
        with torch.no_grad():
            self.where = "in evaluation, with extreme weights"
            self.hidden(exact, few=True, batch_size=exact_size)
            if decode:
                self.where = "in decoding, with extreme weights"
                self.hidden(decode, few=not self.strict, batch_size=exact_size)

    @torch.no_grad()
    def randomize(self) -> None:
        """Give every weight a random value, so that each part of the model matters."""
        torch.manual_seed(int(torch.randint(2**31, (), generator=self.random)))
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                if parameter.dim() < 2:  # gains and biases
                    values.uniform_(0.5, 1.5).mul_(torch.randint_like(values, 2) * 2 - 1)
                else:
                    values.normal_(std=parameter.size(-1) ** -0.5)
                parameter.copy_(shard_like(values, parameter))

    @torch.no_grad()
    def enlarge(self) -> None:
        """Scale the weights of queries and keys; all weights, if none has the name of these."""
        weights = {name: p for name, p in self.module.named_parameters() if p.is_floating_point()}
        for name in [name for name in weights if FOR_SCORES.search(name)] or weights:
            weights[name].mul_(EXTREME)
        self.is_extreme = True

    def positions(self, few: bool = False) -> Tensor:
        """Return ascending positions: both ends, the last before each power of two (a tile's edge), and random ones."""
        chosen = {0, self.length - 2, self.length - 1}
        if self.strict and not few:
            chosen |= {2**n - 1 for n in range(self.length.bit_length())}
        chosen &= set(range(self.length))
        count = self.length if self.length <= SHORT and not few else NUM_POSITIONS[self.strict, few]
        while len(chosen) < min(count, self.length):
            chosen.add(next(self.deck))
        self.probed |= chosen
        return torch.tensor(sorted(chosen), device=self.device)

    def tokens(self, num_sequences: int) -> Tensor:
        """Return random tokens, (num_sequences, T). The first sequence repeats one token."""
        picked = torch.randint(len(self.pool), (num_sequences, self.length), generator=self.random)
        picked[0] = 0
        return self.pool[picked.to(self.device)]

    def others(self, idx: Tensor) -> Tensor:
        """Return random tokens that differ from idx, (B, T), everywhere."""
        steps = torch.randint(1, len(self.pool), idx.shape, generator=self.random).to(self.device)
        return self.pool[(torch.searchsorted(self.pool, idx) + steps) % len(self.pool)]

    def call(self, function: Callable, *arguments: Tensor) -> object:
        """Call a function; in training mode with the same dropout and the same buffers each time."""
        if self.module.training:
            seed()
            self.restore_buffers()
        return function(*arguments)

    def logits(self, forward: Forward, idx: Tensor) -> Tensor:
        """Call `forward`: (B, T) -> (B, T, V)."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda _: None, lambda _: None
            ):  # keep nothing for a gradient
                output = self.call(forward, idx)
        except (RuntimeError, TypeError):  # the forward pass needs gradients of its own
            output = self.call(forward, idx)
        logits = logits_of(output, (*idx.shape, self.vocab_size)).detach()
        if not self.is_extreme and not torch.stack(logits.aminmax()).isfinite().all():
            raise Finding(f"its logits are not finite numbers ({self.where})")
        return logits

    def alone(self, forward: Forward) -> tuple[Tensor, Tensor]:
        """Run the probes "alone" and "repeatable". Return two sequences and their logits."""
        idx = self.tokens(2)
        before = self.logits(forward, idx)
        for kept in ([0], [1], [0, 1]):
            changed = self.others(idx)
            changed[kept] = idx[kept]
            self.compare(forward, idx, before, changed, changed == idx)
        return idx, before

    def hidden(
        self, forward: Forward, few: bool = False, known: tuple[Tensor, Tensor] | None = None, batch_size: int = 0
    ) -> Tensor:
        """Run the probe "hidden". Return the positions probed; each has a sequence of its own.

        known: two sequences and their logits, which need not be computed again. batch_size: another one.
        """
        positions = self.positions(few)
        hide_from = positions[~self.mask[positions].all(1)]  # nothing is hidden from the last
        parts = hide_from.split(batch_size or self.batch_size)
        B = len(parts[0])  # of each call: kernels may differ by batch
        if B:
            base = known if B == 2 else None
            for part in parts:
                if base is None or self.strict:
                    idx = self.tokens(B)
                    base = idx, self.logits(forward, idx)
                idx, before = base
                hide = ~self.mask[part.repeat(B)[:B]]  # (B, T)
                changed = torch.where(hide, self.others(idx), idx)
                self.compare(forward, idx, before, changed, ~self.sees_any(hide))
        return positions

    def compare(self, forward: Forward, idx: Tensor, before: Tensor, changed: Tensor, same: Tensor) -> None:
        """Raise the fault if logits of `changed` differ from those before where they must be the same, (B, T) bool."""
        after = self.logits(forward, changed)
        kept = equals(before, after) | ~same
        if kept.all():
            return
        moved = ~kept

        def difference() -> Tensor:
            return relative(self.logits(forward, idx), self.logits(forward, changed))[moved].max()

        if self.vanishes(relative(before, after)[moved].max(), difference):
            return

        if not equals(before, self.logits(forward, idx)).all():
            raise Finding(f"the same tokens do not give the same logits again ({self.where}); is dropout still on?")
        query, row = first_true(moved.T)[0]
        own = idx.clone()
        own[row] = changed[row]

        def read(tokens: Tensor) -> Tensor:
            return self.logits(forward, tokens)[row, query].float()

        logits = torch.stack((read(idx), read(own)))
        if equals(*logits):
            raise Finding(f"a sequence changes when the others of its batch do ({self.where})")
        size, share = (numbers.diff(dim=0).abs().max() for numbers in (logits, logits.softmax(-1)))
        effect = f"moves its logits by up to {size:.2g} and a probability by up to {share:.2g}"
        raise leak(query, first_cause(read, idx, own)[1], f", which {effect} ({self.where})")

    def vanishes(self, once: Tensor, difference: Callable[[], Tensor], is_derivative: bool = False) -> bool:
        """Return whether a difference is one of rounding: tiny, and gone in float64, where a leak remains.

        once: the difference as a part of the logits; difference: a function that measures it again. Without a float64
        to ask in, what is tiny passes, but not a derivative: where nothing is seen, it is zero without rounding.
        """
        if self.strict or self.is_function or not once <= TINY:
            return False
        again = self.in_float64(difference)
        if again is None:
            self.rounding = f"less than {TINY}, and no float64 to ask again in"
            return not is_derivative
        self.rounding = "asked again in float64"
        return bool(again <= max(VANISHED * once, 1e-15))

    def in_float64(self, ask: Callable) -> object | None:
        """Return ask() with weights in float64; None if there are no weights, or a kernel has no float64."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        kept = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
        if not kept or any(hasattr(tensor, "placements") for tensor in tensors):  # shards of FSDP stay as they are
            return None
        try:
            for tensor, data in kept:
                tensor.data = data.double()
            return ask()
        except Exception:  # of whichever kind: a kernel is missing, or memory
            return None
        finally:
            for tensor, data in kept:
                tensor.data = data

    def seen(self, forward: Forward, positions: Tensor, batch_size: int) -> None:
        """Run the probe "seen", in several texts if need be."""
        for keys in positions.split(batch_size):
            unseen = self.mask[:, keys].T  # (B, T)
            for _ in range(1 if self.strict else NUM_DRAWS):
                idx = self.tokens(len(keys))
                before = self.logits(forward, idx)
                if before.dtype.itemsize < 4:  # half precision rounds away one token among many
                    return
                replaced = torch.where(self.places == keys[:, None], self.others(idx), idx)
                unseen = unseen & equals(before, self.logits(forward, replaced))
                if not unseen.any():
                    break
            for query, row in first_true(unseen.T):
                raise blindness(query, keys[row].item())

    def agrees(self, exact: Forward, decode: Forward) -> None:
        """Run the probe "agrees", in float64 where that can be had, with products in full precision."""
        idx = self.tokens(2)[-self.batch_size :]

        def compare() -> float:
            expected = self.logits(exact, idx).cpu()  # where the memory is
            error = ((self.logits(decode, idx).cpu() - expected).norm() / expected.norm()).item()
            return error * (expected.dtype.itemsize >= 4)  # half precision rounds too much

        with exact_products(self.device):
            # A GPU has no attention kernel in float64: its formula would need memory that grows with T^2.
            error = self.in_float64(compare) if self.device.type == "cpu" else None
            most = 1e-6  # parts may be float32 still
            if error is None:
                error, most = compare(), 1e-3
        if not error <= most:
            raise Finding(f"read part by part with a cache, a text gets other logits: off by {error:.2g} of their size")

    def gradient(self, function: Forward) -> None:
        """Run the probe "gradient", if an nn.Embedding reads the tokens: its output is the input of the derivative."""
        queries = self.positions()
        hidden = ~self.mask[queries]
        unseen = ~hidden
        for _ in range(1 if self.strict else NUM_DRAWS):
            idx = self.tokens(2)[1:]
            influence = self.influence(function, idx, queries)
            if influence is None:
                return
            leaks = influence.masked_fill(~hidden, 0)

            def largest_leak(idx: Tensor = idx) -> Tensor:
                influence = self.influence(function, idx, queries)
                return influence[hidden].max() / influence.max()

            is_zero = (leaks == 0).all()
            if not is_zero and not self.vanishes(leaks.max() / influence.max(), largest_leak, True):
                row, key = first_true(leaks)[0]
                effect = f": the derivative of its logits to it is {leaks[row, key]:.2g} and must be exactly 0"
                raise leak(queries[row].item(), key, effect)
            unseen &= influence == 0
            if not unseen.any():
                return
        for row, key in first_true(unseen):
            raise blindness(queries[row].item(), key)

    def influence(self, function: Forward, idx: Tensor, queries: Tensor) -> Tensor | None:
        """Return how large the derivatives of N queries' logits to each token are, (N, T); None if there are none."""
        plain = getattr(self.module, "_orig_mod", self.module)  # a compiled module would ignore new hooks
        # A training step of so few sequences, in half precision, would need less memory of a GPU.
        on_host = self.strict and self.batch_size < 4 and self.device.type != "cpu"
        with watched(plain, idx) as embedded, torch.autograd.graph.save_on_cpu() if on_host else nullcontext():
            logits = logits_of((plain if function is self.module else function)(idx), (*idx.shape, self.vocab_size))
        if not embedded or not logits.requires_grad:
            self.no_derivative = "no nn.Embedding reads the tokens, or autograd is off"
            return None
        found = []
        for part in queries.split(len(idx)):
            of_queries = logits[range(len(part)), part]  # (B, T, V) -> (B, V)
            score = (of_queries * torch.randn_like(of_queries)).sum()
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            try:
                gradients = torch.autograd.grad(score, embedded, **options)
            except RuntimeError:  # reentrant checkpoints, or a kernel without a derivative
                if self.strict:
                    raise
                self.no_derivative = "autograd fails in it"
                return None
            found.append(sum(gradient.abs().amax(-1) for gradient in gradients)[: len(part)])
        return torch.cat(found)

    def hidden_from_loss(self, loss_fn: Loss) -> None:
        """Run the probe "hidden" on a loss, which is one sum over a batch.

        Few targets are counted, because a small sum shows small changes: in each sequence that of one position, and
        those of some positions that see none of the replaced tokens.
        """
        for positions in self.positions().split(self.batch_size):
            positions = positions.repeat(self.batch_size)[: self.batch_size]
            hide = ~self.mask[positions]
            idx = self.tokens(self.batch_size)
            other = self.others(idx)
            targets = self.tokens(self.batch_size)
            counted = torch.rand(targets.shape, generator=self.random).to(self.device) < 4 / self.length
            counted &= ~self.sees_any(hide)
            counted |= self.places == positions[:, None]
            targets = targets.masked_fill(~counted, IGNORE)
            changed = torch.where(hide, other, idx)

            def loss(tokens: Tensor, targets: Tensor = targets) -> Tensor:
                return self.call(loss_fn, tokens, targets).detach()

            before = loss(idx)
            after = loss(changed)
            if not equals(before, after):
                if not equals(before, loss(idx)):
                    raise Finding(f"the same tokens do not give the same loss again ({self.where})")
                nothing = torch.full_like(targets, IGNORE)
                another_start = torch.where(self.places == 0, other, idx)
                if not equals(loss(idx, nothing), loss(another_start, nothing)):
                    rule = f"whose target is {IGNORE} and must be skipped, as F.cross_entropy skips them"
                    raise Finding(f"the loss counts positions {rule} ({self.where})")
                row, key = first_cause(loss, idx, changed)
                size = (after - before).abs()
                raise leak(positions[row].item(), key, f": the loss moves by {size:.2g} ({self.where})")
        if self.module.training and not (before != loss(other)).any():
            raise Finding(f"the loss does not depend on the tokens ({self.where})")

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


def seed() -> None:
    """Seed all generators that a layer may draw from."""
    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


@contextmanager
def watched(module: nn.Module, idx: Tensor) -> Iterator[list[Tensor]]:
    """Yield a list to which each output (B, T, C) of an nn.Embedding that reads idx, (B, T), is added as a leaf."""
    embedded = []

    def watch(part: nn.Module, inputs: tuple, options: dict, output: object) -> Tensor | None:
        reads = any(isinstance(read, Tensor) and torch.equal(read, idx) for read in (*inputs, *options.values()))
        if not reads or not isinstance(output, Tensor) or output.shape[:-1] != idx.shape:
            return None
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone() if torch.is_grad_enabled() else embedded[-1]  # some models add to it in place

    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                stack.enter_context(part.register_forward_hook(watch, prepend=True, with_kwargs=True))
        yield embedded


def relative(before: Tensor, after: Tensor) -> Tensor:
    """Return how much logits differ, in sizes of those at their position: (B, T, V) twice -> (B, T)."""
    size = before.abs().median(-1).values  # those of padding may be -1e9
    return (before - after).abs().amax(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)


def equals(before: Tensor, after: Tensor) -> Tensor:
    """Return whether all of V numbers are equal: (..., V) twice -> (...,) bool. nan counts as equal to nan."""
    V = before.size(-1) if before.dim() else 1
    parts = zip(before.reshape(-1, V).split(TOGETHER), after.reshape(-1, V).split(TOGETHER), strict=True)
    found = [((first == second) | (first.isnan() & second.isnan())).all(-1) for first, second in parts]
    return torch.cat(found).view(before.shape[:-1])


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
        return not equals(before, read(partly.view_as(idx)))

    place = bisect_left(range(1, idx.numel()), True, key=changes)
    return divmod(place, idx.size(1))


def make_model(name: str) -> Callable:
    """Return what a factory makes: package.module:factory or file.py:factory."""
    place, _, factory = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        ours = {entry.stem for entry in Path(__file__).resolve().parents[1].iterdir()}
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] in ours]:
            del sys.modules[loaded]  # the file and its neighbours may have the names of ours, such as model
        place = path.stem
    return getattr(importlib.import_module(place), factory)()


def main(load_decoder: Callable[[str], nn.Module]) -> bool:
    """Probe the model that the command line names. Exits with 2 and a sentence if that gives no answer."""
    parser = argparse.ArgumentParser(description="Check that no position of a language model depends on a later token.")
    parser.error = lambda message: parser.exit(2, f"{message}\n")
    parser.add_argument("model", help="package.module:factory, file.py:factory, a directory, or OWNER/NAME on the hub")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text; default: %(default)s")
    parser.add_argument("--vocab-size", type=int, help="default: the number of logits")
    options = parser.parse_args()
    size = options.vocab_size
    try:
        model = make_model(options.model) if ":" in options.model.removeprefix("hf:") else load_decoder(options.model)
        if size is None:
            with torch.no_grad():
                size = logits_of(model(torch.zeros(1, options.length, dtype=torch.int64))).size(-1)
        report = check_causality(model, size, options.length)
    except (Exception, SystemExit) as error:  # whatever a factory or a model raises
        what = " ".join(f"{type(error).__name__}: {error}".split())
        parser.exit(2, f"{options.model}, reading {options.length} tokens (--length): {what}\n")
    print(report)
    return report.ok


if __name__ == "__main__":

    def load(name: str) -> nn.Module:
        """Open a directory or a name on the hub, in the project that this file comes from."""
        try:
            from model.foreign import load_decoder
        except ImportError as error:
            raise ValueError("this file is alone: give package.module:factory or file.py:factory") from error
        return load_decoder(name)

    sys.path.insert(0, "")  # modules are found from where the command is typed
    sys.exit(not main(load))

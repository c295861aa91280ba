"""Proof of causality: probes of the very function that is to be trained, compared bit by bit.

    report = check_causality(model, vocab_size=50257, length=1024, strict=True)
    assert report.ok, report

A language model is trained to predict tokens that are in its own input, one place further on. If a position can see
them, however faintly, the loss falls and means nothing. So the probes compare without a tolerance:

    hidden      replace all tokens that a position may not see: no bit of its logits may change
    alone       replace all other sequences of a batch: no bit of a sequence may change
    gradient    derivatives by tokens: exactly zero to those that a position may not see, and not zero to the others
    seen        the latter, where there are no derivatives: replace one token, and all who should see it must change
    agrees      decoding must give the logits of the whole text at once; the one comparison with a tolerance

Two kinds of layers round a number differently if other tokens of the text change, though they do not depend on them:
mixtures of experts, and convolutions by Fourier transforms. So a tiny difference is measured again in float64, where
one of rounding all but vanishes and a leak stays as it is. A strict check does not do this: any difference is a fault.

A module is probed in evaluation and in training mode. It is probed with its own weights, with random ones (a layer
initialised to zero hides every leak), and with huge ones (a mask of -10,000 leaks only where scores are larger). Its
weights, buffers and mode, and the caller's random states, are restored afterwards.

This file needs PyTorch alone, and can be copied into any project. The suspect must not define what is right.
From the command line: model/check.py.

Shapes: B batch, T time (tokens), V vocabulary, C channels.
"""

import itertools
import os
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

IGNORE = -100  # a target that F.cross_entropy skips
SHORT = 16  # tokens of a text whose derivatives are asked at all positions
NUM_DRAWS = 8  # texts in which a token may be seen: a layer that selects does not see each token in each text
EXTREME = 300.0  # scales queries and keys, so that scores exceed 1e4 and a mask of -1e4 no longer hides anything
TINY = 1e-5  # of the size of logits: a smaller difference may be one of rounding
VANISHED = 1e-13  # of the size of logits: a smaller difference in float64 is one of rounding
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
    remarks: set[str]
    """What else there is to say: that bits differ by rounding alone, that derivatives were not asked for."""
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
        asked = f"none of the {self.num_probed} probed positions (of {self.length}) depends on a later one"
        return "; ".join([f"yes, {asked}", *sorted(self.remarks)])


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
        module: the module that has the weights of `forward`, if `forward` is not a module itself. Without weights the
            tokens are on the CPU, there are no derivatives, and the check is strict.
        decode: a function like `forward` that reads the tokens part by part, with a cache.
        loss_fn: a loss of the module that hides its logits, such as a compiled one: inputs and targets, (B, T) int64
            each -> the sum over all targets except those of -100. It is called with autograd in training mode only.
        extreme: functions like `forward`, to be probed with weights scaled by EXTREME in its place. None of them may
            compute in float16, which would overflow. The first one is that of derivatives and the one that decoding has
            to agree with, so it should compute without autocast. Empty: `forward` itself.
        batch_size: B, the most sequences in a call, and the exact number in a call of `loss_fn`.
        mask: (T, T) bool, True where the position (row) may depend on the token (column), through all layers: windows
            of w tokens in L layers reach L (w - 1) back. None: itself and everything before it. A dependence too faint
            for the precision counts as none.
        tokens: (N,), the ids to draw texts from, such as all but that of padding. None: all of the vocabulary.
        strict: probe more positions, and take no difference for one of rounding, as before a training.

    Raises ValueError if length, vocab_size, mask or tokens are impossible.
    """
    if module is None:
        module = forward if isinstance(forward, nn.Module) else nn.Module()
    pool = torch.as_tensor(range(vocab_size) if tokens is None else tokens).unique().cpu()
    if len(pool) < 2 or length < 1:
        raise ValueError(f"nothing to ask: {length} tokens of a vocabulary of {len(pool)}")
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
    if mask.shape != (length, length):
        raise ValueError(f"the mask must be ({length}, {length}), got {tuple(mask.shape)}")
    prober = Prober(vocab_size, mask.cpu(), pool, batch_size, module, strict)
    finding = ()
    try:
        with prober.restoring():
            prober.probe(forward, decode, loss_fn, extreme or [forward])
    except Finding as found:
        finding = found.args
    return Causality(length, len(prober.probed), prober.remarks, *finding)


def logits_of(output: object, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return the logits, (B, T, V), of what a model returns: a tensor, a tuple or list with one, or `logits` in it.

    shape: that of the logits, if it is known. Raises ValueError if there are none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    shapes = []
    for part in logits if isinstance(logits, tuple | list) else [logits]:
        if isinstance(part, Tensor) and part.is_floating_point():
            if part.shape == shape or shape is None and part.dim() == 3:
                return part
            shapes.append(str(tuple(part.shape)))
    got = " and ".join(shapes) or f"{type(output).__name__}, which has none"
    raise ValueError(f"expected logits of shape {shape or '(B, T, V)'}, got {got}")


@dataclass
class Prober:
    """Tokens, positions and weights to probe with. Each probe raises `Finding` if it finds a fault.

    A text, (B, T), is given in ranks: a token of rank r has the id pool[r % len(pool)]. Adding 1 to a rank replaces the
    token by another one.
    """

    vocab_size: int
    mask: Tensor
    pool: Tensor
    batch_size: int
    module: nn.Module
    strict: bool

    def __post_init__(self) -> None:
        self.length = len(self.mask)
        self.weights = {name: p for name, p in self.module.named_parameters() if p.is_floating_point()}
        self.device = next((weight.device for weight in self.weights.values()), torch.device("cpu"))
        self.strict |= not self.weights  # a function has no float64 to ask in
        self.random = torch.Generator().manual_seed(0)  # for tokens, positions and random weights
        self.pool = self.shuffled(self.pool).to(self.device)
        self.hiding = self.shuffled((~self.mask).any(1).nonzero().flatten()).tolist()  # positions that may not see all
        self.next_position = itertools.cycle(self.hiding)
        self.next_rank = itertools.count(step=2)
        self.many = 16 if self.strict else 12  # positions of a probe, at the least
        self.few = 6 if self.strict else 2
        self.is_extreme = False
        self.where = "with the weights as they are"  # how the module is probed
        self.probed = set()
        self.remarks = set()
        self.parts = [(part, part.training, dict(part._buffers)) for part in self.module.modules()]
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        self.random_state = random.getstate()

    def shuffled(self, numbers: Tensor) -> Tensor:
        """Return numbers, (N,), in random order."""
        return numbers[torch.randperm(len(numbers), generator=self.random)]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn autograd on inside the `with` block. After it, restore the module and the random states."""
        weights = [(parameter, parameter.detach().clone()) for parameter in self.module.parameters()]
        gpus = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=gpus), torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self.rewind()
            for part, training, _ in self.parts:
                part.training = training
            with torch.no_grad():
                for parameter, value in weights:
                    parameter.copy_(value)

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore Python's random numbers, and each buffer's tensor and value, also if another tensor was assigned."""
        random.setstate(self.random_state)
        for part, _, buffers in self.parts:
            part._buffers.clear()
            part._buffers.update(buffers)
        for buffer, value in self.buffers:
            if not torch.equal(buffer, value.to(buffer.dtype)):  # an expanded buffer cannot be written to
                buffer.copy_(value)

    def probe(self, forward: Forward, decode: Forward | None, loss_fn: Loss | None, extreme: Sequence[Forward]) -> None:
        """Run all probes."""
        exact = extreme[0]
        # In float32 a quarter of the batch needs less memory than a training step in half precision.
        small = max(1, self.batch_size // 4) if self.strict else self.batch_size
        self.module.eval()
        with torch.no_grad():
            self.hidden(forward, 2 * self.few)
            self.randomize()
            self.where = "in evaluation"
            self.hidden(forward, self.many, alone=True)
            if loss_fn:
                self.hidden_from_loss(loss_fn)
            if decode:
                self.where = "in decoding"
                self.hidden(decode, self.many, small)
                self.agrees(exact, decode)
        if not self.gradient(exact):
            with torch.no_grad():
                self.seen(forward)
        self.module.train()
        self.where = "in training"
        self.hidden(forward, self.many, alone=self.strict)
        if loss_fn:
            self.hidden_from_loss(loss_fn)

        self.enlarge()
        self.where = "in training, with extreme weights"
        for function in extreme:
            self.hidden(function, self.few, small)
        self.module.eval()
        with torch.no_grad():
            self.where = "in evaluation, with extreme weights"
            self.hidden(exact, self.few, small)
            if decode:
                self.where = "in decoding, with extreme weights"
                self.hidden(decode, self.few, small)

    @torch.no_grad()
    def randomize(self) -> None:
        """Give every weight a random value, so that each part of the model matters."""
        seed = int(torch.randint(2**31, (), generator=self.random))
        torch.manual_seed(seed + int(os.environ.get("RANK", 0)))  # a shard of FSDP on each rank, which must differ
        for weight in self.weights.values():
            values = weight.to_local() if hasattr(weight, "to_local") else weight
            if weight.dim() < 2:  # gains and biases
                values.uniform_(0.5, 1.5).mul_(torch.randint_like(values, 2) * 2 - 1)
            else:
                limit = (3 / weight.size(-1)) ** 0.5  # of a variance that keeps the size of what is multiplied
                values.uniform_(-limit, limit)

    @torch.no_grad()
    def enlarge(self) -> None:
        """Scale the weights of queries and keys; all weights, if none has the name of these."""
        for name in list(filter(FOR_SCORES.search, self.weights)) or self.weights:
            self.weights[name].mul_(EXTREME)
        self.is_extreme = True

    def positions(self, count: int) -> list[int]:
        """Return `count` ascending positions that may not see all: ends, the last of blocks of 2^n, and random ones."""
        ends_of_blocks = (2**n - 1 for n in range(self.length.bit_length(), 0, -1))
        chosen = set()
        for position in itertools.chain([self.length - 2, 0], ends_of_blocks, self.next_position):
            if len(chosen) == min(count, len(self.hiding)):
                break
            if position in self.hiding:
                chosen.add(position)
        self.probed |= chosen
        return sorted(chosen)

    def text(self, num_sequences: int, batches: Sequence[list[int]] = ()) -> Tensor:
        """Return a random text, (num_sequences, T). The first half of the sequences repeat one token.

        batches: positions after which tokens will be replaced, one of each sequence at a time. The first token that is
        replaced, and its replacement, are dealt like cards: two of the pool that had not their turn yet.
        """
        ranks = torch.randint(len(self.pool), (num_sequences, self.length), generator=self.random)
        ranks[: num_sequences // 2] = 0
        for before, batch in enumerate(batches):  # so many times the token will have been replaced before
            for row, position in enumerate(batch):
                ranks[row, (position + 1) % self.length] = next(self.next_rank) - before
        return ranks

    def ids(self, ranks: Tensor) -> Tensor:
        """Return the tokens of a text, on the device."""
        return self.pool[(ranks % len(self.pool)).to(self.device)]

    def call(self, function: Callable, ranks: Tensor, *rest: Tensor) -> object:
        """Call a function with a text; in training mode with the same dropout and the same buffers each time."""
        if self.module.training:
            torch.manual_seed(0)
            self.rewind()
        return function(self.ids(ranks), *rest)

    def logits(self, forward: Forward, ranks: Tensor) -> Tensor:
        """Call `forward`: (B, T) -> (B, T, V)."""
        nothing = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None)
        try:
            with nothing:  # is kept for a gradient
                output = self.call(forward, ranks)
        except (RuntimeError, TypeError):  # the forward pass needs gradients of its own
            output = self.call(forward, ranks)
        logits = logits_of(output, (*ranks.shape, self.vocab_size)).detach()
        if self.is_extreme:
            return logits.nan_to_num()
        if not torch.stack(logits.aminmax()).isfinite().all():
            raise Finding(f"its logits are not finite numbers ({self.where})")
        return logits

    def hidden(self, forward: Forward, count: int, batch_size: int | None = None, alone: bool = False) -> None:
        """Run the probe "hidden" at `count` positions or more, and the probe "alone".

        Each position has a sequence of a batch to itself. Each text is compared with the one before it.
        """
        B = batch_size or self.batch_size
        batches = self.batches(count, B)
        ranks = self.text(B, batches)
        hides = [~self.mask[batch] for batch in batches]  # (B, T) each, True to replace a token
        if alone:
            others = ~torch.eye(B, dtype=torch.bool)[:2]  # than the first sequence, and than the second
            hides += others[:, :, None].expand(-1, B, self.length)
        before = self.logits(forward, ranks)
        for hide in hides:
            changed = ranks + hide
            after = self.logits(forward, changed)
            self.compare(forward, ranks, before, changed, after)
            ranks = changed
            before = after

    def batches(self, count: int, B: int) -> list[list[int]]:
        """Return `count` positions or more by B, the last ones as often as it takes: kernels may differ by batch."""
        positions = self.positions(max(count, B))
        return [(positions[began : began + B] * B)[:B] for began in range(0, len(positions), B)]

    def compare(self, forward: Forward, ranks: Tensor, before: Tensor, changed: Tensor, after: Tensor) -> None:
        """Raise the fault if logits of a position differ that sees none of the tokens that were changed."""
        may_differ = (ranks != changed).float() @ self.mask.float().T > 0  # (B, T)
        fine = may_differ | equals(before, after)
        if fine.all():
            return

        def difference() -> Tensor:
            return relative(self.logits(forward, ranks), self.logits(forward, changed))[~fine].max()

        if self.vanishes(relative(before, after)[~fine].max(), difference):
            return
        query, row = (~fine.T).nonzero()[0].tolist()
        own = ranks.clone()
        own[row] = changed[row]
        cause = self.first_cause(lambda ranks: self.logits(forward, ranks)[row, query], ranks, own)
        if cause is None:
            raise Finding(f"a sequence changes when the others of its batch do ({self.where})")
        size = (after - before)[row, query].abs().max()
        raise leak(query, cause[1], f", which moves its logits by up to {size:.2g} ({self.where})")

    def first_cause(self, read: Callable[[Tensor], Tensor], ranks: Tensor, changed: Tensor) -> tuple[int, int] | None:
        """Return (sequence, position) of the first token whose replacement changes `read`, found by bisection.

        The tokens of a text are replaced by those of `changed` in their order, as many as it takes; None if all of them
        change nothing. Raises `Finding` if a text gives different numbers if it is read twice.
        """
        before = read(ranks)
        if not torch.equal(before, read(ranks)):
            raise Finding(f"the same tokens do not give the same numbers again ({self.where}); is dropout still on?")
        order = torch.arange(ranks.numel()).view_as(ranks)

        def changes(place: int) -> bool:
            """Return whether replacing the tokens up to this place changes `read`."""
            return not torch.equal(before, read(torch.where(order <= place, changed, ranks)))

        place = bisect_left(range(ranks.numel()), True, key=changes)
        return divmod(place, self.length) if place < ranks.numel() else None

    def vanishes(self, once: Tensor, difference: Callable[[], Tensor], is_derivative: bool = False) -> bool:
        """Return whether a difference is one of rounding: tiny, and gone in float64, where a leak remains.

        once: the difference as a part of the logits; difference: a function that measures it again. Without a float64
        to ask in, what is tiny passes, but not a derivative: where nothing is seen, it is zero without rounding.
        """
        if self.strict or not once <= TINY:
            return False
        again = self.in_float64(difference)
        how = "asked again in float64" if again is not None else f"less than {TINY}, and no float64 to ask again in"
        self.remarks.add(f"bits differ by rounding alone: {how}")
        return not is_derivative if again is None else bool(again <= VANISHED)

    def in_float64(self, ask: Callable) -> object | None:
        """Return ask() with weights in float64; None if there are no weights, or a kernel has no float64."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        kept = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
        if not kept or any(hasattr(tensor, "to_local") for tensor in tensors):  # shards of FSDP stay as they are
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

    def agrees(self, exact: Forward, decode: Forward) -> None:
        """Run the probe "agrees", in float64 where that can be had."""
        ranks = self.text(min(2, self.batch_size))

        def error() -> float:
            expected = self.logits(exact, ranks)
            is_half = expected.dtype.itemsize < 4  # which rounds too much
            return 0.0 if is_half else ((self.logits(decode, ranks) - expected).norm() / expected.norm()).item()

        # A GPU has no attention kernel in float64: its formula would need memory that grows with T^2.
        found = self.in_float64(error) if self.device.type == "cpu" else None
        most = 1e-6  # parts may be float32 still
        if found is None:
            found = error()
            most = 1e-3
        if not found <= most:
            raise Finding(f"read part by part with a cache, a text gets other logits: off by {found:.2g} of their size")

    def gradient(self, function: Forward) -> bool:
        """Run the probe "gradient". Return whether there are derivatives."""
        queries = self.single_positions()
        return self.single(lambda ranks: self.influence(function, ranks, queries), queries, range(self.length))

    def seen(self, forward: Forward) -> None:
        """Run the probe "seen"."""
        self.remarks.add("derivatives not asked for: no nn.Embedding reads the tokens, or autograd is off or fails")
        keys = self.single_positions()

        def moved(ranks: Tensor) -> Tensor:
            """Return which logits, (T, N), move if one of N tokens is replaced."""
            before = self.logits(forward, ranks)
            if before.dtype.itemsize < 4:  # half precision rounds away one token among many
                return self.mask[:, keys]
            changed = [ranks + (torch.arange(self.length) == key) for key in keys]
            moves = [~equals(before, self.logits(forward, text)) for text in changed]
            return torch.cat(moves).T & self.mask[:, keys]

        self.single(moved, range(self.length), keys)

    def single_positions(self) -> list[int]:
        """Return ascending positions for probes of one position each: all of a short text, and the last of any."""
        last = self.length - 1
        self.probed.add(last)
        return [*self.positions(self.many if self.length <= SHORT or self.strict else self.few), last]

    def single(self, measure: Callable[[Tensor], Tensor | None], queries: Sequence[int], keys: Sequence[int]) -> bool:
        """Raise the fault if single queries see single keys that they may not see, or miss some that they may see.

        measure: a text, (1, T) -> how much each query is influenced by each key, or None, for which this returns False.
        A layer that selects sees each token in some texts alone.
        """
        may_see = self.mask[queries][:, keys]
        fine = ~may_see
        for _ in range(NUM_DRAWS):
            ranks = self.text(1)
            influence = measure(ranks)
            if influence is None:
                return False

            leaks = influence.masked_fill(may_see, 0)

            def largest_leak(ranks: Tensor = ranks) -> Tensor:
                influence = measure(ranks)
                return influence.masked_fill(may_see, 0).max() / influence.max()

            if leaks.any() and not self.vanishes(leaks.max() / influence.max(), largest_leak, True):
                row, column = leaks.nonzero()[0].tolist()
                effect = f": the derivative of its logits to it is {leaks[row, column]:.2g} and must be exactly 0"
                raise leak(queries[row], keys[column], effect)
            fine = fine | (influence != 0)
            if fine.all():
                return True
        row, column = (~fine).nonzero()[0].tolist()
        blind = f"position {queries[row]} is blind to token {keys[column]}, which it may see"
        raise Finding(blind, queries[row], keys[column])

    def influence(self, function: Forward, ranks: Tensor, queries: list[int]) -> Tensor | None:
        """Return how large the derivatives of N queries' logits to each token of a text, (1, T), are: (N, T).

        None if there are none.
        """
        plain = getattr(self.module, "_orig_mod", self.module)  # a compiled module would ignore new hooks
        idx = self.ids(ranks)
        # A training step of so few sequences, in half precision, would need less memory of a GPU.
        on_host = torch.autograd.graph.save_on_cpu() if self.device.type != "cpu" else nullcontext()
        with watched(plain, idx) as embedded, on_host:
            output = plain(idx) if function is self.module else function(idx)
            logits = logits_of(output, (*idx.shape, self.vocab_size))
        if not embedded or not logits.requires_grad:
            return None
        found = []
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        for query in queries:
            of_query = logits[0, query]
            score = (of_query * torch.randn_like(of_query)).sum()
            try:
                gradients = torch.autograd.grad(score, embedded, **options)
            except RuntimeError:  # reentrant checkpoints, or a kernel without a derivative
                if self.strict:
                    raise
                return None
            found.append(sum(gradient[0].abs().amax(-1) for gradient in gradients))
        return torch.stack(found).cpu()

    def hidden_from_loss(self, loss_fn: Loss) -> None:
        """Run the probe "hidden" on a loss, which is one sum over a batch.

        In each sequence one target is counted, because a small sum shows small changes.
        """
        B = self.batch_size
        for batch in self.batches(self.many, B):
            ranks = self.text(B)
            changed = ranks + ~self.mask[batch]
            counted = torch.arange(self.length) == torch.tensor(batch)[:, None]
            targets = torch.where(counted.to(self.device), self.ids(ranks), IGNORE)

            def loss(ranks: Tensor, targets: Tensor = targets) -> Tensor:
                return self.call(loss_fn, ranks, targets).detach()

            before = loss(ranks)
            after = loss(changed)
            if not torch.equal(before, after):
                row, key = self.first_cause(loss, ranks, changed)
                effect = f": the loss moves by {(after - before).abs():.2g} ({self.where})"
                raise leak(batch[row], key, f"{effect}, unless it counts targets of {IGNORE}")


def leak(query: int, key: int, effect: str) -> Finding:
    """Return the fault that a position sees a token that it must not see."""
    where = f"{key - query} ahead of it" if key > query else "which its mask hides"
    return Finding(f"position {query} sees token {key}, {where}{effect}", query, key)


def relative(before: Tensor, after: Tensor) -> Tensor:
    """Return how much logits differ, in sizes of those at their position: (B, T, V) twice -> (B, T)."""
    size = before.abs().median(-1).values  # those of padding may be -1e9
    return (before - after).abs().amax(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)


def equals(before: Tensor, after: Tensor) -> Tensor:
    """Return whether all logits of a position are equal: (B, T, V) twice -> (B, T), on the CPU."""
    return torch.stack([(first == second).all(-1) for first, second in zip(before, after, strict=True)]).cpu()


@contextmanager
def watched(module: nn.Module, idx: Tensor) -> Iterator[list[Tensor]]:
    """Yield a list to which each output (B, T, C) of an nn.Embedding that reads idx, (B, T), is added as a leaf."""
    embedded = []

    def watch(part: nn.Module, inputs: tuple, options: dict, output: Tensor) -> Tensor | None:
        read = (*inputs, *options.values())
        if not torch.equal(read[0], idx):
            return None
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone() if torch.is_grad_enabled() else embedded[-1]  # some models add to it in place

    parts = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    handles = [part.register_forward_hook(watch, prepend=True, with_kwargs=True) for part in parts]  # before others
    try:
        yield embedded
    finally:
        for handle in handles:
            handle.remove()

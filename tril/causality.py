"""Proof of causality: probes of the very function that is to be trained, compared bit by bit.

    report = check_causality(model, vocab_size=50257, length=1024, strict=True)
    assert report.ok, report

A language model is trained to predict tokens that are in its own input, one place further on. If a position can see
them, however faintly, the loss falls and means nothing. So the probes compare without a tolerance:

    hidden      replace all tokens that a position may not see: no bit of its logits may change
    alone       replace all other sequences of a batch: no bit of a sequence may change
    gradient    derivatives by tokens: exactly zero to those that a position may not see, and not zero to the others
    agrees      decoding must give the logits of the whole text at once, or where there is none, so must its beginnings;
                the one comparison with a tolerance

Two kinds of layers round a number differently if other tokens of the text change, though they do not depend on them:
mixtures of experts, and convolutions by Fourier transforms. So a tiny difference is measured again in float64, where
one of rounding all but vanishes and a leak stays as it is.

A module is probed in evaluation and in training mode. It is probed with its own weights, with random ones (a layer
initialised to zero hides every leak), and with huge ones (a mask of -10,000 leaks only where scores are larger). Signs
of gains and biases stay, since they may open a gate, and so do weights that are frozen beside others. Its weights,
buffers and mode, and random states, are restored afterwards.

This file needs PyTorch alone, and can be copied into any project. The suspect must not define what is right.
`python -m tril check` asks from a command line, and `tril.check_causality(model)` finds how a model is called.

Shapes: B batch, T time (tokens), V vocabulary, C channels.
"""

import itertools
import math
import os
import random
import re
import sys
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

NUMPY = sys.modules.get("numpy")  # which PyTorch imports if it is installed
IGNORE = -100  # a target that F.cross_entropy skips
SHORT = 16  # tokens of a text whose derivatives are asked at all positions
NUM_DRAWS = 16  # texts in which a token may be seen: a layer that selects does not see each token in each text
EXTREME = 300.0  # scales queries and keys, so that scores exceed 1e4 and a mask of -1e4 no longer hides anything
TINY = 1e-4  # of the size of logits: a smaller difference may be one of rounding
ROUNDED = 1e3  # roundings of a number: decoding may differ by so many from the whole text at once
SMALL = 512  # ids of a vocabulary in which each may be special
VANISHED = 1e-13  # of the size of logits: a smaller difference in float64 is one of rounding
FOR_SCORES = re.compile(r"(^|[._])(q|k|qkv|query|key)([._]|$)|c_attn|in_proj")  # names of weights of queries and keys

Mask = Callable[[Tensor], Tensor]  # idx, (B, T) int64 -> (B, T, T) bool
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
    """What else there is to say: that bits differ by rounding or dropout alone, that derivatives were not asked for."""
    finding: str | None = None
    """A description of the fault."""
    query: int | None = None
    """The position that sees a token it must not see, or misses one it must see."""
    key: int | None = None
    """The position of that token."""
    call: str | None = None
    """How the model was called, if that was found."""

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return self.finding is None

    @property
    def is_blind(self) -> bool:
        """Whether the fault is that a position misses a token, while none sees what it must not."""
        return " is blind to " in (self.finding or "")

    def __str__(self) -> str:
        if self.finding:
            return f"no, {'it does not see the future, but ' * self.is_blind}{self.finding}"
        asked = f"yes, none of the {self.num_probed} probed positions (of {self.length}) depends on a later one"
        return "; ".join([asked, *sorted(self.remarks)])


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
    mask: Tensor | Mask | None = None,
    tokens: Sequence[int] | Tensor | None = None,
    special: Iterable[int] | None = None,
    sparse: bool = False,
    strict: bool = False,
    seconds: float = math.inf,
    progress: Callable[[], object] = lambda: None,
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
            each -> the sum of the losses of all targets. A target of -100 counts as none. Autograd is on in training
            mode only.
        extreme: functions like `forward`, to be probed with weights scaled by EXTREME in its place. None of them may
            compute in float16, which would overflow. The first one is that of derivatives and the one that decoding has
            to agree with, so it should compute without autocast. Empty: `forward` itself, not compiled.
        batch_size: B, the most sequences in a call, and the exact number in a call of `loss_fn`.
        mask: (T, T) bool, True where the position (row) may depend on the token (column), through all layers: windows
            of w tokens in L layers reach L (w - 1) back. Or a function, if that depends on the text, as where documents
            do not see each other: ids (B, T), T at most `length`, on the device of the module -> (B, T, T) bool. None:
            itself and everything before it. A dependence too faint for the precision counts as none.
        tokens: (N,), the ids to draw texts from, such as all but that of padding. None: all of the vocabulary.
        special: ids that a model may treat apart, such as an end of text. Each text holds them, in up to a quarter of
            its places, and each in turn takes the place of the token after a position, if they are at most SMALL. That
            takes a sequence for each. Those that move a `mask` that is a function need not be named. None: all of a
            vocabulary of at most SMALL, if the mask is no function.
        sparse: whether a position may miss tokens that the mask lets it see, as where a layer attends to a few that it
            chooses.
        strict: probe more positions, and take a difference for one of rounding only if float64 shows it, as before a
            training.
        seconds: after these each probe asks about one position only, or one batch of them, and the result says so. Not
            for a module whose ranks have to call it equally often, as with FSDP.
        progress: called before each call of a function, as of a bar.

    Raises ValueError if length, vocab_size, mask or tokens are impossible.
    """
    if module is None:
        module = forward if isinstance(forward, nn.Module) else nn.Module()
    pool = torch.as_tensor(range(vocab_size) if tokens is None else tokens).unique().cpu()
    shape = (length, length) if mask is None or callable(mask) else tuple(mask.shape)
    if len(pool) < 2 or length < 1 or shape != (length, length):
        raise ValueError(f"nothing to ask: {length} tokens of a vocabulary of {len(pool)}, with a mask of {shape}")
    prober = Prober(vocab_size, length, mask, pool, special, batch_size, module, sparse, strict, seconds, progress)
    finding = ()
    try:
        with prober.restoring():
            plain = getattr(forward, "_orig_mod", forward)  # a compiled module would ignore new hooks
            prober.probe(forward, decode, loss_fn, extreme or [plain])
    except Finding as found:
        finding = found.args
    return Causality(length, len(prober.probed), prober.remarks, *finding)


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
    raise ValueError(
        f"expected logits of shape {shape or '(B, T, V)'}, got tensors of shapes {[tuple(x.shape) for x in tensors]}: "
        "give a function of ids that returns them, lambda ids: model(ids, ...)"
    )


def difference(before: Tensor, after: Tensor) -> Tensor:
    """Return how much logits differ, (B, T, V) each, in sizes of those at their position: (B, T)."""
    size = before.abs().median(-1).values  # those of padding may be -1e9
    return (after - before).abs().amax(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)


def drop_alike(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop the same of each row, in place of `F.dropout`: without it a mask that it drops would seem whole."""
    numbers = torch.arange(1, input.size(-1) + 1, device=input.device) * 0.618 % 1
    return input * (numbers >= p) if training else input


@dataclass
class Prober:
    """Tokens, positions and weights to probe with. Each probe raises `Finding` if it finds a fault.

    Texts are drawn in ranks: a token of rank r has the id pool[r], and the first `num_special` of the pool are special.
    """

    vocab_size: int
    length: int
    mask: Tensor | Mask | None
    pool: Tensor
    special: Iterable[int] | None
    batch_size: int
    module: nn.Module
    sparse: bool
    strict: bool
    seconds: float
    progress: Callable[[], object]

    def __post_init__(self) -> None:
        weights = {name: p for name, p in self.module.named_parameters() if p.is_floating_point() or p.is_complex()}
        trained = {name: p for name, p in weights.items() if p.requires_grad}
        self.weights = trained or weights  # what is frozen may be a mask
        self.device = next(iter(self.weights.values()), self.pool).device
        self.strict |= not self.weights  # a function has no float64 to ask in
        self.many = 16 if self.strict else 12  # positions of a probe, at the least
        self.few = 6 if self.strict else 2
        self.deadline = time.monotonic() + self.seconds
        self.has_backward = True
        self.probed = set()
        self.remarks = set()
        self.parts = [(part, part.training, dict(part._buffers)) for part in self.module.modules()]
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        self.choose_places()

    def choose_places(self) -> None:
        """Put special tokens first in the pool, and positions that may not see all in random order."""
        self.mask_depends = callable(self.mask)  # on the text
        if not self.mask_depends:
            mask = torch.ones(self.length, self.length).tril().bool() if self.mask is None else self.mask
            self.mask = lambda idx: mask[None, : idx.size(1), : idx.size(1)]
        self.random = torch.Generator().manual_seed(0)  # for tokens and positions
        self.pool = self.shuffled(self.pool)
        special = self.special  # those of the options, and those that move the mask
        if special is None:
            special = () if self.mask_depends or len(self.pool) > SMALL else self.pool
        texts = self.pool[:1].repeat(len(self.pool), min(self.length, SHORT))
        texts[:, texts.size(1) // 2] = self.pool
        masks = self.masks(texts)
        moves = (masks != masks.mode(0).values).flatten(1).any(1)
        is_special = moves | torch.isin(self.pool, torch.tensor([*special]).long())
        self.num_special = int(is_special.sum())
        self.pool = self.pool[is_special.argsort(descending=True)]
        hides = ~self.masks(self.text(1))[0].all(1)
        self.hiding = self.shuffled(hides.nonzero().flatten()).tolist()  # positions that may not see all
        self.next_position = itertools.cycle(self.hiding)

    def shuffled(self, numbers: Tensor) -> Tensor:
        """Return numbers, (N,), in random order."""
        return numbers[torch.randperm(len(numbers), generator=self.random)]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn autograd on inside the `with` block. After it, restore the module and PyTorch's random states."""
        weights = [(parameter, parameter.detach().clone()) for parameter in self.module.parameters()]
        before = random.getstate()
        numpys = NUMPY and NUMPY.random.get_state()
        try:
            of_torch = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
            with of_torch, torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
                # An operator without a derivative, as of int8, has none: it is not zero.
                warnings.filterwarnings("error", ".*autograd kernel was not registered")
                yield
        finally:
            random.setstate(before)
            if NUMPY:
                NUMPY.random.set_state(numpys)
            self.rewind()
            for part, training, _ in self.parts:
                part.training = training
            with torch.no_grad():
                for parameter, value in weights:
                    parameter.copy_(value)

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore each buffer's tensor and value, also if another tensor was assigned."""
        for part, _, buffers in self.parts:
            if isinstance(part._buffers, dict):  # not of a scripted module
                part._buffers.clear()
                part._buffers.update(buffers)
        for buffer, value in self.buffers:
            if not torch.equal(buffer.to(value), value):  # an expanded buffer cannot be written to
                buffer.copy_(value)

    def probe(self, forward: Forward, decode: Forward | None, loss_fn: Loss | None, extreme: Sequence[Forward]) -> None:
        """Run all probes."""
        exact = extreme[0]
        B = self.batch_size
        # In float32 half of the batch needs less memory than a training step in half precision.
        small = (B + 1) // 2 if self.strict else B
        self.hidden(forward, 2 * self.few, B, "with the weights as they are")
        self.hidden(forward, self.few, B, "in training, with the weights as they are")
        self.randomize(1)
        self.hidden(forward, self.many, B, "in evaluation")
        if loss_fn:
            self.hidden_from_loss(loss_fn)
        if decode:
            self.hidden(decode, self.many, small, "in decoding")
        self.agrees(exact, decode)
        self.gradient(exact)
        self.hidden(forward, self.many, B, "in training")
        if loss_fn:
            self.hidden_from_loss(loss_fn)
        # By luck of a draw scores may be high enough for a weak mask: a strict check draws again, with more weights.
        # Not embeddings and gains: scores beyond 1e9 would find fault with a mask of -1e9, which no training reaches.
        embeddings = {id(part.weight) for part in self.module.modules() if isinstance(part, nn.Embedding)}
        matrices = [name for name, p in self.weights.items() if p.dim() > 1 and id(p) not in embeddings]
        for draw, enlarged in ((1, [*filter(FOR_SCORES.search, self.weights)]), (2, matrices))[: 1 + self.strict]:
            self.randomize(draw)
            for name in enlarged or matrices:
                self.weights[name].data.mul_(EXTREME)
            for function in extreme:
                self.hidden(function, self.few, small, "in training, with extreme weights")
            self.hidden(exact, self.few, small, "in evaluation, with extreme weights")
            if decode:
                self.hidden(decode, self.few, small, "in decoding, with extreme weights")

    @torch.no_grad()
    def randomize(self, draw: int) -> None:
        """Give every weight a random value, so that each part of the model matters. Signs of gains and biases stay."""
        torch.manual_seed(draw + int(os.environ.get("RANK", 0)))  # a shard of FSDP on each rank, which must differ
        for weight in self.weights.values():
            values = weight.detach()
            values = values.to_local() if hasattr(values, "to_local") else values  # this rank's shard
            values = torch.view_as_real(values) if values.is_complex() else values
            if weight.dim() < 2:
                signed = torch.where(values == 0, torch.randn_like(values), values)
                values.uniform_(0.5, 1.5).mul_(signed.sign())
            else:
                limit = (3 / weight.size(-1)) ** 0.5  # of a variance that keeps the size of what is multiplied
                values.uniform_(-limit, limit)

    def in_time(self, count: int) -> int:
        """Return how many positions to ask about: `count`, and after `seconds` one."""
        if time.monotonic() < self.deadline:
            return count
        self.remarks.add(f"after {self.seconds} s few positions were probed")
        return 1

    def positions(self, count: int) -> list[int]:
        """Return `count` ascending positions that may not see all: ends, the last of blocks of 2^n, and random ones."""
        ends_of_blocks = (2**n - 1 for n in range(self.length.bit_length(), 0, -1))
        wanted = itertools.chain([self.length - 2, 0], ends_of_blocks, self.next_position)
        chosen = set()
        while len(chosen) < min(count, len(self.hiding)):
            chosen |= {next(wanted)} & {*self.hiding}
        self.probed |= chosen
        return sorted(chosen)

    def ranks(self, B: int) -> Tensor:
        """Return a random text in ranks, (B, T): half of the sequences repeat one token, others hold special ones."""
        ranks = torch.randint(len(self.pool), (B, self.length), generator=self.random)
        ranks[: B // 2] = self.num_special % len(self.pool)
        special = self.shuffled(torch.arange(self.num_special))[: 1 + self.length // 4]
        ranks[B // 2 :, self.shuffled(torch.arange(self.length))[: len(special)]] = special
        return ranks

    def text(self, B: int) -> Tensor:
        """Return a random text, (B, T), as `ranks` draws it."""
        return self.pool[self.ranks(B)]

    def masks(self, idx: Tensor) -> Tensor:
        """Return what each position of a text may see, on the CPU: (B, T) -> (B or 1, T, T) bool."""
        return self.mask(idx.to(self.device)).cpu()

    def call(self, function: Callable, idx: Tensor, *rest: Tensor) -> object:
        """Call a function with a text; in training mode with autograd, and the same dropout and buffers each time."""
        self.progress()
        if self.module.training:
            torch.manual_seed(0)
            random.seed(0)
            if NUMPY:
                NUMPY.random.seed(0)
            self.rewind()
        with torch.set_grad_enabled(self.module.training and self.has_backward):
            return function(idx.to(self.device), *rest)

    def logits(self, forward: Forward, idx: Tensor) -> Tensor:
        """Call `forward`: (B, T) -> (B, T, V)."""
        nothing = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None)
        try:
            with nothing:  # is kept for a gradient
                output = self.call(forward, idx)
        except (RuntimeError, TypeError) as error:  # the forward pass needs gradients of its own, or is to have none
            self.has_backward &= self.strict or not isinstance(error, NotImplementedError)
            output = self.call(forward, idx)
        logits = logits_of(output, (*idx.shape, self.vocab_size)).detach()
        if "extreme" not in self.where and not logits.max().isfinite():  # those of padding may be -inf
            raise Finding(f"its logits are not finite numbers ({self.where}): if of padding, pass tokens= without it")
        return logits.nan_to_num()

    def texts(self, count: int, B: int, alone: bool = False) -> Iterator[Tensor]:
        """Yield texts, (B, T), each of which is to be compared with the one before it.

        For `count` positions or more, by B, all tokens are replaced that a position of each sequence may not see. Where
        special tokens move the mask they stay: else it might see others. But the first one after the position becomes
        each special token in turn, then each of as many others; the next of these, if it is that one already.
        alone: at last replace all sequences but the first, then all but the second.
        """
        count = self.in_time(count)
        count += -count % B  # the last batch is as large: kernels may differ by that
        positions = sorted((self.positions(count) * count)[:count])
        V = len(self.pool)
        ranks = self.ranks(B)
        yield self.pool[ranks]
        for number, batch in enumerate(torch.tensor(positions).long().view(-1, B)):
            hides = ~self.masks(self.pool[ranks]).expand(B, -1, -1)[range(B), batch]
            ahead = (torch.arange(self.length) - batch[:, None] - 1) % self.length
            first = ahead == torch.where(hides, ahead, self.length).amin(1, keepdim=True)
            turn = (number * B + torch.arange(B)[:, None]) % (2 * self.num_special or V) % V
            stays = self.mask_depends & (ranks < self.num_special)
            ranks = torch.where(first, turn + (turn == ranks), ranks + (hides & ~stays)) % V
            yield self.pool[ranks]
        for row in range(alone * min(B, 2)):
            ranks = (ranks + (torch.arange(B) != row)[:, None]) % V
            yield self.pool[ranks]

    def may_differ(self, idx: Tensor, changed: Tensor) -> Tensor:
        """Return which positions of two texts see a token that differs, or see by another mask: (B, T)."""
        masks = self.masks(idx)
        moved = (masks != self.masks(changed)).any(-1)
        differs = moved | (idx != changed)
        return moved | (masks & differs[:, None]).any(-1)

    def hidden(self, forward: Forward, count: int, batch_size: int, where: str) -> None:
        """Run the probe "hidden" at `count` positions or more. where: how the module is probed, and the next ones are.

        Each position has a sequence of a batch to itself. If there are `many`, each special token has its turn, and the
        probe "alone" follows.
        """
        self.where = where
        self.module.train("training" in where)
        alone = count >= self.many
        count = max(count, alone * min(self.num_special, SMALL))
        read = ((idx, self.logits(forward, idx)) for idx in self.texts(count, batch_size, alone))
        for before, after in itertools.pairwise(read):
            self.compare(forward, *before, *after)

    def compare(self, forward: Forward, idx: Tensor, before: Tensor, changed: Tensor, after: Tensor) -> None:
        """Raise the fault if logits of a position differ that sees none of the tokens that were changed."""
        # One sequence at a time needs less memory.
        same = torch.stack([(first == second).all(-1) for first, second in zip(before, after, strict=True)])
        fine = self.may_differ(idx, changed) | same.cpu()
        if fine.all() or self.vanishes(
            difference(before, after)[~fine].max(),
            lambda: difference(self.logits(forward, idx), self.logits(forward, changed))[~fine].max(),
        ):
            return
        query, row = (~fine.T).nonzero()[0].tolist()

        def read(key: int) -> Tensor:
            """Return the logits where the tokens up to this one are replaced, and none of another sequence."""
            text = idx.clone()
            text[row, : key + 1] = changed[row, : key + 1]
            return self.logits(forward, text)[row, query]

        expected = read(-1)
        if not torch.equal(expected, read(-1)):
            raise Finding(f"the same tokens do not give the same numbers again ({self.where}); is dropout still on?")
        effect = f"its logits move by up to {(after - before)[row, query].abs().max():.2g} ({self.where})"
        key = bisect_left(range(self.length), True, key=lambda key: not torch.equal(expected, read(key)))
        if key == self.length:
            raise Finding(f"a sequence changes when the others of its batch do: {effect}")
        raise Finding(f"position {query} sees token {key}, which it must not see: {effect}", query, key)

    @patch("torch.nn.functional.dropout", drop_alike)
    def vanishes(self, found: Tensor, again: Callable[[], Tensor], is_derivative: bool = False) -> bool:
        """Return whether a difference is one of rounding: tiny, and gone in float64, where a leak remains.

        Dropout drops alike: its random numbers are others where later tokens are for other experts, which draw more.
        found: the difference, as a part of the logits; again: a function that measures it again. Without a float64 to
        ask in, on the device or on a CPU, what is tiny passes if the check is not strict, but not a derivative: where
        nothing is seen, it is zero without rounding.
        """
        if self.module.training:
            found = again()
        if not abs(found) <= TINY:
            return False
        kept = [(tensor, tensor.data) for tensor in itertools.chain(self.module.parameters(), self.module.buffers())]
        device = self.device
        for place in dict.fromkeys([device, torch.device("cpu")]):  # Apple's has no float64
            self.device = place
            try:
                for tensor, data in kept:
                    moved = data.to(place)
                    moved = moved.cdouble() if data.is_complex() else moved
                    tensor.data = moved.double() if data.is_floating_point() else moved
                is_rounding = bool(abs(again()) <= VANISHED)
                how = "asked again in float64"
                break
            except Exception:  # of whichever kind: a kernel is missing, or memory
                how = f"less than {TINY}, and no float64 to ask again in"
                is_rounding = not (self.strict or is_derivative)
            finally:
                for tensor, data in kept:
                    tensor.data = data
        self.device = device
        self.remarks.add(f"bits differ by rounding or dropout alone: {how}")
        return is_rounding

    def agrees(self, exact: Forward, decode: Forward | None) -> None:
        """Run the probe "agrees": on decoding, or else on the first tokens of a text, which are read by themselves.

        Half precision rounds too much for it to say no, also if its logits are made float32.
        """
        idx = self.text(min(2, self.batch_size))
        expected = self.logits(exact, idx)
        limit = ROUNDED * max(torch.finfo(x.dtype).eps for x in (expected, *self.weights.values()))
        if decode:
            off = (self.logits(decode, idx) - expected).norm(dim=-1) / expected.norm(dim=-1)
            if not off.max() <= limit:
                first = (off.amax(0) > limit).int().argmax()
                raise Finding(
                    f"decoding with a cache gives other logits than the whole text: off by {off.max():.2g} of their "
                    f"size, from token {first} on"
                )
            return
        n = self.length
        while (n := n // 2) > 1:
            try:
                moved = difference(expected[:, :n], self.logits(exact, idx[:, :n].contiguous())).cpu() > limit
            except Exception:  # of whichever kind: the model may read texts of one length alone
                self.remarks.add(f"a text cut after {n} tokens not asked for: it cannot be read")
                return
            for position in (moved & ~self.masks(idx)[:, :n, n:].any(-1)).nonzero()[:1, 1]:
                finding = (
                    f"position {position} of a text cut after {n} tokens is predicted otherwise than within the whole "
                    "text: it depends on the length"
                )
                if self.strict:
                    raise Finding(finding)
                self.remarks.add(finding)
                return

    def gradient(self, exact: Forward) -> None:
        """Run the probe "gradient", at all positions of a short text.

        A layer that selects sees each token in some texts alone.
        """
        last = self.length - 1
        count = self.many if self.length <= SHORT or self.strict else self.few
        queries = [*self.positions(self.in_time(count)), last]
        self.probed.add(last)
        blind = seen = torch.tensor(False)

        def largest_leak() -> Tensor:
            influence = self.influence(exact, idx, queries)
            return influence.masked_fill(may_see, 0).max() / influence.max()

        for _ in range(NUM_DRAWS):
            idx = self.text(1)
            may_see = self.masks(idx)[0, queries]
            influence = self.influence(exact, idx, queries)
            if influence is None:
                self.remarks.add(
                    "derivatives not asked for: no nn.Embedding reads the tokens, or autograd is off or fails"
                )
                return
            leaks = influence.masked_fill(may_see, 0)
            if leaks.any() and not self.vanishes(largest_leak(), largest_leak, True):
                row, key = leaks.nonzero()[0].tolist()
                effect = f"the derivative of its logits is {leaks[row, key]:.2g}, not exactly 0"
                query = queries[row]
                raise Finding(f"position {query} sees token {key}, which it must not see: {effect}", query, key)
            seen = seen | (influence != 0)
            blind = (blind | may_see) & ~seen
            if self.sparse or not blind.any():
                return
        row, key = blind.nonzero()[0].tolist()
        raise Finding(f"position {queries[row]} is blind to token {key}, which it may see", queries[row], key)

    def influence(self, function: Forward, idx: Tensor, queries: list[int]) -> Tensor | None:
        """Return how large the derivatives of N queries' logits to each token of a text, (1, T), are: (N, T).

        None if there are none.
        """
        idx = idx.to(self.device)
        found = []
        try:
            # On a GPU a training step of so few sequences, in half precision, would need less memory.
            with watched(self.module, idx) as embedded, torch.autograd.graph.save_on_cpu():
                logits = logits_of(function(idx), (*idx.shape, self.vocab_size))
            if not embedded or not logits.requires_grad:
                return None
            for query in queries:
                of_query = logits[0, query]
                score = (of_query * torch.randn_like(of_query)).sum()
                gradients = torch.autograd.grad(score, embedded, retain_graph=True, materialize_grads=True)
                found.append(sum(gradient.flatten(0, -2).abs().amax(-1) for gradient in gradients))
        # A checkpoint, a reversible layer, or a kernel without a derivative.
        except (RuntimeError, AssertionError, UserWarning):
            if self.strict:
                raise
            return None
        return torch.stack(found).cpu()

    def hidden_from_loss(self, loss_fn: Loss) -> None:
        """Run the probe "hidden" on a loss, which is one sum over a batch.

        In each sequence one target is counted, because a small sum shows small changes. A term that counts none, as one
        that balances experts, may move. In training it has to reach some weights, which inputs as such do not, and not
        all: logits, which could be those of a later token, would.
        """

        def moves(beside: bool = False) -> Tensor:
            """Return how much the loss differs for two texts, as a part of a guess; or what is beside the targets."""
            after, before = (self.call(loss_fn, text, none if beside else targets).detach() for text in (changed, idx))
            return (after - before) / (self.batch_size * math.log(self.vocab_size))

        def reached(targets: Tensor) -> Tensor:
            """Return how many weights the loss reaches."""
            loss = self.call(loss_fn, idx, targets)
            weights = self.weights.values()
            gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            return sum(gradient.any() for gradient in gradients)

        for idx, changed in itertools.pairwise(self.texts(self.many, self.batch_size)):
            same = ~self.may_differ(idx, changed)
            counted = same & (same.cumsum(1) == same.sum(1, keepdim=True))  # the last one
            targets = torch.where(counted, idx, IGNORE).to(self.device)
            none = torch.full_like(targets, IGNORE)
            moved = moves()
            if not moved or self.vanishes(moved, moves):
                continue
            # What rounds logits moves a loss less.
            if abs(moved - moves(beside=True)) <= TINY / 10 and (
                not self.module.training or 0 < reached(none) < reached(targets)
            ):
                self.remarks.add("the loss has a term that counts no target, as one that balances experts")
                continue
            raise Finding(
                f"the loss moves by {abs(moved):.2g} of its size ({self.where}) if tokens are replaced that positions "
                f"{counted.nonzero()[:, 1].tolist()} must not see, whose targets alone it should count"
            )


@contextmanager
def watched(module: nn.Module, idx: Tensor) -> Iterator[list[Tensor]]:
    """Yield a list to which each output of an nn.Embedding that reads idx, (B, T), is added as a leaf.

    It is (B, T, C); of a model that is given a single text without B, (T, C). One of positions may be given idx, or its
    shape, and read no more than its length: its output is none of these.
    """
    embedded = []

    def watch(part: nn.Module, inputs: tuple, options: dict, output: Tensor) -> Tensor | None:
        read = (*inputs, *options.values())[0]
        is_per_token = isinstance(read, Tensor) and output.shape[:-1] == read.shape
        if is_per_token and torch.equal(read.flatten(), idx.flatten()):
            embedded.append(output.detach().requires_grad_())
            return embedded[-1].clone()  # some models add to it in place

    with ExitStack() as hooks:
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                hooks.enter_context(part.register_forward_hook(watch, prepend=True, with_kwargs=True))  # before others
        yield embedded

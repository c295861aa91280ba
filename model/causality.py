"""Can a model see the future? Probes of the very function that is to be trained, answered to the last bit.

A language model is trained to predict tokens that are in its own input, one place further on. If a position can see
them, however faintly, the loss falls and means nothing. So nothing here is compared with a tolerance:

    hidden      replace all tokens that a position may not see: no bit of its logits may change
    seen        replace one token: all positions that should see it must change, or the first probe proves nothing
    gradient    the same two as derivatives: exactly zero, and not zero
    alone       a sequence may not change when the others of its batch do
    repeatable  the same tokens must give the same logits again, also after other tokens in between

A module is probed in evaluation and in training; with its own weights, with random ones (a layer whose first weights
are zero hides every leak), and with huge ones (a mask of -10,000 leaks only where scores are larger). Its weights,
buffers and mode, and the caller's random numbers, are put back afterwards.

Shapes are named as in model/attention.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.attention import make_causal_mask
from model.config import ModelError

IGNORE = -100  # a target that F.cross_entropy skips
NUM_POSITIONS = 16  # at least so many are probed, if there are as many
EXTREME = 100.0  # weights times this make scores of up to 1e8, beside which a mask of -1e4 is nothing


@dataclass(frozen=True)
class Causality:
    """What the probes found: `ok`, or the first thing that is wrong; `str` says it in words."""

    length: int
    """The number of tokens probed with."""
    finding: str | None = None
    """What is wrong."""
    query: int | None = None
    """The first position found that sees, or misses, a token it should not."""
    key: int | None = None
    """That token."""
    size: float = 0.0
    """The largest change of a number that should not have changed."""

    @property
    def ok(self) -> bool:
        return self.finding is None

    def __str__(self) -> str:
        return f"no, {self.finding}" if self.finding else f"yes, none of {self.length} positions sees what it may not"


class Finding(Exception):
    """Ends the probing; its arguments are the last four of `Causality`."""


def check_causality(
    forward: Callable[[Tensor], Tensor],
    vocab_size: int,
    length: int,
    *,
    module: nn.Module | None = None,
    others: Sequence[Callable[[Tensor], Tensor]] = (),
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    batch_size: int | None = None,
    mask: Tensor | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Causality:
    """Whether each position of `forward` sees exactly the tokens that it may see.

    Args:
        forward: (B, T) int64 -> logits (B, T, V); any callable.
        vocab_size: V, at least 2.
        length: T. Kernels may differ by length: take that of the training.
        module: what has the weights of `forward`, if that is not a module itself.
            Without one, weights and mode are left as they are, and there is no gradient probe.
        others: more functions of the module like `forward`, such as one that decodes with a cache.
        loss_fn: a loss of the module that hides its logits, such as a compiled one: inputs and targets, (B, T) int64
            each -> the sum over all targets but those of -100. Called with autograd in training, without in evaluation.
        batch_size: B, the most sequences in a call, and their number for `loss_fn`. None: as many as there are probes.
        mask: (T, T) bool, True where the position (row) may depend on the token (column). None: the lower triangle.
        device: where the tokens are put. None: to the module's weights, or the CPU.
        seed: of the tokens and the random weights.

    Raises ModelError if there are not two tokens to tell apart.
    """
    module = forward if module is None and isinstance(forward, nn.Module) else module
    probe = Probe(vocab_size, length, module, batch_size, mask, device, seed)

    def probes() -> None:
        if module is None:
            probe.hidden(forward, "with the weights as they are", healthy=True)
            return
        module.eval()
        probe.hidden(forward, "with the weights as they are")
        probe.randomize()
        for function in (forward, *others):
            probe.hidden(function, "in evaluation", healthy=True)
        probe.gradient()
        if loss_fn:
            with torch.no_grad():
                probe.hidden_from_loss(loss_fn, "in evaluation")
        module.train()
        probe.hidden(forward, "in training")
        if loss_fn:
            probe.hidden_from_loss(loss_fn, "in training")
        module.eval()
        probe.randomize(EXTREME)
        probe.hidden(forward, "with extreme weights")

    return probe.run(probes)


class Probe:
    """The tokens, positions and weights to probe with. Each probe raises `Finding` if something is wrong."""

    def __init__(
        self,
        vocab_size: int,
        length: int,
        module: nn.Module | None,
        batch_size: int | None,
        mask: Tensor | None,
        device: torch.device | str | None,
        seed: int,
    ):
        if vocab_size < 2:
            raise ModelError(f"a vocabulary of {vocab_size} has no token to replace another, so nothing can be shown")
        self.vocab_size, self.length, self.module = vocab_size, length, module
        self.state = [] if module is None else [*module.parameters(), *module.buffers()]
        self.device = torch.device(device or (self.state[0].device if self.state else "cpu"))
        self.random = torch.Generator().manual_seed(seed)
        self.mask = (make_causal_mask(length) if mask is None else mask).to(self.device)
        self.positions = self.choose_positions()
        self.batch_size = batch_size or len(self.positions)

    def choose_positions(self) -> Tensor:
        """Ascending: both ends, the last before each power of two (where tiles begin), and random ones."""
        chosen = {0, self.length - 2, self.length - 1, *(2**n - 1 for n in range(self.length.bit_length()))}
        chosen &= set(range(self.length))
        others = [n for n in torch.randperm(self.length, generator=self.random).tolist() if n not in chosen]
        return torch.tensor(sorted([*chosen, *others[: max(0, NUM_POSITIONS - len(chosen))]]), device=self.device)

    def run(self, probes: Callable[[], None]) -> Causality:
        """The outcome of `probes`, after which the module and the random numbers are what they were before."""
        modes = [] if self.module is None else [(part, part.training) for part in self.module.modules()]
        saved = [tensor.detach().clone() for tensor in self.state]
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                probes()
        except Finding as found:
            return Causality(self.length, *found.args)
        finally:
            with torch.no_grad():
                for tensor, value in zip(self.state, saved, strict=True):
                    tensor.copy_(value)
            for part, training in modes:
                part.training = training
        return Causality(self.length)

    @torch.no_grad()
    def randomize(self, scale: float = 1.0) -> None:
        """Give every weight a random value with which each part of the model matters."""
        torch.manual_seed(int(torch.randint(2**31, (), generator=self.random)))
        for parameter in self.module.parameters():
            if parameter.dim() < 2:
                parameter.uniform_(0.5, 1.5)  # gains and biases
            else:
                parameter.normal_(std=parameter.size(-1) ** -0.5)
            parameter.mul_(scale)

    def tokens(self, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Two (num_sequences, T) of random tokens that differ at every place; the first sequence is all the same."""
        idx = torch.randint(self.vocab_size, (num_sequences, self.length), generator=self.random)
        idx[0] = 0
        other = (idx + torch.randint(1, self.vocab_size, idx.shape, generator=self.random)) % self.vocab_size
        return idx.to(self.device), other.to(self.device)

    def call(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """What it returns; in training with the same dropout each time."""
        if self.module is not None and self.module.training:
            torch.manual_seed(0)
        return function(*arguments).detach()

    @torch.no_grad()
    def hidden(self, forward: Callable[[Tensor], Tensor], where: str, healthy: bool = False) -> None:
        """The probes hidden and alone; with healthy weights seen and repeatable as well.

        There is a sequence for each position, in which what it may not see is replaced, and one that stays as it is.
        """
        limited = self.positions[~self.mask[self.positions].all(1)]  # there is something they may not see
        for positions in limited.split(max(1, self.batch_size - 1)):
            none = torch.zeros_like(self.mask[:1])
            hide = torch.cat((~self.mask[positions], none))  # (B, T)
            idx, other = self.tokens(len(hide))
            changed = torch.where(hide, other, idx)
            before, after = self.call(forward, idx), self.call(forward, changed)
            if healthy and not before.isfinite().all():
                raise Finding(f"its logits are not finite numbers {where}")
            if healthy and not same_bits(before, self.call(forward, idx)).all():
                raise Finding(f"the same tokens do not give the same logits again {where}")
            moved = ~same_bits(before, after)  # (B, T)
            if moved[-1].any():
                raise Finding(f"a sequence changes when the others of its batch do {where}")
            for query, row in (moved & ~self.sees_any(hide)).T.nonzero()[:1].tolist():
                in_row = torch.where(torch.arange(len(idx), device=self.device)[:, None] == row, changed, idx)
                _, key = first_cause(lambda tokens, at=(row, query): self.call(forward, tokens)[at], idx, in_row)
                before, after = before[row, query], after[row, query]
                size, share = largest_change(before, after), largest_change(before.softmax(-1), after.softmax(-1))
                effect = f"moves its logits by up to {size:.2g} and a probability by up to {share:.2g}"
                raise Finding(f"{self.sees(query, key)}, which {effect} ({where})", query, key, size)
            if healthy and before.dtype.itemsize >= 4:  # in half precision one token among many is lost in rounding
                replaced = torch.cat((self.one_hot(positions), none))
                moved = ~same_bits(before, self.call(forward, torch.where(replaced, other, idx)))
                self.refuse_blindness(self.mask[:, positions] & ~moved[:-1].T, torch.arange(self.length), positions)

    def gradient(self) -> None:
        """The probe gradient, if the tokens go through an nn.Embedding, whose output can be watched."""
        plain = getattr(self.module, "_orig_mod", self.module)  # a compiled module would not notice new hooks
        for queries in self.positions.split(max(1, self.batch_size // 4)):  # without autocast, it takes more memory
            idx, _ = self.tokens(len(queries))
            logits, embedded = watch_embedding(plain, idx)
            if not embedded:
                return
            of_queries = logits[torch.arange(len(idx), device=self.device), queries]  # (B, T, V) -> (B, V)
            score = (of_queries * torch.randn_like(of_queries)).sum()
            influence = sum(gradient.abs().amax(-1) for gradient in torch.autograd.grad(score, embedded))  # (B, T)
            allowed = self.mask[queries]
            for row, key in ((influence != 0) & ~allowed).nonzero()[:1].tolist():
                query, size = queries[row].item(), influence[row, key].item()
                effect = f"the derivative of its logits to it is {size:.2g} and must be exactly 0"
                raise Finding(f"{self.sees(query, key)}: {effect}", query, key, size)
            self.refuse_blindness((influence == 0) & allowed, queries, torch.arange(self.length))

    def hidden_from_loss(self, loss_fn: Callable[[Tensor, Tensor], Tensor], where: str) -> None:
        """The probe hidden, in the one sum over a batch: in each sequence a position, and a few that see no more."""
        for positions in self.positions.split(self.batch_size):
            positions = positions.repeat(self.batch_size)[: self.batch_size]
            hide = ~self.mask[positions]
            (idx, other), (targets, _) = self.tokens(self.batch_size), self.tokens(self.batch_size)
            few = torch.rand(targets.shape, generator=self.random).to(self.device) < 4 / self.length
            counted = self.one_hot(positions) | few & ~self.sees_any(hide)  # few, as a small sum shows small changes
            targets = targets.masked_fill(~counted, IGNORE)
            changed = torch.where(hide, other, idx)

            def loss(tokens: Tensor, targets: Tensor = targets) -> Tensor:
                return self.call(loss_fn, tokens, targets)

            before, after = loss(idx), loss(changed)
            if not before.isfinite():
                raise Finding(f"its loss is not finite {where}")
            if not same_bits(before, after):
                row, key = first_cause(loss, idx, changed)
                query, size = positions[row].item(), largest_change(before, after)
                raise Finding(f"{self.sees(query, key)}: the loss moves by {size:.2g} ({where})", query, key, size)
            if same_bits(before, loss(other)):
                raise Finding(f"the loss does not depend on the tokens {where}")

    def refuse_blindness(self, blind: Tensor, queries: Tensor, keys: Tensor) -> None:
        """Raise the first finding of a (query, key) matrix of what should be seen and is not."""
        for query, key in blind.nonzero()[:1].tolist():
            query, key = queries[query].item(), keys[key].item()
            raise Finding(f"position {query} is blind to token {key}, which it may see", query, key)

    def sees(self, query: int, key: int) -> str:
        where = f"{key - query} ahead of it" if key > query else "which its mask hides"
        return f"position {query} sees token {key}, {where}"

    def one_hot(self, positions: Tensor) -> Tensor:
        """(B,) -> (B, T) bool, True at the position of each sequence."""
        return torch.arange(self.length, device=self.device) == positions[:, None]

    def sees_any(self, tokens: Tensor) -> Tensor:
        """Which positions may see at least one of the marked tokens: (B, T) -> (B, T), both bool."""
        return tokens.float() @ self.mask.float().T > 0


def watch_embedding(module: nn.Module, idx: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits of idx (B, T), and the (B, T, C) from which they were computed, where an nn.Embedding had read idx."""
    embedded = []

    def watch(part: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if inputs[0].shape == idx.shape and torch.equal(inputs[0], idx):
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

    hooks = [part.register_forward_hook(watch) for part in module.modules() if isinstance(part, nn.Embedding)]
    try:
        return module(idx), embedded
    finally:
        for hook in hooks:
            hook.remove()


def same_bits(before: Tensor, after: Tensor) -> Tensor:
    """(..., V), twice -> (...,) bool, whether all V numbers are the same; what is not a number is like its kind."""
    return ((before == after) | (before.isnan() & after.isnan())).all(-1)


def largest_change(before: Tensor, after: Tensor) -> float:
    return (after.float() - before.float()).abs().max().item()


def first_cause(read: Callable[[Tensor], Tensor], idx: Tensor, changed: Tensor) -> tuple[int, int]:
    """(sequence, token) of the first place where replacing idx by `changed`, from the beginning on, moves `read`."""
    places = (idx != changed).nonzero()
    before, low, high = read(idx), 0, len(places)  # replacing the first `low` places moves nothing, `high` does
    while high - low > 1:
        middle = (low + high) // 2
        sequences, tokens = places[:middle].T
        partly = idx.index_put((sequences, tokens), changed[sequences, tokens])
        low, high = (middle, high) if same_bits(before, read(partly)) else (low, middle)
    return tuple(places[high - 1].tolist())

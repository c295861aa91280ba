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

Shapes are named as in model/attention.py, from which nothing is imported: what is right is not asked of the suspect.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.config import ModelError
from model.sharded import shard_like

IGNORE = -100  # a target that F.cross_entropy skips
NUM_POSITIONS = 12  # in a probe at least so many positions are asked, if there are as many
EXTREME = 100.0  # queries and keys times this make scores of 1e4 and more, beside which a mask of -1e4 is nothing


@dataclass(frozen=True)
class Causality:
    """What the probes found: `ok`, or the first thing that is wrong; `str` says it in words, `bool` in one."""

    length: int
    """The number of tokens probed with."""
    num_asked: int
    """The number of different positions asked."""
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

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        asked = f"asked {self.num_asked} of {self.length} positions"
        return f"no, {self.finding}" if self.finding else f"yes, each position sees its past and nothing else ({asked})"


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
        module: what has the weights of `forward`, if that is not a module itself; called alone, it is like `forward`.
            Without one, weights and mode are left as they are: no derivatives, no random and no extreme weights.
        others: more functions of the module like `forward`, such as one that decodes with a cache.
        loss_fn: a loss of the module that hides its logits, such as a compiled one: inputs and targets, (B, T) int64
            each -> the sum over all targets but those of -100. Called with autograd in training, without in evaluation.
        batch_size: B, the most sequences in a call, and their number for `loss_fn`. None: as many as there are probes.
        mask: (T, T) bool, True where the position (row) may depend on the token (column), through all layers: windows
            of w tokens in L layers reach L (w - 1) back. None: itself and everything before it. What should be seen
            and is too faint for the precision counts as not seen.
        device: where the tokens are put. None: to the module's weights, or the CPU.
        seed: of the tokens, the positions asked and the random weights.

    Raises ModelError if there is nothing to ask, or the answer is not logits.
    """
    module = forward if module is None and isinstance(forward, nn.Module) else module
    probe = Probe(vocab_size, length, module, batch_size, mask, device, seed)

    def probes() -> None:
        if module is not None:
            module.eval()
        with torch.no_grad():
            probe.alone(forward, "with the weights as they are")
            probe.hidden(forward, "with the weights as they are", seen=module is None, few=module is not None)
        if module is None:
            return
        probe.randomize()
        module.eval()
        with torch.no_grad():
            for function in (forward, *others):
                probe.alone(function, "in evaluation")
                probe.hidden(function, "in evaluation", seen=True)
            if loss_fn:
                probe.hidden_from_loss(loss_fn, "in evaluation")
        probe.gradient()
        module.train()
        probe.alone(forward, "in training")
        probe.hidden(forward, "in training")
        if loss_fn:
            probe.hidden_from_loss(loss_fn, "in training")

        probe.randomize(EXTREME)  # asked of the module itself: under autocast to float16 it would overflow
        probe.hidden(module, "in training, with extreme weights", few=True)
        module.eval()
        with torch.no_grad():
            for function in (module, *others):
                probe.hidden(function, "in evaluation, with extreme weights", few=True)

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
        if vocab_size < 2 or length < 1:
            raise ModelError(f"nothing to ask: {length} tokens of a vocabulary of {vocab_size}")
        if mask is not None and mask.shape != (length, length):
            raise ModelError(f"the mask must be ({length}, {length}), got {tuple(mask.shape)}")
        self.vocab_size, self.length, self.module = vocab_size, length, module
        self.batch_size = batch_size or length
        weights = [] if module is None else list(module.parameters())
        self.device = torch.device(device or (weights[0].device if weights else "cpu"))
        self.random = torch.Generator().manual_seed(seed)
        places = torch.arange(length, device=self.device)
        self.mask = places <= places[:, None] if mask is None else mask.to(self.device)
        self.asked: set[int] = set()

    def run(self, probes: Callable[[], None]) -> Causality:
        """The outcome of `probes`, after which the module and the random numbers are what they were before."""
        parts = [] if self.module is None else list(self.module.modules())
        modes = [(part, part.training) for part in parts]
        weights = [] if self.module is None else [(p, p.detach().clone()) for p in self.module.parameters()]
        self.buffers = [
            (part, name, buffer, buffer.detach().clone())
            for part in parts
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
        return Causality(self.length, len(self.asked), *found)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Give each buffer the value it had, also where the module has put another tensor in its place."""
        for part, name, buffer, value in self.buffers:
            part._buffers[name] = buffer
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    @torch.no_grad()
    def randomize(self, scale: float = 1.0) -> None:
        """Give every weight a random value with which each part of the model matters; scale what makes the scores."""
        torch.manual_seed(int(torch.randint(2**31, (), generator=self.random)))
        named = [(name, p) for name, p in self.module.named_parameters() if p.is_floating_point()]
        by_name = any(is_for_scores(name) for name, _ in named)
        for name, parameter in named:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
            if parameter.dim() < 2:  # gains and biases
                values.uniform_(0.5, 1.5).mul_(torch.randint_like(values, 2) * 2 - 1)
            else:
                values.normal_(std=parameter.size(-1) ** -0.5)
            if is_for_scores(name) or not by_name:
                values.mul_(scale)
            parameter.copy_(shard_like(values, parameter))

    def positions(self, few: bool = False) -> Tensor:
        """Ascending: both ends, the last before each power of two (where tiles begin), and others at random."""
        ends = {0, self.length - 2, self.length - 1}
        chosen = ends if few else ends | {2**n - 1 for n in range(self.length.bit_length())}
        chosen &= set(range(self.length))
        others = [n for n in torch.randperm(self.length, generator=self.random).tolist() if n not in chosen]
        chosen |= set(others[: max(0, (NUM_POSITIONS // 2 if few else NUM_POSITIONS) - len(chosen))])
        self.asked |= chosen
        return torch.tensor(sorted(chosen), device=self.device)

    def tokens(self, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Two (num_sequences, T) of random tokens that differ at every place; the first sequence is all the same."""
        idx = torch.randint(self.vocab_size, (num_sequences, self.length), generator=self.random)
        idx[0] = 0
        other = (idx + torch.randint(1, self.vocab_size, idx.shape, generator=self.random)) % self.vocab_size
        return idx.to(self.device), other.to(self.device)

    def call(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """What it returns; in training with the same dropout, and the same buffers, each time."""
        if self.module is not None and self.module.training:
            torch.manual_seed(0)
            self.restore_buffers()
        return function(*arguments).detach()

    def logits(self, forward: Callable[[Tensor], Tensor], idx: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        logits, expected = self.call(forward, idx), (*idx.shape, self.vocab_size)
        if logits.shape != expected:
            raise ModelError(f"expected logits of shape {expected}, got {tuple(logits.shape)}")
        return logits

    def alone(self, forward: Callable[[Tensor], Tensor], where: str) -> None:
        """The probes alone and repeatable."""
        idx, other = self.tokens(2)
        before = self.logits(forward, idx)
        if not before.isfinite().all():
            raise Finding(f"its logits are not finite numbers ({where})")
        with_other = [self.logits(forward, torch.stack(pair)) for pair in ((idx[0], other[1]), (other[0], idx[1]))]
        if not same_bits(before, self.logits(forward, idx)).all():
            raise Finding(f"the same tokens do not give the same logits again ({where})")
        if not all(same_bits(before[row], with_other[row][row]).all() for row in (0, 1)):
            raise Finding(f"a sequence changes when the others of its batch do ({where})")

    def hidden(self, forward: Callable[[Tensor], Tensor], where: str, seen: bool = False, few: bool = False) -> None:
        """The probe hidden, and perhaps seen: there is a sequence for each position that is asked."""
        for positions in self.positions(few).split(self.batch_size):
            hide = ~self.mask[positions]  # (B, T)
            idx, other = self.tokens(len(hide))
            changed = torch.where(hide, other, idx)
            before, after = self.logits(forward, idx), self.logits(forward, changed)
            leaks = ~same_bits(before, after) & ~self.sees_any(hide)
            for query, row in leaks.T.nonzero()[:1].tolist():
                only_row = idx.clone()
                only_row[row] = changed[row]
                _, key = first_cause(lambda tokens, at=(row, query): self.call(forward, tokens)[at], idx, only_row)
                before, after = before[row, query].float(), after[row, query].float()
                size, share = largest_change(before, after), largest_change(before.softmax(-1), after.softmax(-1))
                effect = f"moves its logits by up to {size:.2g} and a probability by up to {share:.2g}"
                raise Finding(f"{sees(query, key)}, which {effect} ({where})", query, key, size)
            if seen and before.dtype.itemsize >= 4:  # in half precision one token among many is lost in rounding
                replaced = torch.where(self.one_hot(positions), other, idx)
                moved = ~same_bits(before, self.logits(forward, replaced))  # (key, query)
                refuse_blindness(self.mask[:, positions] & ~moved.T, torch.arange(self.length), positions)

    def gradient(self) -> None:
        """The probe gradient, if the tokens go through an nn.Embedding, whose output can be watched."""
        plain = getattr(self.module, "_orig_mod", self.module)  # a compiled module would not notice new hooks
        for queries in self.positions().split(max(1, self.batch_size // 4)):  # without autocast, it takes more memory
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
                query, size = queries[row].item(), influence[row, key].item()
                effect = f"the derivative of its logits to it is {size:.2g} and must be exactly 0"
                raise Finding(f"{sees(query, key)}: {effect}", query, key, size)
            refuse_blindness((influence == 0) & allowed, queries, torch.arange(self.length))

    def hidden_from_loss(self, loss_fn: Callable[[Tensor, Tensor], Tensor], where: str) -> None:
        """The probe hidden, in the one sum over a batch: in each sequence a position, and a few that see no more."""
        for positions in self.positions().split(self.batch_size):
            positions = positions.repeat(self.batch_size)[: self.batch_size]
            hide = ~self.mask[positions]
            (idx, other), (targets, _) = self.tokens(self.batch_size), self.tokens(self.batch_size)
            some = torch.rand(targets.shape, generator=self.random).to(self.device) < 4 / self.length
            counted = self.one_hot(positions) | some & ~self.sees_any(hide)  # some: a small sum shows small changes
            targets = targets.masked_fill(~counted, IGNORE)
            changed = torch.where(hide, other, idx)

            def loss(tokens: Tensor, targets: Tensor = targets) -> Tensor:
                return self.call(loss_fn, tokens, targets)

            before, after = loss(idx), loss(changed)
            if not same_bits(before, after):
                if not same_bits(before, loss(idx)):
                    raise Finding(f"the same tokens do not give the same loss again ({where})")
                row, key = first_cause(loss, idx, changed)
                query, size = positions[row].item(), largest_change(before, after)
                raise Finding(f"{sees(query, key)}: the loss moves by {size:.2g} ({where})", query, key, size)
        if self.module.training and same_bits(before, loss(other)):
            raise Finding(f"the loss does not depend on the tokens ({where})")

    def one_hot(self, positions: Tensor) -> Tensor:
        """(B,) -> (B, T) bool, True at the position of each sequence."""
        return torch.arange(self.length, device=self.device) == positions[:, None]

    def sees_any(self, tokens: Tensor) -> Tensor:
        """Which positions may see at least one of the marked tokens: (B, T) -> (B, T), both bool."""
        return tokens.float() @ self.mask.float().T > 0


def is_for_scores(name: str) -> bool:
    """Whether the weight of this name makes queries or keys, as far as names tell."""
    return (
        bool({"q", "k", "qkv", "query", "key"} & set(re.split("[._]", name))) or "c_attn" in name or "in_proj" in name
    )


def sees(query: int, key: int) -> str:
    where = f"{key - query} ahead of it" if key > query else "which its mask hides"
    return f"position {query} sees token {key}, {where}"


def refuse_blindness(blind: Tensor, queries: Tensor, keys: Tensor) -> None:
    """Raise the first finding in a (query, key) matrix of what should be seen and is not."""
    for query, key in blind.nonzero()[:1].tolist():
        query, key = queries[query].item(), keys[key].item()
        raise Finding(f"position {query} is blind to token {key}, which it may see", query, key)


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

"""Two models that read the same tokens: what each knows better, and which of their heads look at the same.

    both = compare(inspect_heads(a, text, names), inspect_heads(b, text, names))
    print(both)
    both.save("both.html")                # a page of both, each head beside its match; in a notebook: both

Shapes are named as in tril/weights.py; N texts are read.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tril import page
from tril.errors import UserError
from tril.experiments import progress, token_losses
from tril.inspection import FORMATS, Inspection, check_output, write_file
from tril.kinds import kind_of, name_of, short, tag
from tril.look import look
from tril.metrics import Head
from tril.places import Places, choose

MOST_COMPARED = 256  # tokens of a text in which patterns are compared
MATCHES = """heads matched by where they look, the share of attention that lies elsewhere,
and that of the next best
 head                match              differs  next"""
BETTER = "known better by {}: nats, number, token, next"


class Match(NamedTuple):
    """A head of one model and the head of the other that is matched with it; distances are those of `distances`."""

    head: Head
    other: Head
    distance: float
    next_best: float  # the distance of the next best head, whether or not that is the match of another


@dataclass(eq=False, repr=False)
class Comparison:
    """Two models and the matches of their heads. A notebook shows it as a page of both."""

    a: Inspection
    b: Inspection  # its heads are the matches of those of a, in their order
    matches: list[Match]

    @cached_property
    def known(self) -> Places:
        """The losses of both, and the places where one knows the next token better; the key is that token."""
        texts = self.a.measured
        N, T = texts.shape
        rise = token_losses(self.b.model, texts) - token_losses(self.a.model, texts)
        error = f" ± {rise.mean(1).std() / N**0.5:.4f}" if N > 1 else ""
        note = f"loss {self.a.loss:.4f} of {self.a.name}, {self.b.loss:.4f} of {self.b.name}: {rise.mean():+.4f}{error}"
        following = torch.arange(T).roll(-1).expand(N, T)
        groups = [
            (BETTER.format(name), choose(range(0, N * T, T), texts, self.a.label, amounts, following))
            for name, amounts in ((self.a.name, rise), (self.b.name, -rise))
        ]
        return Places(note, groups)

    def __repr__(self) -> str:
        lines = []
        for head, other, *distances in self.matches:
            sides = ((self.a, head), (self.b, other))
            named = [f"{name_of(each):>5} {tag(kind_of(found.scores, each)):12}" for found, each in sides]
            lines.append("  ".join([*named, *map(short, distances)]))
        return "\n".join([MATCHES, *lines, "", repr(self.known)])

    def page_data(self) -> list[page.PageData]:
        """Return what a page shows of both. There the heads have the names of those of a."""
        a, b = (found.page_data(places=False) for found in (self.a, self.b))
        pairs = [(*map(name_of, match[:2]), *map(short, match[2:])) for match in self.matches]
        names = {other: head for head, other, *_ in pairs}
        stored = {names.get(name, name): numbers for name, numbers in b.stored.items()}
        stored["places"] = page.pack_places([self.known] * len(pairs))
        return [a, b._replace(stored=stored, texts=b.texts | {"pairs": pairs})]

    def save(self, path: str | Path) -> None:
        """Write a page, .html, of both. A failure leaves an old file there. Raises UserError for another suffix."""
        check_output(Path(path), FORMATS[:1])
        write_file(Path(path), page.render(self.page_data()).encode())

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        return page.in_frame(self.page_data())


def compare(a: Inspection, b: Inspection) -> Comparison:
    """Compare two models that have read the same tokens, and match heads of the first by where they look in them.

    Matched is the closest pair of the heads that `a` shows and all of `b`, then the closest of those that are left, and
    so on. So no two heads would both be better off with each other; the sum of all distances may not be the least. If
    `a` shows more heads than `b` has, some have no match.

    Raises UserError if the tokens differ, as those of different tokenizers do.
    """
    read = [(found.measured.tolist(), [*map(found.label, found.measured.unique().tolist())]) for found in (a, b)]
    if read[0] != read[1]:
        raise UserError("the two have not read the same tokens: compare models of one tokenizer, on one text")
    numbers = [a.att.shape[2] * layer + head for layer, head in a.heads]
    apart = distances(a, b)[numbers]
    left = apart.clone()
    matches = {}
    for _ in range(min(left.shape)):
        i, j = divmod(left.argmin().item(), left.size(1))
        left[i] = left[:, j] = torch.inf
        others = apart[i].clone()
        others[j] = 1.0  # the most there is
        other = divmod(j, b.att.shape[2])
        matches[i] = Match(a.heads[i], other, apart[i, j].item(), others.min().item())
    shown = [matches[i] for i in sorted(matches)]
    heads, others, *_ = zip(*shown, strict=True)
    are_namesakes = a.name == b.name
    a = replace(a, name=a.name + " a" * are_namesakes, asked=heads)
    b = replace(b, name=b.name + " b" * are_namesakes, asked=others)
    return Comparison(a, b, shown)


def distances(a: Inspection, b: Inspection) -> Tensor:
    """Return how differently the heads of two models look, (L H of a, L H of b).

    That is the share of the attention that lies elsewhere: half the sum of the absolute differences of two rows (their
    total variation distance), on average over the queries but the first, which has no choice.
    """
    total = 0.0
    texts = a.measured[:, :MOST_COMPARED]
    for idx in progress(texts.split(1), desc="patterns", unit=" texts"):
        patterns = []
        for model in (a.model, b.model):
            att, _ = look(model, idx)
            att.verify()
            weights = torch.cat([call.weights()[0] for call in att.calls])[..., -idx.size(1) :]
            patterns.append(weights[:, *torch.tril_indices(*weights.shape[1:])].cpu().float())
        total += torch.cdist(*patterns, p=1)
    return total / 2 / len(texts) / (texts.size(1) - 1)

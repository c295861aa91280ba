"""Inspect the heads of any decoder: measured, proved, and shown as a table, a page, pictures or arrays.

    inspection = inspect_heads(model, [5, 3, 8, 5, 3])
    print(inspection.table())
    inspection.pattern(1, 3)              # (T, T): row = query, column = key
    inspection.save("heads.html")         # or .png, .svg, .npz
    inspection                            # in a notebook: the page

Shapes are named as in tril/weights.py.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tril import page
from tril.decoder import Decoder, check_causality, find_call
from tril.errors import UserError
from tril.experiments import (
    MOST_EARLIER,
    Ablation,
    RepeatProbe,
    ablate,
    change_of,
    head_scores,
    influence,
    make_probe,
    upstream_heads,
)
from tril.kinds import Upstream, choose_heads, kind_of, name_of, tag
from tril.look import UNMASKED, Captured, Edits, look
from tril.metrics import METRICS, Head, Heads, HeadScores
from tril.places import Places, find_places
from tril.terminal import number, report
from tril.texts import Names, Text, draw_texts
from tril.views import LogitAttribution, Stream, attribute_logits, projected_values
from tril.weights import HIDES, summarise
from tril.why import Why, Writers, explain, explain_strongest

FORMATS = (".html", ".png", ".svg", ".npz")
TEXT_LENGTH = 1024  # the most tokens of a text of a corpus


@dataclass(eq=False, repr=False)
class Inspection:
    """A decoder and what it reads. What is asked of it is measured once. A notebook shows it as its page.

    Whatever is asked first raises UserError if the model cannot be inspected, and NotTheKernels if the weights computed
    are not those that its kernel used.
    """

    decoder: Decoder  # the model, and how it is called
    names: Names  # of tokens
    measured: Tensor  # (N, T), scores are means over these sequences
    shown: Tensor  # (1, T), the text of the pictures
    labels: Sequence[str]  # of the T tokens that are shown
    asked: str | Sequence[str | Head] = ()  # patterns of the heads to show
    probe: RepeatProbe | None = None
    corpus: Sequence[int] | None = None  # (n,) ids of a long text, for the strongest places
    name: str = "model"  # as "quickstart step-00000400"
    text_note: str = ""  # describes `measured`
    pool: str = "vocabulary"  # what the tokens of the probe were drawn from
    num_generated: int = 0  # of the tokens shown, so many of the last are the model's own
    ablation: Ablation | None = None
    edits: Edits | None = None  # while the text is read
    effort: float = 1.0  # the part of CPU_FLOPS to spend on each extra of a page
    plain: "Inspection | None" = None  # of the same model without edits, which has scores on the probe

    @cached_property
    def model(self) -> nn.Module:
        """The model, from ids to logits."""
        return self.decoder.as_module()

    @property
    def label(self) -> Callable[[int], str]:
        """The function that names an id."""
        return self.names.label

    @cached_property
    def att(self) -> Captured:
        """The attention on the text that is shown, (1, T), proved."""
        att, _ = look(self.model, self.shown, self.edits)
        att.verify()
        return att

    @cached_property
    def heads(self) -> list[Head]:
        """The heads to show."""
        return choose_heads(self.asked, self.att.shape)

    @cached_property
    def scores(self) -> HeadScores:
        """The metrics of all heads."""
        scores = head_scores(self.model, self.measured, self.probe, self.edits)
        if self.ablation:
            scores.samples["ablation"] = ablate(self.model, self.measured, self.heads, self.ablation)
        if self.plain is None:
            return scores
        beside = self.plain.scores  # with those on the probe
        samples = beside.samples | scores.samples
        return replace(scores, samples=samples, chance=beside.chance | scores.chance, rows=beside.rows | scores.rows)

    @cached_property
    def verified(self) -> str:
        """A line that says how the weights were verified, and what is not shown."""
        values = self.att.calls[0].values
        # The text that is shown is one of those that are measured, or its beginning.
        text = f"{summarise(self.scores.proofs)} ({str(values.dtype).removeprefix('torch.')}, {values.device.type})"
        left_out = [f"{number} x {what}" for what, number in Counter(self.att.left_out).items()]
        return "; not shown: ".join([text, *left_out])

    @property
    def note(self) -> str:
        """What was read: the text, and in a second line the probe, if there was one."""
        if self.probe is None:
            return f"text:   {self.text_note}"
        N, length = self.probe.repeated.shape
        probe = f"{N} x [start, {length // 2} random tokens of the {self.pool}, the same again]"
        return f"text:   {self.text_note}\nprobe:  {probe}"

    @property
    def loss(self) -> float:
        """The mean loss on the text, in nats a token."""
        return self.scores.losses.mean().item()

    @cached_property
    def upstream(self) -> Mapping[Head, Upstream]:
        """The upstream heads of heads, as far as they were measured."""
        if self.plain:
            return self.plain.upstream
        return upstream_heads(self.model, self.probe, self.scores, self.heads, self.ablation)

    @cached_property
    def influence(self) -> Tensor:
        """How much tokens influence predictions, (T, T); rows of nan were not computed."""
        return influence(self.model, self.shown, self.effort, self.edits)

    @cached_property
    def value_norms(self) -> Mapping[Head, Tensor]:
        """The norms of the values of a head behind the output projection, (T,); empty if that is not known."""
        # Known is what moves through an output projection that reads the output of the heads as it is; no gate between.
        is_known = len(self.att.projections) == len(self.att.calls)
        return {head: projected_values(self.att, head).norm(dim=-1).cpu() for head in self.heads if is_known}

    @cached_property
    def logit_attribution(self) -> Mapping[Head, LogitAttribution]:
        """What a head adds to logits of tokens, its direct logit attribution; empty if that is not known."""
        with suppress(UserError):
            stream, logits = look(self.model, self.shown, self.edits, slice(None), Stream)
            return attribute_logits(self.att, stream, logits, self.heads, self.effort)
        return {}

    @cached_property
    def writers(self) -> Writers:
        """Who wrote what the heads read of the text that is shown."""
        writers, _ = look(self.model, self.shown, self.edits, kind=Writers)
        return writers

    @cached_property
    def explained(self) -> tuple[list[str], Tensor]:
        """Why each token looks where it looks most strongly, as a page stores it; see `explain_strongest`."""
        return explain_strongest(self.att, self.writers, self.heads, self.effort)

    @cached_property
    def strongest(self) -> Mapping[Head, Places]:
        """The places of each head in the corpus; empty without one. Missed is a head that is asked for, or of few."""
        if self.corpus is None:
            return {}
        T = min(self.decoder.context_length or self.measured.size(1), TEXT_LENGTH)
        without = self.heads if self.asked or len(self.heads) <= MOST_EARLIER else ()
        return find_places(self.model, self.corpus, T, self.heads, self.label, without, self.ablation or "mean")

    def pattern(self, layer: int, head: int) -> Tensor:
        """Return the weights of a head, (T, T) on the CPU. Keys before the text, as a learned sink, are left out."""
        weights = self.att.pattern(layer, head)[0].cpu()
        return weights[:, -len(weights) :]

    def places(self, layer: int, head: int) -> Places:
        """Return the strongest places of a head in the corpus. Raises UserError if there was none."""
        if not self.strongest:
            raise UserError("no place was looked for, since there is no long text: give one as corpus=")
        return self.strongest[layer, head]

    def why(self, layer: int, head: int, query: int | None = None, key: int | None = None) -> Why:
        """Return why a head looks from one token of the text that is shown at another: who wrote what makes it do so.

        query, key: their numbers. None: those of the largest weight behind the first eighth of the text, of another
        token, of the first one if there is no other.

        Raises UserError for tokens that are not there, or not seen, and if it is not known.
        """
        [(layer, head)] = choose_heads([(layer, head)], self.att.shape)
        T = len(self.labels)
        parts = self.writers.parts(layer)
        weights = self.pattern(layer, head)
        elsewhere = weights.tril(-1)
        elsewhere[:, 0] *= 1e-30
        elsewhere[: T // 8] *= 1e-30  # which have few keys to choose from, as in `Places`
        query = elsewhere.amax(1).argmax().item() if query is None else query
        if query not in range(T):
            raise UserError(f"the text has tokens 0 to {T - 1}, and no token {query}")
        key = elsewhere[query].argmax().item() if key is None else key
        mask = self.att.calls[layer].of_head(head).mask[0, 0, query, -T:]
        seen = (mask > HIDES).nonzero().flatten().tolist()
        if key not in seen or len(seen) == 1:
            what = f"tokens {seen[0]} to {seen[-1]}, not {key}" if len(seen) > 1 else "itself alone"
            raise UserError(f"token {query} sees {what}: choose another key or query")
        there = slice(query, query + 1), torch.tensor([[key]])
        names, score, sides = explain(self.att, parts, (layer, head), *there)
        by = [dict(zip(names, side.flatten().tolist(), strict=True)) for side in sides]
        labels = self.labels[query], self.labels[key]
        return Why(query, key, labels, weights[query, key].item(), score.item(), sum(by[0].values()), *by)

    def table(self, heads: Heads = ()) -> str:
        """Format a line for each of these heads, and one for each kind. By default of many heads the best are shown."""
        return report(self.scores, self.heads, heads, self.upstream)

    def save(self, path: str | Path, earlier: Sequence[page.PageData] = ()) -> None:
        """Write a page (.html), a picture (.png, .svg) or arrays (.npz). A failure leaves an old file there.

        Arrays are heads (n, 2), weights (n, T, T), tokens (T,), losses (N,), and metrics by their names, (L, H).
        earlier: what `page_data` returned of earlier checkpoints, for a page of all. Raises UserError for another
        suffix, and if the heads do not fit; OSError if it cannot be written.
        """
        path = Path(path)
        check_output(path)
        content = BytesIO()
        suffix = path.suffix.lower()
        if suffix == ".html":
            content.write(page.render([*earlier, self.page_data()]).encode())
        elif suffix == ".npz":
            weights = torch.stack([self.pattern(*head) for head in self.heads])
            arrays = {"heads": self.heads, "weights": weights, "tokens": self.labels, "losses": self.scores.losses}
            np.savez_compressed(content, **self.scores.mean, **arrays)
        else:
            from tril.plots import draw_heads  # slow to import

            tiles = {f"{name_of(head)} {tag(kind_of(self.scores, head))}": self.pattern(*head) for head in self.heads}
            columns = len({head for _, head in self.heads})
            draw_heads(content, suffix[1:], self.name, self.labels, tiles, columns)
        write_file(path, content.getvalue())

    def on(self, text: Text) -> "Inspection":
        """Return the inspection of another text, by the same model and without a probe."""
        ids = self.names.ids(text)
        return inspection_of(self.decoder, self.names, ids, name=self.name, asked=self.asked, probe=None)

    @property
    def predictions(self) -> list[tuple[str, str, float | None]]:
        """The likeliest token after each token, its probability, and the loss of the one that follows, for a page."""
        shown = self.scores.predictions[: len(self.labels)]  # the first text may be shown in part
        # JSON has no infinity, and no nan. The last token is followed by none.
        return [
            (self.label(token), f"{chance:.1%}", loss if math.isfinite(loss or 0.0) else None)
            for token, chance, loss in shown
        ]

    def page_data(self, places: bool = True) -> page.PageData:
        """Return what a page shows, without the model; places: also the strongest places."""
        page.check_room(len(self.heads), len(self.labels))
        both = (self.scores.mean, self.scores.chance)
        texts = {
            "name": self.name,
            "summary": f"{self.name} · loss {self.loss:.4f} · {self.verified}",
            "heads": [  # the scores beside those of an even head
                {
                    "kind": kind_of(self.scores, head),
                    "upstream": str(self.upstream.get(head, "")),
                    "scores": {name: [number(of, name, head) for of in both] for name in METRICS},
                }
                for head in self.heads
            ],
            "predictions": self.predictions,
        }
        stored = {name_of(head): page.pack_pattern(self.pattern(*head)) for head in self.heads}
        stored["influence"] = page.pack_pattern(self.influence.nan_to_num())  # 0: not computed
        if self.value_norms:
            stored["values"] = page.pack(torch.stack([self.value_norms[head] for head in self.heads]), "<f4")
        if self.logit_attribution:
            tokens, logits = map(torch.stack, zip(*map(self.logit_attribution.get, self.heads), strict=True))
            texts["token_names"] = {token: self.label(token) for token in tokens.unique().tolist()}
            stored["logit_tokens"] = page.pack(tokens, "<i4")
            stored["logits"] = page.pack(logits, "<f4")
        try:
            texts["writers"], numbers = self.explained
            stored["why"] = page.pack(numbers, "<i4")
        except UserError as error:
            texts["unexplained"] = str(error)
        if places and self.strongest:
            stored["places"] = page.pack_places(self.strongest.values())
        heads = [*map(name_of, self.heads)]
        return page.PageData(self.note, self.labels, self.num_generated, heads, texts, stored)

    def __repr__(self) -> str:
        return f"{self.note}\n{self.verified}\n{self.table()}"

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        return page.in_frame([self.page_data()])


def write_file(path: Path, content: bytes) -> None:
    """Write a file as a whole; a failure leaves an old one there."""
    path = path.resolve()  # behind a link
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def check_output(path: Path, formats: Sequence[str] = FORMATS) -> None:
    """Raise UserError unless a file of this name can be written, and its suffix is one of these."""
    if path.suffix.lower() not in formats:
        raise UserError(f"{path}: the name of an output must end in one of {', '.join(formats)}")
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write {path}: it is a directory, or in none that can be written to")


def inspect_heads(
    model: nn.Module,
    text: Text,
    names: object = None,
    heads: str | Sequence[str] = (),
    ablate: Ablation | None = None,
    corpus: Text | None = None,
    call: Callable[[Tensor], object] | None = None,
) -> Inspection:
    """Inspect the heads of a decoder on a text, and prove their weights. What is asked of the answer is measured then.

    With ablate the scores are measured at once.

    Args:
        model: any module that reads token ids, however it attends. The way to call it is found.
        text: a text or its token ids, (T,).
        names: of tokens: a list with one for each, an encoding of tiktoken, or a tokenizer of transformers or
            tokenizers. None shows ids.
        heads: those to show, as "5.1" or ["2.*", "-1.*"]; none are all.
        ablate: measure the rise of the loss without a head, whose output becomes zero or its mean.
        corpus: a long text or its token ids, in which strongest places are looked for.
        call: a function of ids, (B, T), if the model needs more than them.

    Raises UserError if the model, text or names cannot be used, and NotTheKernels if the weights computed are not those
    that the kernel used.
    """
    if ablate:
        change_of(ablate)
    decoder = find_call(model, call=call)
    names = Names(names)
    found = inspection_of(
        decoder,
        names,
        names.ids(text),
        name=type(decoder.module).__name__,
        asked=heads,
        ablation=ablate,
        corpus=None if corpus is None else names.ids(corpus),
    )
    try:
        left_out = found.att.left_out
    except UserError as error:
        left_out = [str(error)]
    if any(UNMASKED in reason for reason in left_out):
        finding = check_causality(model, call=call).finding or ""
        if " sees " in finding:
            raise UserError(f"the model attends without a causal mask: {finding}")
    len(found.heads)  # raises now if nothing can be shown
    if found.probe:
        try:
            look(found.model, found.probe.repeated[:1])[0].scores()
        except UserError:  # some models read texts of certain lengths only, or an id as padding
            found.probe = None
    if ablate:
        len(found.scores.samples)  # measures them of these weights, which may be changed next, to compare
    return found


def inspection_of(
    decoder: Decoder,
    names: Names,
    ids: Sequence[int],
    texts: Tensor | None = None,
    tokens: Sequence[int] = (),
    **options: object,
) -> Inspection:
    """Return the inspection of a text, with these ids.

    names: of its tokens; texts: (N, T), to be measured in place of it; tokens: those to draw the probe from, by default
    all; options: fields of `Inspection`.

    Raises UserError for ids that the model does not know.
    """
    T = decoder.context_length or len(ids)
    _, shown = draw_texts(ids, T, 1)
    labels = names.labels(ids)
    measured = shown if texts is None else texts
    if not 0 <= measured.min() <= measured.max() < decoder.num_ids:
        raise UserError(f"expected tokens from 0 to {decoder.num_ids - 1}, got {measured.min()} to {measured.max()}")
    cut = f"the first {T:,} of " if T < len(ids) else ""
    known = range(min(decoder.num_ids, names.vocab_size or decoder.num_ids))
    T = decoder.context_length or measured.size(1)
    fields = {
        "probe": make_probe(tokens or known, names.special, names.start, T),
        "text_note": f"{cut}{len(ids):,} tokens",
    }
    return Inspection(decoder, names, measured, shown, labels[: shown.size(1)], **fields | options)

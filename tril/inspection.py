"""Inspect the heads of any decoder: measured, proved, and shown as a table, a page, pictures or arrays.

    found = inspect_heads("out/quickstart", "def add(a, b): return a + b")
    print(found.table())
    found.pattern(1, 3)                   # (T, T): row = query, column = key
    found.save("heads.html")              # or .png, .svg, .npz
    found                                 # in a notebook: the page

Shapes are named as in model/attention.py.
"""

import html
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from files import replace_file
from inspection.foreign import load_decoder
from inspection.inputs import Inputs, choose_inputs
from model import GPT
from model.checkpoint import STEP, Checkpoint, find_checkpoint
from model.device import autocast, dtype_name, find_device, is_fast
from tril.decoder import evaluating, read
from tril.errors import UserError, visible
from tril.experiments import Ablation, ablate, feeders, head_scores, influence
from tril.kinds import Fed, Head
from tril.look import UNMASKED, Captured, Replace, capture
from tril.metrics import HeadScores, summarise
from tril.places import Places, find_places
from tril.terminal import report
from tril.views import Said, moved, say

FORMATS = (".html", ".png", ".svg", ".npz")
NO_CORPUS = "no place was looked for: the model's validation text is not here, give one with --corpus FILE"


@dataclass(frozen=True, repr=False)
class Inspection(Inputs):
    """Everything measured on one model. A notebook shows it as its page."""

    name: str  # of the model, as "quickstart step-00000400"
    verified: str  # one line that says how the weights were verified
    scores: HeadScores
    att: Captured  # queries and keys of the text that is shown, (1, T)
    influence: Tensor  # (T, T), rows of nan were not computed
    fed: Mapping[Head, Fed] = field(default_factory=dict)  # of the heads of which it was measured what feeds them
    lengths: Mapping[Head, Tensor] = field(default_factory=dict)  # (T,), of what a head moves; empty if not known
    said: Mapping[Head, Said] = field(default_factory=dict)  # what a head makes likely; empty if not known
    strongest: Mapping[Head, Places] = field(default_factory=dict)  # empty without a corpus

    @property
    def loss(self) -> float:
        """The mean loss on the text, in nats a token."""
        return self.scores.losses.mean().item()

    def pattern(self, layer: int, head: int) -> Tensor:
        """Return the weights of a head, (T, T) on the CPU. Keys before the text, as a learned sink, are left out."""
        weights = self.att.pattern(layer, head)[0].cpu()
        return weights[:, -len(weights) :]

    def places(self, layer: int, head: int) -> Places:
        """Return the strongest places of a head in the corpus. Raises UserError if there was none."""
        if not self.strongest:
            raise UserError(NO_CORPUS)
        return self.strongest[layer, head]

    def table(self, heads: Sequence[Head] = ()) -> str:
        """Format a line for each of these heads, and one for each kind. By default of many heads the best are shown."""
        return report(self.scores, self.heads, heads, self.fed)

    def save(self, path: str | Path) -> None:
        """Write a page (.html), a picture (.png, .svg) or arrays (.npz; see docs/inspect.md).

        Raises UserError for another suffix, and if the heads do not fit; OSError if it cannot be written.
        """
        save(Path(path), [self])

    def __repr__(self) -> str:
        return f"{self.verified}\n{self.table()}"

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        from tril import page

        frame = '<iframe srcdoc="{}" style="width: 100%; height: 50rem; border: 0"></iframe>'
        return frame.format(html.escape(page.render([self])))


def save(path: Path, inspections: Sequence[Inspection]) -> None:
    """Write a page of all checkpoints, or a picture or the arrays of the last. A failure leaves an old file there."""
    from tril import page, plots  # which use an inspection; plots is slow to import

    check_output(path)
    last = inspections[-1]
    content = BytesIO()
    suffix = path.suffix.lower()
    if suffix == ".html":
        content.write(page.render(inspections).encode())
    elif suffix == ".npz":  # docs/inspect.md has the shapes
        weights = torch.stack([last.pattern(*head) for head in last.heads])
        arrays = {"heads": last.heads, "weights": weights, "tokens": last.labels, "losses": last.scores.losses}
        np.savez_compressed(content, **last.scores.mean, **arrays)
    else:
        plots.draw_heads(content, last, suffix[1:])
    replace_file(path.resolve(), content.getvalue())  # behind a link


def check_output(path: Path) -> None:
    """Raise UserError unless a file of this name can be written, and its suffix is one of FORMATS."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: the name of an output must end in one of {', '.join(FORMATS)}")
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write {path}: it is a directory, or in none that can be written to")


def inspect_heads(
    model: nn.Module | str | Path | Checkpoint,
    text: str | Sequence[int] | Tensor | None = None,
    tokenizer: object = None,
    heads: str | Sequence[str] = (),
    ablate: Ablation | None = None,
    device: str = "auto",
    complete: bool = True,
    corpus: str | Sequence[int] | Tensor | None = None,
) -> Inspection:
    """Measure the heads of a decoder on a text, and prove their weights.

    Args:
        model: any module that takes ids (B, T) however it attends, or a run, a checkpoint, a Hugging Face
            model directory, or a model OWNER/NAME of the hub.
        text: a text or its token ids; None takes the validation text of a checkpoint.
        tokenizer: one of tril or of `transformers`, or a list with a label for each token. None takes that of a
            directory; labels are then numbers for a module.
        heads: those to show, as "5.1" or ["2.*", "-1.*"]; none are all.
        ablate: measure the rise of the loss without a head, whose output becomes zero or its mean.
        device: of a model that is opened, as for `find_device`; a module stays where it is.
        complete: also measure what only a page shows: what heads take and say, the influence of tokens, and places in
            the corpus. That takes seconds on a CPU, and of a large model and corpus another minute.
        corpus: a long text or its token ids, in which strongest places are looked for. None takes the validation text
            of a checkpoint, if it is on this machine.

    Raises UserError if the model, text or tokenizer cannot be used, and NotTheKernels if the weights computed are not
    those that the kernel used.
    """
    checkpoint = None
    precision = nullcontext()
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        checkpoint = find_checkpoint(model)
        model, precision = open_model(checkpoint, find_device(device))
        name = name_of_model(checkpoint.directory)
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    with precision:
        inputs = choose_inputs(model, text, tokenizer, heads, checkpoint, corpus)
        return measure(model, inputs, name, ablate, complete, complete)


def measure(
    model: nn.Module,
    inputs: Inputs,
    name: str,
    ablation: Ablation | None,
    effort: float,
    places: bool = False,
    change: Replace | None = None,
) -> Inspection:
    """Measure the heads of a model and capture the text that is shown; see `inspect_heads`.

    effort: the part of CPU_FLOPS to spend on each extra of a page; 0 leaves them out.
    places: also find strongest places, if there is a corpus.
    change: what replaces the outputs of heads, as for `capture`, while the text is read.
    """
    scores = head_scores(model, inputs.measured, inputs.probe, change)
    if ablation:
        scores.samples["ablation"] = ablate(model, inputs.measured, inputs.heads, ablation)
    idx = inputs.shown
    with evaluating(model), torch.no_grad(), capture(model, change) as att:
        read(model, idx, slice(1))
    values = att.calls[0].values
    proved = summarise([*scores.proofs, *att.verify().values()])
    verified = f"{proved} ({dtype_name(values.dtype)}, {values.device.type})"
    if num_unmasked := att.left_out.count(UNMASKED):
        verified += f"; {num_unmasked} more layers: {UNMASKED}, python -m model.check says where"
    fed = {} if change else feeders(model, inputs.probe, scores, inputs.heads, ablation)
    strongest = find_places(model, inputs) if places and inputs.corpus is not None else {}
    found = Inspection(
        **vars(inputs),
        name=name,
        verified=verified,
        scores=scores,
        att=att,
        fed=fed,
        strongest=strongest,
        influence=torch.full((idx.size(1), idx.size(1)), torch.nan),
    )
    if not effort:
        return found
    # Known is what moves through an output projection that reads the output of the heads as it is; no gate between.
    is_known = len(att.projections) == len(att.calls)
    is_ours = is_known and isinstance(model, GPT) and len(att.calls) == len(model.blocks)
    with capture(model, change):
        shares = influence(model, idx, effort)
    return replace(
        found,
        influence=shares,
        lengths={head: moved(att, head).norm(dim=-1).cpu() for head in inputs.heads if is_known},
        said=say(model, att, inputs.heads, effort) if is_ours else {},
    )


def open_model(checkpoint: Checkpoint, device: torch.device) -> tuple[nn.Module, AbstractContextManager]:
    """Load a model, and the context in which its matrix products have the precision of the training.

    A model from elsewhere has the precision of its stored weights. Where the device is slow in that precision, the
    model is float32, and a line says so.
    """
    model = load_decoder(checkpoint, device)
    stored = next(model.parameters()).dtype
    trained = checkpoint.manifest.get("environment", {}).get("dtype")
    dtype = getattr(torch, trained) if trained in ("float32", "bfloat16", "float16") else stored
    if not is_fast(dtype, device):
        print(f"device: {device}, in float32: it is slow in {dtype_name(dtype)}, the precision of the model")
        dtype = torch.float32
    return (model, nullcontext()) if dtype == stored else (model.float(), autocast(device, dtype))


def name_of_model(directory: Path) -> str:
    """Name a model RUN step-00000400, OWNER/NAME if it came from the hub, or by its directory; safe to print."""
    directory = directory.resolve()
    if directory.parent.name == "snapshots":  # in the hub's cache
        return directory.parts[-3].removeprefix("models--").replace("--", "/")
    return visible(" ".join(directory.parts[-3::2]) if directory.match(STEP) else directory.name)

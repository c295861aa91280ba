#!/usr/bin/env python3
"""Show where the heads of a checkpoint look, by the weights of its own kernel.

Ways to start:
    python inspect_attention.py out/quickstart            all heads
    python inspect_attention.py out/quickstart --text "def f():" --heads 1.1
    python inspect_attention.py out/quickstart --text @a.py -o a.png -o a.html
    python inspect_attention.py out/quickstart/checkpoints/* -o timeline.html
    python inspect_attention.py out/one out/other -o both.html     two models
    python inspect_attention.py out/quickstart --ablate zero    a head's worth
    python inspect_attention.py out/quickstart --heads 1.1 --view places
    python inspect_attention.py out/quickstart --heads 1.1 --view why
    python inspect_attention.py out/quickstart --live           what if

The options that people need first: --text, --heads, -o, --ablate, --live.

Without --text it reads the validation text, if that is on this machine.
"""

import cores  # noqa: F401  before torch
import shutil
import sys
import textwrap
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from cli.options import parse
from cli.script import read_prompt, run_script
from errors import UserError, check_numbers
from files import expand
from inspection.checkpoints import inspect_heads, opened
from model.checkpoint import STEP, Checkpoint, find_checkpoint
from model.device import find_device
from model.sampling import Sampler
from tril import compare, terminal
from tril.experiments import Ablation
from tril.inspection import FORMATS, check_output
from tril.kinds import name_of
from tril.live import answers, serve
from tril.page import check_room


@dataclass(frozen=True)
class Options:
    __doc__ = f"{__doc__}\n{terminal.COLUMNS}"

    checkpoints: tyro.conf.Positional[tuple[str, ...]]
    """A run (its newest checkpoint), a checkpoint, a Hugging Face model directory, or OWNER/NAME or hf:OWNER/NAME on
    the Hugging Face hub; several checkpoints of one run make a timeline, two of different runs are compared."""
    text: str = ""
    """Text to read; @FILE reads a file, - standard input, @@ is an @. Left out: the model's validation text."""
    heads: tuple[str, ...] = ()
    """Heads to show, as 0.1, "2.*" (a layer), "-1.*" (the last layer) or "*.*"; after the checkpoints. Up to 16
    are also drawn. Left out: all; if these are more than 16, the table has the best of each kind."""
    view: Literal["weights", "places", "why"] = "weights"
    """What to print for these heads. weights: the text as a triangle. places: where in the corpus they look. why: why a
    token looks at another, split by who wrote to the two: embedding, heads, MLPs."""
    at: tuple[int, int] | None = None
    """The numbers of a query and a key, for --view why. Left out: where a head looks most."""
    corpus: str = ""
    """A text to search for places: a file, folder or table, as --data.source. A CPU needs a minute at most.
    Left out: the model's validation text."""
    ablate: Ablation | None = None
    """Measure the rise of the loss when a head's output is replaced by zero or by its mean, and find upstream heads.
    Left out: upstream heads are still found, by the mean, if the layers before have at most 16 heads."""
    generate: int = 0
    """Let the model continue the text by this many tokens, and inspect it all. Without --text it begins a document."""
    sampler: Annotated[Sampler, tyro.conf.arg(name="")] = Sampler(0.8)
    seed: int = 0
    """The same seed generates the same tokens."""
    output: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    """A file to write; may be repeated. .html: a page of all checkpoints. .png or .svg: a picture of the last one.
    .npz: its weights and scores as arrays."""
    live: tyro.conf.FlagCreatePairsOff[bool] = False
    """Serve the page of the last checkpoint to a browser on this machine, to try texts and to switch heads off."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a device such as cuda:1."""

    def __post_init__(self) -> None:
        check_numbers(self)


def main() -> None:
    """Inspect the checkpoints, write the outputs, and print the heads of the last one."""
    options = parse(Options, sys.argv[1:])
    if sys.argv.count("--text") > 1:
        raise UserError("--text was given twice: give one text, as in a file by --text @FILE")
    outputs = [*map(expand, options.output)]
    checkpoints = find_checkpoints(options.checkpoints)
    device = find_device(options.device)
    if options.generate and len(checkpoints) > 1:
        raise UserError(f"--generate takes one checkpoint, got {len(checkpoints)}: leave the others out")
    torch.manual_seed(options.seed)
    if options.at and options.view != "why":
        raise UserError("--at names the two tokens of --view why: give both, or neither")
    are_two = len({*map(run_of, checkpoints)}) == 2
    if are_two and (options.live or options.view != "weights"):
        raise UserError("--live and --view take one model, got two: leave them out (-o both.html is a page of both)")
    for output in outputs:
        check_output(output, FORMATS[:1] if are_two else FORMATS)
    has_page = any(path.suffix.lower() == ".html" for path in outputs)
    text = read_prompt(options.text) if options.text or options.generate else None
    earlier = []  # what a page shows of the checkpoints before the last
    last = inspect_heads(
        checkpoints[-1],
        text,
        options.heads,
        options.ablate,
        options.device,
        Path(options.corpus) if options.corpus else None,
        options.generate,
        options.sampler,
    )
    if are_two:
        both = compare(last, replace(last, **opened(checkpoints[0], device)))
        print(f"{last.note}\n\n{both}")
        for output in outputs:
            both.save(output)
            print(f"wrote {output}")
        return
    if options.view == "places" and last.corpus is None:
        raise UserError("the model's validation text is not here, give one with --corpus FILE")
    num_heads = len(last.heads)
    if has_page:  # check now, not after the work
        check_room(num_heads, len(last.labels), len(checkpoints))
    print(last.note)
    if last.num_generated:
        print("wrote:  " + "".join(last.labels[-last.num_generated :]))
    before = (replace(last, **opened(checkpoint, device)) for checkpoint in checkpoints[:-1])
    for found in chain(before, [last]):
        print(f"model:  {found.name}, loss {found.loss:.4f} on the text")
        print(textwrap.fill(found.verified, 80, initial_indent=" " * 8, subsequent_indent=" " * 8), flush=True)
        if has_page and found is not last:
            earlier.append(found.page_data(places=False))

    print(f"\n{found.name}{', on average' if len(found.scores.losses) > 1 else ''}")
    heads = found.heads if options.heads else ()
    print(found.table(heads))
    if options.view != "weights":
        for head in found.heads:
            shown = found.places(*head) if options.view == "places" else found.why(*head, *(options.at or ()))
            print(f"\nhead {name_of(head)}\n{shown}")
    elif len(heads) <= terminal.MOST_ROWS:
        for head in heads:
            print(
                f"\nhead {name_of(head)}, where it looks: a line is a query, a character a key, in the order of lines;"
                f"\nweights of 0 to 1: {' '.join(terminal.GREY)}"
            )
            print(terminal.triangle(found.pattern(*head), found.labels, shutil.get_terminal_size().columns))
    for output in outputs:
        found.save(output, earlier)
        print(f"wrote {output}")
    if options.live:
        serve(answers(found, text or ""))


def find_checkpoints(paths: tuple[str, ...]) -> list[Checkpoint]:
    """Find checkpoints, and return them by step, each once; two of different runs with the first one last.

    Raises UserError if one is not found, if there are more than two that are not of one run, or if there is none.
    """
    by_path = {checkpoint.directory.resolve(): checkpoint for checkpoint in map(find_checkpoint, paths)}
    found = [*by_path.values()]
    if len({*map(run_of, found)}) == 1:
        return [by_path[path] for path in sorted(by_path)]
    if len(found) == 2:
        return found[::-1]
    raise UserError("give a checkpoint first of all: one, two to compare, or several step-... of a run for a timeline")


def run_of(checkpoint: Checkpoint) -> Path:
    """Return the directory that the checkpoints of a run share, or that of any other checkpoint."""
    path = checkpoint.directory.resolve()
    return path.parent if path.match(STEP) else path


if __name__ == "__main__":
    run_script(main)

#!/usr/bin/env python3
"""Show where the heads of a checkpoint look, by the weights of its own kernel.

Ways to run:
    python inspect_attention.py out/quickstart            all heads
    python inspect_attention.py out/quickstart --text "def f():" --heads 1.1
    python inspect_attention.py out/quickstart --text @a.py -o a.png -o a.html
    python inspect_attention.py out/quickstart/checkpoints/* -o timeline.html
    python inspect_attention.py out/quickstart --ablate zero    a head's worth

First of all: --text, --heads, -o, --ablate, --device.

Without --text it reads the validation text, if that is on this machine.
"""

import fnmatch
import os
import shutil
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from cli.options import parse
from cli.script import BrokenPipeGuard, read_prompt, run_script, visible
from data.config import DataConfig
from data.prepare import find_prepared
from data.token_files import open_token_files
from data.tokenizer import Tokenizer, load_tokenizer
from errors import UserError
from inspection import page, terminal
from inspection.heads import Inspection, RepeatProbe, ablate, head_scores, influence, repeat_probe
from inspection.kinds import Head, name_of
from inspection.metrics import METRICS
from inspection.patterns import capture
from model import GPT, GPTConfig
from model.checkpoint import STEP, Checkpoint, find_checkpoint, nested
from model.device import autocast, dtype_name, find_device, is_fast
from model.load import load_config, load_model

FORMATS = (".html", ".png", ".svg")
NUM_TEXTS = 8  # sequences of validation text that are measured
TEXT_LENGTH = 1024  # the most tokens of each
SHOWN_LENGTH = 256  # the most tokens of it in a picture


@dataclass(frozen=True)
class Options:
    __doc__ = f"{__doc__}\nColumns and metrics; A_ij is the weight of query i for key j:\n" + "\n".join(
        textwrap.fill(f"{title:8} {name}: {meaning}", 80, initial_indent=" " * 4, subsequent_indent=" " * 13)
        for name, (title, _, meaning) in METRICS.items()
    )

    checkpoints: tyro.conf.Positional[tuple[Path, ...]]
    """A run (its newest checkpoint), a checkpoint, or a model OWNER/NAME of the Hugging Face hub; several checkpoints
    of one run make a timeline."""
    text: str | None = None
    """Text to read; @FILE reads a file, - standard input. None: the model's validation text."""
    heads: tuple[str, ...] = ()
    """Heads to show, as 0.1, "2.*" (a layer), "-1.*" (the last layer) or "*.*"; after the checkpoints. Up to 16
    are also drawn. None: all, but of more than 16 the table has the best of each kind."""
    ablate: Literal["zero", "mean"] | None = None
    """Measure the rise of the loss when a head's output is replaced by zero or by its mean."""
    output: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    """A file to write, any number of times: .html, a page of all checkpoints; .png or .svg, a picture of the last."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a device such as cuda:1."""

    @property
    def writes_page(self) -> bool:
        """Whether a page is among the outputs."""
        return any(path.suffix == ".html" for path in self.output)

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise UserError("which checkpoint? It comes first: inspect_attention.py out/quickstart --heads 0.1")
        for path in self.output:
            if path.suffix not in FORMATS:
                raise UserError(f"{path}: the name of an output must end in one of {', '.join(FORMATS)}")
            if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {path}: it is a directory, or in none that can be written to")


@dataclass(frozen=True)
class Inputs:
    """Tokens that the models read."""

    measured: Tensor  # (N, T), scores are means over these sequences
    shown: Tensor  # (1, T), the text of the pictures
    note: str  # describes `measured`
    probe: RepeatProbe | None
    pool: str  # where the tokens of the probe come from


def main() -> None:
    with redirect_stdout(BrokenPipeGuard(sys.stdout)):  # files are written also if `head` has seen enough
        inspect(parse(Options, sys.argv[1:]))


def inspect(options: Options) -> None:
    """Inspect the checkpoints, write the outputs, and print the heads of the last one."""
    checkpoints = find_checkpoints(options.checkpoints)
    newest = checkpoints[-1]
    config = load_config(newest.directory)
    tokenizer = load_tokenizer(newest.directory)
    tokenizer.check_fits(config.vocab_size)
    heads = choose_heads(options.heads, config)
    device = find_device(options.device)
    inputs = choose_inputs(options, newest, config, tokenizer)
    if options.writes_page:
        page.check_room(inputs.shown.size(1), len(heads), len(checkpoints))  # now, not after the work
    print(visible(f"text:   {inputs.note}"))
    labels = [label(tokenizer, token) for token in inputs.shown[0].tolist()]
    if probe := inputs.probe:
        drawn = f"{probe.repeat} random tokens of the {inputs.pool}"
        print(f"probe:  {len(probe.repeated)} x [start, {drawn}, the same again]")

    inspections = []
    for checkpoint in checkpoints:
        if not options.writes_page:
            inspections.clear()  # only the last one is drawn, and its queries and keys are large
        inspections.append(inspect_checkpoint(checkpoint, inputs, heads, tokenizer, device, options))
        print(f"model:  {inspections[-1].name}, loss {inspections[-1].loss:.4f} on the text")
        print(f"        {inspections[-1].verified}", flush=True)
    for output in options.output:
        path = output.resolve()  # behind a link
        with TemporaryDirectory(prefix=".tril-", dir=path.parent) as directory:  # a failure leaves the old file
            unfinished = Path(directory, path.name)
            if path.suffix == ".html":
                page.write_page(unfinished, f"scores of {inputs.note}", labels, heads, inspections)
            else:
                from inspection import plots  # slow to import

                plots.draw_heads(unfinished, inspections[-1], heads, labels)
            os.replace(unfinished, path)

    last = inspections[-1]
    print(f"\n{last.name}{', on average' if len(last.scores.losses) > 1 else ''}")
    are_many = len(heads) > terminal.MOST_ROWS
    in_table = terminal.best(last.scores.mean, heads) if are_many and not options.heads else heads
    print(terminal.table(last.scores, in_table, last.labels))
    if len(in_table) < len(heads):
        print(f'{len(in_table)} of {len(heads)} heads; --heads "*.*" shows all, and -o page.html draws them')
    print(f"\n{terminal.in_words(last.scores.mean, heads, last.labels)}")
    for head in heads if options.heads and not are_many else []:
        print(f"\nhead {name_of(head)}: a line is a query, a character is a key, in the order of the lines")
        print(terminal.triangle(last.pattern(head), labels, shutil.get_terminal_size().columns))
    for output in options.output:
        print(f"wrote {output}")


def find_checkpoints(paths: tuple[Path, ...]) -> list[Checkpoint]:
    """Find checkpoints, and return them by step, each once.

    Raises UserError if one is not found, or if there are several that are not of one run.
    """
    by_path = {checkpoint.directory.resolve(): checkpoint for checkpoint in map(find_checkpoint, paths)}
    runs = {path.parent if STEP.fullmatch(path.name) else path for path in by_path}
    if len(runs) > 1:
        raise UserError("several checkpoints make a timeline, so they must be directories step-... of one run")
    return [replace(by_path[path], directory=path) for path in sorted(by_path)]


def choose_heads(patterns: tuple[str, ...], config: GPTConfig) -> list[Head]:
    """List the heads that match, in the order of the patterns. Raises UserError for a head that does not exist."""
    L = config.n_layer  # layers are also counted from the last, which is -1
    heads = {f"{layer}.{head}": (layer % L, head) for layer in range(-L, L) for head in range(config.n_head)}
    chosen = []
    for pattern in patterns or ("*",):
        found = sorted({heads[name] for name in fnmatch.filter(heads, pattern)})
        if not found:
            shape = f"{L} layers of {config.n_head} heads, written as 0.1 0.* -1.*"
            raise UserError(f"there is no head {pattern:.80}: the model has {shape}")
        chosen += found
    return list(dict.fromkeys(chosen))


def choose_inputs(options: Options, checkpoint: Checkpoint, config: GPTConfig, tokenizer: Tokenizer) -> Inputs:
    """Read the text. Raises UserError if there is none."""
    T = config.context_length
    if options.text is None:
        measured = validation_texts(checkpoint, min(T, TEXT_LENGTH))
        shown = measured[:1, :SHOWN_LENGTH]
        note = f"{len(measured)} x {measured.size(1)} tokens of its validation text"
    else:
        ids = tokenizer.start_of_text + tokenizer.encode(read_prompt(options.text)).tolist()
        measured = shown = torch.tensor([ids[:T]])
        note = f"{len(ids)} tokens" if len(ids) <= T else f"the first {T} of {len(ids)} tokens, which fill the context"
    if measured.size(1) < 2:
        raise UserError("attention is between tokens: give a text of two or more")
    return Inputs(measured, shown, note, *make_probe(tokenizer, measured, config))


def validation_texts(checkpoint: Checkpoint, T: int) -> Tensor:
    """Return up to NUM_TEXTS texts that the model was not trained on, evenly spread, (N, T); T is less if they are few.

    Raises UserError if they are not on this machine.
    """
    fingerprint = checkpoint.trainer.get("fingerprint")
    options = nested(checkpoint.trainer, "config", "data")
    corpus = find_prepared(fingerprint, str(nested(options, "source")))
    if corpus is None and "\n" in str(fingerprint):
        with suppress(UserError, OSError, TypeError):  # token files, whose tokenizer is beside the model
            corpus = open_token_files(DataConfig(**options | {"tokenizer": "model"}), checkpoint.directory)
    if corpus is None or corpus.meta["fingerprint"] != fingerprint:
        raise UserError("the model's validation text is not here: give a text with --text")
    tokens = corpus.tokens["val"]
    T = min(T, len(tokens))
    starts = np.linspace(0, len(tokens) - T, min(NUM_TEXTS, len(tokens) // T), dtype=int)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(T)]).long()


def make_probe(tokenizer: Tokenizer, text: Tensor, config: GPTConfig) -> tuple[RepeatProbe | None, str]:
    """Draw a probe from the tokens of the text if they are many, because a model may never have seen the others.

    Returns the probe, and the name of what its tokens were drawn from.
    """
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_tokens.values()))
    seen = np.intersect1d(text, ordinary)
    start = tokenizer.document_start or ordinary.tolist()
    tokens, pool = (seen, "text") if 2 * len(seen) > min(len(ordinary), 200) else (ordinary, "vocabulary")
    return repeat_probe(torch.from_numpy(tokens), start[-1], config.context_length), pool


def inspect_checkpoint(
    checkpoint: Checkpoint,
    inputs: Inputs,
    heads: list[Head],
    tokenizer: Tokenizer,
    device: torch.device,
    options: Options,
) -> Inspection:
    """Measure a checkpoint and capture the text that is shown. Raises NotTheKernels if weights are not its kernel's."""
    model, precision = load(checkpoint, device)
    shares = None
    predictions = []
    with precision:
        scores = head_scores(model, inputs.measured, inputs.probe)
        if options.ablate:
            progress = tqdm(heads, unit="head", leave=False, disable=None)
            scores.samples["ablation"] = ablate(model, inputs.measured, progress, options.ablate)
        with capture(model) as att, torch.no_grad():
            model.hidden(inputs.shown.to(device))
        row_error = max(scores.row_error, *att.verify().values())
        if options.writes_page:
            shares, tokens, probabilities = influence(model, inputs.shown)
            names = [label(tokenizer, token) for token in tokens.tolist()]
            predictions = list(zip(names, probabilities.tolist(), strict=True))
    dtype = dtype_name(att[0][0].dtype)
    return Inspection(
        name=visible(name_of_model(checkpoint.directory)),
        verified=f"weights match the fused kernel: max row error {row_error:.1e} ({dtype}, {device.type})",
        scores=scores,
        att=att,
        influence=shares,
        predictions=predictions,
        labels=[[label(tokenizer, token) for token in layer] for layer in scores.tokens.tolist()],
    )


def name_of_model(directory: Path) -> str:
    """Name a model RUN step-00000400, OWNER/NAME if it came from the hub, or by its directory."""
    if directory.parent.name == "snapshots":  # in the hub's cache
        return directory.parts[-3].removeprefix("models--").replace("--", "/")
    return " ".join(directory.parts[-3::2]) if STEP.fullmatch(directory.name) else directory.name


def label(tokenizer: Tokenizer, token: int) -> str:
    """Show a token with every character visible: special ones in brackets, ids without text as numbers in brackets."""
    text = terminal.label(tokenizer.token_bytes(token))
    return f"⟦{text or token}⟧" if not text or token in tokenizer.special_tokens.values() else text


def load(checkpoint: Checkpoint, device: torch.device) -> tuple[GPT, AbstractContextManager]:
    """Load the model, and the context in which its matrix products have the precision of the training.

    A model from elsewhere has the precision of its stored weights. Where the device is slow in that precision, the
    model is float32, and a line says so.
    """
    if checkpoint.code_has_changed:
        print(f"note:   {checkpoint.directory.name} was trained by other code in model/; here it may be another model")
    model = load_model(checkpoint, device)
    stored = model.lm_head.weight.dtype
    trained = nested(checkpoint.manifest, "environment", "dtype")
    dtype = getattr(torch, trained) if trained in ("float32", "bfloat16", "float16") else stored
    if not is_fast(dtype, device):
        print(f"device: {device}, in float32: it is slow in {dtype_name(dtype)}, the precision of the model")
        dtype = torch.float32
    return (model, nullcontext()) if dtype == stored else (model.float(), autocast(device, dtype))


if __name__ == "__main__":
    run_script(main)

#!/usr/bin/env python3
"""See what the attention heads of a checkpoint do, and that it is what its kernel did.

Ways to look:
    python inspect_attention.py out/quickstart                                a table of every head
    python inspect_attention.py out/quickstart --text "def f(x):" --heads 2.1 last.*
    python inspect_attention.py out/quickstart --text @a.py -o heads.png -o page.html
    python inspect_attention.py out/quickstart/checkpoints/* -o timeline.png -o heads.csv
    python inspect_attention.py out/quickstart --ablate zero                  what each head is worth

Without --text it is the model's validation text.
"""

import os
import re
import shutil
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from configs import ConfigError, parse, read_prompt, run_script, visible
from data import DataError, sources
from data.prepare import find_prepared
from data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    read_files,
)
from inspection import (
    Captured,
    HeadScores,
    Probe,
    ablate,
    capture,
    files,
    head_scores,
    influence,
    page,
    plots,
    repeat_probe,
    rollout,
    terminal,
)
from inspection.metrics import DEFINITIONS
from inspection.terminal import Head
from model import GPT, GPTConfig
from model.checkpoint import STEP, find_checkpoint, read_optional
from model.load import load_config
from training.device import autocast, find_device
from training.progress import Outliving

FORMATS = (".png", ".svg", ".html", ".npz", ".safetensors", ".csv", ".json")
WINDOWS, LONGEST, PICTURED = 8, 1024, 256  # texts to measure on, their tokens at most, and those of a picture
INFLUENCE_FLOPS = 5e12  # of a page, on a CPU: half a minute
Sort = Literal["auto", "head", *(title for title, _ in terminal.COLUMNS.values())]


@dataclass(frozen=True)
class Options:
    __doc__ = f"{__doc__}\nColumns and metrics; A_ij is the weight of query i for key j:\n" + "\n".join(
        f"    {terminal.COLUMNS[name][0] if name in terminal.COLUMNS else '':8} {name}: {meaning}"
        for name, meaning in DEFINITIONS.items()
    )

    checkpoints: tyro.conf.Positional[tuple[Path, ...]]
    """A run (its newest checkpoint), a checkpoint, or a model OWNER/NAME of the Hugging Face hub; several checkpoints
    of one run make a timeline."""
    text: str | None = None
    """Text to look at; @FILE reads a file, - standard input. None: validation text."""
    heads: tuple[str, ...] = ()
    """Which heads to show, as 0.1, "2.*" or 2 (a layer), "-1.*" or "last.*"; after the checkpoints. None: all."""
    generate: int | None = None
    """Let the (last) model write so many tokens more, and look at them as they are decoded with the cache."""
    ablate: Literal["zero", "mean"] | None = None
    """Measure how much the loss rises without each head: with zeros, or its mean, in its place."""
    output: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    """A file to write, any number of times: .png, .svg, .html, .npz, .safetensors, .csv or .json."""
    sort: Sort = "auto"
    """The column that orders the table. auto: loss with --ablate, else sink, prev, dup or ind, whichever a head has
    most of."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a device such as cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products. auto: that of the training."""
    seed: int = 0
    """Draws the probe and the generated text."""

    def __post_init__(self) -> None:
        if not self.checkpoints:
            first = ", before --heads" if self.heads else ""
            raise ConfigError(f"which checkpoint{first}? As in: python inspect_attention.py out/quickstart")
        if self.generate is not None and self.generate < 1:
            raise ConfigError(f"generate must be at least 1, got {self.generate}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.sort == "loss" and self.ablate is None:
            raise ConfigError("loss is what --ablate measures: give that, or another --sort")
        for path in self.output:
            if path.suffix.lower() not in FORMATS:
                raise ConfigError(f"{path}: what is written ends in one of {', '.join(FORMATS)}")
            if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
                raise ConfigError(f"cannot write {path}: there is no directory one may write to, or it is one itself")
            if path.suffix.lower() in (".npz", ".safetensors") and len(self.checkpoints) > 1:
                raise ConfigError(f"{path} holds the queries and keys of one checkpoint, got {len(self.checkpoints)}")

    @property
    def page(self) -> bool:
        """Whether a page is asked for, which needs the most."""
        return any(path.suffix.lower() == ".html" for path in self.output)


@dataclass(frozen=True)
class Text:
    """What the models look at."""

    measured: Tensor  # (N, T): scores are a mean over these
    pictured: Tensor  # (1, T): pictures show this
    num_read: int  # tokens of it that are read at once; those behind them one by one, as they were written
    note: str  # of what is measured


@dataclass(frozen=True)
class Look:
    """What one checkpoint makes of it."""

    name: str
    step: int | None  # None: it is from elsewhere
    loss: float  # on the text, in nats a token
    config: dict
    scores: HeadScores
    att: Captured  # of the pictured text
    note: str
    influence: Tensor | None  # (T, T), nan in rows that were not computed; only for a page
    predictions: list[tuple[str, float]]


def main() -> None:
    options = parse(Options, sys.argv[1:])
    # A reader that has seen enough, as `head`, does not keep the files from being written.
    with redirect_stdout(Outliving(sys.stdout)) if options.output else nullcontext():
        inspect(options)


def inspect(options: Options) -> None:
    """Look, print a table, and write what is asked for."""
    if {path.suffix.lower() for path in options.output} & {".png", ".svg"}:
        plots.check_installed()
    directories = in_order([find_checkpoint(path) for path in options.checkpoints])
    config, tokenizer = same_shape(directories)
    heads = choose(options.heads, config)
    device = find_device(options.device)
    text = choose_text(options, directories[-1], config, tokenizer, device)
    probe = make_probe(tokenizer, text, config, options.seed)
    if probe is None and options.sort in ("dup", "ind", "(ctrl)"):
        raise ConfigError(f"{options.sort} is measured on a probe, for which vocabulary or context is too small here")
    print(visible(f"text:   {text.note}"))
    labels = [label(tokenizer, token) for token in text.pictured[0].tolist()]
    if options.generate:
        print(f"wrote:  {''.join(labels[text.num_read :])}")
    if probe:
        print(f"probe:  {len(probe.repeated)} x [start, {probe.repeat} random tokens, the same again]")

    looks = []
    for directory in directories:
        for earlier in looks if not options.page else []:
            earlier.att.layers.clear()  # only the last one is drawn, and queries and keys are large
        looks.append(look(directory, text, probe, heads, tokenizer, device, options))
        print(f"model:  {looks[-1].name}, loss {looks[-1].loss:.4f} on the text")
        print(f"        {looks[-1].note}", flush=True)
    width = shutil.get_terminal_size().columns
    print(f"\n{looks[-1].name}{', on average' if len(text.measured) > 1 else ''}")
    sort = "loss" if options.sort == "auto" and options.ablate else options.sort
    print(terminal.table(looks[-1].scores, heads, sort, width))
    for head in heads if options.heads else []:
        print(f"\nhead {terminal.name_of(head)}: a line is a query, a letter is a key, in the order of the lines")
        print(terminal.triangle(looks[-1].att.pattern(*head)[0].cpu(), labels, width))
    for path in options.output:
        for note in write(path, text, labels, heads, looks):
            print(note)
        print(f"wrote {path}")


def in_order(directories: list[Path]) -> list[Path]:
    """Checkpoints by their steps, each once. Raises ConfigError if they are not of one run."""
    directories = [directory.absolute() if directory.is_symlink() else directory.resolve() for directory in directories]
    if len({directory.parent for directory in directories}) > 1:
        names = " and ".join(sorted({str(directory.parent) for directory in directories})[:2])
        raise ConfigError(f"several checkpoints make a timeline of one run, and {names} are two")
    return sorted(dict.fromkeys(directories), key=lambda directory: step_of(directory) or 0)


def same_shape(directories: list[Path]) -> tuple[GPTConfig, Tokenizer]:
    """The shape and the tokenizer of all these checkpoints. Raises ConfigError if they differ."""
    tokenizer, config = load_tokenizer(directories[0]), load_config(directories[0])
    if tokenizer.vocab_size > config.vocab_size:
        raise DataError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}")
    for directory in directories[1:]:
        same_tokenizer = read_files(directory) == read_files(directories[0])
        if replace(load_config(directory), dropout=config.dropout) != config or not same_tokenizer:
            raise ConfigError(
                f"a timeline has checkpoints of one shape and tokenizer: those of {directory} are not those of "
                f"{directories[0]}"
            )
    return config, tokenizer


def choose(patterns: tuple[str, ...], config: GPTConfig) -> list[Head]:
    """The heads that are asked for, in order. Raises ConfigError for one that is not there."""
    chosen: dict[Head, None] = {}
    for pattern in patterns or ("*.*",):
        parts = re.fullmatch(r"(-?\d{1,9}|\*|last)(?:\.(-?\d{1,9}|\*|last))?", pattern)
        if not parts:
            first = "; checkpoints stand before --heads" if "/" in pattern else ""
            raise ConfigError(f"a head is written LAYER.HEAD, as 0.1, 0.*, -1.* or last.*, got {pattern!r}{first}")
        numbers = []
        for part, count, what in zip(
            parts.groups("*"), (config.n_layer, config.n_head), ("layers", "heads"), strict=True
        ):
            number = -1 if part == "last" else part
            if part != "*" and not -count <= int(number) < count:
                raise ConfigError(f"there is no head {pattern}: {what} are 0 to {count - 1}, or -{count} to -1")
            numbers.append(range(count) if part == "*" else [range(count)[int(number)]])
        chosen |= dict.fromkeys((layer, head) for layer in numbers[0] for head in numbers[1])
    return list(chosen)


def choose_text(
    options: Options, directory: Path, config: GPTConfig, tokenizer: Tokenizer, device: torch.device
) -> Text:
    """What to look at. Raises ConfigError or DataError if there is nothing."""
    T, num_new = config.context_length, options.generate or 0
    start = [] if options.text is None or tokenizer.start_of_text is None else [tokenizer.start_of_text]
    room = T - num_new - len(start)
    if room < 1:
        raise ConfigError(f"generate {num_new} leaves no room for a text: the context has {T} tokens")
    if options.text is None:
        tokens, note = validation_text(directory, tokenizer)
        T = min(T, LONGEST, len(tokens))
        starts = np.linspace(0, len(tokens) - T, min(WINDOWS, len(tokens) // T)).astype(int)
        measured = torch.from_numpy(tokens[starts[:, None] + np.arange(T)].astype(np.int64))
        pictured, note = measured[:1, : min(PICTURED, room)], f"{len(measured)} x {T} tokens of {note}"
    else:
        ids = tokenizer.encode(read_prompt(options.text)).tolist()
        if not ids:
            raise ConfigError("the text is empty")
        note, cut = f"{len(ids)} tokens", len(ids) - room
        if cut > 0 and num_new:  # what is written goes on from the end
            ids, note = ids[cut:], f"the last {room} of {note}: a context of {T} has no room for the first {cut}"
        elif cut > 0:
            ids, note = ids[:room], f"the first {room} of {note}: a context of {T} has no room for the last {cut}"
        measured = pictured = torch.tensor([start + ids])
    num_read = pictured.size(1)
    if num_new:
        with autocast(device, precision_of(directory, options)):
            model = load(directory, device, options)
            pictured = model.generate(pictured.to(device), num_new, temperature=0.8, seed=options.seed).cpu()
        if options.text is not None:
            measured, note = pictured, f"{note}; and {num_new} that it wrote"
    if measured.size(1) < 2:
        raise ConfigError("attention is between tokens, and the text has only one")
    return Text(measured, pictured, num_read, note)


def validation_text(directory: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, str]:
    """Ids the model was not trained on, if its corpus is here, else of the standard library; and which these are."""
    trainer = directory / "trainer.json"
    if corpus := find_prepared(
        read_optional(trainer, "fingerprint"), str(read_optional(trainer, "config", "data", "source"))
    ):
        return corpus.tokens["val"], "its validation text"
    ids: list[int] = []
    for document in sources.documents(sources.find_shards("stdlib")):
        try:
            ids += [*tokenizer.document_start, *tokenizer.encode("".join(document)).tolist()]
        except DataError as error:
            raise DataError(f"the model's validation text is not here, and {error}: give a text with --text") from error
        if len(ids) > WINDOWS * LONGEST:
            break
    return np.array(ids), "the Python standard library, as its validation text is not here (--text gives another)"


def make_probe(tokenizer: Tokenizer, text: Text, config: GPTConfig, seed: int) -> Probe | None:
    """A probe of the tokens that the text has, if they are many: the model may never have seen some of the others."""
    ordinary = torch.from_numpy(tokenizer.ordinary_tokens())
    seen = text.measured.unique()
    seen = seen[torch.isin(seen, ordinary)]
    tokens = seen if 2 * len(seen) > min(len(ordinary), 200) else ordinary
    start = tokenizer.document_start[-1:] or tokens[:1].tolist()
    return repeat_probe(tokens, start[0], config.context_length, seed=seed)


def look(
    directory: Path,
    text: Text,
    probe: Probe | None,
    heads: list[Head],
    tokenizer: Tokenizer,
    device: torch.device,
    options: Options,
) -> Look:
    """Look at the text with a checkpoint. Raises NotTheKernels if what would be shown is not what its kernel did."""
    model, shares, predictions = load(directory, device, options), None, []
    with autocast(device, precision_of(directory, options)):
        scores = head_scores(model, text.measured, probe)
        if options.ablate:
            scores.samples["ablation"] = ablation(model, text, heads, options.ablate)
        att = decode(model, text, device)
        row_error = max(scores.row_error, *att.verify().values())
        if options.page:
            shares, tokens, probabilities = explain(model, text)
            names = [label(tokenizer, token) for token in tokens.tolist()]
            predictions = list(zip(names, probabilities.tolist(), strict=True))
    dtype = str(att[0][0].dtype).removeprefix("torch.")
    return Look(
        name=visible(name_of_model(directory)),
        step=step_of(directory),
        loss=scores.losses.mean().item(),
        config=asdict(model.config),
        scores=scores,
        att=att,
        note=f"weights match the fused kernel: max row error {row_error:.1e} ({dtype}, {device.type})",
        influence=shares,
        predictions=predictions,
    )


def name_of_model(directory: Path) -> str:
    """RUN step-00000400, OWNER/NAME for what came from the hub, or the directory's name."""
    if directory.parent.name == "snapshots":  # of the hub's cache
        return directory.parts[-3].removeprefix("models--").replace("--", "/")
    return " ".join(directory.parts[-3::2]) if STEP.fullmatch(directory.name) else directory.name


def ablation(model: GPT, text: Text, heads: list[Head], mode: str) -> Tensor:
    """What the loss of each sequence rises by without each of these heads: (N, L, H), nan for the others."""
    rises = torch.full((len(text.measured), model.config.n_layer, model.config.n_head), torch.nan).double()
    found = ablate(model, text.measured, heads, mode)
    for (layer, head), rise in zip(
        heads, tqdm(found, total=len(heads), unit="head", leave=False, disable=None), strict=True
    ):
        rises[:, layer, head] = rise
    return rises


@torch.no_grad()
def decode(model: GPT, text: Text, device: torch.device) -> Captured:
    """Read the text, and what was written to it token by token, as it was written."""
    idx = text.pictured.to(device)
    caches = model.new_cache(1, idx.size(1)) if text.num_read < idx.size(1) else None
    with capture(model) as att:
        model.hidden(idx[:, : text.num_read], caches)
        for position in range(text.num_read, idx.size(1)):
            model.hidden(idx[:, position : position + 1], caches)
    return att


def explain(model: GPT, text: Text) -> tuple[Tensor, Tensor, Tensor]:
    """`influence` in a (T, T), for as many rows as there is time for, the others nan; and the predictions."""
    T = text.pictured.size(1)
    cost = 2 * T * sum(parameter.numel() for parameter in model.parameters())  # of a row, to go back through the model
    num_rows = T if model.lm_head.weight.is_cuda else min(T, max(1, int(INFLUENCE_FLOPS // cost)))
    rows = np.linspace(T - 1, 0, num_rows).astype(int)[::-1].copy()
    shares, tokens, probabilities = influence(model, text.pictured, rows.tolist())
    return torch.full((T, T), torch.nan).index_copy(0, torch.from_numpy(rows), shares), tokens, probabilities


def write(path: Path, text: Text, labels: list[str], heads: list[Head], looks: list[Look]) -> list[str]:
    """Write what the suffix asks for; returns what a reader of it should know."""
    last, kind = looks[-1], path.suffix.lower()
    title = last.name if len(looks) == 1 else f"{looks[0].name} to {last.name}"
    about = [{"checkpoint": each.name, "step": each.step, "loss": each.loss, "verified": each.note} for each in looks]
    if kind in (".csv", ".json"):
        rows = files.score_table(about, [each.scores for each in looks], heads)
        files.write_scores(path, rows, {"text": text.note, "tokens": text.pictured[0].tolist(), "labels": labels})
    elif kind in (".npz", ".safetensors"):
        files.write_tensors(
            path, last.att, text.pictured[0], last.scores.mean, {**about[0], "labels": labels, "config": last.config}
        )
    elif kind == ".html":
        names = [terminal.name_of(head) for head in heads]
        note = f"text: {text.note}"
        if not torch.equal(text.measured, text.pictured):
            note = f"scores: a mean over {text.note}; pictures: the first {text.num_read} of these"
            if text.num_read < len(labels):
                note += f", and {len(labels) - text.num_read} that it wrote"
        return page.write_page(path, f"Heads of {title}", note, labels, names, [snapshot(each) for each in looks])
    elif len(looks) > 1:
        steps = [number if each.step is None else each.step for number, each in enumerate(looks)]
        means = [each.scores.mean for each in looks]
        plots.draw_timeline(path, title, steps, [each.loss for each in looks], means, heads)
    else:
        plots.draw_heads(path, title, labels, heads, lambda head: last.att.pattern(*head)[0].cpu(), last.scores.mean)
    return []


def snapshot(look: Look) -> page.Snapshot:
    """A look, for the page."""
    mean, error = look.scores.mean, look.scores.error
    return page.Snapshot(
        name=look.name,
        step=look.step,
        loss=look.loss,
        note=look.note,
        scores={name: mean[name] for name in terminal.COLUMNS if name in mean},
        errors={name: error[name] for name in terminal.COLUMNS if name in error},
        pattern=lambda name: look.att.pattern(*map(int, name.split(".")))[0].cpu(),
        rollout=rollout(look.att)[0].cpu(),
        influence=look.influence,
        predictions=look.predictions,
    )


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token, every character of it visible; special ones in brackets, and ids that stand for nothing by number."""
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    if token in names:
        return f"⟦{terminal.label(names[token].encode())}⟧"
    return terminal.label(tokenizer.token_bytes(token)) or f"⟦{token}⟧"


def load(directory: Path, device: torch.device, options: Options) -> GPT:
    """The model; its weights are as they were stored, unless float32 is asked for."""
    return GPT.read(directory, device, torch.float32 if options.dtype == "float32" else None)


def precision_of(directory: Path, options: Options) -> torch.dtype:
    """The precision of the products: what is asked for, else that of the training."""
    name = (
        read_optional(directory / "manifest.json", "environment", "dtype") if options.dtype == "auto" else options.dtype
    )
    return getattr(torch, name) if name in ("bfloat16", "float16") else torch.float32


def step_of(directory: Path) -> int | None:
    """How long a checkpoint was trained; None if it is from elsewhere."""
    step = read_optional(directory / "trainer.json", "step")
    return step if type(step) is int and 0 <= step < 10**9 else None


if __name__ == "__main__":
    run_script(main)

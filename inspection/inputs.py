"""What is inspected: a text that a model reads, random tokens that repeat, a label for each token, and the heads."""

import fnmatch
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from cli.bars import progress_bar
from data.encoding import TOKENIZER_JSON, Tokenizer
from data.prepare import find_prepared
from data.tokenizer import load_tokenizer
from errors import UserError, errors_as_user_error
from model.checkpoint import Checkpoint
from model.sampling import Sampler
from tril.decoder import evaluating, read
from tril.experiments import PROBE_TOKENS, RepeatProbe, make_probe
from tril.kinds import Head
from tril.look import capture
from tril.terminal import label as visible_label

NUM_TEXTS = 8  # sequences of validation text that are measured
TEXT_LENGTH = 1024  # the most tokens of each
FEW = 3  # tokens that a model of any size can read
SHOWN_LENGTH = 256  # the most tokens of it in a picture
CONTEXTS = ("context_length", "max_position_embeddings", "block_size")  # the names of ours, `transformers`, nanoGPT


@dataclass(frozen=True)
class Inputs:
    """Tokens that a model reads, and the heads to show."""

    heads: Sequence[Head]
    measured: Tensor  # (N, T), scores are means over these sequences
    shown: Tensor  # (1, T), the text of the pictures
    labels: Sequence[str]  # of the T tokens that are shown
    label: Callable[[int], str]  # of any token
    note: str  # describes `measured`, and in a second line `probe`
    probe: RepeatProbe | None
    corpus: np.ndarray | None  # (n,) ids of a long text, for the strongest places; None: it is not here
    num_written: int  # of the tokens shown, so many of the last are the model's own


@torch.no_grad()
def choose_inputs(
    model: nn.Module,
    text: str | Sequence[int] | Tensor | None,
    tokenizer: object,
    heads: str | Sequence[str],
    checkpoint: Checkpoint | None = None,
    corpus: str | Sequence[int] | Tensor | None = None,
    num_tokens: int = 0,
    sampler: Sampler | None = None,
) -> Inputs:
    """Choose what a model reads and which of its heads are shown.

    text, tokenizer, heads and corpus are as in `inspect_heads`. checkpoint: has what None stands for.
    num_tokens: so many tokens the model adds to the text, as the sampler chooses; fewer if that fills the context.

    Raises UserError if the model cannot be inspected, for a head that does not exist, if there is no text, if it needs
    a tokenizer, or if the model does not know its tokens.
    """
    L, H, vocab_size = sizes_of(model)
    chosen = choose_heads(heads, L, H)
    given = tokenizer if isinstance(tokenizer, list | tuple) else ()
    tokenizer = None if given else as_tokenizer(tokenizer, checkpoint)
    if tokenizer:
        tokenizer.check_fits(vocab_size)
    T = context_length(model)
    long = validation_text(checkpoint) if corpus is None else np.array(as_ids(corpus, tokenizer))
    ids = []
    num_written = 0
    if text is not None:
        ids = as_ids(text, tokenizer)
        places = range(len(ids), min(len(ids) + num_tokens, T or math.inf))
        num_written = len(places)
        with evaluating(model):
            for _ in progress_bar(iterable=places, unit=" tokens", leave=False, delay=1):
                logits = read(model, torch.tensor([ids]), slice(-1, None))  # without a cache, as any decoder can
                ids.append(sampler.choose(logits[:, 0]).item())
        _, measured = draw_texts(np.array(ids), T or len(ids), 1)
        shown = measured
        cut = f"the first {T:,} of " if measured.size(1) < len(ids) else ""
        note = f"text:   {cut}{len(ids):,} tokens"
        if num_tokens:
            full = ", then the context was full" if num_written < num_tokens else ""
            note += f", of which the model wrote {num_written}{full}"
    elif long is not None:
        _, measured = draw_texts(long, min(T or TEXT_LENGTH, TEXT_LENGTH), NUM_TEXTS)
        shown = measured[:1, :SHOWN_LENGTH]
        origin = "its validation text" if corpus is None else "the corpus"
        size = f"{len(measured)} x {measured.size(1)} tokens of {origin}"
        note = f"text:   {size}, in pictures the first {shown.size(1)}"
    else:
        raise UserError("the model's validation text is not here: give a text with --text, or a long one with --corpus")
    if not 0 <= measured.min() <= measured.max() < vocab_size:
        raise UserError(f"expected tokens from 0 to {vocab_size - 1}, got {measured.min()} to {measured.max()}")
    if given and len(given) != len(ids):
        raise UserError(f"expected a label for each token, got {len(given)} for {len(ids)}")
    names = dict(zip(ids, given, strict=False))
    special = tokenizer.special_tokens.values() if tokenizer else ()

    @cache
    def label(token: int) -> str:
        """Show a token with every character visible: special ones and ids without text in brackets."""
        name = visible_label(tokenizer.token_bytes(token)) if tokenizer else names.get(token)
        return f"⟦{name or token}⟧" if not name or token in special else name

    seen = np.array(checkpoint.trainer.get(PROBE_TOKENS, []) if checkpoint else [])
    probe = make_probe(tokenizer, vocab_size, seen, T or measured.size(1))
    if probe:
        pool = "validation text" if len(seen) else "vocabulary"
        N, length = probe.repeated.shape
        note += f"\nprobe:  {N} x [start, {length // 2} random tokens of the {pool}, the same again]"
    labels = list(given[: shown.size(1)]) or [label(token) for token in shown[0].tolist()]
    return Inputs(chosen, measured, shown, labels, label, note, probe, long, num_written)


@torch.no_grad()
def sizes_of(model: nn.Module) -> tuple[int, int, int]:
    """Return L, H and V of a model, which reads a few tokens for that. Raises UserError if it cannot be inspected."""
    with evaluating(model), capture(model) as att:
        logits = read(model, torch.zeros(1, FEW, dtype=torch.long))
    L, _, H, _ = att.shape
    return L, H, logits.size(2)


def choose_heads(patterns: str | Sequence[str], L: int, H: int) -> list[Head]:
    """List the heads that match, in the order of the patterns; without patterns all.

    Raises UserError for a head that does not exist.
    """
    # Layers are also counted from the last, which is -1.
    heads = {f"{layer}.{head}": (layer % L, head) for layer in range(-L, L) for head in range(H)}
    chosen = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ["*"]:
        found = sorted(heads[name] for name in fnmatch.filter(heads, pattern))
        if not found:
            shape = f"{L} layers of {H} heads, written as 0.1 0.* -1.*"
            raise UserError(f"there is no head {pattern:.80}: the model has {shape}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def as_tokenizer(tokenizer: object, checkpoint: Checkpoint | None) -> Tokenizer | None:
    """Return a tokenizer of ours, or one of ours around that of `transformers`; for None that of a checkpoint.

    A directory without a tokenizer.json is read by `transformers`. Raises UserError for something else.
    """
    if tokenizer is None and checkpoint:
        directory = checkpoint.directory
        if (directory / TOKENIZER_JSON).is_file():
            return load_tokenizer(directory)
        with errors_as_user_error(f"{directory} has no {TOKENIZER_JSON}, and no tokenizer that transformers can read"):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    with errors_as_user_error("expected a tokenizer: one of tril, a fast one of transformers, or a list of labels"):
        library = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        return Tokenizer(type(tokenizer).__name__, library, [tokenizer.eos_token])


def as_ids(text: str | Sequence[int] | Tensor, tokenizer: Tokenizer | None) -> list[int]:
    """Return the ids of a text; of an empty one those that begin a document.

    Raises UserError if it has to be tokenised and there is no tokenizer.
    """
    if isinstance(text, str):
        if tokenizer is None:
            raise UserError("a text needs a tokenizer: give one, or the ids of the tokens")
        return tokenizer.start_of_text + tokenizer.encode(text).tolist() or tokenizer.document_start
    ids = torch.as_tensor(text)
    return ids.reshape(ids.size(-1)).tolist()  # also (1, T)


def context_length(model: nn.Module) -> int | None:
    """Return the most tokens that a model reads, as its configuration says; None if it does not say."""
    config = getattr(model, "config", None)
    return next((getattr(config, name) for name in CONTEXTS if hasattr(config, name)), None)


def validation_text(checkpoint: Checkpoint | None) -> np.ndarray | None:
    """Return the tokens that the model of a checkpoint was not trained on; None if they are not on this machine.

    Nor are they if no run of ours wrote the checkpoint, or if they are in token files, which are never prepared.
    """
    corpus = None
    if checkpoint:
        with suppress(LookupError, TypeError):  # no run of ours has written it
            trainer = checkpoint.trainer
            corpus = find_prepared(trainer["fingerprint"], trainer["config"]["data"]["source"])
    return corpus.tokens["val"] if corpus else None


def draw_texts(ids: np.ndarray, T: int, most: int) -> tuple[np.ndarray, Tensor]:
    """Draw up to so many texts, evenly spread: the place of the first token of each, (N,), and the ids (N, T).

    There is one at least, and T is less if the ids are few. Raises UserError if they are fewer than two.
    """
    T = min(T, len(ids))
    if T < 2:
        raise UserError("attention is between tokens: give a text of two or more")
    starts = np.linspace(0, len(ids) - T, max(1, min(most, len(ids) // T)), dtype=int)
    return starts, torch.from_numpy(ids[starts[:, None] + np.arange(T)]).long()

"""What is inspected: a text that a model reads, random tokens that repeat, a label for each token, and the heads."""

import fnmatch
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data import errors_as_user_error
from data.config import DataConfig
from data.encoding import TOKENIZER_JSON, HubTokenizer, Tokenizer
from data.known import record_of
from data.prepare import find_prepared, prepare
from data.tokenizer import load_tokenizer
from errors import UserError
from files import read_small
from inspection.decoder import device_of, evaluating, read
from inspection.heads import PROBE_LENGTH, PROBE_TOKENS, RepeatProbe, make_probe
from inspection.kinds import Head
from inspection.patterns import capture
from inspection.terminal import label as visible_label
from model.checkpoint import Checkpoint

NUM_TEXTS = 8  # sequences of validation text that are measured
TEXT_LENGTH = 1024  # the most tokens of each
SHOWN_LENGTH = 256  # the most tokens of it in a picture
CONTEXTS = ("context_length", "max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len")


@dataclass(frozen=True)
class Inputs:
    """Tokens that a model reads, and the heads to show."""

    heads: Sequence[Head]
    measured: Tensor  # (N, T), scores are means over these sequences
    shown: Tensor  # (1, T), the text of the pictures
    labels: Sequence[str]  # of the T tokens that are shown
    label: Callable[[int], str]  # of any token
    note: str  # describes `measured`
    probe: RepeatProbe | None
    probe_note: str  # describes `probe`; empty without one


def choose_inputs(
    model: nn.Module,
    text: str | Sequence[int] | Tensor | None,
    tokenizer: object,
    heads: str | Sequence[str],
    checkpoint: Checkpoint | None = None,
) -> Inputs:
    """Choose what a model reads and which of its heads are shown.

    text, tokenizer and heads are as in `inspect_heads`. checkpoint: has what None stands for.

    Raises UserError if the model cannot be inspected, for a head that does not exist, if there is no text, if it needs
    a tokenizer, or if the model does not know its tokens.
    """
    L, H, vocab_size = sizes_of(model)
    chosen = choose_heads(heads, L, H)
    if tokenizer is None and checkpoint:
        tokenizer = open_tokenizer(checkpoint.directory)
    given = tokenizer if isinstance(tokenizer, list | tuple) else ()
    tokenizer = None if given else as_tokenizer(tokenizer)
    if tokenizer and (text is None or isinstance(text, str)):
        tokenizer.check_fits(vocab_size)
        vocab_size = tokenizer.vocab_size
    T = context_length(model)
    if text is None:
        if checkpoint is None or given:
            raise UserError("which text? Only a checkpoint without a list of labels has its own")
        measured = validation_texts(checkpoint, min(T or TEXT_LENGTH, TEXT_LENGTH))
        note = f"{len(measured)} x {measured.size(1)} tokens of its validation text"
    else:
        ids = as_ids(text, tokenizer)
        if given and len(given) != len(ids):
            raise UserError(f"expected a label for each token, got {len(given)} for {len(ids)}")
        measured = torch.tensor([ids[:T]])
        note = f"{len(ids)} tokens"
        if measured.size(1) < len(ids):
            note = f"the first {T} of {len(ids)} tokens, which fill the context"
    if measured.size(1) < 2:
        raise UserError("attention is between tokens: give a text of two or more")
    if not 0 <= measured.min() <= measured.max() < vocab_size:
        raise UserError(f"expected tokens from 0 to {vocab_size - 1}, got {measured.min()} to {measured.max()}")
    shown = measured[:1, : SHOWN_LENGTH if text is None else None]
    ids = shown[0].tolist()
    names = dict(zip(ids, given, strict=False))

    def label(token: int) -> str:
        """Show a token with every character visible: special ones and ids without text in brackets."""
        if tokenizer is None:
            return names.get(token, f"⟦{token}⟧")
        name = visible_label(tokenizer.token_bytes(token))
        return f"⟦{name or token}⟧" if not name or token in tokenizer.special_tokens.values() else name

    labels = given[: len(ids)] or [label(token) for token in ids]
    with errors_as_user_error("expected ids of tokens for a probe in trainer.json"):
        seen = np.array(checkpoint.trainer.get(PROBE_TOKENS, []) if checkpoint else [], dtype=np.int64).ravel()
    probe = make_probe(tokenizer, vocab_size, seen, T or longest_probe(model, measured.size(1)))
    probe_note = ""
    if probe:
        pool = "validation text" if len(seen) else "vocabulary"
        probe_note = f"{len(probe.repeated)} x [start, {probe.repeat} random tokens of the {pool}, the same again]"
    return Inputs(chosen, measured, shown, labels, label, note, probe, probe_note)


@torch.no_grad()
def sizes_of(model: nn.Module) -> tuple[int, int, int]:
    """Return L, H and V of a model, which reads two tokens for that. Raises UserError if it cannot be inspected."""
    with evaluating(model), capture(model) as att:
        logits = read(model, torch.zeros(1, 2, dtype=torch.long, device=device_of(model)))
    L, _, H, _ = att.shape
    return L, H, logits.size(2)


def choose_heads(patterns: str | Sequence[str], L: int, H: int) -> list[Head]:
    """List the heads that match, in the order of the patterns; without patterns all.

    Raises UserError for a head that does not exist.
    """
    # Layers are also counted from the last, which is -1.
    heads = {f"{layer}.{head}": (layer % L, head) for layer in range(-L, L) for head in range(H)}
    chosen = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ["*"]:
        found = sorted({heads[name] for name in fnmatch.filter(heads, pattern)})
        if not found:
            shape = f"{L} layers of {H} heads, written as 0.1 0.* -1.*"
            raise UserError(f"there is no head {pattern:.80}: the model has {shape}")
        chosen += found
    return list(dict.fromkeys(chosen))


def longest_probe(model: nn.Module, least: int) -> int:
    """Return the length of a whole probe if a model of unknown context reads so many tokens, else `least`.

    Only a CPU is tried: on a GPU a position beyond a table ends all work of the process.
    """
    if device_of(model).type == "cpu":
        with suppress(UserError), torch.no_grad(), evaluating(model):
            read(model, torch.zeros(1, PROBE_LENGTH, dtype=torch.long), slice(1))
            return PROBE_LENGTH
    return least


def as_tokenizer(tokenizer: object) -> Tokenizer | None:
    """Return a tokenizer of ours, or one of ours around that of `transformers`. Raises UserError for something else."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        kinds = "one of tril, a fast one of transformers, or a list with a label for each token"
        raise UserError(f"expected a tokenizer: {kinds}, got {type(tokenizer).__name__}")
    content = tokenizer.backend_tokenizer.to_str().encode()
    return HubTokenizer(type(tokenizer).__name__, content, [tokenizer.eos_token])


def open_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a model directory; one without a tokenizer.json by `transformers`, if that can read it."""
    if (directory / TOKENIZER_JSON).is_file():
        return load_tokenizer(directory)
    with errors_as_user_error(f"{directory} has no {TOKENIZER_JSON}, and no tokenizer that transformers can read"):
        from transformers import AutoTokenizer

        return as_tokenizer(AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False))


def as_ids(text: str | Sequence[int] | Tensor, tokenizer: Tokenizer | None) -> list[int]:
    """Return the ids of a text. Raises UserError if it has to be tokenised and there is no tokenizer."""
    if isinstance(text, str):
        if tokenizer is None:
            raise UserError("a text needs a tokenizer: give one, or the ids of the tokens")
        return tokenizer.start_of_text + tokenizer.encode(text).tolist()
    with errors_as_user_error("expected a text, or the ids of its tokens"):
        ids = torch.as_tensor(text)
        if ids.is_floating_point() or ids.numel() != ids.size(-1):
            raise ValueError(f"got {ids.dtype} of shape {tuple(ids.shape)}")
    return ids.flatten().tolist()


def context_length(model: nn.Module) -> int | None:
    """Return the most tokens that a model reads, as its configuration says; None if it does not say."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):  # of a model that also sees or hears
        config = config.get_text_config()
    named = [getattr(config, name, None) for name in CONTEXTS]
    return next((number for number in named if isinstance(number, int) and number > 0), None)


def validation_texts(checkpoint: Checkpoint, T: int) -> Tensor:
    """Return up to NUM_TEXTS texts that the model was not trained on, evenly spread, (N, T); T is less if they are few.

    Raises UserError if they are not on this machine.
    """
    fingerprint = checkpoint.trainer.get("fingerprint")
    corpus = find_prepared(fingerprint)
    if corpus is None:
        with suppress(UserError, OSError, TypeError):
            content = read_small(checkpoint.directory.resolve().parent.parent / "config.toml")
            if record_of(content).exists():  # a run from elsewhere may name any folder
                options = tomllib.loads(content.decode())["data"]
                corpus = find_prepared(fingerprint, options["source"])
                if corpus is None and "\n" in fingerprint:  # token files, whose tokenizer is beside the model
                    corpus = prepare(DataConfig(**options), fingerprint=fingerprint, model=checkpoint.directory)
    if corpus is None:
        raise UserError("the model's validation text is not here: give a text with --text")
    tokens = corpus.tokens["val"]
    T = min(T, len(tokens))
    starts = np.linspace(0, len(tokens) - T, min(NUM_TEXTS, len(tokens) // T), dtype=int)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(T)]).long()

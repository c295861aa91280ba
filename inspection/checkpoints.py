"""Inspect checkpoints of ours, and models from elsewhere, by tril: open them, and choose what they read.

Shapes are named as in tril/weights.py; N is a number of texts.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch import nn

from cli.script import progress_bar
from data.encoding import TOKENIZER_JSON, Tokenizer
from data.prepare import find_prepared
from data.sources import DataConfig, documents
from data.tokenizer import load_tokenizer
from errors import UserError, errors_as_user_error, printable
from model.checkpoint import PROBE_TOKENS, STEP, Checkpoint, find_checkpoint, read_json, tensor_files
from model.device import autocast, dtype_name, find_device, is_fast
from model.huggingface import OWN_KEY
from model.load import load_config, load_model
from model.sampling import Sampler
from tril.decoder import Decoder, find_call, open_by_transformers
from tril.experiments import Ablation
from tril.inspection import TEXT_LENGTH, Inspection, inspection_of
from tril.look import look
from tril.texts import Names, Text, draw_texts

NUM_TEXTS = 8  # sequences of validation text that are measured
SHOWN_LENGTH = 256  # the most tokens of it in a picture


class OurNames(Names):
    """The tokens of a tokenizer of ours."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self.special = {*tokenizer.special_tokens.values()}
        self.start = tokenizer.document_start
        self.vocab_size = tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; of an empty one those that begin a document."""
        tokenizer = self.tokenizer
        return tokenizer.start_of_text + tokenizer.encode(text).tolist() or tokenizer.document_start

    def name(self, token: int) -> bytes:
        """Return the bytes that label an id."""
        return self.tokenizer.token_bytes(token)


def inspect_heads(
    place: str | Path | Checkpoint,
    text: Text | None = None,
    heads: str | Sequence[str] = (),
    ablate: Ablation | None = None,
    device: str = "auto",
    corpus: Text | Path | None = None,
    num_tokens: int = 0,
    sampler: Sampler | None = None,
) -> Inspection:
    """Inspect a run, a checkpoint, a Hugging Face model directory, or a model OWNER/NAME of the hub.

    As `tril.inspect_heads`, with what a checkpoint has of its own: its tokenizer, and its validation text, which text
    or corpus None stands for, if it is on this machine.

    device: as for `find_device`.
    corpus: a Path is read as a source of data is, a table by its rows.
    num_tokens: so many tokens the model adds to the text, as the sampler chooses; fewer if that fills the context.

    Raises UserError also if there is no text, or if the tokenizer has more tokens than the model.
    """
    checkpoint = find_checkpoint(place)
    decoder, names, name = opened(checkpoint, find_device(device)).values()
    names.tokenizer.check_fits(decoder.num_ids)
    seen = checkpoint.trainer.get(PROBE_TOKENS, [])
    if isinstance(corpus, Path):
        read = documents(DataConfig(source=str(corpus)))
        corpus = [token for document in read for token in names.ids("".join(document))]
    long = validation_text(checkpoint) if corpus is None else names.ids(corpus)
    options = {"name": name, "corpus": long, "asked": heads, "ablation": ablate}
    if seen:
        options["pool"] = "validation text"
    if text is not None:
        given = names.ids(text)
        ids = given + continued(decoder, given, num_tokens, sampler)
        found = inspection_of(decoder, names, ids, tokens=seen, num_generated=len(ids) - len(given), **options)
        if num_tokens:
            full = ", then the context was full" if found.num_generated < num_tokens else ""
            found.text_note += f", of which the model wrote {found.num_generated}{full}"
    elif long is None:
        raise UserError(
            "its validation text is not on this machine: give a text with --text, or a long one with --corpus"
        )
    else:
        _, texts = draw_texts(long, min(decoder.context_length or TEXT_LENGTH, TEXT_LENGTH), NUM_TEXTS)
        shown = texts[0, :SHOWN_LENGTH].tolist()
        origin = "its validation text" if corpus is None else "the corpus"
        options["text_note"] = f"{len(texts)} x {texts.size(1)} tokens of {origin}, in pictures the first {len(shown)}"
        found = inspection_of(decoder, names, shown, texts, seen, **options)
    len(found.heads)  # raises now if nothing can be shown
    return found


def opened(checkpoint: Checkpoint, device: torch.device) -> dict[str, object]:
    """Return the fields of an `Inspection` in which two checkpoints differ."""
    return {
        "decoder": find_call(open_model(checkpoint, device)),
        "names": OurNames(tokenizer_of(checkpoint)),
        "name": name_of_model(checkpoint.directory),
    }


def continued(decoder: Decoder, ids: list[int], num_tokens: int, sampler: Sampler | None) -> list[int]:
    """Return the tokens that a model adds to a text, without a cache, as any decoder can."""
    room = (decoder.context_length or len(ids) + num_tokens) - len(ids)
    new = []
    for _ in progress_bar(iterable=range(min(num_tokens, room)), unit=" tokens", leave=False, delay=1):
        _, logits = look(decoder.as_module(), torch.tensor([ids + new]), positions=slice(-1, None))
        new.append(sampler.choose(logits[:, 0]).item())
    return new


def open_model(checkpoint: Checkpoint, device: torch.device) -> nn.Module:
    """Load a model that multiplies matrices in the precision of its training.

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
    if dtype == stored:
        return model
    model = model.float()
    if dtype != torch.float32:
        model.forward = autocast(device, dtype)(model.forward)
    return model


def load_decoder(path: str | Path | Checkpoint, device: str | torch.device = "cpu") -> nn.Module:
    """Return a stored causal language model in eval mode: of our classes, or of those of `transformers`.

    path and device are those of `load_model`; the model may be of any type. Raises UserError if there is none, or if it
    is of another type and `transformers` is not installed or cannot open it without running code of its own.
    """
    checkpoint = find_checkpoint(path)
    directory = checkpoint.directory
    try:
        load_config(directory)
    except UserError as ours:
        if OWN_KEY in read_json(directory / "config.json"):  # `transformers` would leave out what that says
            raise
        tensor_files(directory, "model")  # an index would make `transformers` open what it names
        with errors_as_user_error(f"{ours}; for all other decoders: pip install -e '.[any]'"):
            import transformers  # noqa: F401  an extra, and slow to import
        try:
            return open_by_transformers(directory).to(device)
        except UserError as theirs:
            raise UserError(f"{theirs}; {ours}") from theirs
    return load_model(checkpoint, device)


def name_of_model(directory: Path) -> str:
    """Name a model RUN step-00000400, OWNER/NAME if it came from the hub, or by its directory; safe to print."""
    directory = directory.resolve()
    if directory.parent.name == "snapshots":  # in the hub's cache
        return directory.parts[-3].removeprefix("models--").replace("--", "/")
    return printable(" ".join(directory.parts[-3::2]) if directory.match(STEP) else directory.name)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a checkpoint; where there is no tokenizer.json, one that `transformers` reads."""
    directory = checkpoint.directory
    if (directory / TOKENIZER_JSON).is_file():
        return load_tokenizer(directory)
    with errors_as_user_error(f"{directory} has no {TOKENIZER_JSON}, and no tokenizer that transformers can read"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        library = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        return Tokenizer(type(tokenizer).__name__, library, [tokenizer.eos_token])


def validation_text(checkpoint: Checkpoint) -> np.ndarray | None:
    """Return the tokens that the model of a checkpoint was not trained on; None if they are not on this machine.

    Nor are they if no run of ours wrote the checkpoint, or if they are in token files, which are never prepared.
    """
    with suppress(LookupError, TypeError):  # no run of ours has written it
        corpus = find_prepared(checkpoint.trainer)
        return corpus.tokens["val"] if corpus else None
    return None

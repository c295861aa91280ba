"""Texts for a model: their ids, a name for each token, and parts as long as a model reads."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from tril.errors import UserError, errors_as_user_error
from tril.terminal import label as visible_label

Text = str | Sequence[int] | Tensor
TOKENIZERS = "a list of names, an encoding of tiktoken, or a tokenizer of transformers or tokenizers"


class Names:
    """The tokens of a text: names from a list, from a tokenizer, or their ids.

    given: one of TOKENIZERS, or None. Raises UserError for something else.

    Attributes:
        special: ids that are not drawn for a probe, and are shown in brackets.
        start: the ids that begin a text of a probe.
        vocab_size: the number of ids that a text can have; 0 if that is not known.
    """

    def __init__(self, given: object = None):
        self.listed = list(given) if isinstance(given, list | tuple) else []
        self.tokenizer = None if self.listed else given
        if self.tokenizer is not None and not hasattr(given, "encode"):
            raise UserError(f"names are {TOKENIZERS}, got {type(given).__name__}")
        ends = [getattr(given, name, None) for name in ("eot_token", "eos_token_id", "bos_token_id")]
        self.start = [token for token in ends if token is not None] or [0]
        self.special = {*getattr(given, "all_special_ids", []), *(self.start if self.tokenizer is not None else [])}
        self.vocab_size = getattr(given, "n_vocab", 0)
        self.known: dict[int, str] = {}  # names of ids so far

    def ids(self, text: Text) -> list[int]:
        """Return the ids of a text, given as text or ids: (T,), or (1, T). Raises UserError for anything else."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise UserError("a text needs a tokenizer: give one of tiktoken, transformers or tokenizers, or ids")
            with errors_as_user_error(f"{type(self.tokenizer).__name__}.encode cannot read the text"):
                return self.encode(text)
        with errors_as_user_error("a text is ids, (T,)"):
            ids = torch.as_tensor(text)
        if ids.dim() == 2 and len(ids) == 1:
            ids = ids[0]
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise UserError(f"a text is ids, (T,) whole numbers, got {ids.dtype} of shape {tuple(ids.shape)}")
        return ids.tolist()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text by the tokenizer."""
        try:
            found = self.tokenizer.encode(text, add_special_tokens=False)
        except TypeError:  # of tiktoken, where the name of a special token is ordinary text
            found = self.tokenizer.encode(text, disallowed_special=())
        return list(getattr(found, "ids", found))

    def labels(self, ids: Sequence[int]) -> list[str]:
        """Return names of the tokens of a text. Raises UserError if names were given, of another number."""
        if self.listed and len(self.listed) != len(ids):
            raise UserError(f"expected a name for each token, got {len(self.listed)} for {len(ids)}")
        self.known |= zip(ids, self.listed, strict=False)
        return self.listed or [*map(self.label, ids)]

    def label(self, token: int) -> str:
        """Return the name of an id with every character visible; in brackets special ones, and ids without a name."""
        if token not in self.known:
            name = visible_label(self.name(token))
            self.known[token] = f"⟦{name or token}⟧" if not name or token in self.special else name
        return self.known[token]

    def name(self, token: int) -> str | bytes:
        """Return the text of an id by the tokenizer; empty if it has none."""
        tokenizer = self.tokenizer
        if hasattr(tokenizer, "decode_single_token_bytes"):  # tiktoken
            with suppress(KeyError):
                return tokenizer.decode_single_token_bytes(token)
        to_piece = getattr(tokenizer, "convert_ids_to_tokens", getattr(tokenizer, "id_to_token", None))
        piece = to_piece(token) if to_piece else None
        if not piece:
            return ""
        text = tokenizer.decode([token], skip_special_tokens=False)
        # SentencePiece drops a space in front; a part of a character has no text.
        return piece.replace("\u2581", " ") if "\u2581" in piece or "\ufffd" in text or not text else text


def draw_texts(ids: Sequence[int], T: int, most: int) -> tuple[np.ndarray, Tensor]:
    """Draw up to so many texts, evenly spread: the place of the first token of each, (N,), and the ids (N, T).

    There is one at least, and T is less if the ids are few. Raises UserError if they are fewer than two.
    """
    T = min(T, len(ids))
    if T < 2:
        raise UserError("attention is between tokens: give a text of two or more")
    starts = np.linspace(0, len(ids) - T, max(1, min(most, len(ids) // T)), dtype=int)
    return starts, torch.from_numpy(np.asarray(ids)[starts[:, None] + np.arange(T)]).long()

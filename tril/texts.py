"""Texts for a model: their ids, a name for each token, and parts as long as a model reads."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from tril.errors import UserError, errors_as_user_error
from tril.terminal import label as visible_label

Text = str | Sequence[int] | Tensor


class Names:
    """Ids and names of tokens: by a list of names for one text, or by a tokenizer; without either a name is the id.

    given: None, such a list, an encoding of tiktoken, or a tokenizer of transformers or tokenizers.

    Attributes:
        special: ids that are not drawn for a probe, and are shown in brackets.
        start: the ids that begin a text of a probe.
        vocab_size: the number of ids that a text can have; 0 if that is not known.
    """

    vocab_size = 0

    def __init__(self, given: object = None):
        is_list = isinstance(given, list | tuple)
        if not (given is None or is_list or hasattr(given, "decode")):
            raise UserError(f"names are a list, or a tokenizer, not {type(given).__name__}")
        self.listed = [*map(visible_label, given)] if is_list else None
        self.tokenizer = None if is_list else given
        self.known: dict[int, str] = {}  # names so far
        self.special = getattr(given, "all_special_ids", [])
        ends = []
        for name in ("eot_token", "eos_token_id", "bos_token_id"):
            with suppress(KeyError):  # of an encoding without it
                ends.append(getattr(given, name, None))
        self.start = [token for token in ends if token is not None] or [0]

    def ids(self, text: Text) -> list[int]:
        """Return the ids of a text, given as text or ids: (T,), or (1, T). Raises UserError for anything else."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise UserError("a text needs a tokenizer: give one of tiktoken, transformers or tokenizers, or ids")
            return self.encode(text)
        with errors_as_user_error("a text is ids, (T,)"):
            ids = torch.atleast_2d(torch.as_tensor(text))
        if len(ids) != 1 or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise UserError(f"a text is ids, (T,) whole numbers, got {ids.dtype} of shape {tuple(ids.shape)}")
        return ids[0].tolist()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text by the tokenizer."""
        with errors_as_user_error("the tokenizer cannot encode the text"):
            found = self.tokenizer.encode(text)
            return list(getattr(found, "ids", found))

    def name(self, token: int) -> str | bytes:
        """Return the text of an id by the tokenizer; empty if it has none, or a part of a character."""
        with suppress(UserError), errors_as_user_error("there may be none, or one of fewer ids"):
            text = self.tokenizer.decode([token])
            return text if "\ufffd" not in text else ""
        return ""

    def labels(self, ids: Sequence[int]) -> list[str]:
        """Return names of the tokens of a text. Raises UserError if names were given, of another number."""
        if self.listed is None:
            return [*map(self.label, ids)]
        if len(self.listed) != len(ids):
            raise UserError(f"expected a name for each token, got {len(self.listed)} for {len(ids)}")
        self.known |= zip(ids, self.listed, strict=True)
        return self.listed

    def label(self, token: int) -> str:
        """Return the name of an id with every character visible; in brackets special ones, and ids without a name."""
        if token not in self.known:
            name = visible_label(self.name(token))
            self.known[token] = f"⟦{name or token}⟧" if not name or token in self.special else name
        return self.known[token]


def draw_texts(ids: Sequence[int], T: int, most: int) -> tuple[np.ndarray, Tensor]:
    """Draw up to so many texts, evenly spread: the place of the first token of each, (N,), and the ids (N, T).

    There is one at least, and T is less if the ids are few. Raises UserError if they are fewer than two.
    """
    T = min(T, len(ids))
    if T < 2:
        raise UserError("attention is between tokens: give a text of two or more")
    starts = np.linspace(0, len(ids) - T, max(1, min(most, len(ids) // T)), dtype=int)
    return starts, torch.from_numpy(np.asarray(ids)[starts[:, None] + np.arange(T)]).long()

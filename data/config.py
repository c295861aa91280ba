"""The options of data preparation."""

import os
from dataclasses import dataclass

from errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """The text to learn from."""

    source: str = "stdlib"
    """stdlib (the Python standard library); a file, folder or glob of text, JSON lines, Parquet or CSV;
    hf:NAME[:CONFIG][@REVISION] on the Hugging Face hub; a directory made by data.prepare, as it was made;
    or a folder or glob of datatrove's token files (.ds)."""
    tokenizer: str = "bpe:4096"
    """bytes, chars, bpe:SIZE (trained on the source), a tiktoken name such as gpt2 or o200k_base,
    the path of a tokenizer.json; or model: that of train.init_from."""
    text_column: str = "text"
    """The column that holds the text, in tables and hub data sets."""
    max_tokens: int | None = None
    """Stop tokenising after about this many tokens. None: everything. chars and bpe may learn from text beyond them."""
    val_fraction: float = 0.1
    """Share of the documents that is kept for validation. Of one document, or of token files, it is the end."""
    val_source: str | None = None
    """Token files to validate on. None: the end of those of the source."""

    def __post_init__(self) -> None:
        for name in ("source", "val_source"):
            if path := getattr(self, name):
                object.__setattr__(self, name, os.path.expanduser(path))
        if not 0 < self.val_fraction < 1:
            raise UserError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {self.max_tokens}")

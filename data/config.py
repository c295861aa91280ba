"""The options of data preparation."""

import os
from dataclasses import dataclass

from errors import check_numbers


@dataclass(frozen=True)
class DataConfig:
    """The text to learn from."""

    source: str = "stdlib"
    """stdlib (the Python standard library); a file, folder or glob of text,
    JSON, CSV, TSV or Parquet; hf:NAME[:CONFIG][@REVISION][#SPLIT] on the
    hub of Hugging Face; a directory made by data.prepare; a folder or glob of
    datatrove's token files (.ds); or bin:PATH, one of llm.c's shards (.bin)."""
    tokenizer: str = "bpe:4096"
    """bytes, chars, bpe:SIZE (trained on the source), a tiktoken name such as gpt2 or o200k_base,
    the path of a tokenizer.json; or model: that of train.init_from."""
    text_column: str = "text"
    """The column that holds the text, in tables and hub data sets."""
    max_tokens: int | None = None
    """Stop at this many tokens in both splits, or a piece of text later. None: everything. chars and bpe may learn from
    text beyond them. Where the text to validate on is not part of the source, as with val_source or llm.c's shards,
    these are the tokens of training."""
    val_fraction: float = 0.1
    """Share of the documents that is kept for validation. Of a few documents, or of token files, it is the end.
    Shards of llm.c have their own validation."""
    val_source: str = ""
    """A text of its own to validate on, of the same kinds. Left out: val_fraction of the source."""

    def __post_init__(self) -> None:
        for name in ("source", "val_source"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        check_numbers(self, max_tokens=(1, 1e30), val_fraction=(1e-9, 0.999999))

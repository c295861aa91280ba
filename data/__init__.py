"""From any text to batches of tokens: sources.py reads, tokenizer.py splits, prepare.py writes, batches.py draws."""


class DataError(ValueError):
    """A corpus, tokenizer or prompt that cannot be used; the message is for the user."""

    exit_code = 2

"""From any text to batches of tokens.

sources.py reads, tokenizer.py splits, tokenise.py writes, corpus.py opens, batches.py draws; prepare.py is the command.
With parts.py and directories.py several processes share its work; hub_tokenizer.py has what tiktoken cannot be.
"""


class DataError(ValueError):
    """A corpus, tokenizer or prompt that cannot be used; the message is for the user."""

    exit_code = 2

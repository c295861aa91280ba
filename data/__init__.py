"""From any text to batches of tokens.

sources.py reads text, tokenizer.py makes and loads tokenizers, encoding.py turns text into ids and back, tokenise.py
writes files of ids, corpus.py opens them, batches.py draws batches. prepare.py is the command.
"""


class DataError(ValueError):
    """A corpus, tokenizer or prompt that cannot be used. The message is for the user."""

    exit_code = 2

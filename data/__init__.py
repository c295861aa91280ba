"""From any text to batches of tokens.

sources.py reads text, tokenizer.py makes and loads tokenizers, encoding.py turns text into ids and back, tokenise.py
writes files of ids, corpus.py opens them, token_files.py opens those of datatrove, batches.py draws batches.
The command is prepare.py, with the options of config.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from errors import UserError


@contextmanager
def errors_as_user_error(problem: str) -> Iterator[None]:
    """Raise UserError, "problem: kind: message", for any error of a library, including a panic of its Rust code."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic is no Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{problem}: {reason:.160}") from error

"""The one exception for what a user can mend, and text that is safe to print."""

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

# Unicode's categories of controls, formats (as writing from right to left), surrogates, ends of lines and paragraphs.
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
# The joiner and the non-joiner, unless a letter of Arabic or Indic scripts or an emoji follows, which may need them.
LONE = re.compile("[\u200c\u200d](?![\u0600-\u1cff\u2190-\u2bff\U00010000-\U0001ffff])")


class UserError(Exception):
    """A mistake that the user can mend. The message is one sentence for the user: expected, got, what to do."""

    exit_code = 2


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
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        reason = re.sub("HTTPS?ConnectionPool.host='(.*?)'.*", r"no answer from \1", reason)  # of urllib3
        raise UserError(f"{problem}: {reason:.300}") from error


def printable(text: str) -> str:
    """Return the text with escapes for characters that nobody sees, or that a terminal would obey."""
    text = LONE.sub(lambda found: ascii(found[0])[1:-1], text)
    shown = {"\n", "\t", "\u200c", "\u200d"}
    hidden = [letter for letter in {*text} - shown if unicodedata.category(letter) in HIDDEN]
    return text.translate({ord(letter): letter.encode("unicode_escape").decode() for letter in hidden})

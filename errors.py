"""The one exception for what a user can mend, and its two commonest uses. Every room may use them."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real


class UserError(Exception):
    """A mistake that the user can mend. The message is one sentence for the user: expected, got, what to do."""

    exit_code = 2


def check_numbers(options: object, **ranges: tuple[float, float]) -> None:
    """Raise UserError unless every number in a dataclass is in its range, from 0 to 1e30 by default."""
    for name, value in vars(options).items():
        least, most = ranges.get(name, (0, 1e30))
        if isinstance(value, Real) and not least <= value <= most:
            raise UserError(f"{name} must be a number from {least:,} to {most:,}, got {value}")


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
        raise UserError(f"{problem}: {reason:.300}") from error

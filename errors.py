"""The one exception for what a user can mend, and the check that most numbers need. Every room may use both."""

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

"""The one exception for what a user can mend, and the check that most numbers need. Every room may use both."""

from numbers import Integral, Real


class UserError(ValueError):
    """A mistake that the user can mend. The message is one sentence for the user: expected, got, what to do."""

    exit_code = 2


def check_ranges(options: object, ranges: dict[str, tuple[float, float]]) -> None:
    """Raise UserError unless each field has its default or a number in its range: whole if that ends with an int."""
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        kind, type_of = ("whole number", Integral) if isinstance(most, int) else ("number", Real)
        is_right = isinstance(value, type_of) and not isinstance(value, bool) and least <= value <= most
        if not is_right and value is not getattr(type(options), name):
            raise UserError(f"{name} must be a {kind} from {least:,} to {most:,}, got {value!r:.60}")

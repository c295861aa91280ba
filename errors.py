"""What every room may use for a mistake that the user can mend. The class is that of `tril`."""

from numbers import Real

from tril.errors import UserError, errors_as_user_error, printable

__all__ = ["UserError", "check_numbers", "errors_as_user_error", "printable"]


def check_numbers(options: object, **ranges: tuple[float, float]) -> None:
    """Raise UserError unless every number in a dataclass is in its range, by default the 32 bits of a CPU's seed."""
    for name, value in vars(options).items():
        least, most = ranges.get(name, (0, 2**32 - 1 if isinstance(value, int) else 1e30))
        if isinstance(value, Real) and not least <= value <= most:
            upto = f"from {least:,} to {most:,}" if most < 1e30 else f"of at least {least:,}"
            raise UserError(f"{name} must be a number {upto}, got {value}")

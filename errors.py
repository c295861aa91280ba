"""The one exception for what a user can mend. Every room may raise it."""


class UserError(ValueError):
    """A mistake that the user can mend. The message is one sentence for the user: expected, got, what to do."""

    exit_code = 2

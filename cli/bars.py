"""The older name of `cli.script.progress_bar`, until nobody imports it from here."""

from cli.script import progress_bar  # noqa: F401

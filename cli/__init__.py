"""The interface to a person at a terminal: options, exit codes, prompts, text that is safe to print, progress bars."""

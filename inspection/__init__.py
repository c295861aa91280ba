"""Our checkpoints, opened for `tril`: their model, text, tokenizer, and the tokens of their probe."""

from inspection.checkpoints import inspect_heads

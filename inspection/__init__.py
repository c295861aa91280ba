"""What attention heads do: patterns.py takes the queries and keys the kernel saw, and proves what it made of them."""

from inspection.patterns import Captured, NotTheKernels, capture

__all__ = ["Captured", "NotTheKernels", "capture"]

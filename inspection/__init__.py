"""What attention heads do: capture.py takes the queries and keys the kernel saw, and proves what it made of them."""

from inspection.capture import Captured, NotTheKernels, capture

__all__ = ["Captured", "NotTheKernels", "capture"]

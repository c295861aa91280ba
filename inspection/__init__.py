"""Attention heads: captured, measured, drawn, and proved to be those that met the values."""

from inspection.heads import ablate, head_scores, influence, repeat_probe
from inspection.inspection import Inspection, inspect_heads
from inspection.patterns import Captured, NotTheKernels, capture

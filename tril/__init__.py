"""Attention heads: captured, measured, drawn, and proved to be those that met the values."""

from tril.experiments import ablate, head_scores, influence, repeat_probe
from tril.inspection import Inspection, inspect_heads
from tril.look import Captured, NotTheKernels, capture

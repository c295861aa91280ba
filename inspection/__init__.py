"""Attention heads: captured, measured, drawn, and proved to be what the fused kernel computed."""

from inspection.heads import ablate, head_scores, influence, repeat_probe
from inspection.inspection import Inspection, inspect_heads
from inspection.patterns import Captured, NotTheKernels, capture

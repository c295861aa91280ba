"""Attention heads: captured, measured, drawn, and proved to be what the fused kernel computed."""

from inspection.heads import HeadScores, Inspection, RepeatProbe, ablate, as_json, head_scores, influence, repeat_probe
from inspection.patterns import Captured, NotTheKernels, capture

__all__ = [
    "Captured",
    "HeadScores",
    "Inspection",
    "NotTheKernels",
    "RepeatProbe",
    "ablate",
    "as_json",
    "capture",
    "head_scores",
    "influence",
    "repeat_probe",
]

"""What attention heads do: seen, measured, drawn, and proved to be what the kernel did."""

from inspection.heads import HeadScores, Probe, ablate, head_scores, influence, repeat_probe, rollout
from inspection.patterns import Captured, NotTheKernels, capture

__all__ = [
    "Captured",
    "HeadScores",
    "NotTheKernels",
    "Probe",
    "ablate",
    "capture",
    "head_scores",
    "influence",
    "repeat_probe",
    "rollout",
]

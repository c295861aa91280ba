"""Measurements: bench.py runs what one machine can tell, the other scripts answer one question each."""

"""Measurements: bench.py is run by make bench, the other scripts answer one question each."""

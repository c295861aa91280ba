"""What train.py names and a reader may skip: its options, the device, the optimizer, and the run directory."""

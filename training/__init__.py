"""Parts of training that train.py names and a reader may skip: options, device, optimizer, run directory."""

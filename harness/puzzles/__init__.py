"""A folder for each puzzle. Its `spec.py` is what the harness knows of it: data, and a reference that is a function."""

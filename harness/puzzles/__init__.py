"""One folder per puzzle. The harness starts from its `spec.py`: data, and a reference function."""

"""One folder per puzzle. Its `spec.py` is all that the harness needs: data, and a reference function."""

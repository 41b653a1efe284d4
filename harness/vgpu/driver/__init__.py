"""The driver side of the virtual GPU: stand-in CUDA libraries and the two ways to reach the executor."""

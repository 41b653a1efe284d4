"""The kernels of cross-entropy over rows of logits, and of a training step."""

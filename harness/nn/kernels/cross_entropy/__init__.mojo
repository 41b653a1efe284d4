"""The kernels of cross-entropy over rows of logits."""

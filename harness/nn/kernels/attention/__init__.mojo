"""The kernels of attention on tensor cores, with masks, dropout and unequal lengths."""

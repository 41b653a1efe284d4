"""The kernels of LayerNorm + Linear: rows, products, and what is launched."""

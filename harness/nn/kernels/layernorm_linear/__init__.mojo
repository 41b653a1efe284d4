"""LayerNorm + Linear: kernels, launches, and the choice among them."""

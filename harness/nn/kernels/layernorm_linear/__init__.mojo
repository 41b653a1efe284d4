"""LayerNorm + Linear: its kernels, their launches, and the choice among them."""

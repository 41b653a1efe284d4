"""The second engine of the virtual GPU: kernels as machine code, with the same checks. `engine.py` is its
interface."""

"""Emitters of each opcode's NumPy code, and the code generator that calls them."""

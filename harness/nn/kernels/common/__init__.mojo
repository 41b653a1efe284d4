"""Code shared by the layers' kernels: matrix products, launches on a caller's stream, calls over the C
ABI.
"""

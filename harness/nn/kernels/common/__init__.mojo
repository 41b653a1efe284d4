"""Code that the layers' kernels share: products, launches on a stream of the caller's, and calls over the C ABI."""

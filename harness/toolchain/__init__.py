"""Build Mojo and C++ code: the compiler and its messages, op packages, shared libraries, the cache."""

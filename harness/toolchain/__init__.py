"""Build Mojo and C++ code: compilers and their messages, op packages, shared libraries, the cache."""

"""Build Mojo files: the compiler, its messages, packages, extension modules, the cache."""

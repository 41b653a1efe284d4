"""From Mojo files to something that runs: the compiler, its messages, packages, extension modules, the cache."""

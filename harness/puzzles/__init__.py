"""One module for each puzzle: its spec is data, its reference a function."""

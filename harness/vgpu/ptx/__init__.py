"""The text of kernels: parser, control-flow graph, and the source locations of instructions."""

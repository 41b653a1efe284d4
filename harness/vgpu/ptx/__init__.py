"""PTX: the parser, control-flow graphs, and the source locations of instructions."""

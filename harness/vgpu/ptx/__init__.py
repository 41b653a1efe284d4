"""The text of kernels: what PTX says, its control-flow graph, and where its instructions stand in the
source."""

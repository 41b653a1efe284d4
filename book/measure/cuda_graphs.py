"""What the tools that time on a GPU share: a call as a CUDA graph."""

from collections.abc import Callable

import torch


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A call as a graph. It runs on a side stream before, so that nothing is built or chosen within the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph

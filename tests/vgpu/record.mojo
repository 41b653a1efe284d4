"""Prints the PTX of the graph's sum kernel, with a line table when run with -g1."""

from graph_ops.sums import add_and_overrun
from max.gpu.host.compile import get_gpu_target
from std.compile import compile_info


def main() raises:
    var info = compile_info[add_and_overrun, emission_kind="asm", target=get_gpu_target["sm_90a"]()]()
    print(info.asm)

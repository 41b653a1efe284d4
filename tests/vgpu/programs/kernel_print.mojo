"""Printing from inside a kernel: two threads of each of three blocks say who they are."""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext


def greet(factor: Int32):
    if thread_idx.x % 2 == 0:
        print("block", block_idx.x, "thread", thread_idx.x, "value", Int(factor) * thread_idx.x)


def main() raises:
    with DeviceContext() as ctx:
        ctx.enqueue_function[greet](Int32(7), grid_dim=3, block_dim=4)
        ctx.synchronize()

"""Argument checks of custom ops."""

from extensibility import ManagedTensorSlice


def expect_shape[
    rank: Int, //
](name: StaticString, tensor: ManagedTensorSlice[rank=rank, ...], *shape: Int) raises:
    """Raise if a tensor's shape differs from `shape`."""
    for axis in range(rank):
        if tensor.dim_size(axis) != shape[axis]:
            raise Error(t"{name} has size {tensor.dim_size(axis)} along axis {axis}, expected {shape[axis]}")

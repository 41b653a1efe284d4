"""Check of a custom op before it accesses memory."""

from extensibility import ManagedTensorSlice


def expect_shape[
    rank: Int, //
](name: StaticString, tensor: ManagedTensorSlice[rank=rank, ...], *shape: Int) raises:
    """Raise if a tensor's shape differs from that of the parameters or the other tensors."""
    for axis in range(rank):
        if tensor.dim_size(axis) != shape[axis]:
            raise Error(t"{name} has size {tensor.dim_size(axis)} along axis {axis}, expected {shape[axis]}")

"""What a custom op checks before it touches memory."""

from extensibility import ManagedTensorSlice


def expect_shape[
    rank: Int, //
](name: StaticString, tensor: ManagedTensorSlice[rank=rank, ...], *shape: Int) raises:
    """Raises where a tensor's shape is not what the parameters or the other tensors make it."""
    for axis in range(rank):
        if tensor.dim_size(axis) != shape[axis]:
            raise Error(t"{name} has size {tensor.dim_size(axis)} along axis {axis}, expected {shape[axis]}")

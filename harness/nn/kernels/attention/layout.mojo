"""What the launches of the fast variant ask of a type and of the tensors: whether tensor cores take them."""

from std.sys import default_accelerator, has_accelerator

from .scores import Strides
from .tensors import FlashSizes

comptime WIDE = 128
"""The largest head dimension of the kernels of unequal lengths, of dropout and of a mask's gradient."""


def has_tensor_cores[dtype: DType]() -> Bool:
    """Whether NVIDIA's tensor cores multiply this type, on the GPU of this build."""
    comptime if has_accelerator():
        return dtype.is_half_float() and default_accelerator().is_nvidia_gpu()
    else:
        return False


def contiguous(heads: Int32, length: Int32, d: Int32) -> Strides:
    """The strides of a tensor [B, heads, length, d] without gaps."""
    var row = Int64(d)
    return Strides(Int64(heads) * Int64(length) * row, Int64(length) * row, row, 0)


@fieldwise_init
struct Layout(Copyable, Movable):
    """The strides of all tensors of a pass."""

    var query: Strides
    var key: Strides
    var value: Strides
    var output: Strides
    var grad_output: Strides
    var grad_query: Strides
    var grad_key: Strides
    var grad_value: Strides

    @staticmethod
    def without_gaps(sizes: FlashSizes) -> Self:
        """Of contiguous tensors."""
        var rows = contiguous(sizes.query_heads, sizes.query_len, sizes.head_dim)
        var keys = contiguous(sizes.key_heads, sizes.key_len, sizes.head_dim)
        return Self(rows, keys, keys, rows, rows, rows, keys, keys)

"""The strides of a pass's tensors, and whether tensor cores support a dtype."""

from std.sys import default_accelerator, has_accelerator

from .scores import Strides
from .tensors import FlashSizes

comptime MAX_OPTION_HEAD_DIM = 128
"""The largest head dimension for unequal lengths, dropout and a mask's gradient."""


def has_tensor_cores[dtype: DType]() -> Bool:
    """Return whether the build's GPU has NVIDIA tensor cores for this dtype."""
    comptime if has_accelerator():
        return dtype.is_half_float() and default_accelerator().is_nvidia_gpu()
    else:
        return False


def contiguous(heads: Int32, length: Int32, d: Int32) -> Strides:
    """Return the strides of a contiguous tensor [B, heads, length, d]."""
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
    def contiguous_layout(sizes: FlashSizes) -> Self:
        """Return the strides of contiguous tensors."""
        var rows = contiguous(sizes.query_heads, sizes.query_len, sizes.head_dim)
        var keys = contiguous(sizes.key_heads, sizes.key_len, sizes.head_dim)
        return Self(rows, keys, keys, rows, rows, rows, keys, keys)

"""What the launches of the fast variant ask of a type and of the tensors: whether tensor cores take them."""

from std.sys import default_accelerator, has_accelerator

from .scores import Strides
from .tiles import CHUNK
from .tensors import FlashBackward, FlashSizes
from shared.common import ImmPtr

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


def fits_chunks[dtype: DType](tensor: ImmPtr[dtype], strides: Strides) -> Bool:
    """Whether every row begins where 16 bytes do."""
    var together = strides[0] | strides[1] | strides[2]
    return Int(tensor) % 16 == 0 and together % CHUNK == 0


def is_aligned[dtype: DType, //](t: FlashBackward[dtype], layout: Layout) -> Bool:
    """Whether the `aligned` kernels take the tensors."""
    var plain = fits_chunks(t.query, layout.query) and fits_chunks(t.key, layout.key)
    plain = plain and fits_chunks(t.value, layout.value)
    plain = plain and fits_chunks(t.grad_output, layout.grad_output)
    plain = plain and fits_chunks(t.grad_query.as_imm(), layout.grad_query)
    plain = plain and fits_chunks(t.grad_key.as_imm(), layout.grad_key)
    plain = plain and fits_chunks(t.grad_value.as_imm(), layout.grad_value)
    return plain and t.sizes.head_dim % CHUNK == 0

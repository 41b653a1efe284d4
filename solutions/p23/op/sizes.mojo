"""The sizes of puzzle 23 in the type of the kernels' arguments, their checks before a launch, and structs with the
tensors of each pass of the flash kernels. A kernel takes addresses as separate arguments, and the sizes as one vector.
"""

from std.math import sqrt

from .shared.common import accum_type
from .tiles import MAX_HEAD

comptime MAX_COLUMNS = 16 * 65535
"""Maximum keys, or elements of a head: tiles of 16 along a grid of at most 65535 blocks."""
comptime PackedSizes = SIMD[DType.int32, 8]
"""The sizes as a flash kernel's argument."""


@fieldwise_init
struct Sizes(Copyable, Movable):
    """The sizes of a problem: `batches` is batch times heads, B * N."""

    var batches: Int32
    var query_len: Int32
    var key_len: Int32
    var head_dim: Int32

    def rows(self) -> Int:
        """Return the rows of the scores: one for each query of each head."""
        return Int(self.batches) * Int(self.query_len)

    def scores(self) -> Int:
        """Return the number of scores: B * N * S * T."""
        return self.rows() * Int(self.key_len)

    def scale(self) -> Float64:
        """Return the factor of the scores: 1 / sqrt(head_dim)."""
        return 1 / sqrt(Float64(self.head_dim))


def validate_sizes(batch: Int, heads: Int, query_len: Int, key_len: Int, head_dim: Int) raises -> Sizes:
    """Return the sizes in the kernels' type; raise if a kernel does not support them."""
    if head_dim < 1:
        raise Error(t"the head dimension must be at least 1, got {head_dim}")
    if head_dim > MAX_COLUMNS or key_len > MAX_COLUMNS:
        raise Error(
            t"key length and head dimension must be at most {MAX_COLUMNS}, got {key_len} and {head_dim}"
        )
    if batch * heads * query_len > Int(Int32.MAX):
        raise Error(
            t"batch * heads * query length must be at most {Int32.MAX}, got {batch} * {heads} * {query_len}"
        )
    return Sizes(Int32(batch * heads), Int32(query_len), Int32(key_len), Int32(head_dim))


# ---- The flash kernels ---------------------------------------------------------------------------------------


@fieldwise_init
struct FlashSizes(Copyable, Movable):
    """The sizes of a problem for the flash kernels: N query heads share G heads of key and value, N / G share each.
    """

    var batch: Int32
    var query_heads: Int32
    var key_heads: Int32
    var query_len: Int32
    var key_len: Int32
    var head_dim: Int32

    @always_inline
    def __init__(out self, packed: PackedSizes):
        """Unpack the sizes of `packed`."""
        self.batch = packed[0]
        self.query_heads = packed[1]
        self.key_heads = packed[2]
        self.query_len = packed[3]
        self.key_len = packed[4]
        self.head_dim = packed[5]

    def packed(self) -> PackedSizes:
        """Return the sizes as a kernel argument."""
        var sizes = PackedSizes(0)
        sizes[0] = self.batch
        sizes[1] = self.query_heads
        sizes[2] = self.key_heads
        sizes[3] = self.query_len
        sizes[4] = self.key_len
        sizes[5] = self.head_dim
        return sizes

    @always_inline
    def heads(self) -> Int:
        """Return the query heads of the whole batch: B * N."""
        return Int(self.batch) * Int(self.query_heads)

    @always_inline
    def shared_heads(self) -> Int:
        """Return the heads of key and value of the whole batch: B * G."""
        return Int(self.batch) * Int(self.key_heads)

    @always_inline
    def group(self) -> Int:
        """Return the number of query heads that share a head of key and value: N / G."""
        return Int(self.query_heads) // Int(self.key_heads)

    @always_inline
    def shared_head(self, head: Int) -> Int:
        """Return a query head's head of key and value; both are counted across the batch."""
        return head // self.group()


@fieldwise_init
struct FlashForward[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The outputs and inputs of the forward pass."""

    var output: Pointer[Scalar[Self.dtype], Self.written]  # [B, N, S, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [B, N, S]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var mask: Pointer[Scalar[Self.dtype], Self.read]  # [S, T]
    var sizes: FlashSizes
    var scale: Scalar[accum_type[Self.dtype]]


@fieldwise_init
struct FlashBackward[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The outputs of the backward pass, three gradients, and its inputs."""

    var grad_query: Pointer[Scalar[Self.dtype], Self.written]  # [B, N, S, d]
    var grad_key: Pointer[Scalar[Self.dtype], Self.written]  # [B, G, T, d]
    var grad_value: Pointer[Scalar[Self.dtype], Self.written]  # [B, G, T, d]
    var grad_output: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S]
    var delta: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S], rowsum(dO * O)
    var mask: Pointer[Scalar[Self.dtype], Self.read]  # [S, T]
    var sizes: FlashSizes
    var scale: Scalar[accum_type[Self.dtype]]


def validate_flash_sizes(
    batch: Int, query_heads: Int, key_heads: Int, query_len: Int, key_len: Int, head_dim: Int
) raises -> FlashSizes:
    """Return the sizes in the kernels' type; raise if a flash kernel does not support them."""
    _ = validate_sizes(batch, query_heads, query_len, key_len, head_dim)
    if head_dim > MAX_HEAD:
        raise Error(t"the head dimension must be at most {MAX_HEAD}, got {head_dim}")
    if key_heads < 1 or query_heads % key_heads != 0:
        raise Error(
            t"the heads of query must be a multiple of those of key and value, got {query_heads} and"
            t" {key_heads}"
        )
    return FlashSizes(
        Int32(batch), Int32(query_heads), Int32(key_heads), Int32(query_len), Int32(key_len), Int32(head_dim)
    )

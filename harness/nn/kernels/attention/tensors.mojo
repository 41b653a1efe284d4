"""Sizes, options and tensors of the passes of attention.

Launch functions take a pass's tensors as one value; a kernel takes addresses as separate arguments, and the
sizes as one vector.
"""

from shared.common import accum_type

comptime PackedSizes = SIMD[DType.int32, 16]
"""The sizes as a kernel argument."""


@fieldwise_init
struct FlashSizes(Copyable, Movable):
    """The sizes of a problem, and the layout of its mask.

    N query heads share G heads of key and value: N / G query heads share each. A query sees keys up to its
    own position plus `diagonal`: 0 for a causal mask from the top left, key_len - query_len from the bottom
    right, key_len for all keys. The mask's strides are in elements, 0 along a broadcast axis. One element of
    it applies to `mask_block` queries and as many keys.
    """

    var batch: Int32
    var query_heads: Int32
    var key_heads: Int32
    var query_len: Int32
    var key_len: Int32
    var head_dim: Int32
    var diagonal: Int32
    var mask_b: Int32
    var mask_n: Int32
    var mask_s: Int32
    var mask_t: Int32
    var mask_block: Int32

    @always_inline
    def __init__(out self, packed: PackedSizes):
        """Unpack the sizes from a kernel argument."""
        self.batch = packed[0]
        self.query_heads = packed[1]
        self.key_heads = packed[2]
        self.query_len = packed[3]
        self.key_len = packed[4]
        self.head_dim = packed[5]
        self.diagonal = packed[6]
        self.mask_b = packed[7]
        self.mask_n = packed[8]
        self.mask_s = packed[9]
        self.mask_t = packed[10]
        self.mask_block = packed[11]

    def packed(self) -> PackedSizes:
        """Return the sizes as a kernel argument."""
        var sizes = PackedSizes(0)
        sizes[0] = self.batch
        sizes[1] = self.query_heads
        sizes[2] = self.key_heads
        sizes[3] = self.query_len
        sizes[4] = self.key_len
        sizes[5] = self.head_dim
        sizes[6] = self.diagonal
        sizes[7] = self.mask_b
        sizes[8] = self.mask_n
        sizes[9] = self.mask_s
        sizes[10] = self.mask_t
        sizes[11] = self.mask_block
        return sizes

    @always_inline
    def heads(self) -> Int:
        """Return B * N, the query heads of the whole batch."""
        return Int(self.batch) * Int(self.query_heads)

    @always_inline
    def shared_heads(self) -> Int:
        """Return B * G, the heads of key and value of the whole batch."""
        return Int(self.batch) * Int(self.key_heads)

    @always_inline
    def group(self) -> Int:
        """Return N / G, the query heads that share a head of key and value."""
        return Int(self.query_heads) // Int(self.key_heads)

    @always_inline
    def shared_head(self, head: Int) -> Int:
        """Return the key/value head of a query head; both indices count across the batch."""
        return head // self.group()

    @always_inline
    def head_mask_offset(self, head: Int) -> Int:
        """Return the offset of a query head's mask."""
        return head // Int(self.query_heads) * Int(self.mask_b) + head % Int(self.query_heads) * Int(
            self.mask_n
        )

    @always_inline
    def mask_offset(self, query: Int, key: Int) -> Int:
        """Return the offset, within a head's mask, of a query and a key."""
        var block = Int(self.mask_block)
        return query // block * Int(self.mask_s) + key // block * Int(self.mask_t)

    @always_inline
    def visible_keys(self, query: Int) -> Int:
        """Return the number of keys, from the first on, that a query sees."""
        return max(0, min(Int(self.key_len), query + Int(self.diagonal) + 1))

    @always_inline
    def first_query(self, key: Int) -> Int:
        """Return the first query that sees a key."""
        return max(0, key - Int(self.diagonal))

    def rows(self) -> Int:
        """Return B * N * S, the queries of all heads."""
        return self.heads() * Int(self.query_len)


@fieldwise_init
struct FlashForward[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The tensors of the forward pass."""

    var output: Pointer[Scalar[Self.dtype], Self.written]  # [B, N, S, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [B, N, S]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var mask: Pointer[Scalar[Self.dtype], Self.read]
    var sizes: FlashSizes
    var scale: Scalar[accum_type[Self.dtype]]


@fieldwise_init
struct FlashBackward[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The tensors of the backward pass."""

    var grad_query: Pointer[Scalar[Self.dtype], Self.written]  # [B, N, S, d]
    var grad_key: Pointer[Scalar[Self.dtype], Self.written]  # [B, G, T, d]
    var grad_value: Pointer[Scalar[Self.dtype], Self.written]  # [B, G, T, d]
    var grad_output: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [B, N, S, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [B, G, T, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S]
    var delta: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, N, S], rowsum(dO * O)
    var mask: Pointer[Scalar[Self.dtype], Self.read]
    var sizes: FlashSizes
    var scale: Scalar[accum_type[Self.dtype]]

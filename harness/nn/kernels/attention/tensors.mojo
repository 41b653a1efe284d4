"""What the fused variant of puzzle 23 computes on: its sizes, with the options that they hold, and the tensors of a pass.

Launch functions take a pass's tensors as one value; a kernel takes addresses, and the sizes as one vector.
"""

from shared.common import accum_type

comptime PackedSizes = SIMD[DType.int32, 16]
"""The sizes as a kernel argument."""


@fieldwise_init
struct FlashSizes(Copyable, Movable):
    """The sizes of a problem, and how the mask is read.

    N query heads share G heads of key and value, N / G each. `diagonal` is how many keys further than its own place a query
    sees: 0 for a causal mask from the top left, key_len - query_len from the bottom right, key_len for all of them. The
    mask's strides are in elements, 0 along an axis that it does not have. One element of it stands for `mask_block` queries
    and as many keys.
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
        """The sizes that `packed` made an argument of."""
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
        """The sizes as a kernel argument."""
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
        """Query heads of the whole batch: B * N."""
        return Int(self.batch) * Int(self.query_heads)

    @always_inline
    def shared_heads(self) -> Int:
        """Heads of key and value of the whole batch: B * G."""
        return Int(self.batch) * Int(self.key_heads)

    @always_inline
    def group(self) -> Int:
        """How many query heads share a head of key and value: N / G."""
        return Int(self.query_heads) // Int(self.key_heads)

    @always_inline
    def shared_head(self, head: Int) -> Int:
        """The head of key and value that a query head reads, both counted through the batch."""
        return head // self.group()

    @always_inline
    def mask_of(self, head: Int) -> Int:
        """Where the mask of a query head begins."""
        return head // Int(self.query_heads) * Int(self.mask_b) + head % Int(self.query_heads) * Int(
            self.mask_n
        )

    @always_inline
    def mask_at(self, query: Int, key: Int) -> Int:
        """Where in a head's mask the element of a query and a key is."""
        var block = Int(self.mask_block)
        return query // block * Int(self.mask_s) + key // block * Int(self.mask_t)

    @always_inline
    def keys_seen(self, query: Int) -> Int:
        """The keys that a query can see are the first so many."""
        return max(0, min(Int(self.key_len), query + Int(self.diagonal) + 1))

    @always_inline
    def first_query(self, key: Int) -> Int:
        """The first query that can see a key."""
        return max(0, key - Int(self.diagonal))

    def rows(self) -> Int:
        """Queries of all heads: B * N * S."""
        return self.heads() * Int(self.query_len)


@fieldwise_init
struct FlashForward[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """What the forward pass writes, and what it reads."""

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
    """What the backward pass writes, the three gradients, and what it reads."""

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

"""The data of windowed attention, provided: its sizes, and the tensors of each pass in one struct."""

from std.math import ceildiv, sqrt

from .shared.common import accum_type

comptime PackedSizes = SIMD[DType.int32, 8]
"""The sizes as a kernel argument."""
comptime TILE = 16
"""Side of a block's square of scores; the tile size is a multiple of it."""
comptime MAX_HEAD = 256
"""Maximum head dimension: a thread keeps one of every TILE elements of a row in registers."""


@fieldwise_init
struct WindowSizes(Copyable, Movable):
    """The sizes of a problem: `batches` is batch times heads, `length` the number of cells, `tile` the positions per tile.
    """

    var batches: Int32
    var length: Int32
    var head_dim: Int32
    var width: Int32
    var radius: Int32
    var tile: Int32

    @always_inline
    def __init__(out self, packed: PackedSizes):
        """Unpack the sizes from `packed`."""
        self.batches = packed[0]
        self.length = packed[1]
        self.head_dim = packed[2]
        self.width = packed[3]
        self.radius = packed[4]
        self.tile = packed[5]

    def packed(self) -> PackedSizes:
        """Return the sizes as a kernel argument."""
        var sizes = PackedSizes(0)
        sizes[0] = self.batches
        sizes[1] = self.length
        sizes[2] = self.head_dim
        sizes[3] = self.width
        sizes[4] = self.radius
        sizes[5] = self.tile
        return sizes

    @always_inline
    def tiles(self) -> Int:
        """Return the number of tiles of positions: ceil(length / tile)."""
        return ceildiv(Int(self.length), Int(self.tile))

    @always_inline
    def in_window(self, query: Int, key: Int) -> Bool:
        """Return whether a query's cell sees a key's cell."""
        var W = Int(self.width)
        return max(abs(query // W - key // W), abs(query % W - key % W)) <= Int(self.radius)

    @always_inline
    def scale(self) -> Float64:
        """Return the factor of the scores: 1 / sqrt(head_dim)."""
        return 1 / sqrt(Float64(self.head_dim))


@fieldwise_init
struct WindowForward[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The outputs and inputs of the forward pass."""

    var output: Pointer[Scalar[Self.dtype], Self.written]  # [batches, L, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [batches, L]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var order: Pointer[Int32, Self.read]  # [L]
    var tiles: Pointer[Int32, Self.read]  # [t, t]
    var sizes: WindowSizes


@fieldwise_init
struct WindowBackward[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The outputs of the backward pass, the gradients and delta = rowsum(dO * O), and its inputs."""

    var grad_query: Pointer[Scalar[Self.dtype], Self.written]  # [batches, L, d]
    var grad_key: Pointer[Scalar[Self.dtype], Self.written]  # [batches, L, d]
    var grad_value: Pointer[Scalar[Self.dtype], Self.written]  # [batches, L, d]
    var delta: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [batches, L]
    var grad_output: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var query: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var key: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var value: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var output: Pointer[Scalar[Self.dtype], Self.read]  # [batches, L, d]
    var lse: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [batches, L]
    var order: Pointer[Int32, Self.read]  # [L]
    var tiles: Pointer[Int32, Self.read]  # [t, t]
    var sizes: WindowSizes

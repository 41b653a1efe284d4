"""The sizes of puzzle 23, in the type in which kernels take them, and what is checked of them before a launch."""

from std.math import sqrt

comptime MOST_COLUMNS = 16 * 65535
"""Keys, or elements of a head, at most: tiles of 16 along a grid that ends at 65535."""


@fieldwise_init
struct Sizes(Copyable, Movable):
    """The sizes of a problem: `batches` is batch times heads, B * N."""

    var batches: Int32
    var query_len: Int32
    var key_len: Int32
    var head_dim: Int32

    def rows(self) -> Int:
        """Rows of the scores: one for each query of each head."""
        return Int(self.batches) * Int(self.query_len)

    def scores(self) -> Int:
        """How many scores there are: B * N * S * T."""
        return self.rows() * Int(self.key_len)

    def scale(self) -> Float64:
        """What the scores are multiplied by: 1 / sqrt(head_dim)."""
        return 1 / sqrt(Float64(self.head_dim))


def checked_sizes(batch: Int, heads: Int, query_len: Int, key_len: Int, head_dim: Int) raises -> Sizes:
    """The sizes in the kernels' type, or an error where a kernel cannot cover them."""
    if head_dim < 1:
        raise Error(t"the head dimension must be at least 1, got {head_dim}")
    if head_dim > MOST_COLUMNS or key_len > MOST_COLUMNS:
        raise Error(
            t"key length and head dimension must be at most {MOST_COLUMNS}, got {key_len} and {head_dim}"
        )
    if batch * heads * query_len > Int(Int32.MAX):
        raise Error(
            t"batch * heads * query length must be at most {Int32.MAX}, got {batch} * {heads} * {query_len}"
        )
    return Sizes(Int32(batch * heads), Int32(query_len), Int32(key_len), Int32(head_dim))

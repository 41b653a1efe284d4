"""Sizes and tensors of the passes of LayerNorm + Linear.

Launch functions take a pass's tensors as one value; a kernel takes the addresses that it needs as separate
arguments. Their origins are parameters of the struct, because the compiler does not allow fields with unbound
origins.
"""

from shared.common import accum_type


@fieldwise_init
struct Sizes(Copyable, Movable):
    """The sizes of a problem, in the type of the kernels' arguments."""

    var batch_size: Int32
    var seq_len: Int32
    var hidden_dim: Int32
    var output_dim: Int32

    def rows(self) -> Int32:
        """Return batch_size * seq_len."""
        return self.batch_size * self.seq_len


@fieldwise_init
struct ForwardTensors[
    dtype: DType, x_dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin
](Copyable, Movable):
    """The tensors of a forward pass; the input, gamma and beta are in `x_dtype`."""

    var output: Pointer[Scalar[Self.dtype], Self.written]  # [B, S, O]
    var mean: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [B, S]
    var rstd: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [B, S]
    var input: Pointer[Scalar[Self.x_dtype], Self.read]  # [B, S, H]
    var ln_weight: Pointer[Scalar[Self.x_dtype], Self.read]  # [H], gamma
    var ln_bias: Pointer[Scalar[Self.x_dtype], Self.read]  # [H], beta
    var linear_weight: Pointer[Scalar[Self.dtype], Self.read]  # [O, H]
    var linear_bias: Pointer[Scalar[Self.dtype], Self.read]  # [O]
    var sizes: Sizes
    var eps: Scalar[accum_type[Self.dtype]]


@fieldwise_init
struct BackwardTensors[
    dtype: DType, x_dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin
](Copyable, Movable):
    """The tensors of a backward pass; the input, gamma, beta and their gradients are in `x_dtype`."""

    var grad_input: Pointer[Scalar[Self.x_dtype], Self.written]  # [B, S, H]
    var grad_ln_weight: Pointer[Scalar[Self.x_dtype], Self.written]  # [H], dgamma
    var grad_ln_bias: Pointer[Scalar[Self.x_dtype], Self.written]  # [H], dbeta
    var grad_weight: Pointer[Scalar[Self.dtype], Self.written]  # [O, H]
    var grad_bias: Pointer[Scalar[Self.dtype], Self.written]  # [O]
    var grad_output: Pointer[Scalar[Self.dtype], Self.read]  # [B, S, O], dy
    var input: Pointer[Scalar[Self.x_dtype], Self.read]  # [B, S, H]
    var mean: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, S]
    var rstd: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, S]
    var ln_weight: Pointer[Scalar[Self.x_dtype], Self.read]  # [H], gamma
    var ln_bias: Pointer[Scalar[Self.x_dtype], Self.read]  # [H], beta
    var linear_weight: Pointer[Scalar[Self.dtype], Self.read]  # [O, H]
    var sizes: Sizes

"""The data of puzzle 22: its sizes, and the tensors of each pass in one struct.

Launch functions and the CPU paths take these structs; a kernel takes the addresses that it needs as separate arguments.
The addresses are like `ImmPtr` and `MutPtr`, but the compiler requires unbound origins to be parameters of a struct.
"""

from .shared.common import accum_type


@fieldwise_init
struct Sizes(Copyable, Movable):
    """The four sizes of a problem, in the type of the kernels' arguments."""

    var batch_size: Int32
    var seq_len: Int32
    var hidden_dim: Int32
    var output_dim: Int32

    def rows(self) -> Int32:
        """Return the number of sequence positions, batch_size * seq_len."""
        return self.batch_size * self.seq_len


@fieldwise_init
struct ForwardTensors[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The outputs and inputs of a forward pass."""

    var output: Pointer[Scalar[Self.dtype], Self.written]  # [B, S, O]
    var mean: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [B, S]
    var rstd: Pointer[Scalar[accum_type[Self.dtype]], Self.written]  # [B, S]
    var input: Pointer[Scalar[Self.dtype], Self.read]  # [B, S, H]
    var ln_weight: Pointer[Scalar[Self.dtype], Self.read]  # [H], gamma
    var ln_bias: Pointer[Scalar[Self.dtype], Self.read]  # [H], beta
    var linear_weight: Pointer[Scalar[Self.dtype], Self.read]  # [O, H]
    var linear_bias: Pointer[Scalar[Self.dtype], Self.read]  # [O]
    var sizes: Sizes
    var eps: Scalar[accum_type[Self.dtype]]


@fieldwise_init
struct BackwardTensors[dtype: DType, written: MutOrigin = MutAnyOrigin, read: ImmOrigin = ImmutAnyOrigin](
    Copyable, Movable
):
    """The outputs of a backward pass, five gradients, and its inputs."""

    var grad_input: Pointer[Scalar[Self.dtype], Self.written]  # [B, S, H]
    var grad_ln_weight: Pointer[Scalar[Self.dtype], Self.written]  # [H], dgamma
    var grad_ln_bias: Pointer[Scalar[Self.dtype], Self.written]  # [H], dbeta
    var grad_weight: Pointer[Scalar[Self.dtype], Self.written]  # [O, H]
    var grad_bias: Pointer[Scalar[Self.dtype], Self.written]  # [O]
    var grad_output: Pointer[Scalar[Self.dtype], Self.read]  # [B, S, O], dy
    var input: Pointer[Scalar[Self.dtype], Self.read]  # [B, S, H]
    var mean: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, S]
    var rstd: Pointer[Scalar[accum_type[Self.dtype]], Self.read]  # [B, S]
    var ln_weight: Pointer[Scalar[Self.dtype], Self.read]  # [H], gamma
    var ln_bias: Pointer[Scalar[Self.dtype], Self.read]  # [H], beta
    var linear_weight: Pointer[Scalar[Self.dtype], Self.read]  # [O, H]
    var sizes: Sizes

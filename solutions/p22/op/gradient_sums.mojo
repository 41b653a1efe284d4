"""What comes before and after a kernel whose blocks add to sums of parameter gradients: clearing them, and rounding them."""

from max.gpu import global_idx

from .shared.common import ImmPtr, MutPtr


def clear_gradients_kernel[
    dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_weight: MutPtr[dtype],  # [O, H]
    grad_bias: MutPtr[dtype],  # [O]
    hidden_dim: Int32,
    output_dim: Int32,
):
    """Zeroes what the fused backward kernel adds to. One thread owns one element of grad_weight.

    This is a launch of its own because nothing inside a kernel makes one block wait for another: a block that
    clears in the same launch may wipe out what the others have already added.
    """
    var index = global_idx.x
    if index < Int(hidden_dim):
        grad_ln_weight[unsafe_offset=index] = 0
        grad_ln_bias[unsafe_offset=index] = 0
    if index < Int(output_dim):
        grad_bias[unsafe_offset=index] = 0
    if index < Int(output_dim) * Int(hidden_dim):
        grad_weight[unsafe_offset=index] = 0


def convert_gradients_kernel[
    dtype: DType, sum_dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_weight: MutPtr[dtype],  # [O, H]
    grad_bias: MutPtr[dtype],  # [O]
    sums_ln_weight: ImmPtr[sum_dtype],  # [H]
    sums_ln_bias: ImmPtr[sum_dtype],  # [H]
    sums_weight: ImmPtr[sum_dtype],  # [O, H]
    sums_bias: ImmPtr[sum_dtype],  # [O]
    hidden_dim: Int32,
    output_dim: Int32,
):
    """Rounds the sums of the fused backward pass to the dtype of the gradients. One thread owns one element of dW.
    """
    var index = global_idx.x
    if index < Int(hidden_dim):
        grad_ln_weight[unsafe_offset=index] = sums_ln_weight[unsafe_offset=index].cast[dtype]()
        grad_ln_bias[unsafe_offset=index] = sums_ln_bias[unsafe_offset=index].cast[dtype]()
    if index < Int(output_dim):
        grad_bias[unsafe_offset=index] = sums_bias[unsafe_offset=index].cast[dtype]()
    if index < Int(output_dim) * Int(hidden_dim):
        grad_weight[unsafe_offset=index] = sums_weight[unsafe_offset=index].cast[dtype]()

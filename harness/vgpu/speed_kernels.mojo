"""Prints the PTX of the puzzle's kernels, without a GPU and without MAX: `mojo run -g1 -I solutions/p22 FILE`.

Each kernel comes after a line `//==NAME:DTYPE`. speed.py measures them, and a test compares them with NumPy.
"""

from max.gpu.host.compile import get_gpu_target
from std.compile import compile_info

from op.common import accum_type
from op.layernorm_linear import (
    add_bias_kernel,
    clear_gradients_kernel,
    column_sums_kernel,
    convert_gradients_kernel,
    layernorm_kernel,
    ln_backward_input,
    ln_backward_parameters,
    ln_backward_row_sums,
    matmul_idiomatic_tiled,
    minimal_fused_backward_kernel,
    minimal_fused_forward_kernel,
    row_statistics_kernel,
    transpose_kernel,
)


def show[F: TrivialRegisterPassable, //, f: F](name: StaticString, dtype: DType):
    """Prints a heading and the PTX of one kernel."""
    var info = compile_info[f, emission_kind="asm", target=get_gpu_target["sm_90a"]()]()
    print("//==", name, ":", dtype, sep="")
    print(info.asm)


def show_all[dtype: DType]():
    """Every kernel of the puzzle for one dtype."""
    show[row_statistics_kernel[dtype]]("row_statistics", dtype)
    show[layernorm_kernel[dtype]]("layernorm", dtype)
    show[transpose_kernel[dtype]]("transpose", dtype)
    show[matmul_idiomatic_tiled[dtype]]("matmul", dtype)
    show[add_bias_kernel[dtype]]("add_bias", dtype)
    show[minimal_fused_forward_kernel[dtype]]("fused_forward", dtype)
    show[ln_backward_row_sums[dtype]]("row_sums", dtype)
    show[ln_backward_input[dtype]]("backward_input", dtype)
    show[column_sums_kernel[dtype]]("column_sums", dtype)
    show[ln_backward_parameters[dtype]]("backward_parameters", dtype)
    show[clear_gradients_kernel[accum_type[dtype]]]("clear", dtype)
    show[minimal_fused_backward_kernel[dtype]]("fused_backward", dtype)
    show[convert_gradients_kernel[dtype]]("convert", dtype)


def main():
    show_all[DType.float32]()
    show_all[DType.bfloat16]()

"""The matrix products of the fast variant: which kernel, and with which geometry."""

from std.math import ceildiv
from max.gpu.host import Dim

from shared.common import ImmPtr, MutPtr, multiprocessors
from .gemm_hopper_launches import launch_gemm_hopper, suits_hopper
from .gemm_portable import GEMM_THREADS, gemm_kernel
from shared.launcher import Launcher

comptime TILE = 128
"""Side of the tiles of c where there are enough of them to fill the GPU."""
comptime SMALL_TILE = 64
"""Side of the tiles of a small c."""


def launch_gemm[
    L: Launcher,
    //,
    dtype: DType,
    operands: StaticString,
    with_bias: Bool,
    tf32: Bool = False,
](
    mut launcher: L,
    name: StaticString,
    c: MutPtr[dtype],
    a: ImmPtr[dtype],
    b: ImmPtr[dtype],
    bias: ImmPtr[dtype],
    m: Int32,
    n: Int32,
    k: Int32,
) raises:
    """One launch: c [m, n] = a b, plus the bias of each column with_bias; every matrix is row-major. None where m is 0.

    Parameters:
        L: The launcher.
        dtype: Of all four matrices; sums are kept in `accum_type[dtype]`.
        operands: "nt": a [m, k], b [n, k]; "nn": a [m, k], b [k, n]; "tn": a [k, m], b [k, n].
        with_bias: Whether `bias` is read; without it, it may be any address.
        tf32: Whether float32 operands may be rounded to tf32 for the tensor cores.

    Args:
        launcher: Where the kernel goes.
        name: What reports call the launch.
        c: The product.
        a: The first factor.
        b: The second factor.
        bias: One element for each column of c.
        m: Rows of c.
        n: Columns of c.
        k: The length of the sums.
    """
    comptime assert operands == "nt" or operands == "nn" or operands == "tn", "operands must be nt, nn or tn"
    if m == 0:
        return
    comptime if L.wgmma and dtype.is_half_float():
        if suits_hopper[dtype, operands](c, a, b, Int(m), Int(n), Int(k)):
            launch_gemm_hopper[dtype, operands, with_bias, "none"](launcher, name, c, a, b, bias, m, n, k)
            return
    if ceildiv(Int(m), TILE) * ceildiv(Int(n), TILE) >= multiprocessors():
        launch_portable[dtype, operands, with_bias, tf32, TILE](launcher, name, c, a, b, bias, m, n, k)
    else:
        launch_portable[dtype, operands, with_bias, tf32, SMALL_TILE](launcher, name, c, a, b, bias, m, n, k)


def launch_portable[
    L: Launcher,
    //,
    dtype: DType,
    operands: StaticString,
    with_bias: Bool,
    tf32: Bool,
    tile: Int,
](
    mut launcher: L,
    name: StaticString,
    c: MutPtr[dtype],
    a: ImmPtr[dtype],
    b: ImmPtr[dtype],
    bias: ImmPtr[dtype],
    m: Int32,
    n: Int32,
    k: Int32,
) raises:
    """One launch of a kernel for every GPU; the tiles of c are numbered along grid x, which has room for any number.
    """
    launcher.launch[gemm_kernel[dtype, operands, with_bias, tf32, tile]](
        name,
        c,
        a,
        b,
        bias,
        m,
        n,
        k,
        grid_dim=Dim(ceildiv(Int(m), tile) * ceildiv(Int(n), tile)),
        block_dim=Dim(GEMM_THREADS),
    )

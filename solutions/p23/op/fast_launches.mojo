"""How the fast variant is launched: which kernels, in which tiles, and with what geometry.

Of 16-bit types on NVIDIA's GPUs, up to the widest tile, the kernels of `fast_kernels.mojo`, or of `fast_hopper.mojo` where they
fit and the GPU is a Hopper (a mask: `suits_hopper_mask`); of float32, where they suit, those for pairs of float16
(`fast_pairs_launches.mojo`). In every other case the flash kernels; these and the pairs take contiguous tensors alone. Where there
is no mask, its blocks have size 0 and the mask is a single 0, which the flash kernels read.
"""

from std.math import ceildiv
from std.sys import default_accelerator, has_accelerator, size_of
from max.gpu.host import Dim
from max.gpu.host.nvidia.tma import TMADescriptor

from .fast_kernels import (
    DELTA_LANES,
    DELTA_THREADS,
    Strides,
    fast_delta_kernel,
    fast_forward_kernel,
    fast_key_value_kernel,
    fast_query_kernel,
    handed_bytes,
    in_pairs,
)
from .fast_hopper import (
    forward_bytes,
    hopper_forward_kernel,
    hopper_numbers_kernel,
    hopper_query_kernel,
    padded,
    query_bytes,
)
from .fast_hopper_tiles import GROUP, SIDE, head_map
from .fast_hopper_masks import map_of_mask, suits_boxes
from .fast_hopper_keys import hopper_key_value_kernel, key_bytes, key_owners
from .fast_dropout import ONE, Draws
from .fast_hopper_dropout import DRAW_THREADS, count_words, draw_blocks, hopper_draws_kernel
from .fast_masks import is_one_row
from .fast_mask_gradient import launch_mask_gradient_tiles
from .fast_pairs_launches import launch_backward_pairs, launch_forward_pairs, suits_pairs
from .fast_tiles import CHUNK, WIDEST, pitch_of
from .fast_varlen import slots
from .flash_launches import launch_delta, launch_flash_backward, launch_flash_forward
from .mask_gradient import MaskGradient, launch_mask_gradient
from .flash_tensors import FlashBackward, FlashForward, FlashSizes
from .shared.common import ImmPtr, MutPtr, accum_type, shared_memory
from .shared.launcher import Launcher

comptime FEW_QUERIES = 1024
"""Up to so many, and under a causal mask, small blocks of the query's kernel leave less of a Hopper idle at the end."""
comptime MOST_ROWS = 128
"""Of a tile of the portable kernels; all other numbers of rows divide it."""
comptime ROOM = 115200
"""Bytes of shared memory that the largest of the portable kernels with a mask take."""
comptime WIDE = 128
"""The largest head dimension of the kernels of a window, and of a mask's gradient."""
comptime MOST_BLOCKS = 65535
"""Of a grid along y and z."""
comptime WINDOW_WARPS = 8
"""Warps on a multiprocessor of the kernels of a window, of one block or of several: as many as the registers last for."""


def has_tensor_cores[dtype: DType]() -> Bool:
    """Whether NVIDIA's tensor cores multiply this type, on the GPU of this build."""
    comptime if has_accelerator():
        return dtype.is_half_float() and default_accelerator().is_nvidia_gpu()
    else:
        return False


def splits[dtype: DType]() -> Bool:
    """Whether this type is multiplied as pairs of float16, on the GPU of this build."""
    comptime if has_accelerator():
        return dtype == DType.float32 and default_accelerator().is_nvidia_gpu()
    else:
        return False


def contiguous(heads: Int32, length: Int32, d: Int32) -> Strides:
    """The strides of a tensor [B, heads, length, d] without gaps."""
    var row = Int64(d)
    return Strides(Int64(heads) * Int64(length) * row, Int64(length) * row, row, 0)


@fieldwise_init
struct Layout(Copyable, Movable):
    """The strides of all tensors of a pass."""

    var query: Strides
    var key: Strides
    var value: Strides
    var output: Strides
    var grad_output: Strides
    var grad_query: Strides
    var grad_key: Strides
    var grad_value: Strides

    @staticmethod
    def without_gaps(sizes: FlashSizes) -> Self:
        """Of contiguous tensors."""
        var rows = contiguous(sizes.query_heads, sizes.query_len, sizes.head_dim)
        var keys = contiguous(sizes.key_heads, sizes.key_len, sizes.head_dim)
        return Self(rows, keys, keys, rows, rows, rows, keys, keys)


def is_whole(sizes: FlashSizes) -> Bool:
    """Whether every tile of every portable kernel is full, and every query sees every key: then no kernel asks. Those of wider
    heads ask always.
    """
    var full = sizes.query_len % MOST_ROWS == 0 and sizes.key_len % MOST_ROWS == 0
    full = full and sizes.head_dim % 64 == 0 and Int(sizes.head_dim) <= WIDE
    return full and sizes.keys_seen(0) == Int(sizes.key_len)


def fits_chunks[dtype: DType](tensor: ImmPtr[dtype], strides: Strides) -> Bool:
    """Whether every row begins where 16 bytes do."""
    var together = strides[0] | strides[1] | strides[2]
    return Int(tensor) % 16 == 0 and together % CHUNK == 0


def suits_tma(sizes: FlashSizes, heads: Int32, length: Int32, strides: Strides) -> Bool:
    """Whether the TMA can read a tensor whose rows begin at multiples of 16 bytes: it repeats nothing; and a grid has a block
    for each head of each batch."""
    if max(sizes.batch, heads) > MOST_BLOCKS:
        return False
    var repeats = (sizes.batch > 1 and strides[0] <= 0) or (heads > 1 and strides[1] <= 0)
    return not repeats and (length == 1 or strides[2] > 0)


def launch_forward_fast[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashForward[dtype], layout: Layout, portable: Bool = False, pairs: Bool = True) raises:
    """One launch: output and lse; by the `portable` kernels, or by the fastest. Four where float32 is taken as pairs.
    """
    ref sizes = t.sizes
    comptime if has_tensor_cores[dtype]():
        if Int(sizes.head_dim) <= WIDEST:
            if sizes.heads() == 0 or sizes.query_len == 0:
                return
            var plain = fits_chunks(t.query, layout.query) and fits_chunks(t.key, layout.key)
            plain = plain and fits_chunks(t.value, layout.value)
            plain = plain and fits_chunks(t.output.as_imm(), layout.output)
            if not plain or sizes.head_dim % CHUNK != 0:
                launch_forward_tiles[True, aligned=False](launcher, t, layout)
                return
            comptime if L.wgmma:
                if not portable and suits_hopper_forward(t, layout):
                    launch_forward_hopper(launcher, t, layout)
                    return
            if sizes.mask_block != 0 or t.scale <= 0:
                launch_forward_tiles[True](launcher, t, layout)
            else:
                launch_forward_tiles[False](launcher, t, layout)
            return
    comptime if splits[dtype]():
        if pairs and suits_pairs(sizes, t.scale.cast[DType.float32]()):
            launch_forward_pairs(launcher, rebind[FlashForward[DType.float32]](t), portable)
            return
    var flash = t.copy()
    flash.sizes.mask_block = max(Int32(1), sizes.mask_block)
    launch_flash_forward(launcher, flash)


def mask_bytes[dtype: DType, rows: Int, columns: Int](sizes: FlashSizes) -> Int:
    """Shared memory for the two tiles of a mask that a kernel has at once."""
    return 2 * size_of[Scalar[dtype]]() * columns * (1 if is_one_row(sizes) else rows)


def tiles_of[varlen: Bool](sizes: FlashSizes, length: Int32, rows: Int) -> Int:
    """Blocks of so many rows for each head."""
    comptime if varlen:
        return slots(Int(length), Int(sizes.mask_block), rows)
    return ceildiv(Int(length), rows)


def launch_forward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool, *, aligned: Bool = True
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """The forward kernel, in tiles for the head dimension."""
    comptime if not masked:
        if is_whole(t.sizes):
            launch_forward_tiles[masked, aligned=aligned, whole=True](launcher, t, layout)
            return
    launch_forward_tiles[masked, aligned=aligned, whole=False](launcher, t, layout)


def launch_forward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool, *, aligned: Bool, whole: Bool
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """The forward kernel, `whole` or not."""
    if t.sizes.head_dim <= 64:
        launch_forward_tiles[masked, 64, aligned=aligned, bands=2, warps=4, step=64, resident=2, whole=whole](
            launcher, t, layout
        )
    elif t.sizes.head_dim <= 128:
        launch_forward_tiles[
            masked, 128, aligned=aligned, bands=2, warps=4, step=32, resident=2, whole=whole
        ](launcher, t, layout)
    elif t.sizes.head_dim <= 160:
        launch_forward_tiles[masked, 160, aligned=aligned, bands=1, warps=4, step=32, resident=2](
            launcher, t, layout
        )
    elif t.sizes.head_dim <= 192:
        launch_forward_tiles[masked, 192, aligned=aligned, bands=1, warps=4, step=32, resident=2](
            launcher, t, layout
        )
    else:
        comptime step = 32 if not masked or shared_memory() >= ROOM else 16
        launch_forward_tiles[masked, WIDEST, aligned=aligned, bands=1, warps=4, step=step, resident=2](
            launcher, t, layout
        )


def launch_forward_tiles[
    L: Launcher,
    dtype: DType,
    //,
    masked: Bool,
    width: Int,
    *,
    aligned: Bool = True,
    bands: Int,
    warps: Int,
    step: Int,
    resident: Int,
    windowed: Bool = False,
    whole: Bool = False,
    varlen: Bool = False,
    dropout: Bool = False,
](mut launcher: L, t: FlashForward[dtype], layout: Layout, draws: Optional[Draws] = None) raises:
    """The forward kernel in one tiling."""
    comptime rows = 16 * bands * warps
    var drawn = draws.copy().or_else(Draws(t.query.unsafe_bitcast[UInt32](), 0))  # else not read
    launcher.launch[
        fast_forward_kernel[
            dtype, masked, aligned, width, bands, warps, step, resident, windowed, whole, varlen, dropout
        ]
    ](
        "fast_forward",
        t.output,
        rebind[MutPtr[DType.float32]](t.lse),
        t.query,
        t.key,
        t.value,
        t.mask,
        layout.output,
        layout.query,
        layout.key,
        layout.value,
        t.sizes.packed(),
        t.scale.cast[DType.float32](),
        drawn.state,
        drawn.kept,
        grid_dim=Dim(tiles_of[varlen](t.sizes, t.sizes.query_len, rows) * t.sizes.heads()),
        block_dim=Dim(32 * warps),
        shared_bytes=(rows + 4 * step) * pitch_of[width]() * size_of[Scalar[dtype]]()
        + (mask_bytes[dtype, rows, step](t.sizes) if masked else 0),
    )


def launch_delta_fast[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    delta: MutPtr[accum_type[dtype]],
    grad_output: ImmPtr[dtype],
    output: ImmPtr[dtype],
    grad_lse: ImmPtr[accum_type[dtype]],
    with_grad_lse: Bool,
    sizes: FlashSizes,
    layout: Layout,
) raises:
    """One launch: delta = rowsum(dO * O), less grad_lse where there is one."""
    if sizes.rows() == 0:
        return
    var plain = fits_chunks(grad_output, layout.grad_output) and fits_chunks(output, layout.output)
    plain = plain and sizes.head_dim % CHUNK == 0
    comptime if has_tensor_cores[dtype]() or splits[dtype]():
        if plain:
            launch_delta_rows[aligned=True](
                launcher,
                rebind[MutPtr[DType.float32]](delta),
                grad_output,
                output,
                rebind[ImmPtr[DType.float32]](grad_lse),
                with_grad_lse,
                sizes,
                layout,
            )
            return
    comptime if has_tensor_cores[dtype]():
        launch_delta_rows[aligned=False](
            launcher,
            rebind[MutPtr[DType.float32]](delta),
            grad_output,
            output,
            rebind[ImmPtr[DType.float32]](grad_lse),
            with_grad_lse,
            sizes,
            layout,
        )
    else:
        if with_grad_lse:
            raise Error("the flash kernels take the gradient of lse within delta")
        launch_delta[dtype](launcher, delta, grad_output, output, sizes.rows(), sizes.head_dim)


def launch_delta_rows[
    L: Launcher, dtype: DType, //, *, aligned: Bool
](
    mut launcher: L,
    delta: MutPtr[DType.float32],
    grad_output: ImmPtr[dtype],
    output: ImmPtr[dtype],
    grad_lse: ImmPtr[DType.float32],
    with_grad_lse: Bool,
    sizes: FlashSizes,
    layout: Layout,
) raises:
    """The kernel of `launch_delta_fast`."""
    launcher.launch[fast_delta_kernel[dtype, aligned]](
        "fast_delta",
        delta,
        grad_output,
        output,
        grad_lse,
        Int32(1 if with_grad_lse else 0),
        layout.grad_output,
        layout.output,
        sizes.packed(),
        grid_dim=Dim(ceildiv(sizes.rows(), DELTA_THREADS // DELTA_LANES)),
        block_dim=Dim(DELTA_THREADS),
    )


def launch_backward_fast[
    L: Launcher, dtype: DType, //
](
    mut launcher: L, t: FlashBackward[dtype], layout: Layout, portable: Bool = False, pairs: Bool = True
) raises:
    """Two launches, three on a Hopper: grad_query by one kernel, grad_key and grad_value by another; by the `portable` kernels,
    or by the fastest. Six where float32 is taken as pairs."""
    ref sizes = t.sizes
    comptime if has_tensor_cores[dtype]():
        if Int(sizes.head_dim) <= WIDEST:
            if not is_aligned(t, layout):
                launch_backward_tiles[True, aligned=False](launcher, t, layout)
                return
            comptime if L.wgmma:
                if not portable and suits_hopper(t, layout):
                    launch_backward_hopper(launcher, t, None, layout)
                    return
            if sizes.mask_block != 0 or t.scale <= 0:
                launch_backward_tiles[True](launcher, t, layout)
            else:
                launch_backward_tiles[False](launcher, t, layout)
            return
    comptime if splits[dtype]():
        if pairs and suits_pairs(sizes, t.scale.cast[DType.float32]()):
            launch_backward_pairs(launcher, rebind[FlashBackward[DType.float32]](t), None, portable)
            return
    var flash = t.copy()
    flash.sizes.mask_block = max(Int32(1), sizes.mask_block)
    launch_flash_backward(launcher, flash)


def launch_gradients_fast[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    t: FlashBackward[dtype],
    output: ImmPtr[dtype],
    layout: Layout,
    portable: Bool = False,
    pairs: Bool = True,
) raises:
    """`launch_delta_fast` and `launch_backward_fast` in one, three launches, six where float32 is taken as pairs; t.delta is not
    read."""
    comptime if splits[dtype]():
        if pairs and suits_pairs(t.sizes, t.scale.cast[DType.float32]()):
            launch_backward_pairs(
                launcher,
                rebind[FlashBackward[DType.float32]](t),
                rebind[ImmPtr[DType.float32]](output),
                portable,
            )
            return
    comptime if has_tensor_cores[dtype]() and L.wgmma:
        if not portable and Int(t.sizes.head_dim) <= WIDEST and fits_chunks(output, layout.output):
            if is_aligned(t, layout) and suits_hopper(t, layout):
                launch_backward_hopper(launcher, t, output, layout)
                return
    var delta = launcher.workspace[accum_type[dtype]]("delta", t.sizes.rows())
    launch_delta_fast[dtype](launcher, delta, t.grad_output, output, delta.as_imm(), False, t.sizes, layout)
    var with_delta = t.copy()
    with_delta.delta = delta.as_imm()
    launch_backward_fast(launcher, with_delta, layout, portable, pairs)


def launch_mask_gradient_fast[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: MaskGradient[dtype], layout: Layout) raises:
    """One launch: the gradient of a mask whose strides are its own and the mask's; the kernel without tensor cores takes contiguous
    tensors."""
    comptime if has_tensor_cores[dtype]():
        var aligned = fits_chunks(t.query, layout.query) and fits_chunks(t.key, layout.key)
        aligned = aligned and fits_chunks(t.value, layout.value)
        aligned = aligned and fits_chunks(t.grad_output, layout.grad_output)
        aligned = aligned and t.sizes.head_dim % CHUNK == 0
        # A mask that is broadcast along the keys wants a delta of its own.
        if aligned and Int(t.sizes.head_dim) <= WIDE and t.sizes.mask_t != 0:
            launch_mask_gradient_tiles(
                launcher, t, layout.grad_output, layout.query, layout.key, layout.value
            )
            return
    launch_mask_gradient(launcher, t)


def is_aligned[dtype: DType, //](t: FlashBackward[dtype], layout: Layout) -> Bool:
    """Whether the `aligned` kernels take the tensors."""
    var plain = fits_chunks(t.query, layout.query) and fits_chunks(t.key, layout.key)
    plain = plain and fits_chunks(t.value, layout.value)
    plain = plain and fits_chunks(t.grad_output, layout.grad_output)
    plain = plain and fits_chunks(t.grad_query.as_imm(), layout.grad_query)
    plain = plain and fits_chunks(t.grad_key.as_imm(), layout.grad_key)
    plain = plain and fits_chunks(t.grad_value.as_imm(), layout.grad_value)
    return plain and t.sizes.head_dim % CHUNK == 0


def suits_hopper_mask[dtype: DType](mask: ImmPtr[dtype], sizes: FlashSizes, widest: Int) -> Bool:
    """Whether the kernels with wgmma take the mask, those of heads of up to `widest` elements; none takes a causal one too.
    """
    if sizes.mask_block == 0:
        return True
    var alone = sizes.keys_seen(0) == Int(sizes.key_len)
    return alone and Int(sizes.head_dim) <= widest and suits_boxes(mask, sizes)


def suits_hopper_forward[dtype: DType, //](t: FlashForward[dtype], layout: Layout) -> Bool:
    """Whether the forward kernel with wgmma takes tensors that are plain."""
    ref sizes = t.sizes
    var suits = suits_tma(sizes, sizes.query_heads, sizes.query_len, layout.query)
    suits = suits and suits_tma(sizes, sizes.key_heads, sizes.key_len, layout.key)
    suits = suits and suits_tma(sizes, sizes.key_heads, sizes.key_len, layout.value)
    return suits and suits_hopper_mask(t.mask, sizes, WIDEST) and t.scale > 0 and sizes.key_len > 0


def suits_hopper[dtype: DType, //](t: FlashBackward[dtype], layout: Layout) -> Bool:
    """Whether the backward kernels with wgmma take tensors that are plain."""
    ref sizes = t.sizes
    var suits = suits_tma(sizes, sizes.query_heads, sizes.query_len, layout.query)
    suits = suits and suits_tma(sizes, sizes.query_heads, sizes.query_len, layout.grad_output)
    suits = suits and suits_tma(sizes, sizes.key_heads, sizes.key_len, layout.key)
    suits = suits and suits_tma(sizes, sizes.key_heads, sizes.key_len, layout.value)
    suits = suits and suits_hopper_mask(t.mask, sizes, 2 * SIDE) and t.scale > 0
    return suits and sizes.rows() > 0 and sizes.shared_heads() > 0 and sizes.key_len > 0


def launch_backward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool, *, aligned: Bool = True
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Both kernels, in tiles for the head dimension, where they have something to write."""
    comptime if not masked:
        if is_whole(t.sizes):
            launch_backward_tiles[masked, aligned=aligned, whole=True](launcher, t, layout)
            return
    launch_backward_tiles[masked, aligned=aligned, whole=False](launcher, t, layout)


def launch_backward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool, *, aligned: Bool, whole: Bool
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Both kernels, `whole` or not."""
    # Where tiles of a mask have no room beside those of 128 rows, blocks are half as large.
    comptime roomy = not masked or shared_memory() >= ROOM
    comptime of_192 = 32 if roomy else 16
    if t.sizes.shared_heads() and t.sizes.key_len:
        if t.sizes.head_dim <= 64:
            launch_key_value_tiles[
                masked, 64, aligned=aligned, bands=2, warps=4, step=64, part=32, resident=2, whole=whole
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 128:
            launch_key_value_tiles[
                masked,
                128,
                aligned=aligned,
                bands=1,
                warps=8 if roomy else 4,
                step=32,
                part=32,
                resident=1,
                whole=whole,
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 160:
            launch_key_value_tiles[
                masked, 160, aligned=aligned, bands=1, warps=4, step=32, part=32, resident=2
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 192:
            launch_key_value_tiles[
                masked, 192, aligned=aligned, bands=1, warps=4, step=32, part=32, resident=2
            ](launcher, t, layout)
        else:
            launch_key_value_tiles[
                masked, WIDEST, aligned=aligned, bands=1, warps=4, step=16, part=16, resident=2
            ](launcher, t, layout)
    if t.sizes.heads() and t.sizes.query_len:
        if t.sizes.head_dim <= 64:
            launch_query_tiles[
                masked, 64, aligned=aligned, bands=2, warps=4, step=64, part=32, resident=2, whole=whole
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 128:
            launch_query_tiles[
                masked,
                128,
                aligned=aligned,
                bands=2 if roomy else 1,
                warps=4,
                step=32,
                part=16,
                resident=2,
                whole=whole,
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 160:
            launch_query_tiles[
                masked, 160, aligned=aligned, bands=1, warps=4, step=of_192, part=of_192, resident=2
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 192:
            launch_query_tiles[
                masked, 192, aligned=aligned, bands=1, warps=4, step=of_192, part=of_192, resident=2
            ](launcher, t, layout)
        else:
            comptime warps = 4 if roomy else 2
            launch_query_tiles[
                masked, WIDEST, aligned=aligned, bands=1, warps=warps, step=16, part=16, resident=2
            ](launcher, t, layout)


def launch_query_tiles[
    L: Launcher,
    dtype: DType,
    //,
    masked: Bool,
    width: Int,
    *,
    aligned: Bool = True,
    bands: Int,
    warps: Int,
    step: Int,
    part: Int,
    resident: Int,
    windowed: Bool = False,
    whole: Bool = False,
    varlen: Bool = False,
    dropout: Bool = False,
](mut launcher: L, t: FlashBackward[dtype], layout: Layout, draws: Optional[Draws] = None) raises:
    """The kernel of the gradient of the query in one tiling."""
    comptime rows = 16 * bands * warps
    var drawn = draws.copy().or_else(Draws(t.query.unsafe_bitcast[UInt32](), 0))  # else not read
    launcher.launch[
        fast_query_kernel[
            dtype,
            masked,
            aligned,
            width,
            bands,
            warps,
            step,
            part,
            resident,
            windowed,
            whole,
            varlen,
            dropout,
        ]
    ](
        "fast_query",
        t.grad_query,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        rebind[ImmPtr[DType.float32]](t.lse),
        rebind[ImmPtr[DType.float32]](t.delta),
        t.mask,
        layout.grad_query,
        layout.grad_output,
        layout.query,
        layout.key,
        layout.value,
        t.sizes.packed(),
        t.scale.cast[DType.float32](),
        drawn.state,
        drawn.kept,
        grid_dim=Dim(tiles_of[varlen](t.sizes, t.sizes.query_len, rows) * t.sizes.heads()),
        block_dim=Dim(32 * warps),
        shared_bytes=(2 * rows + 4 * step) * pitch_of[width]() * size_of[Scalar[dtype]]()
        + (mask_bytes[dtype, rows, step](t.sizes) if masked else 0),
    )


def launch_key_value_tiles[
    L: Launcher,
    dtype: DType,
    //,
    masked: Bool,
    width: Int,
    *,
    aligned: Bool = True,
    bands: Int,
    warps: Int,
    step: Int,
    part: Int,
    resident: Int,
    windowed: Bool = False,
    whole: Bool = False,
    varlen: Bool = False,
    dropout: Bool = False,
](mut launcher: L, t: FlashBackward[dtype], layout: Layout, draws: Optional[Draws] = None) raises:
    """The kernel of the gradients of key and value in one tiling."""
    comptime rows = 16 * bands * (warps // 2 if in_pairs[width]() else warps)
    var drawn = draws.copy().or_else(Draws(t.query.unsafe_bitcast[UInt32](), 0))  # else not read
    launcher.launch[
        fast_key_value_kernel[
            dtype,
            masked,
            aligned,
            width,
            bands,
            warps,
            step,
            part,
            resident,
            windowed,
            whole,
            varlen,
            dropout,
        ]
    ](
        "fast_key_value",
        t.grad_key,
        t.grad_value,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        rebind[ImmPtr[DType.float32]](t.lse),
        rebind[ImmPtr[DType.float32]](t.delta),
        t.mask,
        layout.grad_key,
        layout.grad_value,
        layout.grad_output,
        layout.query,
        layout.key,
        layout.value,
        t.sizes.packed(),
        t.scale.cast[DType.float32](),
        drawn.state,
        drawn.kept,
        grid_dim=Dim(tiles_of[varlen](t.sizes, t.sizes.key_len, rows) * t.sizes.shared_heads()),
        block_dim=Dim(32 * warps),
        shared_bytes=(2 * rows + 4 * step) * pitch_of[width]() * size_of[Scalar[dtype]]()
        + 16 * step
        + handed_bytes[width, rows, part]()
        + (mask_bytes[dtype, step, rows](t.sizes) if masked else 0),
    )


# ---- In a window --------------------------------------------------------------------------------------------


def expect_window[dtype: DType](sizes: FlashSizes, scale: Scalar[accum_type[dtype]]) raises:
    """Raises an error for what the kernels of a window do not take."""
    comptime if not has_tensor_cores[dtype]():
        raise Error("a window wants 16-bit types on NVIDIA's tensor cores")
    var d = Int(sizes.head_dim)
    var alike = sizes.query_len == sizes.key_len and sizes.query_heads == sizes.key_heads
    if d > WIDE or d % CHUNK != 0 or not alike or scale <= 0:
        raise Error(
            t"a window wants as many keys as queries in each head, heads of at most {WIDE} elements in"
            t" whole chunks, a scale above 0"
        )


def launch_forward_window[
    L: Launcher, dtype: DType, //, tiles: Int
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """One launch: output and lse in a window, which `t.mask` is (`fast_window.mojo`); a block owns 64 * tiles queries.
    """
    expect_window[dtype](t.sizes, t.scale)
    comptime if has_tensor_cores[dtype]():
        if t.sizes.rows():
            if t.sizes.head_dim <= 64:
                launch_forward_window[64, bands=2, warps=2 * tiles](launcher, t, layout)
            else:
                launch_forward_window[128, bands=1, warps=4 * tiles](launcher, t, layout)


def launch_forward_window[
    L: Launcher, dtype: DType, //, width: Int, *, bands: Int, warps: Int
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """The forward kernel in one tiling."""
    launch_forward_tiles[
        False, width, bands=bands, warps=warps, step=64, resident=WINDOW_WARPS // warps, windowed=True
    ](launcher, t, layout)


def launch_backward_window[
    L: Launcher, dtype: DType, //, tiles: Int
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Two launches: grad_key and grad_value in a window, then grad_query."""
    expect_window[dtype](t.sizes, t.scale)
    comptime if has_tensor_cores[dtype]():
        if t.sizes.rows():
            if t.sizes.head_dim <= 64:
                launch_backward_window[64, bands=2, warps=2 * tiles](launcher, t, layout)
            else:
                launch_backward_window[128, bands=1, warps=4 * tiles](launcher, t, layout)


def launch_backward_window[
    L: Launcher, dtype: DType, //, width: Int, *, bands: Int, warps: Int
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Both kernels in one tiling."""
    comptime resident = WINDOW_WARPS // warps
    launch_key_value_tiles[
        False, width, bands=bands, warps=warps, step=64, part=32, resident=resident, windowed=True
    ](launcher, t, layout)
    launch_query_tiles[
        False, width, bands=bands, warps=warps, step=64, part=32, resident=resident, windowed=True
    ](launcher, t, layout)


# ---- On a Hopper --------------------------------------------------------------------------------------------


def launch_forward_hopper[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """The forward kernel with wgmma, in tiles for the head dimension."""
    if t.sizes.mask_block != 0:
        if Int(t.sizes.head_dim) <= SIDE:
            launch_forward_hopper[SIDE, groups=1, keys=128, resident=2, biased=True](launcher, t, layout)
        elif Int(t.sizes.head_dim) <= 2 * SIDE:
            launch_forward_hopper[2 * SIDE, groups=2, keys=128, resident=1, biased=True](launcher, t, layout)
        elif Int(t.sizes.head_dim) <= 3 * SIDE:
            launch_forward_hopper[3 * SIDE, groups=2, keys=64, resident=1, biased=True](launcher, t, layout)
        else:
            launch_forward_hopper[WIDEST, groups=2, keys=64, resident=1, biased=True](launcher, t, layout)
    elif Int(t.sizes.head_dim) <= SIDE:
        launch_forward_hopper[SIDE, groups=1, keys=128, resident=2](launcher, t, layout)
    elif Int(t.sizes.head_dim) <= 2 * SIDE:
        launch_forward_hopper[2 * SIDE, groups=2, keys=128, resident=1](launcher, t, layout)
    elif Int(t.sizes.head_dim) <= 3 * SIDE:
        launch_forward_hopper[3 * SIDE, groups=2, keys=64, resident=1](launcher, t, layout)
    else:
        launch_forward_hopper[WIDEST, groups=2, keys=64, resident=1](launcher, t, layout)


def launch_forward_hopper[
    L: Launcher,
    dtype: DType,
    //,
    width: Int,
    *,
    groups: Int,
    keys: Int,
    resident: Int,
    biased: Bool = False,
    dropped: Bool = False,
](mut launcher: L, t: FlashForward[dtype], layout: Layout, draws: Optional[Draws] = None) raises:
    """The forward kernel with wgmma in one tiling; `biased`, with a mask; `dropped`, what is kept is drawn first.
    """
    ref sizes = t.sizes
    var words = draw_words[dropped](launcher, sizes, draws)
    var ctx = launcher.context()
    if not ctx:
        return
    var query = head_map(ctx.value(), t.query, sizes.query_heads, sizes.query_len, sizes, layout.query)
    launcher.launch[hopper_forward_kernel[dtype, width, groups, keys, resident, biased, dropped]](
        "hopper_forward",
        t.output,
        rebind[MutPtr[DType.float32]](t.lse),
        query,
        head_map(ctx.value(), t.key, sizes.key_heads, sizes.key_len, sizes, layout.key),
        head_map(ctx.value(), t.value, sizes.key_heads, sizes.key_len, sizes, layout.value),
        map_of_mask(ctx.value(), t.mask, sizes) if biased else query,
        t.mask,
        words,
        layout.output,
        sizes.packed(),
        t.scale.cast[DType.float32](),
        rescale_of(draws),
        grid_dim=Dim(ceildiv(Int(sizes.query_len), groups * SIDE), Int(sizes.query_heads), Int(sizes.batch)),
        block_dim=Dim((groups + 1) * GROUP),
        shared_bytes=forward_bytes[width, groups, keys, biased](),
    )


def draw_words[
    L: Launcher, //, dropped: Bool
](mut launcher: L, sizes: FlashSizes, draws: Optional[Draws]) raises -> ImmPtr[DType.uint32]:
    """One launch where some probabilities are `dropped`: words of which are kept; else nothing, and an address that nobody reads.
    """
    comptime if not dropped:
        return ImmPtr[DType.uint32](unsafe_from_address=16)
    var words = launcher.workspace[DType.uint32]("draws", count_words(sizes))
    if launcher.context():
        launcher.launch[hopper_draws_kernel](
            "hopper_draws",
            words,
            draws.value().state,
            draws.value().kept,
            sizes.packed(),
            grid_dim=Dim(draw_blocks(sizes)),
            block_dim=Dim(DRAW_THREADS),
        )
    return words.as_imm()


def share_of(draws: Optional[Draws]) -> Float32:
    """The share of probabilities that are kept."""
    return Float32(draws.value().kept) / ONE if draws else 1


def rescale_of(draws: Optional[Draws]) -> Float32:
    """What they are multiplied by."""
    var share = share_of(draws)
    return 1 / share if share != 0 else 0


def launch_backward_hopper[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashBackward[dtype], output: Optional[ImmPtr[dtype]], layout: Layout) raises:
    """Three launches: lse and delta in whole boxes, grad_key and grad_value, grad_query; in tiles for the head dimension.

    Delta is made of the output where there is one, else it is t.delta.
    """
    ref sizes = t.sizes
    if sizes.mask_block != 0:
        if Int(sizes.head_dim) <= SIDE:
            launch_backward_hopper[
                SIDE,
                key_groups=1,
                key_resident=2,
                query_groups=1,
                query_stages=3,
                query_resident=2,
                biased=True,
            ](launcher, t, output, layout)
        else:
            launch_backward_hopper[
                2 * SIDE,
                key_groups=2,
                key_resident=1,
                query_groups=2,
                query_stages=3,
                query_resident=1,
                biased=True,
            ](launcher, t, output, layout)
    elif Int(sizes.head_dim) > 3 * SIDE:
        launch_backward_hopper[
            WIDEST, key_groups=2, key_resident=1, query_groups=1, query_stages=2, query_resident=1
        ](launcher, t, output, layout)
    elif Int(sizes.head_dim) > 2 * SIDE:
        launch_backward_hopper[
            3 * SIDE, key_groups=2, key_resident=1, query_groups=2, query_stages=2, query_resident=1
        ](launcher, t, output, layout)
    elif Int(sizes.head_dim) > SIDE:
        launch_backward_hopper[
            2 * SIDE, key_groups=2, key_resident=1, query_groups=2, query_stages=3, query_resident=1
        ](launcher, t, output, layout)
    elif Int(sizes.query_len) > FEW_QUERIES and sizes.keys_seen(0) == Int(sizes.key_len):
        launch_backward_hopper[
            SIDE, key_groups=1, key_resident=2, query_groups=3, query_stages=3, query_resident=1
        ](launcher, t, output, layout)
    else:
        launch_backward_hopper[
            SIDE, key_groups=1, key_resident=2, query_groups=1, query_stages=3, query_resident=2
        ](launcher, t, output, layout)


def launch_backward_hopper[
    L: Launcher,
    dtype: DType,
    //,
    width: Int,
    *,
    key_groups: Int,
    key_resident: Int,
    query_groups: Int,
    query_stages: Int,
    query_resident: Int,
    biased: Bool = False,
    dropped: Bool = False,
](
    mut launcher: L,
    t: FlashBackward[dtype],
    output: Optional[ImmPtr[dtype]],
    layout: Layout,
    draws: Optional[Draws] = None,
) raises:
    """The backward kernels with wgmma in one tiling; `biased`, with a mask; `dropped`, what is kept is drawn first, once more. So many
    blocks of a kernel are `resident` on a multiprocessor."""
    ref sizes = t.sizes
    var words = draw_words[dropped](launcher, sizes, draws)
    var count = sizes.heads() * 2 * padded(Int(sizes.query_len))
    var numbers = launcher.workspace[DType.float32]("numbers", count)
    var ctx = launcher.context()
    if not ctx:
        return
    var query = head_map(ctx.value(), t.query, sizes.query_heads, sizes.query_len, sizes, layout.query)
    var grad = head_map(
        ctx.value(), t.grad_output, sizes.query_heads, sizes.query_len, sizes, layout.grad_output
    )
    var key = head_map(ctx.value(), t.key, sizes.key_heads, sizes.key_len, sizes, layout.key)
    var value = head_map(ctx.value(), t.value, sizes.key_heads, sizes.key_len, sizes, layout.value)
    var mask = map_of_mask(ctx.value(), t.mask, sizes) if biased else query
    launcher.launch[hopper_numbers_kernel[dtype]](
        "hopper_numbers",
        numbers,
        rebind[ImmPtr[DType.float32]](t.lse),
        rebind[ImmPtr[DType.float32]](t.delta),
        t.grad_output,
        output.value() if output else t.grad_output,
        Int32(1 if output else 0),
        share_of(draws),
        layout.grad_output,
        layout.output,
        sizes.packed(),
        grid_dim=Dim(ceildiv(count // 2, DELTA_THREADS // DELTA_LANES)),
        block_dim=Dim(DELTA_THREADS),
        early=True,
    )
    # Whether the first query sees the last key, and so every query every key. With dropout there is but the kernel that asks.
    if biased or (not dropped and sizes.keys_seen(0) == Int(sizes.key_len)):
        launch_key_value_hopper[width, key_groups, key_resident, dropped and not biased, biased, dropped](
            launcher, t, query, grad, key, value, mask, words, numbers.as_imm(), layout, rescale_of(draws)
        )
    else:
        launch_key_value_hopper[width, key_groups, key_resident, not biased, biased, dropped](
            launcher, t, query, grad, key, value, mask, words, numbers.as_imm(), layout, rescale_of(draws)
        )
    launcher.launch[
        hopper_query_kernel[dtype, width, query_groups, query_stages, query_resident, biased, dropped]
    ](
        "hopper_query",
        t.grad_query,
        query,
        grad,
        key,
        value,
        mask,
        t.mask,
        words,
        numbers.as_imm(),
        layout.grad_query,
        sizes.packed(),
        t.scale.cast[DType.float32](),
        rescale_of(draws),
        grid_dim=Dim(
            ceildiv(Int(sizes.query_len), query_groups * SIDE), Int(sizes.query_heads), Int(sizes.batch)
        ),
        block_dim=Dim((query_groups + 1) * GROUP),
        shared_bytes=query_bytes[width, query_groups, query_stages, biased, dropped](),
        early=True,
    )


def launch_key_value_hopper[
    L: Launcher,
    dtype: DType,
    //,
    width: Int,
    groups: Int,
    resident: Int,
    masked: Bool,
    biased: Bool,
    dropped: Bool,
](
    mut launcher: L,
    t: FlashBackward[dtype],
    query: TMADescriptor,
    grad: TMADescriptor,
    key: TMADescriptor,
    value: TMADescriptor,
    mask: TMADescriptor,
    words: ImmPtr[DType.uint32],
    numbers: ImmPtr[DType.float32],
    layout: Layout,
    rescale: Float32,
) raises:
    """The kernel of the gradients of key and value with wgmma in one tiling; `masked` where a query does not see every key for a causal
    mask, `biased` with one that is added, `dropped` with dropout."""
    ref sizes = t.sizes
    launcher.launch[hopper_key_value_kernel[dtype, width, groups, resident, masked, biased, dropped]](
        "hopper_key_value",
        t.grad_key,
        t.grad_value,
        query,
        grad,
        key,
        value,
        mask,
        t.mask,
        words,
        numbers,
        layout.grad_key,
        layout.grad_value,
        sizes.packed(),
        t.scale.cast[DType.float32](),
        rescale,
        grid_dim=Dim(
            ceildiv(Int(sizes.key_len), key_owners[width, groups]() * SIDE),
            Int(sizes.key_heads),
            Int(sizes.batch),
        ),
        block_dim=Dim((groups + 1) * GROUP),
        shared_bytes=key_bytes[width, groups, biased, dropped](),
        early=True,
    )

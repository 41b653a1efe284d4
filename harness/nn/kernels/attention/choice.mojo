"""Kernel selection for a call of attention, used by the launches, the C++ and `explain`.

A call uses the first kernels that support it. The wgmma kernels, for Hopper only, are by far the fastest:
both passes are 1.3 to 1.7 times faster, without a mask (book/records, `attention`) and with one
(`attention_options`).
"""

from common.stream_launcher import StreamLauncher

from .call import BACKWARD, LENGTHS, MASK_GRADIENT, PORTABLE, Call, input_pointer
from .dropout import KEEP_ONE
from .hopper_dropout import MAX_WORDS, count_words
from .hopper_launches import MAX_GRID_YZ
from .hopper_masks import tma_supports_mask
from .layout import MAX_OPTION_HEAD_DIM
from .mask_gradient import MaskGradientTile
from .tiles import MAX_HEAD_DIM

comptime HOPPER = StreamLauncher.wgmma
"""Whether the library is built for Hopper."""

# Kernels: PyTorch's own; wgmma; wgmma with a mask; mma.sync; mma.sync with a mask, a block mask, or a scale
# that is not positive. There are variants of these for dropout and for unequal lengths.
comptime TORCH = 0
comptime WGMMA = 1
comptime WGMMA_MASK = 2
comptime MMA = 3
comptime MMA_MASK = 4

# Parts of the library, each compiled separately; `Part` in harness/nn/host/attention.cpp lists them too.
comptime BASIC = 0
comptime MASK = 1
comptime PORTABLE_PART = 2
comptime DROPOUT = 3
comptime VARLEN = 4

comptime MAX_GRID = 2**31 - 1
"""Maximum blocks along x of a grid, and the largest 32-bit number."""
comptime MIN_ROWS = 32
"""Rows per block of the smallest mma.sync kernel."""


@fieldwise_init
struct Choice(Copyable, Movable):
    """The selected kernels, their part of the library, and the reason why no faster kernels support the
    call, which is empty for the fastest.
    """

    var kernel: Int
    var part: Int
    var reason: String


def choose(call: Call, flags: Int) -> Choice:
    """Return the choice for a call; `flags` is a sum of PORTABLE, LENGTHS, BACKWARD and MASK_GRADIENT."""
    var reason = explain_unsupported(call, flags)
    if reason:
        return Choice(TORCH, BASIC, reason.value())
    var masked = call.sizes.mask_block != 0 or call.scale <= 0
    if flags & LENGTHS:
        return Choice(MMA, VARLEN, "")
    comptime if HOPPER:
        reason = explain_no_wgmma(call, flags)
        if not reason:
            var kernel = WGMMA_MASK if masked else WGMMA
            return Choice(kernel, select_part(call, MASK if masked else BASIC), "")
        return Choice(MMA_MASK if masked else MMA, select_part(call, PORTABLE_PART), reason.value())
    else:
        return Choice(MMA_MASK if masked else MMA, select_part(call, MASK if masked else BASIC), "")


def select_part(call: Call, part: Int) -> Int:
    """Return `part`, or DROPOUT if the call has dropout."""
    return part if call.draws.keep_threshold == KEEP_ONE else DROPOUT


def explain_unsupported(call: Call, flags: Int) -> Optional[String]:
    """Return the reason why no kernel supports a call, or None."""
    ref sizes = call.sizes
    var d = Int(sizes.head_dim)
    var has_dropout = call.draws.keep_threshold != KEEP_ONE
    var widest = MAX_OPTION_HEAD_DIM if has_dropout or flags & LENGTHS else MAX_HEAD_DIM
    if d > widest:
        var subject = "with dropout the kernels" if has_dropout else "the kernels"
        return String(t"query has heads of {d} elements; {subject} support up to {widest}")
    if flags & LENGTHS and call.scale <= 0:
        return String(t"scale is {call.scale}, not positive")
    if flags & MASK_GRADIENT:
        if has_dropout:
            return String("attn_mask requires a gradient, which the kernels with dropout do not compute")
        if sizes.mask_t == 0:
            return String("attn_mask requires a gradient and has one number for all keys")
        if d > MAX_OPTION_HEAD_DIM:
            return String(
                t"attn_mask requires a gradient, which the kernels compute for heads of up to"
                t" {MAX_OPTION_HEAD_DIM} elements, not {d}"
            )
    var rows = max(Int(sizes.query_len) * sizes.heads(), Int(sizes.key_len) * sizes.shared_heads())
    # The last rows of each sequence take an extra block per head.
    var sequences = Int(sizes.mask_block) if flags & LENGTHS else 1
    var blocks = rows // MIN_ROWS + sequences * max(sizes.heads(), sizes.shared_heads())
    if max(blocks, MaskGradientTile.blocks(sizes), call.largest) > MAX_GRID:
        return String(
            "the kernels would need a grid of more than 2^31 - 1 blocks, or a mask has strides above that"
        )
    return None


def explain_no_wgmma(call: Call, flags: Int) -> Optional[String]:
    """Return the reason why the wgmma kernels do not support a call, or None. Their inputs must consist of
    whole 16-byte chunks.
    """
    ref sizes = call.sizes
    if flags & PORTABLE:
        return String("kernels for every GPU are requested")
    if call.scale <= 0:
        return String(t"scale is {call.scale}, not positive")
    if sizes.mask_block > 1:
        return String(t"an element of the mask is a block of {sizes.mask_block} queries and keys")
    if sizes.mask_block != 0:
        if flags & BACKWARD and Int(sizes.head_dim) > MAX_OPTION_HEAD_DIM:
            return String(
                t"query has heads of {sizes.head_dim} elements; with attn_mask the backward wgmma kernels"
                t" support up to {MAX_OPTION_HEAD_DIM}"
            )
        if sizes.mask_t == 0:
            return String("attn_mask has one number for all keys")
        if sizes.visible_keys(0) != Int(sizes.key_len):
            return String("there are both attn_mask and a causal mask")
        if not tma_supports_mask(input_pointer[DType.bfloat16](call.mask), sizes):
            return String("the rows of attn_mask do not begin at multiples of 16 bytes")
    if max(sizes.batch, sizes.query_heads, sizes.key_heads) > MAX_GRID_YZ:
        return String("there is a batch size or number of heads above 65,535")
    if call.draws.keep_threshold != KEEP_ONE and count_words(sizes) > MAX_WORDS:
        return String("dropout's random bits would take more than 1 GiB")
    return None

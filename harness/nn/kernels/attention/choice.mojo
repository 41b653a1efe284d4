"""The choice of kernels for a call of attention: one table for the launches, C++ and `explain`.

A call takes the first kernels that support it. Those by wgmma, for Hopper only, are by far the fastest: both
passes take 1.3 to 1.7 times less without a mask (book/records, `attention`), and with one
(`attention_options`).
"""

from common.stream_launcher import StreamLauncher

from .call import BACKWARD, LENGTHS, MASK_GRADIENT, PORTABLE, Call, read
from .dropout import ONE
from .hopper_dropout import MOST_WORDS, count_words
from .hopper_launches import MOST_BLOCKS
from .hopper_masks import suits_boxes
from .layout import WIDE
from .mask_gradient import MaskWalk
from .tiles import WIDEST

comptime HOPPER = StreamLauncher.wgmma
"""Whether the library is built for Hopper."""

# Kernels: PyTorch's own; wgmma; wgmma with a mask; mma.sync; mma.sync with a mask, blocks, or a scale not
# above 0. Dropout and unequal lengths have variants of these.
comptime TORCH = 0
comptime WGMMA = 1
comptime WGMMA_MASK = 2
comptime MMA = 3
comptime MMA_MASK = 4

# Parts of the library, each compiled separately: `PARTS` in harness/nn/host/attention.cpp has their names.
comptime PLAIN = 0
comptime MASK = 1
comptime PORTABLE_PART = 2
comptime DROPOUT = 3
comptime VARLEN = 4

comptime MOST_GRID = 2**31 - 1
"""The most blocks along x of a grid, and the largest 32-bit number."""
comptime FEWEST_ROWS = 32
"""Rows per block of the smallest mma.sync kernel."""


@fieldwise_init
struct Choice(Copyable, Movable):
    """Kernels, the part of the library that has them, and why no faster ones; empty for the fastest."""

    var kernel: Int
    var part: Int
    var reason: String


def choose(call: Call, how: Int) -> Choice:
    """Return the choice for a call; `how` is PORTABLE, LENGTHS, BACKWARD and MASK_GRADIENT, added."""
    var lacking = all_lack(call, how)
    if lacking:
        return Choice(TORCH, PLAIN, lacking.value())
    var masked = call.sizes.mask_block != 0 or call.scale <= 0
    if how & LENGTHS:
        return Choice(MMA, VARLEN, "")
    comptime if HOPPER:
        lacking = wgmma_lacks(call, how)
        if not lacking:
            var kernel = WGMMA_MASK if masked else WGMMA
            return Choice(kernel, part_of(call, MASK if masked else PLAIN), "")
        return Choice(MMA_MASK if masked else MMA, part_of(call, PORTABLE_PART), lacking.value())
    else:
        return Choice(MMA_MASK if masked else MMA, part_of(call, MASK if masked else PLAIN), "")


def part_of(call: Call, part: Int) -> Int:
    """Return the part, or that of dropout."""
    return part if call.draws.kept == ONE else DROPOUT


def all_lack(call: Call, how: Int) -> Optional[String]:
    """Return why no kernel supports a call."""
    ref sizes = call.sizes
    var d = Int(sizes.head_dim)
    var dropped = call.draws.kept != ONE
    var widest = WIDE if dropped or how & LENGTHS else WIDEST
    if d > widest:
        var subject = "with dropout the kernels" if dropped else "the kernels"
        return String(t"query has heads of {d} elements; {subject} take up to {widest}")
    if how & LENGTHS and call.scale <= 0:
        return String(t"scale is {call.scale}, not above 0")
    if how & MASK_GRADIENT:
        if dropped:
            return String("attn_mask needs a gradient; with dropout the kernels make none")
        if sizes.mask_t == 0:
            return String("attn_mask needs a gradient, and is one number for all keys")
        if d > WIDE:
            return String(
                t"attn_mask needs a gradient, and query has heads of {d} elements; for that they take up to"
                t" {WIDE}"
            )
    var rows = max(Int(sizes.query_len) * sizes.heads(), Int(sizes.key_len) * sizes.shared_heads())
    # The last rows of each sequence take a block per head.
    var sequences = Int(sizes.mask_block) if how & LENGTHS else 1
    var blocks = rows // FEWEST_ROWS + sequences * max(sizes.heads(), sizes.shared_heads())
    if max(blocks, MaskWalk.blocks(sizes), call.largest) > MOST_GRID:
        return String("a grid of the kernels would have more than 2^31 - 1 blocks, or a mask such strides")
    return None


def wgmma_lacks(call: Call, how: Int) -> Optional[String]:
    """Return why wgmma does not support a call, or None. Everything read must be in whole chunks of 16
    bytes.
    """
    ref sizes = call.sizes
    if how & PORTABLE:
        return String("kernels for every GPU are asked for")
    if call.scale <= 0:
        return String(t"scale is {call.scale}, not above 0")
    if sizes.mask_block > 1:
        return String(t"an element of the mask is a block of {sizes.mask_block} queries and keys")
    if sizes.mask_block != 0:
        if how & BACKWARD and Int(sizes.head_dim) > WIDE:
            return String(
                t"there is attn_mask, and query has heads of {sizes.head_dim} elements; backward wgmma then"
                t" takes up to {WIDE}"
            )
        if sizes.mask_t == 0:
            return String("attn_mask is one number for all keys")
        if sizes.keys_seen(0) != Int(sizes.key_len):
            return String("there are attn_mask and a causal one")
        if not suits_boxes(read[DType.bfloat16](call.mask), sizes):
            return String("the rows of attn_mask do not begin at multiples of 16 bytes")
    if max(sizes.batch, sizes.query_heads, sizes.key_heads) > MOST_BLOCKS:
        return String("there is a batch or heads above 65,535")
    if call.draws.kept != ONE and count_words(sizes) > MOST_WORDS:
        return String("the draws of dropout would take more than a GiB")
    return None

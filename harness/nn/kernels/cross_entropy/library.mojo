"""The C functions that `harness/nn/host/cross_entropy.cpp` calls, for the dtype PART."""

from std.sys.defines import get_defined_string

from common.calls import Words, call, open_gpu
from common.stream_launcher import StreamLauncher
from cross_entropy.rows import LossOptions, RowSizes, launch_cross_entropy_rows, launch_scale_unless_one
from shared.common import accum_type

comptime PART = get_defined_string["PART", "bfloat16"]()
comptime dtype = DType._from_str(PART).value()
comptime accum = accum_type[dtype]


def rows(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch cross-entropy over rows. 13 words: rows, classes, pitch, scale step, whether to compute the
    gradient; ignored target, smoothing, z, cap; logits, losses, targets, scales.
    """
    # Arguments are evaluated in this order.
    var sizes = RowSizes(
        rows=words.integer(), classes=words.integer(), pitch=words.integer(), scale_step=words.integer()
    )
    var gradient_requested = words.integer() != 0
    var options = LossOptions[accum](
        ignore_index=Int64(words.integer()),
        smoothing=words.float().cast[accum](),
        z=words.float().cast[accum](),
        cap=words.float().cast[accum](),
    )
    var logits = words.output[dtype]()
    var losses = words.output[accum]()
    var targets = words.input[DType.int64]()
    launch_cross_entropy_rows(
        launcher, logits, losses, targets, words.input[accum](), sizes, gradient_requested, options
    )


def scale(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch the scaling of values in place. 3 words: the number of values, the values, the factor."""
    var count = words.integer()
    var values = words.output[dtype]()
    launch_scale_unless_one(launcher, values, count, words.input[accum]())


@export("workbook_open")
def workbook_open(index: Int64, message: Int, capacity: Int64) abi("C") -> Int64:
    """Return a handle to GPU `index`."""
    return open_gpu(index, message, capacity)


@export("workbook_cross_entropy_rows")
def workbook_cross_entropy_rows(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Launch cross-entropy over rows (see `rows`); 4 + 13 words."""
    return call[rows](words, message, capacity)


@export("workbook_cross_entropy_scale")
def workbook_cross_entropy_scale(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Launch the scaling of values in place (see `scale`); 4 + 3 words."""
    return call[scale](words, message, capacity)

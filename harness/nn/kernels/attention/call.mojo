"""The arguments of a call of attention, as words from C++: the same for each pass and for kernel selection.

`harness/nn/host/attention.cpp` writes them in this order; words that a pass does not use are 0.
"""

from common.calls import Words
from shared.common import ImmPtr, MutPtr, accum_type

from .dropout import DropoutArguments
from .layout import Layout
from .scores import Strides
from .tensors import FlashBackward, FlashForward, FlashSizes

# Bits of a request for kernel selection: use only kernels for every GPU; sequences of unequal lengths; also
# the backward pass; also the mask's gradient.
comptime PORTABLE = 1
comptime LENGTHS = 2
comptime BACKWARD = 4
comptime MASK_GRADIENT = 8


struct Call(Movable):
    """Sizes, options, addresses and strides.

    For sequences of unequal lengths, `mask` is the address of their offsets and `sizes.mask_block` is the
    number of sequences.
    """

    var kernel: Int
    """The kernels, numbered as in `choice.mojo`; for `workbook_attention_plan`, the bits of the request."""
    var sizes: FlashSizes
    var largest: Int
    """The largest size or stride; kernels take 32-bit numbers."""
    var scale: Float32
    var draws: DropoutArguments
    var output: Int
    var lse: Int
    var query: Int
    var key: Int
    var value: Int
    var mask: Int
    var grad_query: Int
    var grad_key: Int
    var grad_value: Int
    var grad_output: Int
    var delta: Int
    """The address of delta; 0 to compute delta from the output."""
    var grad_lse: Int
    var grad_mask: Int
    var layout: Layout

    def __init__(out self, mut words: Words):
        self.kernel = words.integer()
        var numbers = List[Int32]()
        self.largest = 0
        for _ in range(12):
            var number = words.integer()
            self.largest = max(self.largest, number)
            numbers.append(Int32(number))
        self.sizes = FlashSizes(
            numbers[0],
            numbers[1],
            numbers[2],
            numbers[3],
            numbers[4],
            numbers[5],
            numbers[6],
            numbers[7],
            numbers[8],
            numbers[9],
            numbers[10],
            numbers[11],
        )
        self.scale = words.float().cast[DType.float32]()
        var keep_threshold = Int32(words.integer())
        self.draws = DropoutArguments(words.input[DType.uint32](), keep_threshold)
        self.output = words.integer()
        self.lse = words.integer()
        self.query = words.integer()
        self.key = words.integer()
        self.value = words.integer()
        self.mask = words.integer()
        self.grad_query = words.integer()
        self.grad_key = words.integer()
        self.grad_value = words.integer()
        self.grad_output = words.integer()
        self.delta = words.integer()
        self.grad_lse = words.integer()
        self.grad_mask = words.integer()
        self.layout = Layout.contiguous_layout(self.sizes)
        self.layout.query = read_strides(words)
        self.layout.key = read_strides(words)
        self.layout.value = read_strides(words)
        self.layout.output = read_strides(words)
        self.layout.grad_output = read_strides(words)
        self.layout.grad_query = read_strides(words)
        self.layout.grad_key = read_strides(words)
        self.layout.grad_value = read_strides(words)

    def forward[dtype: DType](self) -> FlashForward[dtype]:
        return FlashForward[dtype](
            output=output_pointer[dtype](self.output),
            lse=output_pointer[accum_type[dtype]](self.lse),
            query=input_pointer[dtype](self.query),
            key=input_pointer[dtype](self.key),
            value=input_pointer[dtype](self.value),
            mask=input_pointer[dtype](self.mask),
            sizes=self.sizes.copy(),
            scale=self.scale.cast[accum_type[dtype]](),
        )

    def backward[dtype: DType](self) -> FlashBackward[dtype]:
        return FlashBackward[dtype](
            grad_query=output_pointer[dtype](self.grad_query),
            grad_key=output_pointer[dtype](self.grad_key),
            grad_value=output_pointer[dtype](self.grad_value),
            grad_output=input_pointer[dtype](self.grad_output),
            query=input_pointer[dtype](self.query),
            key=input_pointer[dtype](self.key),
            value=input_pointer[dtype](self.value),
            lse=input_pointer[accum_type[dtype]](self.lse),
            delta=input_pointer[accum_type[dtype]](self.delta),
            mask=input_pointer[dtype](self.mask),
            sizes=self.sizes.copy(),
            scale=self.scale.cast[accum_type[dtype]](),
        )


def read_strides(mut words: Words) -> Strides:
    """Read the next three words: the strides of batch, head and row, in elements."""
    var strides = Strides(0)
    for axis in range(3):
        strides[axis] = Int64(words.integer())
    return strides


def input_pointer[dtype: DType](address: Int) -> ImmPtr[dtype]:
    return ImmPtr[dtype](unsafe_from_address=address)


def output_pointer[dtype: DType](address: Int) -> MutPtr[dtype]:
    return MutPtr[dtype](unsafe_from_address=address)

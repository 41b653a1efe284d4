"""Custom ops with which the driver tests go through a MAX graph: a sum that can be told to read too far, and a wait."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu import global_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

comptime Floats = MutPointer[Float32, MutAnyOrigin]
comptime BLOCK = 64


def add_and_overrun(
    total: Floats,
    a: Pointer[Float32, ImmutAnyOrigin],
    b: Pointer[Float32, ImmutAnyOrigin],
    n: Int32,
    extra: Int32,
):
    """The sum of a and b; element i of b is taken `extra` places further right. A kernel without a name of its own.
    """
    var i = global_idx.x
    if i < Int(n):
        total[unsafe_offset=i] = a[unsafe_offset=i] + b[unsafe_offset=i + Int(extra)]


@__name("wait_for_flag")
def wait_for_flag(
    y: Floats, x: Pointer[Float32, ImmutAnyOrigin], flag: MutPointer[Int32, MutAnyOrigin], n: Int32
):
    """Copies x once the flag is not zero; does not end otherwise.

    It writes down its rounds: a poll that changes nothing would be ended as one that nobody can satisfy.
    """
    var i = global_idx.x
    if i >= Int(n):
        return
    var rounds = 0
    while flag.unsafe_load[volatile=True](0) == 0:
        rounds += 1
        y.unsafe_store[volatile=True](i, Float32(rounds))
    y[unsafe_offset=i] = x[unsafe_offset=i]


@extensibility.register("test_add")
struct TestAdd:
    @staticmethod
    def execute[
        target: StaticString
    ](
        total: OutputTensor[dtype=DType.float32, rank=1, static_spec=_],
        a: InputTensor[dtype=DType.float32, rank=1, static_spec=_],
        b: InputTensor[dtype=DType.float32, rank=1, static_spec=_],
        extra: Int32,
        ctx: DeviceContext,
    ) raises:
        var n = total.size()
        ctx.enqueue_function[add_and_overrun](
            total.unsafe_ptr().as_unsafe_any_origin(),
            a.unsafe_ptr().as_unsafe_any_origin().as_imm(),
            b.unsafe_ptr().as_unsafe_any_origin().as_imm(),
            Int32(n),
            extra,
            grid_dim=ceildiv(n, BLOCK),
            block_dim=BLOCK,
        )


@extensibility.register("test_wait")
struct TestWait:
    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.float32, rank=1, static_spec=_],
        x: InputTensor[dtype=DType.float32, rank=1, static_spec=_],
        flag: InputTensor[dtype=DType.int32, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var n = y.size()
        ctx.enqueue_function[wait_for_flag](
            y.unsafe_ptr().as_unsafe_any_origin(),
            x.unsafe_ptr().as_unsafe_any_origin().as_imm(),
            flag.unsafe_ptr().as_unsafe_any_origin(),
            Int32(n),
            grid_dim=ceildiv(n, BLOCK),
            block_dim=BLOCK,
        )

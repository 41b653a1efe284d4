"""The device interface: memory, labels, modules, launches and error messages."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import HEADER, make_kernel

from harness.vgpu import Checks, VirtualGPU, VirtualGPUError
from harness.vgpu.errors import InvalidAddress, InvalidPTX, LaunchError, OutOfDeviceMemory

COPY = make_kernel("mov.b32 %y0, %x0;", [4])


@pytest.fixture
def gpu():
    return VirtualGPU(memory=np.zeros(1 << 20, np.uint8))


def load_only_kernel(gpu, text=COPY):
    return next(iter(gpu.load(text).kernels.values()))


@pytest.mark.compiles
def test_memory_round_trip(gpu):
    a, b = gpu.allocate(1000, "a"), gpu.allocate(1000, "b")
    assert a % 256 == b % 256 == 0 and abs(b - a) >= 1000 + 256
    data = np.arange(250, dtype=np.float32)
    gpu.write(a, data)
    gpu.copy(b, a, 1000)
    np.testing.assert_array_equal(gpu.read(b, 1000).view(np.float32), data)
    gpu.fill(b + 8, b"\x01\x02", 3)
    assert gpu.read(b, 16).tobytes() == data.tobytes()[:8] + b"\x01\x02" * 3 + data.tobytes()[14:16]
    gpu.write(a + 4, b"\xff" * 4)
    assert gpu.read(a + 4, 4).tobytes() == b"\xff" * 4
    assert not gpu.findings


def test_freed_memory_is_reused(gpu):
    for _ in range(50):
        a, b = gpu.allocate(100_000), gpu.allocate(200_000)
        gpu.free(a)
        gpu.free(b)
    assert gpu.arena.size == 1 << 20


def test_padding_between_labelled_tensors_is_not_output(gpu):
    """The host can copy an entire allocation, including the gaps between its tensors."""
    pack = gpu.allocate(1000)
    gpu.name(pack, 400, "a", (100,), "float32")
    gpu.name(pack + 512, 400, "b", (100,), "float32")
    gpu.write(pack, np.ones(100, np.float32))
    gpu.read(pack, 1000)
    (f,) = gpu.findings
    assert (f.tensor, f.index) == ("b", (0,)) and "400 of 400 bytes" in f.format()
    gpu.name(pack, 1000, "whole")  # the memory is reused
    assert gpu.arena.find(pack + 450).name == "whole" and len(gpu.arena.extents) == 1


def test_copies_keep_the_written_state(gpu):
    a, b = gpu.allocate(64, "a"), gpu.allocate(64, "b")
    gpu.write(a, b"\x01" * 32)
    gpu.copy(b, a, 64)
    gpu.read(b, 32)
    assert not gpu.findings
    gpu.read(b, 64)
    (f,) = gpu.findings
    assert (f.kind, f.tensor, f.index) == ("output never written", "b", 32) and "32 of 64 bytes" in f.format()


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda g: g.allocate(1 << 30), OutOfDeviceMemory, "cannot allocate 1073741824 bytes"),
        (lambda g: g.free(12345), InvalidAddress, "no allocation at 0x3039"),
        (lambda g: g.write(g.allocate(16), b"x" * 17), InvalidAddress, "cannot write 17 bytes"),
        (lambda g: g.read(4096, 4), InvalidAddress, "cannot read 4 bytes at 0x1000"),
        (lambda g: g.copy(g.allocate(8), g.allocate(4), 8), InvalidAddress, "cannot copy from"),
        (lambda g: g.name(0, 4, "x"), InvalidAddress, "cannot label"),
        (lambda g: g.load("not ptx"), InvalidPTX, "this is not PTX"),
    ],
)
def test_host_errors(gpu, call, error, text):
    with pytest.raises(error, match=text) as caught:
        call(gpu)
    assert isinstance(caught.value, VirtualGPUError) and caught.value.cuda.startswith("CUDA_ERROR_")


@pytest.mark.parametrize("blocks", ["sideways", "shuffled:x", ""])
def test_unknown_block_order(blocks):
    with pytest.raises(ValueError, match="expected natural, reversed or shuffled"):
        VirtualGPU(block_order=blocks)


def test_base_must_be_aligned():
    with pytest.raises(ValueError, match="multiple of 256"):
        VirtualGPU(memory=np.zeros(4096, np.uint8), base=100)


@pytest.mark.parametrize(
    "change,text,cuda",
    [
        ({"grid": (0, 1, 1)}, "grid dimension x is 0", "CUDA_ERROR_INVALID_VALUE"),
        ({"grid": (1, 65536, 1)}, "grid dimension y is 65536", "CUDA_ERROR_INVALID_VALUE"),
        ({"block": (1025, 1, 1)}, "block dimension x is 1025", "CUDA_ERROR_INVALID_VALUE"),
        ({"block": (1, 1, 65)}, "block dimension z is 65", "CUDA_ERROR_INVALID_VALUE"),
        ({"block": (64, 32, 1)}, "2048 threads in a block", "CUDA_ERROR_INVALID_VALUE"),
        ({"block": (2,)}, "three dimensions", "CUDA_ERROR_INVALID_VALUE"),
        ({"args": [bytes(8)]}, "takes 2 arguments, 1 were given", "CUDA_ERROR_INVALID_VALUE"),
        (
            {"args": [bytes(8), bytes(4)]},
            "argument 1 of k has 8 bytes, 4 were given",
            "CUDA_ERROR_INVALID_VALUE",
        ),
        ({"shared_bytes": 300_000}, "300000 bytes of shared memory", "CUDA_ERROR_INVALID_VALUE"),
        ({"shared_bytes": -1}, "shared memory", "CUDA_ERROR_INVALID_VALUE"),
        ({"cluster": (3, 1, 1)}, "does not divide", "CUDA_ERROR_INVALID_CLUSTER_SIZE"),
        (
            {"block": (512, 1, 1), "limited": True},
            "compiled for at most 256",
            "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        ),
    ],
)
def test_launch_errors_are_raised_before_execution(gpu, change, text, cuda):
    limited = change.pop("limited", False)
    code = COPY.replace(")\n{", ")\n.maxntid 256, 1, 1\n{") if limited else COPY
    call = {"grid": (1, 1, 1), "block": (1, 1, 1), "args": [bytes(8), bytes(8)], **change}
    with pytest.raises(LaunchError, match=text) as caught:
        gpu.launch(load_only_kernel(gpu, code), **call)
    assert caught.value.cuda == cuda and not gpu.launches


def test_kernel_description(gpu):
    text = make_kernel(".shared .align 4 .b8 s[400]; mov.b32 %y0, 0;")
    k = load_only_kernel(
        gpu, text.replace(".param .u64 q0", ".param .u64 q0, .param .align 8 .b8 t[24], .param .f32 s0")
    )
    assert (k.name, k.param_sizes, k.shared_bytes, k.max_threads) == ("k", [8, 24, 4], 400, 1024)
    assert gpu.load(HEADER).kernels == {}


@pytest.mark.parametrize(
    ("body", "module", "message"),
    [
        ("call.uni missing, ();", ".extern .func missing ();\n", "unknown external function missing"),
        ("bra missing;", "", "unknown label missing"),
        ("call.uni f, ();", ".func f () { call.uni f, (); ret; }\n", "recursive"),
    ],
)
def test_invalid_code_is_rejected_at_launch(gpu, body, module, message):
    k = load_only_kernel(gpu, make_kernel(body, module=module))
    with pytest.raises(InvalidPTX, match=message):
        gpu.launch(k, (1, 1, 1), (1, 1, 1), [bytes(8)])


def test_three_dimensional_indices(gpu):
    body = """mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ctaid.z;
    mov.u32 %r5, %ntid.x; mov.u32 %r6, %ntid.y; mov.u32 %r7, %nctaid.x; mov.u32 %r8, %nctaid.y;
    mad.lo.u32 %r9, %r4, %r8, %r3; mad.lo.u32 %r9, %r9, %r7, %t0; mad.lo.u32 %r10, %r2, %r6, %r1;
    mad.lo.u32 %r10, %r10, %r5, %t2; mad.lo.u32 %r11, %r9, 24, %r10; ld.param.u64 %a0, [q0]; mad.wide.u32 %a0, %r11, 4, %a0;
    mul.lo.u32 %y0, %r11, 2;"""
    bench = Bench()
    o = bench.empty("o", (2 * 3 * 5, 24), np.uint32)
    bench.run(make_kernel(body), (2, 3, 5), (4, 3, 2), o)
    np.testing.assert_array_equal(bench.download(o).ravel(), 2 * np.arange(720))


def test_grid_with_many_batches():
    bench = Bench()
    bench.gpu.max_batch_threads = 256
    x = np.arange(5000, dtype=np.uint32)
    o, a = bench.empty("o", 5000, np.uint32), bench.upload("a", x)
    bench.run(COPY, 50, 100, o, a)
    np.testing.assert_array_equal(bench.download(o), x)
    assert not bench.errors()


def test_findings_of_launch_and_device(gpu):
    k = load_only_kernel(gpu)
    a, o = gpu.allocate(4, "a"), gpu.allocate(4, "o")
    gpu.write(a, bytes(4))
    args = [o.to_bytes(8, "little"), a.to_bytes(8, "little")]
    first = gpu.launch(k, (1, 1, 1), (1, 1, 1), args, name="fine")
    second = gpu.launch(k, (1, 1, 1), (2, 1, 1), args, name="too many")
    assert (first.name, first.findings) == ("fine", []) and len(second.findings) == 2
    assert gpu.findings == second.findings and gpu.launches == [first, second]
    assert all(f.kernel == "too many" for f in gpu.findings)
    assert {f.kind for f in gpu.findings} == {"out-of-bounds load", "out-of-bounds store"}
    assert {f.index for f in gpu.findings} == {1}


def test_checks_can_be_disabled():
    bench = Bench(checks=Checks(uninitialised=False, races=False, counters=False))
    o, a = bench.empty("o", 4, np.uint32), bench.empty("a", 4, np.uint32)
    same_address = COPY.replace("mad.wide.u32 %a0, %i, 4, %a0;", "")
    launch = bench.run(same_address, 2, 2, o, a)
    bench.download(o)
    assert not bench.gpu.findings and launch.counters.global_load.requests == 0
    bench.run(COPY, 1, 5, o, a)
    assert {f.kind for f in bench.gpu.findings} == {"out-of-bounds load", "out-of-bounds store"}

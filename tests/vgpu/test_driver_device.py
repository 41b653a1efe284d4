"""What the Python end of the driver answers to requests that no well-behaved program makes."""

import cuda_api
import pytest

from harness.vgpu import VirtualGPU
from harness.vgpu.driver.device import Device, device_attributes, parameter_layout
from harness.vgpu.driver.interface import RESULT_CODES, Op
from harness.vgpu.driver.kernel_names import KernelNames, readable

NO_ARGUMENTS = [0] * 11


@pytest.fixture
def lines() -> list[str]:
    """What the device logs."""
    return []


@pytest.fixture
def device(lines) -> Device:
    return Device(VirtualGPU(), log=lines.append, verbose=True)


def ask(device: Device, operation: Op, *arguments: int, data=b"", room=0) -> tuple[str, tuple, bytes]:
    """One request: (name of the CUDA result, results, output)."""
    code, results, output = device.handle(operation, [*arguments, *NO_ARGUMENTS][:11], data, room)
    return {number: name for name, number in RESULT_CODES.items()}[code], results, bytes(output)


def test_handles_that_were_never_given_out(device, lines):
    assert ask(device, Op.LAUNCH, 999)[0] == "CUDA_ERROR_INVALID_HANDLE"
    assert ask(device, Op.FIND_FUNCTION, 998, data=b"f")[0] == "CUDA_ERROR_INVALID_HANDLE"
    assert lines == [
        "CUDA_ERROR_INVALID_HANDLE: kernel handle 999 is unknown",
        "CUDA_ERROR_INVALID_HANDLE: module handle 998 is not loaded",
    ]


def test_more_parameters_than_the_caller_has_room_for(device, lines):
    _, (module,), _ = ask(device, Op.LOAD_MODULE, data=cuda_api.PTX)
    assert ask(device, Op.FIND_FUNCTION, module, data=b"scale", room=48)[0] == "CUDA_ERROR_NOT_SUPPORTED"
    assert "kernel scale has 4 parameters" in lines[-1]


def test_defects_of_the_machine_name_the_exception(device, lines, monkeypatch):
    monkeypatch.setattr(device.gpu, "allocate", lambda size: [][size])
    name, _, log = ask(device, Op.ALLOCATE, 8, room=12)
    assert (name, log) == ("CUDA_ERROR_UNKNOWN", b"IndexError:\0"[:12])
    assert lines == ["CUDA_ERROR_UNKNOWN: IndexError: list index out of range"]
    assert isinstance(device.errors[0], IndexError)


def test_a_missing_entry_point_is_mentioned_once(device, lines):
    for _ in range(2):
        ask(device, Op.UNSUPPORTED, data=b"cuGraphCreate")
    assert lines == ["the program called cuGraphCreate, which the virtual GPU does not have"]


def test_module_variables_are_found(device):
    text = cuda_api.PTX.replace(
        b".visible .entry", b".visible .global .align 4 .b8 table[12];\n.visible .entry"
    )
    _, (module,), _ = ask(device, Op.LOAD_MODULE, data=text)
    name, (address, size), _ = ask(device, Op.FIND_GLOBAL, module, data=b"table")
    assert (name, size) == ("CUDA_SUCCESS", 12)
    assert ask(device, Op.WRITE, address, data=b"twelve bytes")[0] == "CUDA_SUCCESS"
    assert ask(device, Op.READ, address, room=12)[2] == b"twelve bytes"


def test_memory_that_no_kernel_was_given_may_be_read_unwritten(device):
    """Mojo's map_to_host copies a fresh buffer to the host before the program fills it."""
    _, (address,), _ = ask(device, Op.ALLOCATE, 16)
    assert ask(device, Op.READ, address, room=16)[0] == "CUDA_SUCCESS"
    assert device.gpu.findings == []


def test_results_that_a_kernel_left_out_are_a_finding(device):
    """Four elements, a kernel that writes two of them: reading them all is an error of the program."""
    _, (module,), _ = ask(device, Op.LOAD_MODULE, data=cuda_api.PTX)
    _, (kernel,), _ = ask(device, Op.FIND_FUNCTION, module, data=b"scale", room=4096)
    _, (x,), _ = ask(device, Op.ALLOCATE, 16)
    _, (y,), _ = ask(device, Op.ALLOCATE, 16)
    ask(device, Op.WRITE, x, data=bytes(16))
    packed = y.to_bytes(8, "little") + x.to_bytes(8, "little") + bytes(4) + (2).to_bytes(4, "little")
    assert ask(device, Op.LAUNCH, kernel, 1, 1, 1, 4, 1, 1, 0, 1, 1, 1, data=packed)[0] == "CUDA_SUCCESS"
    assert ask(device, Op.READ, y, room=16)[0] == "CUDA_SUCCESS"
    assert [finding.kind for finding in device.gpu.findings] == ["output never written"]
    assert ask(device, Op.READ, x, room=16)[0] == "CUDA_SUCCESS"  # wholly written
    assert len(device.gpu.findings) == 1


def test_occupancy_follows_threads_and_shared_memory(device):
    """2048 threads, 32 blocks and 228 KiB of shared memory for a multiprocessor of sm_90."""
    _, (module,), _ = ask(device, Op.LOAD_MODULE, data=cuda_api.PTX)
    _, (kernel,), _ = ask(device, Op.FIND_FUNCTION, module, data=b"scale", room=4096)
    blocks = [ask(device, Op.OCCUPANCY, kernel, *case)[1][0] for case in ((32, 0), (256, 0), (256, 99 << 10))]
    assert blocks == [32, 8, 2]


@pytest.mark.parametrize(("arch", "capability"), [("sm_75", (7, 5)), ("sm_89", (8, 9)), ("sm_90a", (9, 0))])
def test_capability_of_a_target(arch, capability):
    attributes = device_attributes(arch)
    assert (attributes[75], attributes[76]) == capability


def test_parameters_are_packed_as_the_abi_does():
    """As in a C struct { char; short; char; double; struct { double v[3]; }; float; }."""
    assert parameter_layout([1, 2, 1, 8, 24, 4]) == [(0, 1), (2, 2), (4, 1), (8, 8), (16, 24), (40, 4)]


@pytest.mark.parametrize("arch", ["sm_30", "gfx942"])
def test_an_unknown_target_is_refused(arch):
    with pytest.raises(ValueError, match=f"unknown virtual GPU '{arch}'"):
        device_attributes(arch)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("app_vector_add_Pointer6A6AoA6A6A_0daf4aec4dd85128", "app_vector_add"),
        ("app_dW_kernel_TileTensor_DType_float32_01a0f766aaaa1111", "app_dW_kernel"),
        ("wait_for_flag_01a0f766", "wait_for_flag"),
        ("scale", "scale"),
    ],
)
def test_readable_names(symbol, name):
    assert readable(symbol) == name


def test_kernels_without_a_name_are_numbered():
    names = KernelNames()
    first, second = "mojo_pkg_0123456789abcdef_aa", "ops_0123456789abcdef_layernorm_6A6A_249de5df4a21c6e5"
    assert [names.label(symbol) for symbol in (first, second, first)] == ["kernel 1", "kernel 2", "kernel 1"]

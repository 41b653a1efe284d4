"""The driver's Python side: responses to valid and invalid requests."""

import cuda_api
import pytest

from harness.vgpu import VirtualGPU
from harness.vgpu.driver.device import Device, compute_parameter_layout, get_device_attributes
from harness.vgpu.driver.interface import RESULT_CODES, Op
from harness.vgpu.driver.kernel_names import KernelNames, shorten_symbol

NO_ARGUMENTS = [0] * 11


@pytest.fixture
def messages() -> list[str]:
    """The device's log messages."""
    return []


@pytest.fixture
def device(messages) -> Device:
    return Device(VirtualGPU(), log=messages.append, verbose=True)


def send(device: Device, operation: Op, *arguments: int, data=b"", size=0) -> tuple[str, tuple, bytes]:
    """Send a request; return (name of the CUDA result, results, output)."""
    code, results, output = device.handle(operation, [*arguments, *NO_ARGUMENTS][:11], data, size)
    return {number: name for name, number in RESULT_CODES.items()}[code], results, bytes(output)


def test_unknown_handles_are_rejected(device, messages):
    assert send(device, Op.LAUNCH, 999)[0] == "CUDA_ERROR_INVALID_HANDLE"
    assert send(device, Op.FIND_FUNCTION, 998, data=b"f")[0] == "CUDA_ERROR_INVALID_HANDLE"
    assert messages == [
        "CUDA_ERROR_INVALID_HANDLE: kernel handle 999 is unknown",
        "CUDA_ERROR_INVALID_HANDLE: module handle 998 is not loaded",
    ]


def test_missing_kernel_arguments_are_rejected(device, messages):
    _, (module,), _ = send(device, Op.LOAD_MODULE, data=cuda_api.PTX)
    assert send(device, Op.FIND_FUNCTION, module, data=b"scale", size=48)[0] == "CUDA_ERROR_NOT_SUPPORTED"
    assert "kernel scale has 4 parameters" in messages[-1]


def test_internal_error_reports_the_exception(device, messages, monkeypatch):
    monkeypatch.setattr(device.gpu, "allocate", lambda size: [][size])
    name, _, output = send(device, Op.ALLOCATE, 8, size=12)
    assert (name, output) == ("CUDA_ERROR_UNKNOWN", b"IndexError:\0"[:12])
    assert messages == ["CUDA_ERROR_UNKNOWN: IndexError: list index out of range"]
    assert isinstance(device.errors[0], IndexError)


def test_missing_entry_point_is_logged_once(device, messages):
    for _ in range(2):
        send(device, Op.UNSUPPORTED, data=b"cuGraphCreate")
    assert messages == ["the program called cuGraphCreate, which the virtual GPU does not implement"]


def test_module_variables_have_an_address_and_a_size(device):
    text = cuda_api.PTX.replace(
        b".visible .entry", b".visible .global .align 4 .b8 table[12];\n.visible .entry"
    )
    _, (module,), _ = send(device, Op.LOAD_MODULE, data=text)
    name, (address, size), _ = send(device, Op.FIND_GLOBAL, module, data=b"table")
    assert (name, size) == ("CUDA_SUCCESS", 12)
    assert send(device, Op.WRITE, address, data=b"twelve bytes")[0] == "CUDA_SUCCESS"
    assert send(device, Op.READ, address, size=12)[2] == b"twelve bytes"


def test_unwritten_memory_without_a_kernel_can_be_read(device):
    """Mojo's map_to_host copies a fresh buffer to the host before the program fills it."""
    _, (address,), _ = send(device, Op.ALLOCATE, 16)
    assert send(device, Op.READ, address, size=16)[0] == "CUDA_SUCCESS"
    assert device.gpu.findings == []


def test_read_of_unwritten_output_is_an_error(device):
    """A kernel writes two of four elements, and the host reads all four."""
    _, (module,), _ = send(device, Op.LOAD_MODULE, data=cuda_api.PTX)
    _, (kernel,), _ = send(device, Op.FIND_FUNCTION, module, data=b"scale", size=4096)
    _, (x,), _ = send(device, Op.ALLOCATE, 16)
    _, (y,), _ = send(device, Op.ALLOCATE, 16)
    send(device, Op.WRITE, x, data=bytes(16))
    packed = y.to_bytes(8, "little") + x.to_bytes(8, "little") + bytes(4) + (2).to_bytes(4, "little")
    assert send(device, Op.LAUNCH, kernel, 1, 1, 1, 4, 1, 1, 0, 1, 1, 1, data=packed)[0] == "CUDA_SUCCESS"
    assert send(device, Op.READ, y, size=16)[0] == "CUDA_SUCCESS"
    assert [finding.kind for finding in device.gpu.findings] == ["output never written"]
    assert send(device, Op.READ, x, size=16)[0] == "CUDA_SUCCESS"  # completely written
    assert len(device.gpu.findings) == 1


def test_occupancy_matches_the_hardware_limits(device):
    """An SM of sm_90 has 2048 threads, 32 blocks and 228 KiB of shared memory."""
    _, (module,), _ = send(device, Op.LOAD_MODULE, data=cuda_api.PTX)
    _, (kernel,), _ = send(device, Op.FIND_FUNCTION, module, data=b"scale", size=4096)
    blocks = [
        send(device, Op.OCCUPANCY, kernel, *case)[1][0] for case in ((32, 0), (256, 0), (256, 99 << 10))
    ]
    assert blocks == [32, 8, 2]


@pytest.mark.parametrize(("arch", "capability"), [("sm_75", (7, 5)), ("sm_89", (8, 9)), ("sm_90a", (9, 0))])
def test_target_has_its_compute_capability(arch, capability):
    attributes = get_device_attributes(arch)
    assert (attributes[75], attributes[76]) == capability


def test_parameter_layout_follows_the_abi():
    """The layout is that of struct { char; short; char; double; struct { double v[3]; }; float; }."""
    layout = [(0, 1), (2, 2), (4, 1), (8, 8), (16, 24), (40, 4)]
    assert compute_parameter_layout([1, 2, 1, 8, 24, 4]) == layout


@pytest.mark.parametrize("arch", ["sm_30", "gfx942"])
def test_unknown_target_is_rejected(arch):
    with pytest.raises(ValueError, match=f"unknown virtual GPU '{arch}'"):
        get_device_attributes(arch)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("app_vector_add_Pointer6A6AoA6A6A_0daf4aec4dd85128", "app_vector_add"),
        ("app_dW_kernel_TileTensor_DType_float32_01a0f766aaaa1111", "app_dW_kernel"),
        ("wait_for_flag_01a0f766", "wait_for_flag"),
        ("scale", "scale"),
    ],
)
def test_kernel_names_are_readable(symbol, name):
    assert shorten_symbol(symbol) == name


def test_kernels_without_a_name_are_numbered():
    names = KernelNames()
    first, second = "mojo_pkg_0123456789abcdef_aa", "ops_0123456789abcdef_layernorm_6A6A_249de5df4a21c6e5"
    labels = [names.get_label(symbol) for symbol in (first, second, first)]
    assert labels == ["kernel 1", "kernel 2", "kernel 1"]

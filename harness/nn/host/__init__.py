"""Build and load the layers' operators (C++) and the kernels that they call (Mojo).

A layer calls `load(layer, device_type)` before its operator, `host/LAYER.cpp`. The operator's kernels,
`kernels/LAYER/library.mojo`, are built in parts, which it opens with `open_part`.
"""

import ctypes
import threading
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from harness.errors import EnvironmentProblem, UsageError, WorkbookError
from harness.toolchain import architectures, libraries
from harness.toolchain.packages import list_mojo_files

DTYPES = ("bfloat16", "float16", "float32", "float64")
FEATURES = ("", "_mask", "_portable", "_dropout", "_varlen")
PARTS = {
    "layernorm_linear": (*DTYPES[:3], "bfloat16_mixed", "float16_mixed"),
    "attention": ("plan", *(dtype + feature for dtype in DTYPES[:2] for feature in FEATURES)),
    "cross_entropy": DTYPES,
}
"""Layer -> the separately built parts of its kernels: a dtype, or a dtype and a feature."""
BUILD_SECONDS = {"layernorm_linear": 75, "attention": 45, "attention/plan": 12, "cross_entropy": 15}
"""Layer or part -> estimated build time in seconds on one core, used until it has been measured."""
OPERATORS = {"attention": "attention_formula", "cross_entropy": "cross_entropy"}
"""Layer -> module with the Python implementations of operators that the C++ code only declares."""
DEVICE = "cuda"
"""Device type of the operators' tensors."""
DEFINES: tuple[str, ...] = ()
"""Macros for the C++ files; tests use them to build for another device."""
HOST_FOLDER = Path(__file__).resolve().parent
KERNELS_FOLDER = HOST_FOLDER.parent / "kernels"
Handle = ctypes.POINTER(ctypes.c_void_p)
OpenCallback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, Handle)
OpenGPUFunction = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)

_loaded: dict[str, bool] = {}
_load_errors: dict[str, str] = {}
_load_lock = threading.Lock()


def get_operator_library(layer: str, torch_home: Path | None = None) -> libraries.Library:
    """Return the library of a layer's operator, for the PyTorch in `torch_home` or the installed one."""
    files = [HOST_FOLDER / f"{layer}.cpp", HOST_FOLDER / "host.h"]
    return libraries.make_torch_library(layer, files, *DEFINES, torch_home=torch_home)


def get_kernel_library(layer: str, part: str, architecture: str) -> libraries.Library:
    main_file = KERNELS_FOLDER / layer / "library.mojo"
    folders = (KERNELS_FOLDER / layer, KERNELS_FOLDER / "common", KERNELS_FOLDER / "shared")
    others = (file for folder in folders for file in list_mojo_files(folder) if file != main_file)
    files = [main_file, *others]
    seconds = BUILD_SECONDS.get(f"{layer}/{part}", BUILD_SECONDS[layer])
    defines = {"PART": part, "LIBRARY": f"workbook_{layer}_{part}"}
    name = f"{layer}_{part}"
    return libraries.make_mojo_library(name, files, KERNELS_FOLDER, architecture, seconds, **defines)


def list_layers() -> list[str]:
    return [layer for layer in PARTS if (KERNELS_FOLDER / layer / "library.mojo").is_file()]


def select_libraries(
    names: Sequence[str], architectures: Sequence[str], torch_homes: Sequence[Path | None]
) -> list[libraries.Library]:
    """Return the libraries of the named layers or parts ("attention/bfloat16"), or of all layers.

    Raises UsageError for an unknown name.
    """
    parts_by_layer: dict[str, list[str]] = {}
    for name in names or list_layers():
        layer, _, part = name.partition("/")
        if layer not in list_layers():
            raise UsageError(f"unknown layer {layer!r}; there is {', '.join(list_layers())}")
        if part and part not in PARTS[layer]:
            raise UsageError(f"{layer} has no part {part!r}; there is {', '.join(PARTS[layer])}")
        parts_by_layer.setdefault(layer, []).extend([part] if part else PARTS[layer])
    operators = [get_operator_library(layer, home) for layer in parts_by_layer for home in torch_homes]
    parts = [
        get_kernel_library(layer, part, architecture)
        for layer, parts in parts_by_layer.items()
        for part in dict.fromkeys(parts)
        for architecture in architectures
    ]
    return operators + parts


def load(layer: str, device_type: str = "cuda") -> bool:
    """Build and load a layer's operator on the first call; return whether it exists for the device type.

    Without an operator the layer calls PyTorch's own operations; on a GPU a warning gives the reason once.
    Without a GPU nothing is built, even for fake CUDA tensors.
    """
    if device_type != DEVICE:
        return False
    if layer not in _loaded:
        with _load_lock:
            if layer not in _loaded:
                _loaded[layer] = _load(layer)
    return _loaded[layer]


# The effect of torch.compiler.assume_constant_result, which would import torch._dynamo.
load.__dict__["_dynamo_marked_constant"] = True


def _load(layer: str) -> bool:
    """Build and load a layer's operator; warn if that fails."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return False
    try:
        if torch.version.hip:
            raise architectures.UnsupportedGPU(architectures.NVIDIA_ONLY_MESSAGE)
        _, library = get_operator_library(layer).load()
    except Exception as error:
        _load_errors[layer] = str(error)
        warn_of_fallback(layer, error)
        return False
    library.workbook_set_open(open_part)
    operators = import_module(f"harness.nn.{OPERATORS[layer]}").OPERATORS if layer in OPERATORS else {}
    for name, function in operators.items():
        # The second key makes vmap run the function without a loop.
        for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
            torch.library.impl(f"mojo_workbook::{name}", key, function)
    return True


@OpenCallback
def open_part(layer: bytes, part: bytes, device_index: int, dl_handle) -> int:
    """Open a part of a layer's kernels for a GPU, built if necessary; return its handle, or warn and return -1.

    The C++ code calls this once for each part and GPU, from any thread; it receives the library in `dl_handle`.
    """
    try:
        library = load_part(layer.decode(), part.decode(), device_index)
        if dl_handle[0] not in (None, library._handle):
            raise EnvironmentProblem("another architecture's kernels are in use")
        message = ctypes.create_string_buffer(4096)
        handle = OpenGPUFunction(("workbook_open", library))(device_index, message, len(message))
        if handle <= 0:
            raise EnvironmentProblem(message.value.decode())
        dl_handle[0] = library._handle
        return handle
    except Exception as error:  # an exception must not cross into C++
        warn_of_fallback(f"{layer.decode()} ({part.decode()})", error)
        return -1


def load_part(layer: str, part: str, device_index: int) -> ctypes.CDLL:
    libraries.load_runtime()
    return get_kernel_library(layer, part, get_architecture(device_index)).load()[1]


def explain_missing_kernels(layer: str, part: str, device: torch.device) -> str:
    """Return the reason why a layer's kernels do not run on a device, or "". This may build them."""
    if device.type != DEVICE:
        return f"there are no kernels for {device.type}"
    if not load(layer, device.type):
        return _load_errors.get(layer, "there is no GPU")
    if part not in PARTS[layer]:
        return f"there are no kernels for {part}"
    try:
        load_part(layer, part, device.index or 0)
    except WorkbookError as error:
        return str(error)
    return ""


def get_architecture(device_index: int) -> str:
    return architectures.get_architecture(torch.device("cuda", device_index))


def warn_of_fallback(name: str, error: Exception) -> None:
    reason = str(error) if isinstance(error, WorkbookError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"{name}: PyTorch's own operations run on this GPU: {reason}", RuntimeWarning, stacklevel=4)

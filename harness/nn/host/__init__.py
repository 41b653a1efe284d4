"""Build and load the layers' operators (C++) and the kernels that they call (Mojo).

A layer calls `load(layer, kind)` before `torch.ops.mojo_workbook.LAYER`. The operator is `host/LAYER.cpp`;
its kernels, `kernels/LAYER/library.mojo`, are built in parts, which it requests with `locate`.
"""

import ctypes
import os
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from harness.errors import BadUse, EnvironmentProblem, WorkbookError
from harness.toolchain import architectures, libraries
from harness.toolchain.packages import mojo_files

DTYPES = ("bfloat16", "float16", "float32", "float64")
FEATURES = ("", "_mask", "_portable", "_dropout", "_varlen")
PARTS = {
    "layernorm_linear": (*DTYPES[:3], "bfloat16_mixed", "float16_mixed"),
    "attention": ("plan", *(dtype + feature for dtype in DTYPES[:2] for feature in FEATURES)),
    "cross_entropy": DTYPES,
}
"""Layer -> the parts that its kernels are built in: a dtype, or a feature of a dtype."""
SECONDS = {"layernorm_linear": 75, "attention": 45, "attention/plan": 12, "cross_entropy": 15}
"""About how long the build of a layer's part takes on one core, until one was measured."""
DEVICE = "cuda"
"""The device whose tensors the operators take."""
DEFINES: tuple[str, ...] = ()
"""Macros for the C++: the tests build it for another device."""
HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "kernels"
Locate = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
)

_loaded: dict[str, bool] = {}
_reasons: dict[str, str] = {}
_loading = threading.Lock()


# ---- Libraries ------------------------------------------------------------------------------------------------------


def operator(layer: str, home: Path | None = None) -> libraries.Library:
    """Return the library with a layer's operator, for the installed PyTorch or one in a folder."""
    return libraries.torch_library(layer, [HERE / f"{layer}.cpp", HERE / "host.h"], *DEFINES, home=home)


def kernels(layer: str, part: str, architecture: str) -> libraries.Library:
    """Return the library with one part of a layer's kernels, for one architecture."""
    first = KERNELS / layer / "library.mojo"
    folders = (KERNELS / layer, KERNELS / "common", KERNELS / "shared")
    files = [first, *(file for folder in folders for file in mojo_files(folder) if file != first)]
    seconds = SECONDS.get(f"{layer}/{part}", SECONDS[layer])
    defines = {"PART": part, "LIBRARY": f"workbook_{layer}_{part}"}
    return libraries.mojo_library(f"{layer}_{part}", files, KERNELS, architecture, seconds, **defines)


def layers() -> list[str]:
    return [layer for layer in PARTS if (KERNELS / layer / "library.mojo").is_file()]


def select_libraries(
    names: Sequence[str], architectures: Sequence[str], homes: Sequence[Path | None]
) -> list[libraries.Library]:
    """Return the libraries of layers, of parts as "attention/bfloat16", or of all; raise BadUse if unknown."""
    chosen: dict[str, list[str]] = {}
    for name in names or layers():
        layer, _, part = name.partition("/")
        if layer not in layers():
            raise BadUse(f"unknown layer {layer!r}; there is {', '.join(layers())}")
        if part and part not in PARTS[layer]:
            raise BadUse(f"{layer} has no part {part!r}; there is {', '.join(PARTS[layer])}")
        chosen.setdefault(layer, []).extend([part] if part else PARTS[layer])
    operators = [operator(layer, home) for layer in chosen for home in homes]
    parts = [
        kernels(layer, part, architecture)
        for layer, parts in chosen.items()
        for part in dict.fromkeys(parts)
        for architecture in architectures
    ]
    return operators + parts


# ---- Loading --------------------------------------------------------------------------------------------------------


def load(layer: str, kind: str = "cuda") -> bool:
    """Return whether a layer has its operator for a kind of device; the first call builds and loads it.

    Without one, the layer calls PyTorch's own operations; on a GPU one warning says why. A machine without a
    GPU, which may have fake tensors of one, builds nothing.
    """
    if kind != DEVICE:
        return False
    if layer not in _loaded:
        with _loading:
            if layer not in _loaded:
                _loaded[layer] = _load(layer)
    return _loaded[layer]


# As torch.compiler.assume_constant_result marks it, which would import all of torch._dynamo.
load.__dict__["_dynamo_marked_constant"] = True


def _load(layer: str) -> bool:
    """Build and load a layer's operator; warn if that fails."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return False
    try:
        if torch.version.hip:
            raise architectures.Unsupported(architectures.ONLY_NVIDIA)
        _, library = operator(layer).load()
    except Exception as error:
        _reasons[layer] = str(error)
        warn(layer, error)
        return False
    library.workbook_set_locate(locate)
    return True


@Locate
def locate(layer: bytes, part: bytes, index: int, path: int, capacity: int) -> int:
    """Write the path of a part of a layer's kernels, built if necessary; return 0 after a warning if that fails.

    The C++ calls this once per part and GPU, from any thread.
    """
    try:
        text = os.fsencode(loaded_part(layer.decode(), part.decode(), index)) + b"\0"
        if len(text) > capacity:
            raise EnvironmentProblem(f"the path is too long: {os.fsdecode(text[:-1])}")
        ctypes.memmove(path, text, len(text))
        return 1
    except Exception as error:  # C++ can take none
        warn(f"{layer.decode()} ({part.decode()})", error)
        return 0


def loaded_part(layer: str, part: str, index: int) -> Path:
    """Build if necessary and load a part of a layer's kernels for a GPU; return its path."""
    libraries.load_runtime()
    return kernels(layer, part, architecture(index)).load()[0]


def missing(layer: str, part: str, device: torch.device) -> str:
    """Return why a layer's kernels do not run on a device, or ""; may build them."""
    if device.type != DEVICE:
        return f"there are no kernels for {device.type}"
    if not load(layer, device.type):
        return _reasons.get(layer, "there is no GPU")
    if part not in PARTS[layer]:
        return f"there are no kernels for {part}"
    try:
        loaded_part(layer, part, device.index or 0)
    except WorkbookError as error:
        return str(error)
    return ""


def architecture(index: int) -> str:
    """Return the architecture of the GPU that PyTorch numbers so."""
    return architectures.architecture(torch.device("cuda", index))


def warn(what: str, error: Exception) -> None:
    reason = str(error) if isinstance(error, WorkbookError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"{what}: PyTorch's own operations run on this GPU: {reason}", RuntimeWarning, stacklevel=4)

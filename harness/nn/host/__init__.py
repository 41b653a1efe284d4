"""The layers' operators: C++ that calls kernels in Mojo, both built when they are first wanted.

`load(layer, kind)` is what a layer asks before it calls `torch.ops.mojo_workbook.LAYER`. The C++ of a layer is
`harness/nn/host/LAYER.cpp`, its kernels are `harness/nn/kernels/LAYER/library.mojo`, built in parts; the operator asks for the part
that it needs by `locate`.
"""

import ctypes
import os
import threading
import warnings
from pathlib import Path

import torch

from harness.errors import EnvironmentProblem, WorkbookError
from harness.toolchain import architectures, libraries
from harness.toolchain.packages import mojo_files

DTYPES = ("bfloat16", "float16", "float32", "float64")
PARTS = {
    "layernorm_linear": (*DTYPES, "bfloat16_mixed", "float16_mixed"),
    "attention": (
        "plan",
        *(
            f"{dtype}{feature}"
            for dtype in DTYPES[:2]
            for feature in ("", "_mask", "_portable", "_dropout", "_varlen")
        ),
    ),
    "cross_entropy": DTYPES,
}
"""Layer -> the parts that its kernels are built in: a dtype, or a feature of a dtype."""
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
_loading = threading.Lock()


# ---- What is built --------------------------------------------------------------------------------------------------


def operator(layer: str) -> libraries.Library:
    """The library with a layer's operator, for the PyTorch that is installed."""
    return libraries.torch_library(layer, [HERE / f"{layer}.cpp", HERE / "host.h"], *DEFINES)


def kernels(layer: str, part: str, architecture: str) -> libraries.Library:
    """The library with one part of a layer's kernels, for one architecture."""
    first = KERNELS / layer / "library.mojo"
    folders = (KERNELS / layer, KERNELS / "common", KERNELS / "shared")
    others = [file for folder in folders for file in mojo_files(folder) if file != first]
    return libraries.mojo_library(f"{layer}_{part}", [first, *others], KERNELS, architecture, PART=part)


# ---- Loading --------------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def load(layer: str, kind: str = "cuda") -> bool:
    """Return whether a layer has its operator for a kind of device, built and loaded at the first question.

    Where it has none, the layer calls PyTorch's own operations; on a GPU one warning says why. A machine without a GPU, which may
    have fake tensors of one, builds nothing.
    """
    if kind != DEVICE:
        return False
    there = _loaded.get(layer)
    if there is None:
        with _loading:
            if layer not in _loaded:
                _loaded[layer] = _load(layer)
            there = _loaded[layer]
    return there


def _load(layer: str) -> bool:
    """Build and load a layer's operator. Return whether it is there, after a warning where it is not."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return False
    try:
        if torch.version.hip:
            raise EnvironmentProblem("the kernels are for GPUs of NVIDIA")
        _, library = operator(layer).load()
    except Exception as error:
        warn(layer, error)
        return False
    library.workbook_set_locate(locate)
    return True


@Locate
def locate(layer: bytes, part: bytes, index: int, path: int, capacity: int) -> int:
    """Write the path of a part of a layer's kernels, built where it must be; return 0 after a warning where it cannot be had.

    The C++ calls this once for a part and a GPU, from any thread.
    """
    try:
        libraries.load_runtime()
        found, _ = kernels(layer.decode(), part.decode(), architecture(index)).load()
        text = os.fsencode(found) + b"\0"
        if len(text) > capacity:
            raise EnvironmentProblem(f"the path is too long: {found}")
        ctypes.memmove(path, text, len(text))
        return 1
    except Exception as error:  # C++ can take none
        warn(f"{layer.decode()} ({part.decode()})", error)
        return 0


def architecture(index: int) -> str:
    """The architecture of a GPU by PyTorch's number of it."""
    return architectures.architecture(torch.device("cuda", index))


def warn(what: str, error: Exception) -> None:
    """Say once what is missing."""
    reason = str(error) if isinstance(error, WorkbookError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"{what}: PyTorch's own operations run on this GPU: {reason}", RuntimeWarning, stacklevel=4)

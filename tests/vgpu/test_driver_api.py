"""The CUDA driver API under `vgpu exec`, called by cuda_api.py."""

import json
import sys

import numpy as np
import pytest
from exec_tools import HERE, run_vgpu


@pytest.fixture(scope="session")
def api() -> dict:
    """Results of cuda_api.py."""
    completed = run_vgpu("--", sys.executable, str(HERE / "cuda_api.py"))
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


@pytest.mark.compiles
def test_fills_and_copies(api):
    expected = np.full(64, 7, np.uint8)
    expected[8:16] = [4, 3, 2, 1] * 2
    expected[16:20] = [6, 5] * 2
    expected[24:28] = expected[40:44] = [9, 0, 0, 0]
    assert api["memory"]["bytes"] == list(expected)
    assert api["memory"]["range"] == [0, 64]
    assert api["memory"]["used"] == 128


@pytest.mark.compiles
def test_fills_and_copies_of_pinned_host_memory(api):
    """Fills and copies accept pinned host memory as device memory, but reject freed ranges and ranges that are too short."""
    host = api["pinned"]
    row = [0] * 16
    for name, value in (("8", [0x11] * 16), ("16", [0x33, 0x22] * 8), ("32", [0x77, 0x66, 0x55, 0x44] * 4)):
        assert host[f"cuMemsetD{name}_v2"] == host[f"cuMemsetD{name}Async"] == value
        width = int(name) // 8
        for at in (0, 8):
            row[at : at + width] = value[:width]
        assert host[f"cuMemsetD2D{name}_v2"] == host[f"cuMemsetD2D{name}Async"] == row
    copies = [name for name in host if name.startswith("cuMemcpy")]
    assert len(copies) == 9 and all(host[name] == list(range(16)) for name in copies)
    assert host["registered"] == [5] * 16
    names = ("past the end", "unregistered", "freed twice")
    assert {host[name] for name in names} == {"CUDA_ERROR_INVALID_VALUE"}


@pytest.mark.compiles
def test_copies_of_rectangles(api):
    """Dense and pitched copies between host and device do not change bytes outside the rectangle."""
    rectangles = api["rectangles"]
    expected = np.zeros((4, 5), int)
    expected[:2, 2:] = np.arange(20).reshape(4, 5)[1:3, 1:4]
    assert (rectangles["pitch"], rectangles["back"]) == (512, expected.ravel().tolist())
    assert rectangles["past the end"] == "CUDA_ERROR_INVALID_VALUE"
    assert rectangles["array"] == "CUDA_ERROR_NOT_SUPPORTED"


@pytest.mark.compiles
def test_memory_errors(api):
    errors = {name: code for name, code in api["memory"].items() if isinstance(code, str)}
    assert errors.pop("too large") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert {errors.pop(name) for name in ("free", "free null")} == {"CUDA_SUCCESS"}
    assert set(errors.values()) == {"CUDA_ERROR_INVALID_VALUE"}
    assert len(errors) == 7


@pytest.mark.compiles
def test_three_launch_functions(api):
    launches = api["launches"]
    assert launches["launch"] == "CUDA_SUCCESS"
    assert launches["by pointers"] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert launches["by buffer"] == [0, 3, 6, 9, 12, 15]
    assert launches["by config"] == [0, 2, 4, 6, 8, 10]
    assert launches["parameters"] == [[0, 8], [8, 8], [16, 4], [20, 4]]


@pytest.mark.compiles
def test_invalid_launches(api):
    launches = api["launches"]
    names = ("fifth parameter", "empty grid", "grid y", "block", "block z", "no arguments")
    names += ("shared without attribute", "attribute too large")
    assert {launches[name] for name in names} == {"CUDA_ERROR_INVALID_VALUE"}
    assert {launches[name] for name in ("attribute", "shared with attribute")} == {"CUDA_SUCCESS"}


@pytest.mark.compiles
def test_threads_do_not_interfere(api):
    assert api["threads"] == 8 * 25


@pytest.mark.compiles
def test_invalid_modules(api):
    modules = api["modules"]
    code, log = modules["machine code"]
    assert code == "CUDA_ERROR_INVALID_IMAGE"
    assert "compiled to machine code" in log
    assert modules["not PTX"][0] == "CUDA_ERROR_INVALID_IMAGE"
    code, log = modules["unknown version"]
    assert code == "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    assert "99.0" in log
    assert modules["unknown kernel"] == modules["unknown variable"] == "CUDA_ERROR_NOT_FOUND"
    assert (modules["unload"], modules["unload twice"]) == ("CUDA_SUCCESS", "CUDA_ERROR_INVALID_HANDLE")
    assert modules["graphs"] == "CUDA_ERROR_NOT_SUPPORTED"
    assert modules["second device"] == "CUDA_ERROR_INVALID_DEVICE"

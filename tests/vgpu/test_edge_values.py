"""The virtual GPU against the results of a real one at the edges: NaNs, infinities, subnormals, ties, integer limits.

`data/edge_values.json.gz` was measured on an H200 by `edge_values.py`. Instructions that PTX defines exactly must give
the very same bits, but for float64 NaNs that come from two NaNs, and for float64 atomics on NaNs: which payload
survives there is not simulated.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import edge_values
import numpy as np
import pytest
from edge_values import BLOCK, BYTES, CASES, Case
from ptx_tools import covers

from harness.devices.poison import POISON
from harness.vgpu import VirtualGPU

TABLE = Path(__file__).with_name("data") / "edge_values.json.gz"
# Relative error that the PTX manual allows, or that the format's last digit is: by instruction, then by result type.
APPROXIMATE = {
    "tanh": 2.0**-10.9,
    "lg2": 2.0**-21,
    "sin": 2.0**-19,
    "cos": 2.0**-19,
    "rcp.approx.ftz.f64": 2.0**-19,
}
LAST_DIGIT = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-22, "f64": 2.0**-51}


@functools.cache
def table() -> dict:
    """What the real GPU gave."""
    recorded = json.loads(gzip.decompress(TABLE.read_bytes()))
    assert recorded["digest"] == edge_values.digest(), (
        "edge_values.py has changed since the table was measured"
    )
    return recorded


def on_virtual_gpu(case: Case) -> np.ndarray:
    """The result bits of a case."""
    gpu, rows = VirtualGPU(), case.operands()
    size = len(rows) * BYTES[case.gives]
    places = [gpu.allocate(size)]
    for data in edge_values.arrays(case):
        places.append(gpu.allocate(len(data)))
        gpu.write(places[-1], data)
    kernel = gpu.load(case.ptx()).kernels["k"]
    arguments = [place.to_bytes(8, "little") for place in places]
    gpu.launch(kernel, (len(rows) // BLOCK, 1, 1), (BLOCK, 1, 1), arguments)
    assert not gpu.findings
    return gpu.read(places[0], size).view(f"u{BYTES[case.gives]}")


def measured(case: Case) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(table()["results"][case.name]), f"u{BYTES[case.gives]}")


def is_nan(bits: int, kind: str) -> bool:
    exponent, mantissa = edge_values.LAYOUT[kind]
    return bits & ((1 << exponent + mantissa) - 1) > ((1 << exponent) - 1) << mantissa


def differences(case: Case, got: np.ndarray, want: np.ndarray) -> list[str]:
    """Elements whose bits differ, but for NaNs whose payload is not simulated."""
    atomic = case.name.startswith("atom")
    out = []
    for row, g, w in zip(case.operands(), got.tolist(), want.tolist(), strict=True):
        if g == w:
            continue
        if case.gives == "f64" and set(case.takes) == {"f64"}:
            nans = sum(is_nan(x, "f64") for x in row)
            if (nans > 1 or (nans and atomic)) and is_nan(g, "f64") and is_nan(w, "f64"):
                continue
        out.append(f"{[hex(x) for x in row]}: {g:#x}, the GPU gives {w:#x}")
    return out


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bits as float64; packed types as two columns."""
    if kind.endswith("x2"):
        halves = np.stack([bits & 0xFFFF, bits >> 16], axis=-1).astype(np.uint16)
        return floats(halves, kind[:-2])
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).astype(np.float64)


def test_the_table_is_complete():
    assert set(table()["results"]) == {case.name for case in CASES} and not table()["errors"]
    assert "NVIDIA" in table()["device"]


@covers("copysign", "div", "fma", "rcp", "sqrt")
@pytest.mark.parametrize("group", sorted({case.name.split(".")[0] for case in CASES if not case.approximate}))
def test_exact_instructions(group):
    wrong = {}
    for case in CASES:
        if case.name.split(".")[0] == group and not case.approximate:
            different = differences(case, on_virtual_gpu(case), measured(case))
            if different:
                wrong[case.name] = different[:3]
    assert not wrong


@covers("cos", "ex2", "lg2", "rsqrt", "sin", "tanh")
@pytest.mark.parametrize("case", [case for case in CASES if case.approximate], ids=lambda case: case.name)
def test_approximate_instructions(case):
    """As near as the manual promises; NaNs to the bit. sine and cosine in [-pi, pi]; what is subnormal may be 0."""
    got, want = on_virtual_gpu(case), measured(case)
    kind = case.gives.removesuffix("x2")
    limit = APPROXIMATE.get(case.name, APPROXIMATE.get(case.name.split(".")[0], 0)) + LAST_DIGIT[kind]
    g, w = floats(got, case.gives), floats(want, case.gives)
    np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
    if case.gives == kind:
        np.testing.assert_array_equal(got[np.isnan(w)], want[np.isnan(w)])
    keep = np.isfinite(g) & np.isfinite(w)
    np.testing.assert_array_equal(g[~keep], w[~keep])
    tiny = {"f16": 2.0**-14, "f64": 2.0**-1022}.get(kind, 2.0**-126)
    scale = np.maximum(np.abs(w), tiny)
    if case.name[:3] in ("sin", "cos", "lg2"):  # the manual gives an absolute error here
        scale = np.maximum(scale, 1)
    if case.name[:3] in ("sin", "cos"):
        operand = floats(np.array([row[0] for row in case.operands()], np.uint32), "f32")
        keep &= np.abs(operand) <= np.pi
    assert (np.abs(g[keep] - w[keep]) <= (limit * scale)[keep] + tiny).all()


def test_poison_does_not_survive_arithmetic():
    """Adding to what an output held before leaves no poison, on the GPU's rules as on the virtual one: an element that
    still holds it was not computed. One type cannot be told apart by its value: float64 behind an atomic add."""
    layouts = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    for dtype, kind in layouts.items():
        assert is_nan(POISON[dtype], kind)
        quiet = 1 << (edge_values.LAYOUT[kind][1] - 1)
        assert not POISON[dtype] & quiet  # every arithmetic instruction makes a signalling NaN quiet
        results = [
            c
            for c in CASES
            if c.takes[0] == kind == c.gives and c.name.split(".")[0] in ("add", "mul", "fma")
        ]
        assert results
        for case in results:
            for bits in (measured(case), on_virtual_gpu(case)):
                assert all(int(b) & quiet for b in bits if is_nan(int(b), kind)), case.name


def test_fills_of_host_memory_were_measured_too():
    """The calls on pinned host memory that the driver's own tests check are legal on the GPU."""
    host = table()["host"]
    assert host.pop("past the end") == 1  # CUDA_ERROR_INVALID_VALUE
    assert len(host) == 13 and {code for code, _ in host.values()} == {0}

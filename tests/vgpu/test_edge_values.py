"""The virtual GPU compared with a GPU's results for edge cases: NaNs, infinities, subnormals, ties, integer limits.

`edge_values.py` measured `data/edge_values.json.gz` on an H200. Instructions that PTX defines exactly must give the
same bits, except for float64 NaNs computed from two NaNs and float64 atomics on NaNs, whose payload is not simulated.
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
# Relative errors: allowed by the PTX manual, by instruction; one ulp, by result type.
APPROXIMATE = {"tanh": 2.0**-10.9, "lg2": 2.0**-21, "sin": 2.0**-19, "cos": 2.0**-19}
APPROXIMATE |= {"rcp.approx.ftz.f64": 2.0**-19}
ULP = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-22, "f64": 2.0**-51}


@functools.cache
def load_table() -> dict:
    """Load the results measured on a GPU."""
    recorded = json.loads(gzip.decompress(TABLE.read_bytes()))
    assert recorded["digest"] == edge_values.compute_digest(), (
        "edge_values.py has changed since the table was measured"
    )
    return recorded


def run_case(case: Case) -> np.ndarray:
    """Return the result bits of a case."""
    gpu, rows = VirtualGPU(), case.operands()
    size = len(rows) * BYTES[case.result_type]
    addresses = [gpu.allocate(size)]
    for data in edge_values.pack_operands(case):
        addresses.append(gpu.allocate(len(data)))
        gpu.write(addresses[-1], data)
    kernel = gpu.load(case.ptx()).kernels["k"]
    arguments = [address.to_bytes(8, "little") for address in addresses]
    gpu.launch(kernel, (len(rows) // BLOCK, 1, 1), (BLOCK, 1, 1), arguments)
    assert not gpu.findings
    return gpu.read(addresses[0], size).view(f"u{BYTES[case.result_type]}")


def get_measured(case: Case) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(load_table()["results"][case.name]), f"u{BYTES[case.result_type]}")


def is_nan(bits: int, kind: str) -> bool:
    exponent, mantissa = edge_values.LAYOUT[kind]
    return bits & ((1 << exponent + mantissa) - 1) > ((1 << exponent) - 1) << mantissa


def find_differences(case: Case, got: np.ndarray, expected: np.ndarray) -> list[str]:
    """Describe elements whose bits differ, except for NaNs whose payload is not simulated."""
    atomic = case.name.startswith("atom")
    out = []
    for row, g, w in zip(case.operands(), got.tolist(), expected.tolist(), strict=True):
        if g == w:
            continue
        if case.result_type == "f64" and set(case.operand_types) == {"f64"}:
            nans = sum(is_nan(x, "f64") for x in row)
            if (nans > 1 or (nans and atomic)) and is_nan(g, "f64") and is_nan(w, "f64"):
                continue
        out.append(f"{[hex(x) for x in row]}: {g:#x}, the GPU gives {w:#x}")
    return out


def to_float64(bits: np.ndarray, kind: str) -> np.ndarray:
    """Convert bits to float64; packed types to two columns."""
    if kind.endswith("x2"):
        halves = np.stack([bits & 0xFFFF, bits >> 16], axis=-1).astype(np.uint16)
        return to_float64(halves, kind[:-2])
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):  # for signalling NaNs
        return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).astype(np.float64)


def test_measured_table_is_complete():
    assert set(load_table()["results"]) == {case.name for case in CASES} and not load_table()["errors"]
    assert "NVIDIA" in load_table()["device"]


@covers("copysign", "div", "fma", "rcp", "sqrt")
@pytest.mark.parametrize("group", sorted({case.name.split(".")[0] for case in CASES if not case.approximate}))
def test_exact_instructions_match_the_gpu(group):
    mismatches_by_case = {}
    for case in CASES:
        if case.name.split(".")[0] == group and not case.approximate:
            mismatches = find_differences(case, run_case(case), get_measured(case))
            if mismatches:
                mismatches_by_case[case.name] = mismatches[:3]
    assert not mismatches_by_case


@covers("cos", "ex2", "lg2", "rsqrt", "sin", "tanh")
@pytest.mark.parametrize("case", [case for case in CASES if case.approximate], ids=lambda case: case.name)
def test_approximate_instructions_are_within_the_manuals_limits(case):
    """Errors are within the manual's limits and NaNs equal; sin and cos in [-pi, pi]; subnormal results may be 0."""
    got, expected = run_case(case), get_measured(case)
    kind = case.result_type.removesuffix("x2")
    tolerance = APPROXIMATE.get(case.name, APPROXIMATE.get(case.name.split(".")[0], 0)) + ULP[kind]
    g, w = to_float64(got, case.result_type), to_float64(expected, case.result_type)
    np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
    if case.result_type == kind:
        np.testing.assert_array_equal(got[np.isnan(w)], expected[np.isnan(w)])
    mask = np.isfinite(g) & np.isfinite(w)
    np.testing.assert_array_equal(g[~mask], w[~mask])
    tiny = {"f16": 2.0**-14, "f64": 2.0**-1022}.get(kind, 2.0**-126)
    scale = np.maximum(np.abs(w), tiny)
    if case.name[:3] in ("sin", "cos", "lg2"):  # the manual's limit is absolute
        scale = np.maximum(scale, 1)
    if case.name[:3] in ("sin", "cos"):
        operand = to_float64(np.array([row[0] for row in case.operands()], np.uint32), "f32")
        mask &= np.abs(operand) <= np.pi
    assert (np.abs(g[mask] - w[mask]) <= (tolerance * scale)[mask] + tiny).all()


def test_poison_does_not_survive_arithmetic():
    """Arithmetic quiets poison, a signaling NaN, on both GPUs, so an element with poison was never written.
    The exception is a float64 atomic add."""
    layouts = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    for dtype, kind in layouts.items():
        assert is_nan(POISON[dtype], kind)
        quiet = 1 << (edge_values.LAYOUT[kind][1] - 1)
        assert not POISON[dtype] & quiet  # arithmetic turns a signalling NaN into a quiet one
        same_type = [c for c in CASES if c.operand_types[0] == kind == c.result_type]
        results = [c for c in same_type if c.name.split(".")[0] in ("add", "mul", "fma")]
        assert results
        for case in results:
            for bits in (get_measured(case), run_case(case)):
                assert all(int(b) & quiet for b in bits if is_nan(int(b), kind)), case.name

"""The virtual GPU against a real one: wgmma, TMA, bulk copies, mbarriers and matrix moves, to the bit.

`data/hopper_values.json` was measured on an H200 by `hopper_values.py`: the SHA-256 of what each kernel leaves.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import hopper_values
import pytest
from hopper_values import CASES, THREADS, TYPES, Case
from ptx_tools import covers

from harness.vgpu import VirtualGPU
from harness.vgpu.memory import tensor_map

TABLE = Path(__file__).with_name("data") / "hopper_values.json"
# The H200 stopped at this one, which has two copies, and which of them it minds was not asked; in a launch without a
# cluster it may be the one from shared to shared memory.
UNEXPLAINED = "bulk copies into shared memory"


@functools.cache
def table() -> dict:
    """What the real GPU gave."""
    recorded = json.loads(TABLE.read_text())
    assert recorded["digest"] == hopper_values.digest(), (
        "hopper_values.py has changed since the table was measured"
    )
    return recorded


def on_virtual_gpu(case: Case) -> tuple[str, set[str]]:
    """The SHA-256 of a case's output, and the kinds of findings."""
    gpu = VirtualGPU()
    given, before = hopper_values.data_of(case.kind), case.output()
    places = [gpu.allocate(len(given), "input"), gpu.allocate(len(before), "output")]
    for place, data in zip(places, (given, before), strict=True):
        gpu.write(place, data)
    encoded = bytes(tensor_map.BYTES)
    if m := case.map:
        encoded = tensor_map.encode_tiled(
            TYPES[m.kind][0], places[m.on_output], m.dims, m.strides, m.box, [1] * len(m.dims),
            interleave=0, swizzle=m.swizzle, promotion=0, fill=m.fill,
        ).encode()  # fmt: skip
    kernel = gpu.load(case.ptx()).kernels["k"]
    arguments = [encoded, *(place.to_bytes(8, "little") for place in places)]
    gpu.launch(kernel, (case.blocks, 1, 1), (THREADS, 1, 1), arguments, cluster=(case.blocks, 1, 1))
    out = gpu.read(places[1], len(before)).tobytes()
    return hashlib.sha256(out).hexdigest(), {f.kind for f in gpu.findings}


@covers("wgmma", "cp", "mbarrier", "ldmatrix", "stmatrix")
@pytest.mark.parametrize("group", sorted({case.name.split()[0] for case in CASES}))
def test_every_bit_is_what_a_gpu_gives(group):
    measured = {
        case.name: table()["results"].get(case.name) for case in CASES if case.name.split()[0] == group
    }
    different = []
    for case in CASES:
        if measured.get(case.name) is not None:
            got, findings = on_virtual_gpu(case)
            assert not findings, case.name
            if got != measured[case.name]:
                different.append(case.name)
    assert not different


def test_what_a_gpu_stops_at_is_a_finding():
    """An innermost coordinate that is no multiple of 16 bytes is an illegal instruction to the GPU (715)."""
    refused = {case.name: case for case in CASES if case.name in table()["errors"]}
    assert len(refused) == 14 and all(text.endswith(": 715") for text in table()["errors"].values())
    for name in refused.keys() - {UNEXPLAINED}:
        assert on_virtual_gpu(refused[name])[1] == {"misaligned bulk copy"}, name


def test_the_table_is_complete():
    assert {*table()["results"], *table()["errors"]} == {case.name for case in CASES}
    assert "NVIDIA H" in table()["device"]

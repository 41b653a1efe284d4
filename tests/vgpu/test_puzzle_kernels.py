"""Puzzle 22's kernels, recorded and replayed: correct values in every block order, no findings, predicted byte counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recordings import make_order
from typed import unwrap

from harness.check.reference import Reference
from harness.devices.recorder import RecordedLaunch, record
from harness.devices.replay import Replay
from harness.devices.targets import Target
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.vgpu.checks.counters import Counters

pytestmark = pytest.mark.compiles

DEFAULT = PUZZLE.dims
WIDE, TALL = (3, 7, 131, 5), (2, 33, 12, 20)  # cases with partial tiles, together along every axis
VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")


def list_orders(folder, tests):
    cases = [Case("", "", dims, "hard") for dims in (DEFAULT, WIDE, TALL)]
    return {
        dtype: make_order("p22", cases_of_dtype, PUZZLE.default_variants, dtype=dtype)
        for dtype, cases_of_dtype in {"float32": cases, "bfloat16": cases[:1]}.items()
    }


@pytest.fixture(scope="module")
def recordings(recorded):
    """Recordings of the solution by dtype."""
    return {dtype: record(order) for dtype, order in recorded.items()}


@pytest.mark.parametrize("variant", PUZZLE.default_variants)
@pytest.mark.parametrize(
    ("dtype", "dims", "order"),
    [
        ("float32", DEFAULT, "natural"),
        ("float32", DEFAULT, "reversed"),
        ("float32", DEFAULT, "shuffled:1"),
        ("bfloat16", DEFAULT, "natural"),
        ("float32", WIDE, "natural"),
        ("float32", TALL, "natural"),
    ],
)
def test_values_are_correct_in_every_block_order(recordings, dtype, dims, order, variant):
    case = Case("recorded", "", dims, "hard")
    reference = Reference(PUZZLE, dtype, seed=0)
    replay = Replay(recordings[dtype], PUZZLE, dtype, block_order=order)
    outputs = replay.run(variant, case, reference.get_inputs(case))
    results = reference.compare_all(case, VIRTUAL, variant, outputs, list(outputs))
    assert {name for name, result in results.items() if not result.ok} == set()
    assert {*PUZZLE.forward, *PUZZLE.backward} <= set(results)
    assert not replay.gpu.findings, replay.gpu.findings[0].format()


def get_default_case_counters(recording, variant: str) -> dict[str, Counters]:
    """Return launch name -> counters of the default case, for the first launch of each name."""
    case = PUZZLE.list_cases(None)[0]
    replay = Replay(recording, PUZZLE, "float32")
    replay.run(variant, case, Reference(PUZZLE, "float32", 0).get_inputs(case))
    counters = {}
    for launch in replay.gpu.launches:
        counters.setdefault(launch.name, launch.counters)
    return counters


def test_byte_counts_match_the_shapes(recordings):
    """The fused kernel reads W once per row; the unfused matmul reads it once per tile of rows."""
    B, S, H, O = DEFAULT
    rows, weight = B * S, O * H * 4
    fused = get_default_case_counters(recordings["float32"], "fused")
    forward = fused["minimal_fused_forward"]
    assert forward.tensors["linear_weight"].read == rows * weight
    assert forward.tensors["output"].written == rows * O * 4
    assert forward.tensors["mean"].written == rows * 4
    matmul = get_default_case_counters(recordings["float32"], "unfused")["matmul"]
    assert matmul.tensors["linear_weight_t"].read == weight
    assert matmul.tensors["output"].written == rows * O * 4
    assert matmul.barriers == 2
    backward = fused["minimal_fused_backward"]
    assert backward.atomics == rows * (O + O * H + 2 * H)
    assert backward.atomics_per_address == rows


def test_workspace_matches_the_ledger(recordings):
    """The workspaces allocated in the default case add up to the ledger's total."""
    for variant in PUZZLE.default_variants:
        events = recordings["float32"].cases[variant, DEFAULT]
        workspace = sum(event.nbytes for event in events if getattr(event, "is_workspace", False))
        assert workspace == sum(unwrap(PUZZLE.make_ledger)(DEFAULT, "float32").temporaries[variant].values())


def test_missing_zeroing_launch_is_reported(recordings):
    """Without the zeroing launch, atomics add to uninitialized memory."""
    recording = recordings["float32"]
    events = [
        event
        for event in recording.cases["fused", DEFAULT]
        if not (isinstance(event, RecordedLaunch) and event.name == "clear_gradients")
    ]
    case = PUZZLE.list_cases(None)[0]
    replay = Replay(replace(recording, cases={("fused", DEFAULT): events}), PUZZLE, "float32")
    replay.run("fused", case, Reference(PUZZLE, "float32", 0).get_inputs(case))
    errors = [finding for finding in replay.gpu.findings if finding.is_error]
    assert {finding.kind for finding in errors} == {"uninitialised read"}
    assert {f.tensor for f in errors} == {"sums_ln_weight", "sums_ln_bias", "sums_weight", "sums_bias"}

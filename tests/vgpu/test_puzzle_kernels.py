"""Puzzle 22's solution kernels, recorded and replayed: right values in every block order, no finding, bytes as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typed import present

from harness.check.reference import Reference
from harness.devices.recorder import Order, RecordedLaunch, record_many
from harness.devices.replay import Replay
from harness.devices.targets import Target
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.vgpu.checks.counters import Counters

pytestmark = pytest.mark.compiles

CHAPTER = PUZZLE.dims
WIDE, TALL = (3, 7, 131, 5), (2, 33, 12, 20)  # of the puzzle's cases; between them every tile edge is ragged
VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")


@pytest.fixture(scope="module")
def recordings():
    """The solution's launches by dtype."""
    package = roots.op_package(roots.solutions(), "p22")
    sizes = {"float32": (CHAPTER, WIDE, TALL), "bfloat16": (CHAPTER,)}
    orders = [Order(package, sizes[dtype], PUZZLE.default_variants, True, dtype) for dtype in sizes]
    return dict(zip(sizes, record_many(orders, "p22"), strict=True))


@pytest.mark.parametrize("variant", PUZZLE.default_variants)
@pytest.mark.parametrize(
    ("dtype", "dims", "order"),
    [
        ("float32", CHAPTER, "natural"),
        ("float32", CHAPTER, "reversed"),
        ("float32", CHAPTER, "shuffled:1"),
        ("bfloat16", CHAPTER, "natural"),
        ("float32", WIDE, "natural"),
        ("float32", TALL, "natural"),
    ],
)
def test_right_in_every_block_order_and_without_a_finding(recordings, dtype, dims, order, variant):
    case = Case("recorded", "", dims, "hard")
    reference = Reference(PUZZLE, dtype, seed=0)
    player = Replay(recordings[dtype], PUZZLE, dtype, blocks=order)
    outputs = player.run(variant, case, reference.inputs(case))
    verdicts = reference.compare_all(case, VIRTUAL, variant, outputs, list(outputs))
    assert {name for name, verdict in verdicts.items() if not verdict.ok} == set()
    assert {*PUZZLE.forward, *PUZZLE.backward} <= set(verdicts)
    assert not player.gpu.findings, player.gpu.findings[0].text()


def chapter_counters(recording, variant: str) -> dict[str, Counters]:
    """The counters of each launch at the chapter's size, by name; the first where a name comes twice."""
    case = PUZZLE.cases(None)[0]
    player = Replay(recording, PUZZLE, "float32")
    player.run(variant, case, Reference(PUZZLE, "float32", 0).inputs(case))
    counters = {}
    for launch in player.gpu.launches:
        counters.setdefault(launch.name, launch.counters)
    return counters


def test_bytes_as_the_shapes_predict(recordings):
    """The fused kernel reads W once for every row; the unfused matmul reads it once for every tile of rows."""
    B, S, H, O = CHAPTER
    rows, weight = B * S, O * H * 4
    fused = chapter_counters(recordings["float32"], "fused")
    forward = fused["minimal_fused_forward"]
    assert forward.tensors["linear_weight"].read == rows * weight
    assert forward.tensors["output"].written == rows * O * 4
    assert forward.tensors["mean"].written == rows * 4
    matmul = chapter_counters(recordings["float32"], "unfused")["matmul"]
    assert matmul.tensors["linear_weight_t"].read == weight
    assert matmul.tensors["output"].written == rows * O * 4
    assert matmul.barriers == 2
    backward = fused["minimal_fused_backward"]
    assert backward.atomics == rows * (O + O * H + 2 * H)
    assert backward.atomics_per_address == rows


def test_the_scratch_memory_is_what_the_ledger_says(recordings):
    """Every workspace that the launch code asks for at the chapter's size."""
    for variant in PUZZLE.default_variants:
        events = recordings["float32"].cases[variant, CHAPTER]
        lent = sum(event.nbytes for event in events if getattr(event, "scratch", False))
        assert lent == sum(present(PUZZLE.ledger)(CHAPTER, "float32").between[variant].values())


def test_forgotten_clear_is_reported(recordings):
    """Without the clearing launch the atomics add to memory that nobody has written."""
    recording = recordings["float32"]
    events = [
        event
        for event in recording.cases["fused", CHAPTER]
        if not (isinstance(event, RecordedLaunch) and event.name == "clear_gradients")
    ]
    case = PUZZLE.cases(None)[0]
    player = Replay(replace(recording, cases={("fused", CHAPTER): events}), PUZZLE, "float32")
    player.run("fused", case, Reference(PUZZLE, "float32", 0).inputs(case))
    errors = [finding for finding in player.gpu.findings if finding.is_error]
    assert {finding.kind for finding in errors} == {"uninitialised read"}
    assert {f.tensor for f in errors} == {"sums_ln_weight", "sums_ln_bias", "sums_weight", "sums_bias"}

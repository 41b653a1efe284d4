"""The recording program: what it takes from a spec, and a launch that nothing defines."""

from dataclasses import replace

import pytest

from harness.dev import check
from harness.devices.record_program import program
from harness.errors import DamagedFile
from harness.puzzles.p20.spec import PUZZLE
from harness.toolchain import roots

PACKAGE = roots.CHECKOUT / "solutions" / "p20" / "op"


def test_a_program_declares_the_tensors_and_makes_the_launches_of_the_spec():
    text = program(PUZZLE, PACKAGE)
    for variant in PUZZLE.variants:
        assert f"def record_{variant}(" in text and f'is_defined["VARIANT_{variant}"]()' in text
    for call in (call for calls in PUZZLE.variants.values() for call in calls):
        assert call.launch.partition("[")[0] in text
        for name in (*call.op.writes, *call.op.reads):
            assert f'("{name}", ' in text
    assert "(..." not in text and "(=" not in text


def test_a_launch_that_no_file_defines_is_named():
    (variant, (first, *rest)), *_ = PUZZLE.variants.items()
    wrong = replace(PUZZLE, variants={variant: (replace(first, launch="launch_nothing(...)"), *rest)})
    with pytest.raises(DamagedFile, match="launch_nothing"):
        program(wrong, PACKAGE)
    assert any("launch_nothing" in fault for fault in check.faults(roots.CHECKOUT, wrong))

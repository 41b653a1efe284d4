"""The recording program: a spec's tensors and launches, and undefined launches."""

from dataclasses import replace

import pytest

from harness.dev import check
from harness.devices.record_program import generate_program
from harness.errors import DamagedFile
from harness.puzzles.p20.spec import PUZZLE
from harness.toolchain import roots

PACKAGE = roots.CHECKOUT / "solutions" / "p20" / "op"


def test_program_has_the_tensors_and_launches_of_the_spec():
    text = generate_program(PUZZLE, PACKAGE)
    for variant in PUZZLE.variants:
        assert f"def record_{variant}(" in text and f'is_defined["VARIANT_{variant}"]()' in text
    for call in (call for calls in PUZZLE.variants.values() for call in calls):
        assert call.launch.partition("[")[0] in text
        for name in (*call.op.writes, *call.op.reads):
            assert f'("{name}", ' in text
    assert "(..." not in text and "(=" not in text


def test_undefined_launch_is_reported():
    (variant, (first, *rest)), *_ = PUZZLE.variants.items()
    wrong = replace(PUZZLE, variants={variant: (replace(first, launch="launch_nothing(...)"), *rest)})
    with pytest.raises(DamagedFile, match="launch_nothing"):
        generate_program(wrong, PACKAGE)
    assert any("launch_nothing" in fault for fault in check.find_errors(roots.CHECKOUT, wrong))

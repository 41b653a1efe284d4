"""The extension module of cross-entropy on the virtual GPU: cross-entropy by rows."""

from pathlib import Path

import pytest
from extension_runs import on_virtual_gpu

from harness.toolchain import extension

LIMITS = {"few classes": 5e-3, "one scale": 1e-3, "float64": 1e-11, "many threads": 5e-3}
LIMITS |= {"whole vectors": 3e-6, "several turns": 5e-3, "several turns under a cap": 3e-6}


@pytest.mark.compiles
def test_the_module_on_the_virtual_gpu():
    """The built file itself, through the driver's interface, with blocks in any order: every result, and no finding."""
    program, module = (
        Path(__file__).with_name("cross_entropy_run.py"),
        extension.build("sm_90a", layer="cross_entropy").path,
    )
    run = on_virtual_gpu(program, module, arch="sm_90a", blocks="shuffled:1")
    assert run.findings == []
    for case, of_case in run.report.items():
        assert max(of_case.values()) < LIMITS.get(case, 1e-6), (case, of_case)
        # A kind that computed in a wider dtype than it says would be as good as the next one.
        assert case not in LIMITS or max(of_case.values()) > LIMITS[case] / 1000, (case, of_case)
    launched = [sum(part in launch.name for launch in run.launches) for part in ("rows_cross", "rows_scale")]
    assert launched == [10, 2]

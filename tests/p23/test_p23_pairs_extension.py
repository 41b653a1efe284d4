"""float32 attention of puzzle 23's extension module for a Hopper, the file itself, on the virtual GPU: pairs of float16 by wgmma."""

import pytest

EPS = 2.0**-23

pytestmark = pytest.mark.compiles


def test_hopper_s_kernels_for_pairs_are_right_on_the_virtual_gpu_without_a_finding(module_on_virtual_gpu):
    """Addresses, counted scratch memory, copies in bulk, barriers; ragged lengths and shared heads; and the plain path."""
    report = module_on_virtual_gpu("p23_pairs_run.py")
    assert report["findings"] == [] and report["plain"]
    for case, errors in report["errors"].items():
        assert max(errors.values()) < 6 * EPS, (case, errors)
    same = [
        report["errors"][case] for case in report["errors"] if "same" in case or case.startswith("ragged")
    ]
    assert same[0] == same[1] != same[2], "another order of blocks changes nothing, other kernels some bits"
    for case, launches in report["launches"].items():
        assert any("pairs_mask_gradient" in name for name in launches) == ("mask" in case)
        by_wgmma = any("fast_pairs_hopper" in name for name in launches)
        assert by_wgmma != any("fast_pairs_kernels" in name for name in launches)
        assert by_wgmma == ("portable" not in case), launches

"""Attention of sequences behind one another: its extension module for a Hopper itself on the virtual GPU."""

import pytest

pytestmark = pytest.mark.compiles


def test_sequences_of_unequal_lengths_are_right_on_the_virtual_gpu_without_a_finding(module_on_virtual_gpu):
    """Sequences without queries or keys, of one row and of several blocks, more than a warp has lanes; rows of none; offsets from
    outside of the tensors; and work that follows the lengths."""
    run = module_on_virtual_gpu("varlen_run.py", blocks="shuffled:1")
    report, launched = run.report, run.names("cases")
    assert run.findings == []
    kernels = ("fast_delta", "fast_forward", "fast_key_value", "fast_query")
    assert all(any(kernel in name for name in launched) for kernel in kernels)
    assert len(launched) == len(kernels), launched
    of_types, *of_sizes = report["refused"]
    assert "there are kernels of bfloat16 and float16" in of_types
    assert len(of_sizes) == 4 and all("at most 128 elements in whole chunks" in text for text in of_sizes)
    for case, errors in report["errors"].items():
        assert errors.pop("lse") < 1e-6, case
        # A few units of the 16-bit type, and not of a wider one.
        assert 1e-4 < max(errors.values()) < 8e-3, (case, errors)
    # Of as many rows: products grow with the squares of the lengths.
    one, eight = (sum(launch.instructions for launch in run.by_part[name]) for name in ("one", "eight"))
    assert eight < one / 4

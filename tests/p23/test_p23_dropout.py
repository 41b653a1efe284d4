"""Attention with dropout, puzzle 23's extension module for a Hopper itself on the virtual GPU."""

import pytest

pytestmark = pytest.mark.compiler


def test_dropout_is_right_on_the_virtual_gpu_without_a_finding(module_on_virtual_gpu):
    """The mask of every kernel is the one that PyTorch draws: a kernel with another would be off by the size of the results."""
    report = module_on_virtual_gpu("p23_dropout_run.py")
    assert report["findings"] == []
    kernels = ("fast_delta", "fast_forward", "fast_key_value", "fast_query")
    assert all(any(kernel in name for name in report["launches"]) for kernel in kernels)
    assert len(report["launches"]) == len(kernels), report["launches"]
    of_types, of_sizes, of_shares = (report["refused"][start:end] for start, end in ((0, 2), (2, 6), (6, 10)))
    assert all("dropout wants 16-bit types on NVIDIA's tensor cores" in text for text in of_types)
    assert all("heads of at most 128 elements in whole chunks" in text for text in of_sizes)
    assert all("dropout wants to keep 0 to 65535 elements of 65536" in text for text in of_shares)
    assert [len(each) for each in (of_types, of_sizes, of_shares)] == [2, 4, 4]
    nothing = report["errors"].pop("nothing is kept")
    assert nothing.pop("lse") < 1e-6 and not any(nothing.values())
    for case, errors in report["errors"].items():
        assert errors.pop("lse") < 1e-6, case
        # A few units of the 16-bit type, and not of a wider one.
        assert 1e-4 < max(errors.values()) < 8e-3, (case, errors)

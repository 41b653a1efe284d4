"""Attention with dropout: its extension module for a Hopper itself on the virtual GPU."""

import pytest

pytestmark = pytest.mark.compiles


def test_dropout_is_right_on_the_virtual_gpu_without_a_finding(module_on_virtual_gpu):
    """The mask of every kernel is the one that PyTorch draws: a kernel with another would be off by the size of the results."""
    run = module_on_virtual_gpu("dropout_run.py", blocks="shuffled:2")
    report = run.report
    assert run.findings == []
    portable = ("fast_delta", "fast_forward", "fast_key_value", "fast_query")
    wgmma = (*("hopper_dropout_hoppe", "hopper_forwar", "keys_hopper_k", "hopper_number", "hopper_query"),)
    for case in report["errors"]:
        launches = run.names(case)
        fastest = case.endswith("fastest") and not case.startswith(
            ("a mask of every head", "a scale below 0")
        )
        kernels = wgmma if fastest else portable
        assert all(any(kernel in name for name in launches) for kernel in kernels), case
        assert len(launches) == len(kernels), (case, launches)
    of_types, of_sizes, of_shares = (report["refused"][start:end] for start, end in ((0, 2), (2, 6), (6, 10)))
    assert all("there are kernels of bfloat16 and float16" in text for text in of_types)
    assert all("heads of at most 128 elements in whole chunks" in text for text in of_sizes)
    assert all("dropout wants to keep 0 to 65535 elements of 65536" in text for text in of_shares)
    assert [len(each) for each in (of_types, of_sizes, of_shares)] == [2, 4, 4]
    assert report["scratch"] == [2**29, 0], "a bit for each probability, up to a GiB"
    for by in ("fastest", "portable"):
        nothing = report["errors"].pop(f"nothing is kept, {by}")
        assert nothing.pop("lse") < 1e-6 and not any(nothing.values())
    for case, errors in report["errors"].items():
        assert errors.pop("lse") < 1e-6, case
        # A few units of the 16-bit type, and not of a wider one.
        assert 1e-4 < max(errors.values()) < 8e-3, (case, errors)

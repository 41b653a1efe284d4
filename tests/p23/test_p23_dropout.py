"""Attention with dropout, puzzle 23's extension module for a Hopper itself on the virtual GPU."""

import pytest

pytestmark = pytest.mark.compiles


def test_dropout_is_right_on_the_virtual_gpu_without_a_finding(module_on_virtual_gpu):
    """The mask of every kernel is the one that PyTorch draws: a kernel with another would be off by the size of the results."""
    report = module_on_virtual_gpu("p23_dropout_run.py")
    assert report["findings"] == []
    portable = ("fast_delta", "fast_forward", "fast_key_value", "fast_query")
    wgmma = (
        *("hopper_dropout_hopper", "hopper_forward", "keys_hopper_key", "hopper_numbers", "hopper_query"),
    )
    of_pairs = ("split_tiles", "choose_path", "pairs_plain_plain")
    pairs = (*of_pairs, *(f"pairs_kernels_pairs_{of}" for of in "fqk"))
    pairs_wgmma = (*of_pairs, "hopper_dropout_hopper", "pairs_hopper_hopper", "pairs_hopper_keys")
    for case, launches in report["launches"].items():
        fastest = case.endswith("fastest") and not case.startswith(
            ("a mask of every head", "a scale below 0")
        )
        if case.startswith("pairs"):
            kernels = pairs_wgmma if fastest else pairs
        else:
            kernels = wgmma if fastest else portable
        assert all(any(kernel in name for name in launches) for kernel in kernels), case
        assert len(launches) == len(kernels), (case, launches)
    of_types, of_sizes, of_shares, of_scales = (
        report["refused"][start:end] for start, end in ((0, 2), (2, 8), (8, 12), (12, 14))
    )
    assert all("dropout wants 16-bit types or float32 on NVIDIA's tensor cores" in text for text in of_types)
    assert all("heads of at most 128 elements in whole chunks" in text for text in of_sizes)
    assert all("dropout wants to keep 0 to 65535 elements of 65536" in text for text in of_shares)
    assert all(
        "dropout in float32 wants a scale above 0 and a mask without blocks" in text for text in of_scales
    )
    assert [len(each) for each in (of_types, of_sizes, of_shares, of_scales)] == [2, 6, 4, 2]
    assert report["scratch"] == [2**29, 0], "a bit for each probability, up to a GiB"
    for by in ("fastest", "portable"):
        for kind in ("", "pairs, "):
            nothing = report["errors"].pop(f"{kind}nothing is kept, {by}")
            assert nothing.pop("lse") < 1e-6 and not any(nothing.values())
    for case, errors in report["errors"].items():
        assert errors.pop("lse") < 1e-6, case
        # A few units of the type, and of a 16-bit one not of a wider one. What is kept grows, and its rounding with it.
        if case.startswith("pairs"):
            share = report["shares"][case.rpartition(", ")[0]]
            assert max(errors.values()) < 6 * 2.0**-23 / share, (case, errors)
        else:
            assert 1e-4 < max(errors.values()) < 8e-3, (case, errors)

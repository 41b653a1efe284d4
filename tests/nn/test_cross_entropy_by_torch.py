"""The PyTorch fallback of linear with cross-entropy, and its argument checks."""

import itertools

import pytest
import torch
from loss_checks import OPTIONS, H, V, assert_matches_reference, compute_loss, make_tensors

from harness.nn import LinearCrossEntropy, linear_cross_entropy


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_matches_reference(options, reduction):
    tensors = make_tensors(ignored=options.get("ignore_index", -100), bias=bool(options))
    assert_matches_reference(tensors, reduction=reduction, chunk_rows=4, **options)


@pytest.mark.parametrize("rows", [(), (0,), (1,)])
def test_zero_or_one_row(rows):
    assert_matches_reference(make_tensors(rows=rows, ignored=0), reduction="none")


def test_smoothing_and_z_loss_of_0_and_1():
    for smoothing, z in itertools.product((0, 1), (0, 1)):
        assert_matches_reference(make_tensors(), label_smoothing=float(smoothing), z_loss=z)


def test_autocast_loss_is_float32():
    input, weight, target, bias = make_tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(input, weight, target, bias)
    exact = compute_loss(input, weight, target, bias)
    assert loss.dtype == torch.float32 and 1e-5 < (loss - exact).abs() / exact < 1e-2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.int(), TypeError, "target: expected int64 classes, got int32"),
        (lambda t: t[0], ValueError, r"target: expected shape \[2, 5\], .* got \[5\]"),
        (lambda t: t.t(), ValueError, r"target: expected shape \[2, 5\], .* got \[5, 2\]"),
        (lambda t: t.clamp(min=V), IndexError, "Target 11 is out of bounds"),
    ],
)
def test_invalid_targets_are_rejected(change, error, message):
    input, weight, target, _ = make_tensors()
    with pytest.raises(error, match=message):
        linear_cross_entropy(input, weight, change(target))


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("reduction", "average", ValueError, "reduction: expected 'none', 'mean', 'sum', got 'average'"),
        ("ignore_index", 1.5, TypeError, "ignore_index: expected an integer, got float"),
        ("label_smoothing", "a lot", TypeError, "label_smoothing: expected a number, got str"),
        ("label_smoothing", 1.5, ValueError, "label_smoothing: expected a number from 0 to 1, got 1.5"),
        ("z_loss", -1.0, ValueError, "z_loss: expected a number that is not negative, got -1.0"),
        ("softcap", 0, ValueError, "softcap: expected a number above 0, or None, got 0"),
        ("chunk_rows", True, TypeError, "chunk_rows: expected an integer, got bool"),
        ("chunk_rows", 0, ValueError, "chunk_rows: expected at least 1, got 0"),
    ],
)
def test_invalid_options_are_rejected(option, value, error, message):
    with pytest.raises(error, match=message):
        linear_cross_entropy(*make_tensors(), **{option: value})
    with pytest.raises(error, match=message):
        LinearCrossEntropy(H, V, **{option: value})

"""PyTorch's OpInfo samples of scaled_dot_product_attention, run with `harness.nn.attention`."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from attention_checks import assert_as_accurate_as_pytorch
from typed import as_triple

from harness.nn import attention

OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def split_sample(sample) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict]:
    """Return the query, key and value of a sample, and its options as a dict."""
    arguments = (sample.input, *sample.args)
    return as_triple(arguments[:3]), dict(zip(OPTIONS, arguments[3:], strict=False)) | sample.kwargs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_opinfo_samples_match_pytorch(dtype):
    dropout_outputs = []
    outcomes = {"accurate": 0, "dropout": 0, "gradient of the mask": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db  # takes seconds
    (info,) = (info for info in op_db if info.name == "nn.functional.scaled_dot_product_attention")
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        tensors, options = split_sample(sample)
        if options.get("dropout_p"):
            for function in (attention, F.scaled_dot_product_attention):
                torch.manual_seed(0)
                dropout_outputs.append(function(*tensors, **options))
            assert torch.equal(*dropout_outputs[-2:]), "the CPU path must use PyTorch's dropout"
            outcomes["dropout"] += 1
            continue
        mask = options.get("attn_mask")
        outcomes["gradient of the mask"] += mask is not None and mask.requires_grad
        assert_as_accurate_as_pytorch(tensors, **options)
        outcomes["accurate"] += 1
    assert outcomes["accurate"] >= 10 and min(outcomes.values()) >= 1, f"torch's samples changed: {outcomes}"

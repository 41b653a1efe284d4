"""Private names of torch that may vanish: the layer imports and computes right without any of them."""

import subprocess
import sys

import pytest
import torch

from harness.nn import private

WITHOUT_PRIVATE_NAMES = """
import torch

names = ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_get_fp32_precision_getter", "_is_any_autocast_enabled",
         "_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_len_torch_function_stack",
         "_is_tracing")
owners = [(torch._C, name) for name in names] + [(torch._C._dynamo.guards, "_empty_strided_cuda")]
owners += [(torch._C._autograd, "_top_saved_tensors_default_hooks"), (torch.nn.modules.module, "_has_any_global_hook")]
owners += [(torch.overrides, "_get_current_function_mode_stack")]
removed = [(owner, name, getattr(owner, name)) for owner, name in owners if hasattr(owner, name)]
for owner, name, _ in removed:
    delattr(owner, name)
import harness.nn.private
for owner, name, value in removed:  # torch uses them itself
    setattr(owner, name, value)

from harness.nn import direct, private
from harness.nn.layers import LayerNormLinear

assert direct.empty_strided is private.empty_on_gpu and direct.any_autocast is private.autocast_on
assert private.dispatch_modes() == 1 and private.transforms_active()
assert private.function_modes() and private.is_tracing() and private.hooks_of_all_modules()
assert private.hooks_on_saved(True) != private.hooks_on_saved(True)
torch.manual_seed(0)
reference = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
layer = LayerNormLinear.from_modules(*reference)
x = torch.randn(3, 8, requires_grad=True)
expected = torch.autograd.grad(reference(x).square().sum(), (x, *reference.parameters()))
found = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
torch.testing.assert_close(found, expected)
print("the same gradients")
"""


@pytest.mark.compiler
def test_the_layer_without_private_names_of_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PRIVATE_NAMES], capture_output=True, text=True)
    assert done.stdout == "the same gradients\n", done.stderr


def test_a_name_that_is_there_and_one_that_is_not():
    assert private.private("autograd.grad", private.raw_stream) is torch.autograd.grad
    assert private.private("_C._no_such_name.at_all", private.raw_stream) is private.raw_stream


def test_autocast_is_seen_without_the_private_name():
    assert not private.autocast_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.autocast_on() and private.any_autocast()


@pytest.mark.parametrize("allowed", [True, False])
def test_the_precision_of_products_is_torch_s_flag(monkeypatch, allowed):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    assert private.product_precision("cuda", "matmul") == ("tf32" if allowed else "ieee")
    assert (private.fp32_precision("cuda", "matmul") == "tf32") == allowed

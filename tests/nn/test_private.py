"""The layers on a torch without CUDA, which lacks some of the private names."""

import subprocess
import sys

import pytest

from harness.nn import private

WITHOUT_CUDA = """
import torch

for name in [name for name in vars(torch._C) if name.startswith("_cuda_")]:
    delattr(torch._C, name)
from harness.nn import private
from harness.nn.layers import LayerNormLinear

assert private.current_device is None
torch.manual_seed(0)
reference = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
layer = LayerNormLinear.from_modules(*reference)
x = torch.randn(3, 8, requires_grad=True)
expected = torch.autograd.grad(reference(x).square().sum(), (x, *reference.parameters()))
found = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
torch.testing.assert_close(found, expected)
print("the same gradients")
"""


@pytest.mark.compiles
def test_the_layer_on_a_torch_without_cuda():
    done = subprocess.run([sys.executable, "-c", WITHOUT_CUDA], capture_output=True, text=True)
    assert done.stdout == "the same gradients\n", done.stderr


def test_a_name_that_torch_lacks_is_named():
    with pytest.raises(
        ImportError, match=r"torch\._C\._no_such_name is missing in torch \d.*has no attribute"
    ):
        private.private("_C._no_such_name")

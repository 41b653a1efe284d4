"""Selection of a GPU's target architecture."""

import pytest
import torch

from harness.errors import UsageError
from harness.toolchain import architectures


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_nvidia_architectures_are_supported_by_mojo(capability, name):
    assert architectures.get_nvidia_architecture(capability) == name
    assert architectures.list_accelerators()[name] == name
    assert (
        architectures.normalize_architecture(name)
        == architectures.normalize_architecture(name.removesuffix("a"))
        == name
    )


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_old_nvidia_gpu_is_rejected(capability):
    name = f"sm_{capability[0]}{capability[1]}"
    with pytest.raises(architectures.UnsupportedGPU, match=f"need sm_80 or newer, not {name}"):
        architectures.get_nvidia_architecture(capability)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "--arch h100: unknown; there is .*sm_80.*sm_90a"),
        ("sm_75", "--arch sm_75: the kernels need sm_80 or newer, not sm_75"),
        ("mi300x", "--arch mi300x: the kernels are for GPUs of NVIDIA"),
    ],
)
def test_unsupported_name_is_rejected(name, message):
    with pytest.raises(UsageError, match=message):
        architectures.normalize_architecture(name)


def test_torch_device_has_an_architecture(monkeypatch):
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {1: (9, 0)}[device.index])
    assert architectures.get_architecture(device) == "sm_90a"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for unsupported in (torch.device("mps"), device):
        with pytest.raises(architectures.UnsupportedGPU, match="for GPUs of NVIDIA"):
            architectures.get_architecture(unsupported)

"""Shared by the tests of the layers' kernels: attention's extension module on the virtual GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
from extension_runs import Run, on_virtual_gpu

from harness.toolchain import extension


@pytest.fixture(scope="session")
def module_on_virtual_gpu() -> Callable[..., Run]:
    """Name of a program in this folder, and an order of the blocks -> what it finds: it gets the module for a Hopper."""

    def run(program: str, blocks: str = "natural") -> Run:
        module = extension.build("sm_90a", layer="attention").path
        return on_virtual_gpu(Path(__file__).with_name(program), module, arch="sm_90a", blocks=blocks)

    return run

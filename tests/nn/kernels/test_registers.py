"""What row kernels hold lies in registers: out of them a kernel is right, and fifty times slower."""

import pytest
from kernel_texts import assembler, kernels_of, spilled

from harness.toolchain import extension

pytestmark = pytest.mark.compiles


def test_the_forward_row_kernels_do_not_run_out_of_registers(tmp_path):
    """A few bytes of addresses may go to memory; a row without vectors once put 1,128 there, behind a loop of one turn."""
    ptxas = assembler()
    if ptxas is None:
        pytest.skip("no assembler: Triton is not installed")
    kernels = kernels_of(extension.build("sm_90a", layer="layernorm_linear").path)
    stores = {
        name: spilled(ptx, ptxas, tmp_path) for name, ptx in kernels.items() if "_linear_forward_" in name
    }
    assert len(stores) > 20 and max(stores.values()) <= 32, stores

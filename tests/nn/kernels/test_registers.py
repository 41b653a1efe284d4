"""What row kernels hold lies in registers: out of them a kernel is right, and fifty times slower."""

import pytest
from kernel_texts import assembler, kernels_of, spilled

from harness.nn import host

pytestmark = pytest.mark.compiles
LAYER = "layernorm_linear"


@pytest.mark.parametrize("part", ["bfloat16", "bfloat16_mixed"])
def test_the_forward_row_kernels_do_not_run_out_of_registers(part, tmp_path):
    """A few bytes of addresses may go to memory; a row without vectors once put 1,128 there, behind a loop of one turn."""
    ptxas = assembler()
    if ptxas is None:
        pytest.skip("no assembler: Triton is not installed")
    kernels = kernels_of(host.kernels(LAYER, part, "sm_90a").build().path)
    stores = {
        name: spilled(ptx, ptxas, tmp_path)
        for name, ptx in kernels.items()
        if "layernorm_linear_forward_" in name
    }
    assert len(stores) > 5 and max(stores.values()) <= 32, stores

"""Registers of the built kernels: where they run out, or the assembler gives them away, a GPU is slow or wrong."""

import pytest
from kernel_texts import assembler, kernels_of, spilled

from harness.nn import host
from harness.vgpu.checks.hazards import factors, is_product
from harness.vgpu.ptx import parser
from harness.vgpu.ptx.program import Program, reads_and_writes

pytestmark = pytest.mark.compiles


def built(layer: str, part: str) -> dict[str, str]:
    """Return the PTX of a part's kernels by name."""
    return kernels_of(host.kernels(layer, part, "sm_90a").build().path)


@pytest.mark.parametrize("part", ["bfloat16", "bfloat16_mixed"])
def test_the_forward_row_kernels_do_not_run_out_of_registers(part, tmp_path):
    """A few bytes of addresses may go to memory; a row without vectors once put 1,128 there, behind a loop of one turn."""
    ptxas = assembler()
    if ptxas is None:
        pytest.skip("no assembler: Triton is not installed")
    stores = {
        name: spilled(ptx, ptxas, tmp_path)
        for name, ptx in built("layernorm_linear", part).items()
        if name.startswith(("layernorm_rows", "layernorm_shared", "layernorm_any"))
    }
    assert len(stores) > 5 and max(stores.values()) <= 32, stores


def reachable(program: Program, start: int, without: int | None = None) -> set[int]:
    """Return the blocks that control flow reaches from one, itself only in a loop."""
    seen, todo = set(), [start]
    while todo:
        for block in program.blocks[todo.pop()].succs:
            if block not in seen and block != without:
                seen.add(block)
                todo.append(block)
    return seen


def longest_jump(program: Program) -> int:
    """Return the most instructions that an iteration can skip in a loop whose wgmma keeps its left factor in registers."""
    longest = 0
    for index, block in enumerate(program.blocks):
        products = [i for i in block.instrs if is_product(i) and factors(i)]
        loop = {other for other in reachable(program, index) if index in reachable(program, other)}
        inside = [i for other in loop for i in program.blocks[other].instrs]
        written = {register for i in inside if not is_product(i) for register in reads_and_writes(i)[1]}
        if any(not written & set(factors(i)) for i in products if loop):
            optional = [
                other for other in loop - {index} if index in reachable(program, index, without=other)
            ]
            longest = max([longest, *(len(program.blocks[other].instrs) for other in optional)])
    return longest


def test_no_branch_lies_between_products_that_keep_a_factor_in_registers():
    """Assemblers up to release 13.0 reuse such registers, and a GPU is wrong where the PTX is right.

    Five instructions, an arrival, become predicates; sixty, a mask, were a branch.
    """
    modules = {
        name: parser.parse(text)
        for part in ("bfloat16", "bfloat16_mask")
        for name, text in built("attention", part).items()
        if "wgmma.mma_async" in text
    }
    jumps = {name: longest_jump(Program(module, module.functions[name])) for name, module in modules.items()}
    assert sum("key_value_wgmma" in name for name in jumps) >= 2, jumps
    assert 0 < max(jumps.values()) < 16, jumps

"""Registers of the compiled kernels: spills make them slow, and reuse by the assembler makes them wrong."""

import pytest
from kernel_texts import count_spilled_bytes, find_assembler, read_kernels

from harness.nn import host
from harness.vgpu.checks.hazards import get_operand_registers, is_wgmma_product
from harness.vgpu.ptx import parser
from harness.vgpu.ptx.program import Program, get_reads_and_writes

pytestmark = [pytest.mark.compiles, pytest.mark.slow]


def build_ptx(layer: str, part: str) -> dict[str, str]:
    """Return the PTX of a library part's kernels by name."""
    return read_kernels(host.get_kernel_library(layer, part, "sm_90a").build().path)


@pytest.mark.parametrize("part", ["bfloat16", "bfloat16_mixed"])
def test_forward_row_kernels_do_not_spill(part, tmp_path):
    """A few bytes of addresses may be spilled; a kernel for unaligned rows once spilled 1,128 bytes."""
    ptxas = find_assembler()
    if ptxas is None:
        pytest.skip("no assembler: Triton is not installed")
    stores = {
        name: count_spilled_bytes(ptx, ptxas, tmp_path)
        for name, ptx in build_ptx("layernorm_linear", part).items()
        if name.startswith(("layernorm_rows", "layernorm_shared", "layernorm_any"))
    }
    assert len(stores) > 5 and max(stores.values()) <= 32, stores


def find_reachable(program: Program, start: int, removed: int | None = None) -> set[int]:
    """Return the basic blocks reachable from `start`, which is included only in a loop."""
    visited, pending = set(), [start]
    while pending:
        for block in program.blocks[pending.pop()].succs:
            if block not in visited and block != removed:
                visited.add(block)
                pending.append(block)
    return visited


def find_longest_jump(program: Program) -> int:
    """Return the most instructions that an iteration can skip in a loop whose wgmma has its left operand in registers."""
    longest = 0
    for index, block in enumerate(program.blocks):
        products = [i for i in block.instrs if is_wgmma_product(i) and get_operand_registers(i)]
        loop = {other for other in find_reachable(program, index) if index in find_reachable(program, other)}
        inside = [i for other in loop for i in program.blocks[other].instrs]
        written = {r for i in inside if not is_wgmma_product(i) for r in get_reads_and_writes(i)[1]}
        if any(not written & set(get_operand_registers(i)) for i in products if loop):
            optional = [b for b in loop - {index} if index in find_reachable(program, index, removed=b)]
            longest = max([longest, *(len(program.blocks[b].instrs) for b in optional)])
    return longest


def test_no_branch_between_products_with_register_operands():
    """Assemblers up to release 13.0 reuse such registers, so that correct PTX gives wrong results.

    Five instructions (an arrival) become predicated; sixty (a mask) became a branch.
    """
    modules = {
        name: parser.parse(text)
        for part in ("bfloat16", "bfloat16_mask")
        for name, text in build_ptx("attention", part).items()
        if "wgmma.mma_async" in text
    }
    jumps = {name: find_longest_jump(Program(m, m.functions[name])) for name, m in modules.items()}
    assert sum("key_value_wgmma" in name for name in jumps) >= 2, jumps
    assert 0 < max(jumps.values()) < 16, jumps

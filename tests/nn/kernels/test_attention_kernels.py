"""Attention's extension module for a Hopper, the file itself, on the virtual GPU: wgmma and the TMA forward and backward."""

from collections import Counter

import pytest
from kernel_texts import kernels_of

from harness.toolchain import extension
from harness.vgpu.checks.hazards import factors, is_product
from harness.vgpu.ptx import parser
from harness.vgpu.ptx.program import Program, reads_and_writes

pytestmark = pytest.mark.compiles


def test_hopper_s_kernels_are_right_on_the_virtual_gpu_without_a_finding(module_on_virtual_gpu):
    """Addresses, order of arguments, strides, scratch memory, tensor maps, barriers; ragged lengths and shared heads."""
    run = module_on_virtual_gpu("attention_run.py", blocks="shuffled:3")
    report, launched = run.report, run.names("cases")
    assert run.findings == []
    kernels = ("hopper_forwar", "hopper_keys_hopper_k", "hopper_number", "hopper_query", "fast_delta")
    assert all(any(kernel in name for name in launched) for kernel in kernels)
    assert len(launched) == len(kernels), launched
    by_tiles = ("fast_delta", "fast_forward", "fast_key_value", "mask_gradient_fast", "fast_query")
    for case in report["masked"]:
        launches = run.names(case)
        expected = by_tiles if case == "mask of every head, ragged" else (*kernels, "mask_gradient_fast")
        if case.endswith("forward alone"):
            expected = ("fast_delta", "hopper_forwar", "fast_key_value", "fast_query")
        assert all(any(kernel in name for name in launches) for kernel in expected), case
        assert len(launches) == len(expected), (case, launches)
    # query, key and value, then the gradient of the output; of fewer keys key and value anew; a mask, and one with other rows.
    assert [run.maps[f"maps {number}"] for number in range(5)] == [4, 0, 2, 1, 1], (
        "maps are kept, but not for a tensor that has become another one"
    )
    for case, errors in report["errors"].items():
        assert errors.pop("lse") < 1e-6, case
        # A few units of the 16-bit type, and not of a wider one.
        assert 1e-4 < max(errors.values()) < 8e-3, (case, errors)


def test_explain_names_the_kernels_that_are_launched(module_on_virtual_gpu):
    """Of drawn calls: heads, masks and blocks of them, strides, scales of every sign, portable kernels."""
    run, kinds = module_on_virtual_gpu("explained_run.py"), Counter()
    assert run.findings == []
    for number, each in enumerate(run.report):
        launches = run.names(f"call {number}")
        by = "mma.sync" if any("kernels_fast_" in name for name in launches) else "wgmma"
        assert by == "mma.sync" or any("hopper" in name for name in launches), each
        assert each["said"].startswith(f"{by}, through the extension module"), each
        kinds[by] += 1
    assert len(kinds) == 2 and min(kinds.values()) >= 5, kinds


def behind(program: Program, start: int, without: int | None = None) -> set[int]:
    """The blocks that control flow can reach from one, itself only around a loop."""
    reached, todo = set(), [start]
    while todo:
        for block in program.blocks[todo.pop()].succs:
            if block not in reached and block != without:
                reached.add(block)
                todo.append(block)
    return reached


def longest_jump(program: Program) -> int:
    """The most instructions of a block that a step can jump over, in loops whose products keep a left factor in registers."""
    longest = 0
    for index, block in enumerate(program.blocks):
        products = [i for i in block.instrs if is_product(i) and factors(i)]
        if not products:
            continue
        loop = {other for other in behind(program, index) if index in behind(program, other)}
        inside = [i for other in loop for i in program.blocks[other].instrs]
        written = {register for i in inside if not is_product(i) for register in reads_and_writes(i)[1]}
        if any(not written & set(factors(i)) for i in products if loop):
            optional = [other for other in loop - {index} if index in behind(program, index, without=other)]
            longest = max([longest, *(len(program.blocks[other].instrs) for other in optional)])
    return longest


def test_no_branch_lies_between_products_that_keep_a_factor_in_registers():
    """Assemblers up to release 13.0 give such registers away, and a GPU is wrong where the PTX is right: five instructions, an
    arrival, become predicates; sixty, a mask, were a branch."""
    kernels = kernels_of(extension.build("sm_90a", layer="attention").path)
    programs = {name: parser.parse(text) for name, text in kernels.items() if "wgmma.mma_async" in text}
    jumps = {name: longest_jump(Program(module, module.functions[name])) for name, module in programs.items()}
    assert sum("hopper_keys" in name for name in jumps) >= 4
    assert max(jumps.values()) > 0, "no kernel keeps its left factors: then this looks at nothing"
    assert max(jumps.values()) < 16, jumps

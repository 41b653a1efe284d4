"""OPCODES.md is current, and every instruction in it has a test."""

from __future__ import annotations

from opcode_table import FILE, find_coverage, make_table

from harness.vgpu.engine.opcodes.emitters import OPCODES


def test_table_is_current():
    assert FILE.read_text() == make_table(), "run python tests/vgpu/opcode_table.py"


def test_every_instruction_has_a_test():
    tests = find_coverage()
    assert set(OPCODES) - {"builtin"} <= set(tests), set(OPCODES) - set(tests)
    assert set(tests) <= set(OPCODES), set(tests) - set(OPCODES)

"""OPCODES.md is current, and every instruction in it has a test."""

from __future__ import annotations

from opcode_table import FILE, coverage, table

from harness.vgpu.engine.opcodes.emitters import OPCODES


def test_the_table_is_current():
    assert FILE.read_text() == table(), "run python tests/vgpu/opcode_table.py"


def test_every_instruction_has_a_test_and_every_claim_an_instruction():
    tests = coverage()
    assert set(OPCODES) - {"builtin"} <= set(tests), set(OPCODES) - set(tests)
    assert set(tests) <= set(OPCODES), set(tests) - set(OPCODES)

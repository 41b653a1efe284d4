"""OPCODES.md is current, and every instruction in it has a test."""

from __future__ import annotations

from harness.vgpu.engines.opcodes.emitters import OPCODES
from harness.vgpu.engines.opcodes.table import FILE, coverage, table


def test_the_table_is_current():
    assert FILE.read_text() == table(), "run python -m harness.vgpu.engines.opcodes.table"


def test_every_instruction_has_a_test_and_every_claim_an_instruction():
    tests = coverage()
    assert set(OPCODES) - {"builtin"} <= set(tests), set(OPCODES) - set(tests)
    assert set(tests) <= set(OPCODES), set(tests) - set(OPCODES)

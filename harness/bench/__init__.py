"""Benchmarks: clocks, timing protocols, runs, tables, and a description of the machine."""

"""Benchmarking: clocks and protocols, runs, their tables, and a description of the machine."""

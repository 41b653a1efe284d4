"""Measuring: clocks and protocols, the run, its tables, the machine."""

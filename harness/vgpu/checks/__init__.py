"""Checks of a launch: races, ordering, divergence, livelocks; its findings, counters and events."""

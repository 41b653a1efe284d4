"""Checks of a running kernel: findings, races, ordering, livelocks, counters, events."""

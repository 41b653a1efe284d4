"""What is found and counted while a kernel runs: findings, races, orders, waits that never end, counters,
events."""

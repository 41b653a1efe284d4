"""Running kernels and judging what they wrote: cases, gates, rungs, diagnoses, the bug zoo."""

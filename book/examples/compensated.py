"""A long float32 sum, plain and compensated, against float64: what `CompensatedSum` is for."""

import numpy as np


# ANCHOR: sums
def plain(terms):
    total = np.float32(0)
    for term in terms:
        total += term
    return total


def compensated(terms):
    total, excess = np.float32(0), np.float32(0)
    for term in terms:
        corrected = term - excess
        grown = total + corrected
        excess = (grown - total) - corrected
        total = grown
    return total


# ANCHOR_END: sums


random = np.random.default_rng(22)
print("    terms   plain  compensated   (relative error)")
for count in (100, 1_000, 10_000, 100_000):
    terms = (1 + random.random(count)).astype(np.float32)
    truth = terms.astype(np.float64).sum()
    errors = (abs(float(make(terms)) / truth - 1) for make in (plain, compensated))
    print(f"{count:9,} {next(errors):.1e}      {next(errors):.1e}")

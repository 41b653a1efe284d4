"""Puzzle 91 in NumPy."""


def dcube(input, grad_output):
    """Return the gradient of the input, [n]."""
    # BLANK-START dcube: dx = 3 * x ** 2 * dy
    return 3 * input**2 * grad_output
    # BLANK-END dcube

"""A row through RMSNorm, nudged: the gradient without any formula, its sum, and its part along x_hat.

Run it from anywhere: python book/examples/rms_row.py
"""

import numpy as np

# ANCHOR: code
EPS = 1e-5
x = np.array([1.3, -0.4, 2.2, 0.7, -1.8, 0.1, 0.9, -0.6])
g = np.array([0.5, 1.5, -1.0, 2.0, 0.3, 1.1, -0.7, 0.5])  # the gradient that arrives at x_hat


def x_hat(row):
    return row / np.sqrt((row**2).mean() + EPS)


def loss(row):
    return g @ x_hat(row)


step = 1e-6 * np.eye(8)
dx = np.array([(loss(x + nudge) - loss(x - nudge)) / 2e-6 for nudge in step])
print("dx, nudged   ", " ".join(f"{value:6.3f}" for value in dx))
print(f"sum of dx     {dx.sum():6.3f}")
print(f"dx @ x_hat    {abs(dx @ x_hat(x)):6.3f}")
# ANCHOR_END: code

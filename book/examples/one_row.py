"""LayerNorm's gradient of one row of eight numbers: the formula, the one without two of its paths, and a nudge of every x."""

import numpy as np

# ANCHOR: row
x = np.array([0.5, -1.2, 2.0, 0.3, -0.4, 1.1, -2.2, 0.1])
g = np.array([1.4, 0.2, -0.6, 1.8, 0.9, -1.1, 0.4, 1.2])  # the gradient that arrives at x_hat
# ANCHOR_END: row


# ANCHOR: code
def layer_norm(x, eps=1e-5):
    rstd = 1 / np.sqrt(((x - x.mean()) ** 2).mean() + eps)
    return (x - x.mean()) * rstd, rstd


def backward(g, x):
    x_hat, rstd = layer_norm(x)
    c2 = g.mean()
    c1 = (g * x_hat).mean()
    return rstd * (g - c2 - x_hat * c1)


def nudged(g, x, step=1e-6):
    """The slope of sum(g * x_hat) for each x, by moving it up and down a little."""
    slopes = []
    for i in range(len(x)):
        move = step * (np.arange(len(x)) == i)
        up, down = layer_norm(x + move)[0], layer_norm(x - move)[0]
        slopes.append((g * (up - down)).sum() / (2 * step))
    return np.array(slopes)


# ANCHOR_END: code


x_hat, rstd = layer_norm(x)
dx, slopes = backward(g, x), nudged(g, x)
diagonal = rstd * g * (1 - 1 / len(x) - x_hat**2 / len(x))
print("    x   x_hat       g  nudged      dx  diagonal")
for row in zip(x, x_hat, g, slopes, dx, diagonal, strict=True):
    print("{:5.1f} {:7.3f} {:7.1f} {:7.3f} {:7.3f} {:9.3f}".format(*row))
print(f"mean {x.mean():.3f}  rstd {rstd:.3f}  c1 {(g * x_hat).mean():.3f}  c2 {g.mean():.3f}")
for name, gradient in (("dx", dx), ("diagonal", diagonal)):
    total, along = (round(float(value), 3) + 0.0 for value in (gradient.sum(), (gradient * x_hat).sum()))
    print(f"{name:8}  sums to {total:6.3f}, along x_hat {along:6.3f}")

g[2] = 0  # as where gamma[2] is zero
print(f"with g[2] = 0, dx[2]: {backward(g, x)[2]:.3f}, nudged {nudged(g, x)[2]:.3f}")

"""Gradient descent on a row of eight numbers through LayerNorm, by its gradient and by the diagonal of its Jacobian alone."""

import numpy as np

start = np.array([0.5, -1.2, 2.0, 0.3, -0.4, 1.1, -2.2, 0.1])
target = np.array([1.4, 0.2, -0.6, 1.8, 0.9, -1.1, 0.4, 1.2])  # what x_hat is to become


def right(g, x_hat, rstd):
    return rstd * (g - g.mean() - x_hat * (g * x_hat).mean())


def by_diagonal(g, x_hat, rstd):
    return rstd * g * (1 - 1 / len(g) - x_hat**2 / len(g))


def descend(gradient, steps=400, rate=0.5):
    """The loss, the mean and the deviation of the row before each step."""
    x, losses, means, deviations = start.copy(), [], [], []
    for _ in range(steps + 1):
        rstd = 1 / np.sqrt(x.var() + 1e-5)
        x_hat = (x - x.mean()) * rstd
        g = x_hat - target  # of the loss, half the sum of the squared distances
        losses.append((g**2).sum() / 2)
        means.append(x.mean())
        deviations.append(x.std())
        x = x - rate * gradient(g, x_hat, rstd)
    return losses, means, deviations


(loss, mean, deviation), (half_loss, half_mean, half_deviation) = descend(right), descend(by_diagonal)
print("       LayerNorm's gradient  diagonal formula")
print("  step     loss     mean      loss     mean")
for step in (0, 1, 2, 5, 10, 20, 50, 100, 200, 400):
    print(f"{step:6} {loss[step]:8.3f} {mean[step]:8.3f}  {half_loss[step]:8.3f} {half_mean[step]:8.3f}")
for step in (0, 5, 400):
    print(f"deviation after {step} steps: {deviation[step]:.3f} and {half_deviation[step]:.3f}")
slow, half_slow = (descend(gradient, 5, 0.05)[0][5] for gradient in (right, by_diagonal))
print(f"loss after 5 steps at a tenth of the rate: {slow:.3f} and {half_slow:.3f}")

"""The parameter gradients of LayerNorm + Linear by hand: two rows of three numbers, a weight of two by three."""

import torch
import torch.nn.functional as F


def show(when: str, *gradients: torch.Tensor) -> None:
    """Prints the four gradients, one on a line."""
    print(f"{when}:")
    for name, gradient in zip(("dW", "db", "dgamma", "dbeta"), gradients, strict=True):
        print(f"  {name:7}{(gradient.round(decimals=3) + 0.0).tolist()}")


x = torch.tensor([[1.0, 3.0, 5.0], [2.0, 2.0, 8.0]], dtype=torch.float64)  # 2 rows, H = 3
gamma = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
beta = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
W = torch.tensor([[1.0, 0.0, -1.0], [2.0, 1.0, 0.0]], dtype=torch.float64)  # O = 2
b = torch.tensor([0.5, 0.0], dtype=torch.float64)
dy = torch.tensor([[1.0, 0.0], [3.0, -1.0]], dtype=torch.float64)  # a gradient for each of the 2 x 2 outputs

x_hat = F.layer_norm(x, [3])
ln = gamma * x_hat + beta

dW, db = torch.zeros_like(W), torch.zeros_like(b)
dgamma, dbeta = torch.zeros_like(gamma), torch.zeros_like(beta)
for row in range(2):
    dln = dy[row] @ W  # one number for each column of the row
    dW += torch.outer(dy[row], ln[row])
    db += dy[row]
    dgamma += dln * x_hat[row]
    dbeta += dln
    show(f"after row {row + 1}", dW, db, dgamma, dbeta)

inputs = [t.requires_grad_() for t in (W, b, gamma, beta)]
by_autograd = torch.autograd.grad(F.linear(F.layer_norm(x, [3], gamma, beta), W, b), inputs, dy)
for mine, truth in zip((dW, db, dgamma, dbeta), by_autograd, strict=True):
    torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)
print("autograd says the same")

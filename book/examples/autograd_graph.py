"""The worked graph of the autograd chapter: five nodes, and the gradient at each of them."""

# ANCHOR: graph
import torch

x = torch.tensor(2.0, requires_grad=True)
w = torch.tensor(3.0, requires_grad=True)
b = torch.tensor(1.0, requires_grad=True)

u = w * x
v = u + b
L = v**2
# ANCHOR_END: graph

for node in (u, v, L):
    node.retain_grad()
L.backward()

print("node  value  gradient")
for name, node in {"L": L, "v": v, "u": u, "b": b, "w": w, "x": x}.items():
    print(f"{name:4} {node.item():6g} {node.grad.item():9g}")

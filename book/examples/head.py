"""A language model's head with its loss, as the book's page on the layers shows it."""

# ANCHOR: head
import torch

from harness import nn

head = nn.LinearCrossEntropy(64, 1000)
hidden, tokens = torch.randn(2, 16, 64, requires_grad=True), torch.randint(0, 1000, (2, 16))
loss = head(hidden[:, :-1], tokens[:, 1:])  # each position predicts the next token
loss.backward()
# ANCHOR_END: head

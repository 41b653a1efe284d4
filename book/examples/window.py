"""Attention in a window of a grid, for positions in an order of their own: what the book's page about block sparsity shows."""

import torch
import torch.nn.functional as F

# ANCHOR: window
from harness.nn import GridWindow, hilbert_order, window_attention

order = hilbert_order(8, 8)
window = GridWindow(order, width=8, radius=2)
cells = torch.randn(3, 1, 4, 64, 16)  # query, key and value of each cell, row by row
query, key, value = cells[:, :, :, order]
output = window_attention(query, key, value, window)
# ANCHOR_END: window

rows, columns = order // 8, order % 8
near = torch.maximum((rows[:, None] - rows).abs(), (columns[:, None] - columns).abs()) <= 2
torch.testing.assert_close(output, F.scaled_dot_product_attention(query, key, value, attn_mask=near))

"""The layers in a model, as the README and the book's page on them show it."""

# ANCHOR: layers
import torch

from harness import LayerNormLinear, nn

layer = LayerNormLinear(768, 3072)  # or LayerNormLinear.from_modules(layer_norm, linear)
layer(torch.randn(8, 16, 768)).square().mean().backward()

model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, norm_first=True)
compiled = torch.compile(model, backend="mojo_workbook")  # swapped in the graph; Inductor compiles the rest
nn.replace(model, [("norm2", "linear1")])  # or without compiling: the LayerNorm and the Linear that you name
# ANCHOR_END: layers

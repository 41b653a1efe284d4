"""What the workbook's backend says of two models: GPT-2, of which it swaps all it can, and one where a write stands in between.

GPT-2 has two layers and random weights. The rest of each graph runs uncompiled, so that nothing waits for a C++ compiler.
"""

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()


class Writes(nn.Module):
    """A Linear layer that reads what LayerNorm made of x, before somebody doubled x."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x):
        """Normalises, writes into x, and multiplies."""
        normal = self.norm(x)
        x.mul_(2.0)
        return self.linear(normal)


def gpt2():
    """GPT-2's own code with small sizes, and its loss of some tokens."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model, ids = transformers.GPT2LMHeadModel(config), torch.randint(128, (2, 16))
    return model, lambda: model(ids, labels=ids).loss


def gradients(model, loss):
    """The loss and every gradient."""
    model.zero_grad()
    value = loss()
    value.backward()
    return value.item(), [parameter.grad.clone() for parameter in model.parameters()]


def main():
    model, loss = gpt2()
    options = {"report": True, "tail": "eager"}
    compiled = torch.compile(loss, backend="mojo_workbook", options=options)
    (value, right), (swapped, ours) = gradients(model, loss), gradients(model, compiled)
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, right, strict=True))
    print(
        f"loss {swapped:.4f}, eager {value:.4f}; {len(right)} gradients, at most {apart:.1e} apart",
        flush=True,
    )
    torch.compile(Writes(), backend="mojo_workbook", options=options)(torch.randn(4, 8))


if __name__ == "__main__":
    main()

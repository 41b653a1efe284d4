"""Which layers of a block the workbook's backend swaps in four models: their own code, with small sizes and random weights.

A line has the block's norms and Linear layers in the order in which they run; a star marks a Linear layer that is swapped. The rest
of each graph runs uncompiled, so that nothing waits for a C++ compiler.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

transformers.logging.set_verbosity_error()
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
WORDS, PICTURES = torch.arange(16).reshape(2, 8), torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)


def models():
    """Each model by its name, with an input."""
    of = transformers
    gpt2 = of.GPT2Config(n_layer=1, n_head=4, n_embd=32, vocab_size=96, bos_token_id=0, eos_token_id=0)
    yield "GPT-2", of.GPT2Model(gpt2), WORDS
    yield "BERT", of.BertModel(of.BertConfig(vocab_size=96, **SIZES), add_pooling_layer=False), WORDS
    vit = of.ViTConfig(image_size=32, patch_size=16, **SIZES)
    yield "ViT", of.ViTModel(vit, add_pooling_layer=False), PICTURES
    yield "Llama", of.LlamaModel(of.LlamaConfig(vocab_size=96, **SIZES)), WORDS


def in_order(model, given):
    """(name, module) of the norms and Linear layers in the model's block, as a call runs them."""
    block = next(f"{name}.0." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    ran, hooks = [], []
    for name, module in model.named_modules():
        if name.startswith(block) and (
            isinstance(module, nn.Linear | Conv1D) or "Norm" in type(module).__name__
        ):
            hooks.append(
                module.register_forward_hook(lambda module, *_, name=name: ran.append((name, module)))
            )
    model(given)
    for hook in hooks:
        hook.remove()
    return ran


def main():
    for called, model, given in models():
        model.eval()
        ran, reports = in_order(model, given), []
        torch.compile(model, backend="mojo_workbook", options={"report": reports.append, "tail": "eager"})(
            given
        )
        swapped = {swap.name for report in reports for swap in report.swaps}
        words = [
            type(module).__name__
            if "Norm" in type(module).__name__
            else name.partition(".0.")[2] + "*" * (name in swapped)
            for name, module in ran
        ]
        print(f"{called:<6}", *words)


main()

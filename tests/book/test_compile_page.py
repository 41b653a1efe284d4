"""The page about torch.compile matches its recorded runs."""

import shutil

import pytest


def test_half_the_memory_budget_saves_the_layers_bytes():
    """x and two numbers per row are saved, and without a budget also the LayerNorm output."""
    from book.measure import outputs
    from book.measure.ledger import GPT2_SMALL
    from harness.puzzles.p22 import spec as p22

    account = p22.ledger(GPT2_SMALL, "float32")
    eager, ours = (
        f"{sum(saved.values()) / 1e6:.1f} MB" for saved in (account.eager_saved, account.our_saved)
    )
    no_budget, default, half = outputs.load("compile_saved").text.splitlines()
    assert eager in no_budget and eager in default and ours in half
    assert half.endswith("(8, 1024, 1) (8, 1024, 1) (8, 1024, 768)")


@pytest.mark.compiles
@pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("c++"), reason="no C++ compiler for torch.compile"
)
def test_half_the_memory_budget_drops_the_layernorm_output():
    import torch
    from torch._functorch import config

    pair, x = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 96)), torch.randn(512, 64)
    parameters = {parameter.data_ptr() for parameter in pair.parameters()}

    def list_saved_sizes(budget: float) -> list[int]:
        saved = {}

        def pack(tensor):
            saved[tensor.data_ptr()] = tensor
            return tensor

        torch.compiler.reset()
        with config.patch(activation_memory_budget=budget):
            compiled = torch.compile(pair)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                compiled(x)
        return sorted(tensor.numel() for at, tensor in saved.items() if at not in parameters)

    assert list_saved_sizes(1.0) == [512, 512, 512 * 64, 512 * 64]
    assert list_saved_sizes(0.5) == [512, 512, 512 * 64]

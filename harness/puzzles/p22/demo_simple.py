"""`--demo-simple`: one forward and one backward pass through CustomOpLibrary, the documented way from PyTorch to a Mojo op."""

import time

import torch
from rich.console import Console

from harness.console import print_lines
from harness.puzzles.p22.spec import BATCH_SIZE, HIDDEN_DIM, OUTPUT_DIM, SEQ_LEN, reference
from harness.toolchain.roots import op_package, solutions

SEED = 22


def run(console: Console) -> int:
    """One forward and one backward pass through MAX's own PyTorch binding, timed. Returns 0, or 1 where it is wrong.

    This is the documented way from PyTorch to a Mojo op: public names, sizes as parameters, outputs first.
    """
    from max.experimental.torch import CustomOpLibrary

    torch.manual_seed(SEED)
    package = op_package(solutions(), "p22").path
    ops, seconds = timed(lambda: CustomOpLibrary(package))
    print_lines(console, [f"Loaded {package} in {seconds:.1f} s"])
    sizes = dict(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, hidden_dim=HIDDEN_DIM, output_dim=OUTPUT_DIM)
    tensors = {
        "input": torch.randn(BATCH_SIZE, SEQ_LEN, HIDDEN_DIM),
        "ln_weight": 1 + 0.5 * torch.randn(HIDDEN_DIM),
        "ln_bias": 0.5 * torch.randn(HIDDEN_DIM),
        "linear_weight": torch.randn(OUTPUT_DIM, HIDDEN_DIM),
        "linear_bias": torch.randn(OUTPUT_DIM),
    }
    grad_output = torch.randn(BATCH_SIZE, SEQ_LEN, OUTPUT_DIM)
    results = {"output": torch.empty_like(grad_output)}
    gradients = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
    for name, tensor in zip(gradients, tensors.values(), strict=True):
        results[name] = torch.empty_like(tensor)

    forward = ops.layernorm_linear[{"algorithm": "fused", **sizes}]
    backward = ops.layernorm_linear_backward[sizes]
    calls = {
        "forward": lambda: forward(results["output"], *tensors.values()),
        "backward": lambda: backward(
            *(results[name] for name in gradients), grad_output, *list(tensors.values())[:-1]
        ),
    }
    for name, call in calls.items():
        _, first = timed(call)
        _, second = timed(call)
        print_lines(
            console,
            [f"   {name:<8} first call {first:.1f} s, with compiling; second call {second * 1e6:,.0f} us"],
        )
    dln = grad_output @ tensors["linear_weight"]
    return compare(console, results, reference({**tensors, "grad_output": grad_output, "dln": dln}))


def compare(console: Console, results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> int:
    """Prints the largest difference of each tensor from autograd's; returns the exit code."""
    wrong = False
    for name, result in results.items():
        difference = (result - expected[name]).abs().max().item()
        good = difference <= 1e-5 * expected[name].abs().max().item()
        wrong |= not good
        print_lines(
            console, [f"   {name:<14} differs from autograd by {difference:.2e} {'✅' if good else '❌'}"]
        )
    return int(wrong)


def timed(work):
    """What `work()` returns, and its seconds."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started

"""Times and memory of a linear layer with cross-entropy: `python -m book.measure cross_entropy`.

8,192 tokens in bfloat16, forward and backward pass with the gradients of input and weight. A row for each size and way: the
median time of one CUDA graph of both, in shuffled turns after a pause, and the most memory at a time beside input and weight.
"products" is the three bare products, "eager" PyTorch's two functions with the logits taken to float32, "compile" the same
through torch.compile, and "chunks of N" `linear_cross_entropy` with so many rows a chunk.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from book.measure.shared import capture, medians, peak, write
from harness.nn import linear_cross_entropy

TOKENS = 8192
SIZES = ((768, 50304), (768, 50257), (2048, 32000), (4096, 128256))
CHUNKS = (512, 1024, 2048, 4096)
ROUNDS = 5
Step = Callable[[], object]


def eager(input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    return F.cross_entropy(F.linear(input, weight).float(), target)


def both_passes(function: Callable[..., torch.Tensor], input, weight, target) -> Step:
    """A forward and a backward pass; the leaves are new ones each time, so that no graph knows another one's stream."""

    def step():
        leaves = [tensor.detach().requires_grad_() for tensor in (input, weight)]
        return torch.autograd.grad(function(*leaves, target), leaves)

    return step


def steps(H: int, V: int) -> dict[str, Step]:
    """What is measured, by its name."""
    torch.manual_seed(0)
    input = torch.randn(TOKENS, H, device="cuda").bfloat16()
    weight = (torch.randn(V, H, device="cuda") / H**0.5).bfloat16()
    target = torch.randint(0, V, (TOKENS,), device="cuda")
    gradient = torch.randn(TOKENS, V, device="cuda", dtype=torch.bfloat16)
    candidates = {
        "products": lambda: (input @ weight.t(), gradient @ weight, gradient.t() @ input),
        "eager": both_passes(eager, input, weight, target),
        "compile": both_passes(torch.compile(eager, dynamic=False), input, weight, target),
    }
    for rows in CHUNKS:
        function = partial(linear_cross_entropy, chunk_rows=rows)
        candidates[f"chunks of {rows}"] = both_passes(function, input, weight, target)
    return candidates


def rows_of(H: int, V: int) -> list[dict]:
    """A row for each way."""
    torch._dynamo.reset()
    ways = steps(H, V)
    for step in ways.values():
        step()
    peaks = {name: round(peak(step) / 2**20) for name, step in ways.items()}
    graphs = {name: capture(step) for name, step in ways.items()}
    times = medians(graphs, ROUNDS, burst=20_000, pause=0.06)
    return [
        {"H": H, "V": V, "way": name, "ms": f"{us / 1e3:.3f}", "of_products": f"{us / times['products']:.3f}"}
        | {"peak_mib": peaks[name]}
        for name, us in times.items()
    ]


if __name__ == "__main__":
    write(row for sizes in SIZES for row in rows_of(*sizes))

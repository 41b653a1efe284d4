"""Measures the layers in plain loops beside eager PyTorch and torch.compile: `python -m book.measure loops`.

A loop calls without a CUDA graph, so that small sizes wait for the host. Three parts: LayerNorm + Linear at the sizes of `sizes`,
attention at three sizes, and whole steps of GPT-2 small with AdamW, in bfloat16 and under autocast, with LayerNorm + Linear, attention
and the loss replaced. Each turn is a burst of calls; turns are shuffled, and the median counts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from book.measure.record import sizes
from book.measure.shared import medians, write
from harness.nn import LayerNormLinear, attention, linear_cross_entropy, mojo_workbook

Calls = Mapping[str, Callable[[], object]]
ROUNDS, BURST, STEP_BURST = 7, 12_000, 150_000
"""Turns of each candidate, and the microseconds of a turn."""
ATTENTION = ((1, 12, 256, 64, True), (4, 12, 1024, 64, True), (8, 16, 512, 128, False))
VOCABULARY, WIDTH, HEADS, BLOCKS, CONTEXT = 50257, 768, 12, 12, 1024
COMPILED = 2
"""The batch at which torch.compile is timed too: each compile takes a minute."""


def pair_calls(M: int, H: int, O: int) -> Calls:
    """Both passes of LayerNorm + Linear, bfloat16."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    norm, linear = nn.LayerNorm(H, **options), nn.Linear(H, O, **options)
    eager = nn.Sequential(norm, linear)
    x, dy = torch.randn(M, H, **options).requires_grad_(), torch.randn(M, O, **options)
    ours = LayerNormLinear.from_modules(norm, linear)
    parameters = [x, *eager.parameters()]
    return {
        "workbook": lambda: torch.autograd.grad(ours(x), parameters, dy),
        "eager": lambda: torch.autograd.grad(eager(x), parameters, dy),
    }


def attention_calls(B: int, N: int, S: int, d: int, causal: bool) -> Calls:
    """Both passes of attention, bfloat16."""
    q, k, v, grad = (torch.randn(B, N, S, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def both(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*inputs, is_causal=causal), inputs, grad)

    return {"workbook": both(attention), "eager": both(F.scaled_dot_product_attention)}


class Block(nn.Module):
    """A block of GPT-2, with its two pairs and attention left to the caller."""

    def __init__(self, pair: Callable[[int, int], nn.Module], attend: Callable[..., Tensor]):
        super().__init__()
        self.queries_keys_values, self.join = pair(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = pair(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.queries_keys_values(x).chunk(3, -1)
        ]
        x = x + self.join(self.attend(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(x), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 small with its loss, of PyTorch's layers or of the workbook's."""

    def __init__(self, workbook: bool):
        super().__init__()
        pair = LayerNormLinear if workbook else lambda H, O: nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
        attend = attention if workbook else F.scaled_dot_product_attention
        self.workbook = workbook
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = (
            nn.Sequential(*(Block(pair, attend) for _ in range(BLOCKS))),
            nn.LayerNorm(WIDTH),
        )
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.token(ids) + self.place.weight)).flatten(0, 1)
        if self.workbook:
            return linear_cross_entropy(x, self.token.weight, targets.flatten())
        return F.cross_entropy(F.linear(x, self.token.weight).float(), targets.flatten())


def step_calls(dtype: str, batch: int) -> Calls:
    """Whole training steps of each candidate, after a few that compile and choose."""
    ids = torch.randint(VOCABULARY, (batch, CONTEXT + 1), device="cuda")
    names = ["workbook", "eager"] + ["compile", "backend"] * (batch == COMPILED)
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        torch.manual_seed(0)
        model = GPT2(name == "workbook").to("cuda", torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        backends = {"compile": "inductor", "backend": mojo_workbook}
        run = torch.compile(model, backend=backends[name]) if name in backends else model

        def step(run=run, optimizer=optimizer) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "autocast"):
                loss = run(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(4):
            loss = step()
        assert math.isfinite(loss.item())
        calls[name] = step
    return calls


def measure() -> Iterator[Mapping[str, object]]:
    """A row for each candidate at each size, with its time over eager PyTorch's in the same turns."""
    cases: list[tuple[str, tuple[int, ...], str, Callable[[], Calls], int]] = [
        *(("pair", size, "bfloat16", partial(pair_calls, *size), BURST) for size in sizes("sizes", "bench")),
        *(("attention", size, "bfloat16", partial(attention_calls, *size), BURST) for size in ATTENTION),
    ]
    for dtype, batch in product(("bfloat16", "autocast"), (COMPILED, 8)):
        cases.append(("step", (batch, CONTEXT), dtype, partial(step_calls, dtype, batch), STEP_BURST))
    for what, size, dtype, make, burst in cases:
        calls = make()
        for call in calls.values():
            call()
        times = medians(calls, ROUNDS, burst, 0.0)
        for name, time in times.items():
            shared = {"what": what, "size": "x".join(map(str, size)), "dtype": dtype, "candidate": name}
            yield shared | {"loop_us": f"{time:.1f}", "ratio_to_eager": f"{time / times['eager']:.3f}"}


if __name__ == "__main__":
    write(measure())

"""`p27 --train --size --time`: the step by hand beside PyTorch's, as it is and by torch.compile, in turns, on one machine."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from rich.console import Console

from harness.bench.timing import CudaClock, Protocol, WallClock, summary, take_turns
from harness.console import print_lines
from harness.puzzles.p27 import kernel_times
from harness.puzzles.p27.gpt import SIZES, Sizes, State
from harness.puzzles.p27.gpt_autograd import ByAutograd
from harness.puzzles.p27.gpt_step import ByHand, by_hand
from harness.puzzles.p27.train_gpt import device_of, excerpts, one_step

ROUNDS, EXCERPTS = 10, 4
"""Steps of each candidate that are timed, and excerpts that it is given in turn."""
RATE = 1e-5
CANDIDATES: dict[str, Callable[[State], ByHand | ByAutograd]] = {
    "by hand": by_hand,
    "autograd": ByAutograd,
    "torch.compile": partial(ByAutograd, compiled=True),
}


@dataclass
class Timed:
    """A candidate: its step, the losses of its first steps, bytes that it took at most in them beyond what there was before
    (0 on a CPU), and microseconds of later steps."""

    step: Callable[[], float]
    losses: list[float]
    peak: int
    times: list[float] = field(default_factory=list)


def bench(console: Console, flags: Namespace, chapters: Path) -> None:
    """Times whole steps, each with its loss waited for, and prints a line for each candidate; on a GPU also where the step by hand spends
    its time."""
    sizes, device = SIZES[flags.size], device_of(flags.device)
    timed = measure(sizes, device, flags.seed, flags.steps or ROUNDS, chapters)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    shape = f"{sizes.batch} x {sizes.context} tokens at every step"
    print_lines(console, [f"{shape}, on {where}; medians", *lines_of(timed, sizes.tokens)])
    if device.type == "cuda":
        kernels = kernel_times.taken(timed["by hand"].step)
        least = kernel_times.floors(sizes, *kernel_times.rates(device))
        print_lines(console, ["the kernels of a step by hand:", *kernel_times.lines_of(kernels, least)])


def measure(sizes: Sizes, device: torch.device, seed: int, rounds: int, chapters: Path) -> dict[str, Timed]:
    """Times the candidates in turns: all train the same model from the same parameters on the same excerpts."""
    texts = list(islice(excerpts(sizes, seed, device, chapters), EXCERPTS))
    timed = {name: begun(make, State.begin(sizes, seed, device), texts) for name, make in CANDIDATES.items()}
    clock = CudaClock() if device.type == "cuda" else WallClock()
    taken = take_turns({name: one.step for name, one in timed.items()}, clock, Protocol(rounds, burst=1.0))
    for name, times in taken.items():
        timed[name].times = times
    return timed


def begun(make: Callable[[State], ByHand | ByAutograd], state: State, texts: list[torch.Tensor]) -> Timed:
    """A candidate after a step on each excerpt; the state that it trains counts to what it takes."""
    gpu = state.master.is_cuda
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    trained, following = make(state), cycle(texts)

    def step() -> float:
        return one_step(trained, next(following), RATE)

    losses = [step() for _ in texts]
    own = 3 * state.master.nbytes
    return Timed(step, losses, torch.cuda.max_memory_allocated() - before + own if gpu else 0)


def lines_of(timed: dict[str, Timed], tokens: int) -> Iterator[str]:
    """A line for each candidate."""
    for name, one in timed.items():
        median = summary(one.times).median
        peak = f" {one.peak / 2**30:7.2f} GiB at the peak" if one.peak else ""
        yield f"   {name:<14} {median / 1e3:9.2f} ms a step {tokens / median * 1e6:12,.0f} tokens a second{peak}"

"""`p27 --train --size --time`: the step by hand beside PyTorch's, as it is and by torch.compile, in turns, on one machine."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from rich.console import Console

from harness.bench.timing import CudaClock, Protocol, WallClock, summary, take_turns
from harness.console import print_lines
from harness.puzzles.p27.gpt import SIZES, State
from harness.puzzles.p27.gpt_autograd import ByAutograd
from harness.puzzles.p27.gpt_step import ByHand
from harness.puzzles.p27.train_gpt import device_of, excerpts, one_step

ROUNDS, SEEN = 10, 4
"""Steps of each candidate that are timed, and excerpts that they see in turn."""
RATE = 1e-5
CANDIDATES: dict[str, Callable[[State], ByHand | ByAutograd]] = {
    "by hand": ByHand,
    "autograd": ByAutograd,
    "torch.compile": partial(ByAutograd, compiled=True),
}


def bench(console: Console, flags: Namespace, chapters: Path) -> None:
    """Times whole steps, each with its loss waited for, and prints a line for each candidate."""
    sizes, device = SIZES[flags.size], device_of(flags.device)
    texts = list(islice(excerpts(sizes, flags.seed, device, chapters), SEEN))

    def call(make: Callable[[State], ByHand | ByAutograd]) -> Callable[[], float]:
        trained, following = make(State.begin(sizes, flags.seed, device)), cycle(texts)
        return lambda: one_step(trained, next(following), RATE)

    clock = CudaClock() if device.type == "cuda" else WallClock()
    protocol = Protocol(flags.steps or ROUNDS, burst=1.0)
    taken = take_turns({name: call(make) for name, make in CANDIDATES.items()}, clock, protocol)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    shape = f"{sizes.batch} x {sizes.context} tokens at every step"
    print_lines(console, [f"{shape}, on {where}; medians", *lines_of(taken, sizes.tokens)])


def lines_of(taken: dict[str, list[float]], tokens: int) -> Iterator[str]:
    """A line for each candidate from microseconds of its steps."""
    for name, times in taken.items():
        median = summary(times).median
        yield f"   {name:<14} {median / 1e3:9.2f} ms a step {tokens / median * 1e6:12,.0f} tokens a second"

"""The bar chart of live bytes on a learner's tape after each part of a step."""

import torch

from harness.puzzles.p27.autograd import init_parameters
from harness.puzzles.p27.running import Module, make_excerpt, no_autograd

WIDTH = 40
"""Width of the longest bar, in characters."""


def measure_live_bytes(module: Module) -> list[tuple[str, int]]:
    """Return (part, live bytes after it) for one step of three blocks in float32, in execution order."""
    p = init_parameters(layers=3, width=32, vocabulary=64, context=32, seed=27, dtype=torch.float32)
    tape = module["Tape"]()
    with no_autograd():
        module["forward"](*make_excerpt(4, 32, 64, 27), tape, p)
        module["backward"](tape, p, {name: torch.zeros_like(t) for name, t in p.items()})
    return tape.story


def keep_last_of_each_block(events: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the last of consecutive entries that belong to the same block, or to a part outside the blocks."""
    last: list[tuple[str, int]] = []
    peak_index = max(range(len(events)), key=lambda i: events[i][1])
    for i, (name, size) in enumerate(events):
        unit = f"{name.partition('.')[0]} {'back' if i > peak_index else ''}".strip()
        if last and last[-1][0] == unit:
            last.pop()
        last.append((unit, size))
    return last


def draw_live_bytes(module: Module) -> list[str]:
    """Return one bar per block, forward and back; [] if the run fails, which the gate's result reports."""
    try:
        events = keep_last_of_each_block(measure_live_bytes(module))
    except Exception:  # the result reports it
        return []
    peak = max(size for _, size in events) or 1
    lines = [
        f"{name:<15} {size / 1024:8.1f} KiB {'█' * round(WIDTH * size / peak)}{' peak' if size == peak else ''}".rstrip()
        for name, size in events
    ]
    return ["bytes on your tape, in a step of 4 x 32 tokens, three blocks, 32 channels:", *lines]

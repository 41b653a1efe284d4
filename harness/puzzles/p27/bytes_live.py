"""The bar chart of live bytes: the bytes that a learner's tape holds after each part of a step."""

import torch

from harness.puzzles.p27.autograd import parameters
from harness.puzzles.p27.running import Module, excerpt, no_autograd

WIDTH = 40
"""Width of the longest bar, in characters."""


def measure_live_bytes(module: Module) -> list[tuple[str, int]]:
    """Return (part, bytes held after it) for one step of three blocks in float32, in execution order."""
    p = parameters(layers=3, width=32, vocabulary=64, context=32, seed=27, dtype=torch.float32)
    tape = module["Tape"]()
    with no_autograd():
        module["forward"](*excerpt(4, 32, 64, 27), tape, p)
        module["backward"](tape, p, {name: torch.zeros_like(t) for name, t in p.items()})
    return tape.story


def keep_last_of_each_block(events: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the last of consecutive entries that belong to the same block, or to a part outside the blocks."""
    kept: list[tuple[str, int]] = []
    half = max(range(len(events)), key=lambda i: events[i][1])
    for i, (name, held) in enumerate(events):
        unit = f"{name.partition('.')[0]} {'back' if i > half else ''}".strip()
        if kept and kept[-1][0] == unit:
            kept.pop()
        kept.append((unit, held))
    return kept


def draw_live_bytes(module: Module) -> list[str]:
    """Return one bar per block, forward and back; [] if the run fails, which the gate's result reports."""
    try:
        events = keep_last_of_each_block(measure_live_bytes(module))
    except Exception:  # the result reports it
        return []
    peak = max(held for _, held in events) or 1
    lines = [
        f"{name:<15} {held / 1024:8.1f} KiB {'█' * round(WIDTH * held / peak)}{' peak' if held == peak else ''}".rstrip()
        for name, held in events
    ]
    return ["bytes on your tape, in a step of 4 x 32 tokens, three blocks, 32 channels:", *lines]

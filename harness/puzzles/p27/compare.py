"""`p27 --compare`: compare every activation and gradient of one step by the learner's tape and one by
autograd."""

from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from harness.console import Parser, print_lines
from harness.puzzles.p27 import compare_gpt
from harness.puzzles.p27.autograd import Model, Tensors, parameters
from harness.puzzles.p27.gpt import SIZES, State
from harness.puzzles.p27.running import (
    Module,
    by_autograd,
    by_hand,
    excerpt,
    leaves,
    near,
    no_autograd,
    watching,
)
from harness.puzzles.p27.train import add_size, by_the_file, check_size, file_of, seed
from harness.puzzles.p27.train_gpt import device_of

VOCABULARY, CONTEXT = 32, 12
"""Of the model, in float64, so that every difference is a mistake."""


def both(module: Module, seed: int) -> tuple[Tensors, Tensors]:
    """Return all values by name, by hand and by autograd: activations in forward order, gradients from the
    loss backwards."""
    p = parameters(layers=2, width=16, vocabulary=VOCABULARY, context=CONTEXT, seed=seed)
    tokens, targets = excerpt(3, CONTEXT, VOCABULARY, seed)
    grads = {name: torch.zeros_like(t) for name, t in p.items()}
    with no_autograd(), watching(module) as watched:
        tape = module["Tape"]()
        loss = module["forward"](tokens, targets, tape, p).clone()
        module["backward"](tape, p, grads)
    zeros = {name: torch.zeros_like(t) for name, t in p.items()}
    model, held = Model(), leaves(p)
    right = by_autograd(model, model.loss(tokens, targets, held), None, held)
    mine = by_hand(loss, watched, grads, zeros)
    activations = {f"{name}, its output": t.detach() for name, t in model.outputs.items()}
    return ({f"{name}, its output": t for name, t in watched.outputs.items()} | mine, activations | right)


def rows(got: Tensors, right: Tensors) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, largest difference, whether it is correct) of each value; without a difference for values
    the file does not compute."""
    for name, expected in right.items():
        if name not in got:
            yield name, "not computed by itself", True
        elif got[name].shape != expected.shape:
            yield name, f"shape {list(got[name].shape)}, expected {list(expected.shape)}", False
        else:
            apart = (got[name] - expected).abs().max().item() if expected.numel() else 0.0
            yield name, f"{apart:.1e}", near(got[name], expected)


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    """Print a line for each value; return 1 if one is wrong. Raise Unsolved."""
    parser = Parser(prog="p27 --compare", description="One step by hand beside one by autograd.")
    parser.add_argument("--solution", action="store_true", help="with the solution's file in place of yours")
    parser.add_argument(
        "--seed", type=seed, default=27, help="of parameters and tokens (default: %(default)s)"
    )
    add_size(parser)
    flags = parser.parse_args(arguments)
    check_size(flags)
    if flags.size:
        sizes, device = SIZES[flags.size], device_of(flags.device)
        state = State.load(flags.load, sizes, device) if flags.load else None
        values = compare_gpt.compare(sizes, flags.seed, device, state)
        print_lines(console, compare_gpt.lines_of(values))
        return int(bool(compare_gpt.wrong_of(values)))
    path, module = file_of(flags)
    with by_the_file(path):
        listed = [*rows(*both(module, flags.seed))]
    width = max(len(name) for name, *_ in listed)
    wrong = [name for name, _, ok in listed if not ok]
    result = f"❌ {len(wrong)} wrong, the first is {wrong[0]}" if wrong else "✅ every value is autograd's"
    lines = [f"{name:<{width}}  {apart:<24}{'ok' if ok else 'NOT OK'}" for name, apart, ok in listed]
    print_lines(console, [*lines, result])
    return int(bool(wrong))

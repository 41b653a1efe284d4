"""`p27 --compare`: compare all activations and gradients of a step of the learner's tape with autograd's."""

from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from harness.console import Parser, print_lines
from harness.puzzles.p27 import compare_gpt, running
from harness.puzzles.p27.autograd import Model, Tensors, init_parameters
from harness.puzzles.p27.gpt import SIZES, State
from harness.puzzles.p27.train import (
    add_size_flags,
    check_size_flags,
    load_tape,
    parse_seed,
    report_learner_errors,
)
from harness.puzzles.p27.train_gpt import select_device

VOCABULARY, CONTEXT = 32, 12
"""Sizes of the model, which is in float64, so that every difference is a mistake."""


def compute_both(module: running.Module, seed: int) -> tuple[Tensors, Tensors]:
    """Return all values by name, by hand and with autograd: activations in order, then gradients in reverse."""
    p = init_parameters(layers=2, width=16, vocabulary=VOCABULARY, context=CONTEXT, seed=seed)
    tokens, targets = running.make_excerpt(3, CONTEXT, VOCABULARY, seed)
    grads = {name: torch.zeros_like(t) for name, t in p.items()}
    with running.no_autograd(), running.record_parts(module) as results:
        tape = module["Tape"]()
        loss = module["forward"](tokens, targets, tape, p).clone()
        module["backward"](tape, p, grads)
    zeros = {name: torch.zeros_like(t) for name, t in p.items()}
    model, q = Model(), running.make_leaves(p)
    expected = running.compute_with_autograd(model, model.loss(tokens, targets, q), None, q)
    got = running.collect_values(loss, results, grads, zeros)
    activations = {f"{name}, its output": t.detach() for name, t in model.outputs.items()}
    return ({f"{name}, its output": t for name, t in results.outputs.items()} | got, activations | expected)


def compare_values(got: Tensors, expected_values: Tensors) -> Iterator[compare_gpt.Row]:
    """Yield a row for each value: its largest difference, and whether it is correct."""
    for name, expected in expected_values.items():
        if name not in got:
            text, ok = compare_gpt.NOT_COMPUTED, True
        elif got[name].shape != expected.shape:
            text, ok = f"shape {list(got[name].shape)}, expected {list(expected.shape)}", False
        else:
            error = (got[name] - expected).abs().max().item() if expected.numel() else 0.0
            text, ok = f"{error:.1e}", running.is_close(got[name], expected)
        yield name, f"{text:<24}{'ok' if ok else 'NOT OK'}", ok


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    description = "Compare one step by hand with the same step by autograd."
    parser = Parser(prog="p27 --compare", description=description)
    parser.add_argument("--solution", action="store_true", help="use the solution's file in place of yours")
    parser.add_argument(
        "--seed", type=parse_seed, default=27, help="of parameters and tokens (default: %(default)s)"
    )
    add_size_flags(parser)
    flags = parser.parse_args(arguments)
    check_size_flags(flags)
    if flags.size:
        sizes, device = SIZES[flags.size], select_device(flags.device)
        state = State.load(flags.load, sizes, device) if flags.load else None
        rows = compare_gpt.compare(sizes, flags.seed, device, state)
    else:
        path, module = load_tape(flags)
        with report_learner_errors(path):
            rows = [*compare_values(*compute_both(module, flags.seed))]
    width = max(len(name) for name, *_ in rows)
    wrong = [name for name, _, ok in rows if not ok]
    result = f"❌ {len(wrong)} wrong, the first is {wrong[0]}" if wrong else "✅ every value is autograd's"
    print_lines(console, [*(f"{name:<{width}}  {text}" for name, text, _ in rows), result])
    return int(bool(wrong))

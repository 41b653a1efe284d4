"""`p20 --worth-it`: eager, compiled and custom on this machine, with time, bytes kept and lines of code; and what follows.

Everybody computes a forward and a backward pass of the same problem and is checked against float64 before it is timed.
Candidates take turns, and a time is a median. "Custom" is the puzzle's solution: functions of the second rung in plain
PyTorch, and the Mojo kernels, registered as in the last rung.
"""

import ast
import logging
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from harness.bench.timing import CudaClock, WallClock, no_garbage_collection
from harness.check.gradient_checks import kept_bytes
from harness.check.python_files import load
from harness.console import print_lines
from harness.puzzles.formulas import EPS
from harness.puzzles.p20.mistakes import WORD
from harness.toolchain.roots import solutions

ROUNDS = 9
TOLERANCE = 1e-4
"""Largest error of a gradient in float32, relative to its largest element, for a candidate to be timed."""
CLEARLY = 1.25
"""Two times that differ by less are called equal."""

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Candidate:
    """Who computes it: a name, the function of the problem's tensors, and the lines that somebody had to write."""

    name: str
    function: Function
    lines: int


@dataclass(frozen=True)
class Operation:
    """One operation to decide about: its tensors, and its candidates, PyTorch's own first."""

    name: str
    inputs: tuple[Tensor, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Row:
    """What a candidate came to; `failed` says why where it came to nothing."""

    operation: str
    name: str
    milliseconds: float = 0.0
    kept: int = 0
    lines: int = 0
    failed: str = ""


# ---- Who takes part -----------------------------------------------------------------------------------------


def source_lines(text: str) -> int:
    """Lines of code: neither empty nor a comment, documentation left out."""
    lines = re.sub(r'""".*?"""', "", text, flags=re.DOTALL).splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith(("#", "//")) for line in lines)


def python_lines(path: Path, *names: str) -> int:
    """Lines of functions and classes of a Python file, by their names."""
    text = path.read_text(encoding="utf-8")
    named = {
        getattr(node, "name", ""): ast.get_source_segment(text, node) or "" for node in ast.parse(text).body
    }
    return sum(source_lines(named[name]) for name in names)


def mojo_lines(*names: str) -> int:
    """Lines of kernels and launches of the solution, by the names of their functions."""
    files = (solutions() / "p20" / "op" / name for name in ("first_backward.mojo", "ops.mojo"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    matches = (
        re.search(rf"^def {name}[\[(].*?(?=^(?:def |#|@)|\Z)", text, re.DOTALL | re.MULTILINE)
        for name in names
    )
    return sum(source_lines(match[0]) for match in matches if match)


class MojoKernels:
    """The kernels of the solution as MAX's PyTorch binding calls them; what `register` of the last rung is given.

    The binding takes matrices, and refuses a tensor that wants a gradient.
    """

    def __init__(self):
        from max.experimental.torch import CustomOpLibrary

        self.ops = CustomOpLibrary(Path(solutions() / "p20" / "op"))

    def softmax(self, y: Tensor, x: Tensor) -> None:
        """Writes softmax over the last axis of x into y."""
        self.ops.softmax(y.view(-1, y.shape[-1]), x.detach().view(-1, x.shape[-1]))

    def softmax_backward(self, dx: Tensor, dy: Tensor, y: Tensor) -> None:
        """Writes the gradient of softmax's input into dx."""
        columns = y.shape[-1]
        self.ops.softmax_backward(*(t.detach().view(-1, columns) for t in (dx, dy, y)))


def relu_of(kernels: MojoKernels) -> Function:
    """ReLU through the Mojo kernels, which keeps their mask."""

    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.empty_like(x)
            mask = x.new_empty(-(-x.numel() // WORD), dtype=torch.int32)
            kernels.ops.relu_mask(y, mask, x.detach())
            ctx.save_for_backward(mask)
            return y

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            dx = torch.empty_like(dy)
            kernels.ops.relu_mask_backward(dx, dy.contiguous(), *ctx.saved_tensors)
            return dx

    return Relu.apply


def operations(rows: int, columns: int, device: torch.device) -> list[Operation]:
    """The puzzle's operations at one size, [rows, columns] in float32; attention has 16 heads and 64 numbers in each."""
    module = load(solutions() / "p20" / "functions.py")
    generator = torch.Generator(device).manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).requires_grad_()

    def candidates(eager: Function, *custom: Candidate) -> tuple[Candidate, ...]:
        return (
            Candidate("eager", eager, 1),
            Candidate("compiled", torch.compile(eager, dynamic=False), 2),
            *custom,
        )

    def lines(*names: str) -> int:
        return python_lines(solutions() / "p20" / "functions.py", *names)

    mojo = mojo_candidates()
    x = leaf(rows, columns)
    heads = tuple(leaf(16, max(1, rows // 16), 64) for _ in range(3))
    layernorm = module["LayerNorm"].apply
    return [
        Operation(
            "relu",
            (x,),
            candidates(
                F.relu,
                Candidate(
                    "custom, PyTorch", module["ReluFromBits"].apply, lines("ReluFromBits", "pack", "unpack")
                ),
                *mojo["relu"],
            ),
        ),
        Operation("softmax", (x,), candidates(lambda x: F.softmax(x, -1), *mojo["softmax"])),
        Operation(
            "layernorm",
            (x, leaf(columns), leaf(columns)),
            candidates(
                lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
                Candidate(
                    "custom, PyTorch",
                    lambda x, weight, bias: layernorm(x, weight, bias, EPS),
                    lines("LayerNorm"),
                ),
            ),
        ),
        Operation(
            "attention",
            heads,
            candidates(
                F.scaled_dot_product_attention,
                Candidate("custom, PyTorch", module["Attention"].apply, lines("Attention")),
            ),
        ),
    ]


def mojo_candidates() -> dict[str, list[Candidate]]:
    """The Mojo kernels for ReLU and softmax; none where MAX is not installed."""
    try:
        kernels = MojoKernels()
    except ImportError:
        return {"relu": [], "softmax": []}
    register = load(solutions() / "p20" / "register.py")["register"]
    registered = python_lines(solutions() / "p20" / "register.py", "register")
    return {
        "relu": [
            Candidate(
                "custom, Mojo",
                relu_of(kernels),
                mojo_lines(
                    "ballot",
                    "relu_mask_kernel",
                    "relu_mask_backward_kernel",
                    "launch_relu_mask",
                    "launch_relu_mask_backward",
                )
                + python_lines(Path(__file__), "relu_of"),
            )
        ],
        "softmax": [
            Candidate(
                "custom, Mojo",
                register("workbook_p20_worth", kernels),
                mojo_lines(
                    "softmax_kernel", "softmax_backward_kernel", "launch_softmax", "launch_softmax_backward"
                )
                + registered,
            )
        ],
    }


# ---- Measuring ----------------------------------------------------------------------------------------------


def both(function: Function, inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the output and every gradient."""
    output = function(*inputs)
    return output.detach(), *torch.autograd.grad(output, inputs, dy)


def measure(operation: Operation, rounds: int) -> list[Row]:
    """A row for each candidate: checked, then timed in turns with the others."""
    device = operation.inputs[0].device
    clock = CudaClock() if device.type == "cuda" else WallClock()
    eager = operation.candidates[0].function
    dy = torch.randn_like(eager(*operation.inputs))
    wide = tuple(t.detach().double().requires_grad_() for t in operation.inputs)
    truth = both(eager, wide, dy.double())
    failed, calls = {}, {}
    for one in operation.candidates:
        call = lambda function=one.function: both(function, operation.inputs, dy)  # noqa: E731
        try:
            if wrong := error_of(call(), truth):
                failed[one.name] = wrong
                continue
        except Exception as error:  # no C++ compiler for torch.compile, no room, an op that a device lacks
            failed[one.name] = (
                f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0][:70]}"
            )
            continue
        calls[one.name] = call
    times: dict[str, list[float]] = {name: [] for name in calls}
    with no_garbage_collection():
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(clock.elapsed(call, 1))
    return [
        Row(operation.name, one.name, failed=failed[one.name])
        if one.name in failed
        else Row(
            operation.name,
            one.name,
            statistics.median(times[one.name]) / 1e3,
            kept_bytes(one.function, list(operation.inputs))[0],
            one.lines,
        )
        for one in operation.candidates
    ]


def error_of(got: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> str:
    """What is wrong with a candidate's results; nothing where they are right."""
    worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, truth, strict=True))
    return "" if worst <= TOLERANCE else f"wrong by {worst:.1e}, and so not timed"


# ---- What follows -------------------------------------------------------------------------------------------


def conclusion(rows: list[Row]) -> str:
    """What the numbers of one operation say, in a sentence: the leanest of ours beside the fastest of PyTorch's."""
    stock = [row for row in rows if not row.failed and not row.name.startswith("custom")]
    custom = [row for row in rows if not row.failed and row.name.startswith("custom")]
    if not stock or not custom:
        return "nothing to compare"
    fastest = min(stock, key=lambda row: row.milliseconds)
    leanest = min(stock, key=lambda row: row.kept)
    best = min(custom, key=lambda row: (row.kept, row.milliseconds))
    ratio = best.milliseconds / fastest.milliseconds
    speed = (
        f"is {1 / ratio:.1f} times as fast"
        if ratio < 1 / CLEARLY
        else f"takes {ratio:.1f} times as long"
        if ratio > CLEARLY
        else "is as fast"
    )
    if best.kept * CLEARLY < leanest.kept:
        bytes_ = f"keeps {100 * best.kept / fastest.kept:.0f} % of the bytes"
        verdict = "do" if ratio <= CLEARLY else "do where memory is what you lack, else don't"
    else:
        leaner = best.kept * CLEARLY < fastest.kept
        bytes_ = f"keeps no less than {leanest.name}" if leaner else "keeps no less"
        verdict = "do" if ratio < 1 / CLEARLY else "don't"
    return f"{verdict}: {best.name}, beside {fastest.name}, {bytes_} and {speed}"


def lines_of(rows: list[Row]) -> list[str]:
    """The table of one operation and its conclusion."""
    said = [
        f"   {row.operation:<11}{row.name:<17}{row.failed}"
        if row.failed
        else f"   {row.operation:<11}{row.name:<17}{row.milliseconds:>9.2f} ms{row.kept / 1e6:>10.2f} MB{row.lines:>7}"
        for row in rows
    ]
    return [*said, f"   -> {conclusion(rows)}", ""]


def run(console: Console, rows: int = 2048, columns: int = 1024, rounds: int = ROUNDS) -> int:
    """Measures every operation and prints the table. Returns 0, or 1 where one of ours is wrong or fails."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no CUDA
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print_lines(
        console,
        [
            f"Forward and backward at [{rows}, {columns}] in float32, attention with 16 heads of {max(1, rows // 16)} x 64; on {name},",
            f"torch {torch.__version__}; medians of {rounds} rounds in turns. Compiling first takes a minute or two ...",
            "",
            f"   {'':<11}{'':<17}{'time':>12}{'kept':>13}{'lines':>7}",
        ],
    )
    failed = False
    for operation in operations(rows, columns, device):
        measured = measure(operation, rounds)
        failed |= any(row.failed and row.name.startswith("custom") for row in measured)
        print_lines(console, lines_of(measured))
    print_lines(
        console,
        [
            "Don't, whatever the table says, while the model still changes, or where nobody will test the gradient.",
            "Do where memory is the limit, where a special structure makes a short form that autograd cannot see, and where",
            "PyTorch lacks the operation.",
        ],
    )
    return int(failed)

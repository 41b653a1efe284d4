"""`p23 --claims`: what tutorials print about attention's backward pass written by hand, beside what is measured here.

The same two functions are timed twice: by the tutorials' own method, with everything in it that flatters one side, and by a
fair one. Beside them stand this puzzle's layer and PyTorch's own function. `claim_methods.py` measures, `claim_rows.py`
keeps, this module prints; `--csv` keeps the rows and `--read` prints them again, on a machine without the GPU that they come
from.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.puzzles.p23.claim_rows import (
    AUTOGRAD,
    CUSTOM,
    FAIR,
    LARGE,
    LAYER,
    ONE_PASS,
    OWN,
    SDPA,
    SMALL,
    TWO_PASSES,
    Row,
    candidate_row,
    kept_as_measured,
    read,
)

PUBLISHED = {512: (15, 12), 1024: (58, 41), 2048: (234, 142), 4096: (950, 486), 8192: (None, 1843)}
"""Length -> milliseconds by autograd, None for out of memory, and by the custom backward pass, as printed."""
PUBLISHED_GB = {2048: (3.2, 1.7), 4096: (12.8, 6.3)}
"""Length -> gigabytes by autograd and by the custom backward pass, as printed."""
ELEMENT = 4
"""Bytes of a float32."""
SHOWN = (AUTOGRAD, CUSTOM, LAYER, SDPA)
"""Whose memory is printed."""
WIDTHS = (10, 8, 8, 8)


# ---- The formulas of the published memory ---------------------------------------------------------------


def formula(length: int, batch: int = 8, heads: int = 12, dim: int = 64) -> tuple[int, int]:
    """Bytes by the tutorials' formulas: four matrices of scores for autograd; one, and Q, K and V, for the custom pass."""
    scores, operand = batch * heads * length * length * ELEMENT, batch * heads * length * dim * ELEMENT
    return 4 * scores, scores + 3 * operand


# ---- The command --------------------------------------------------------------------------------------------


def run(console: Console, arguments: Sequence[str] = ()) -> int:
    """Measures, or reads, and prints. Returns 0. Raises BadUse."""
    flags = make_parser().parse_args(arguments)
    if flags.read:
        rows = read(flags.read)
    else:
        from harness.puzzles.p23.claim_methods import measure

        for name in ("batch", "heads", "dim", "rounds"):
            if getattr(flags, name) is not None and getattr(flags, name) < 1:
                raise BadUse(f"--{name} {getattr(flags, name)}: must be at least 1")
        if flags.lengths and min(flags.lengths) < 1:
            raise BadUse(f"--lengths {min(flags.lengths)}: must be at least 1")
        sizes = {name: getattr(flags, name) for name in LARGE if getattr(flags, name) is not None}
        rows = kept_as_measured(
            measure(sizes, flags.rounds, lambda line: print_lines(console, [line])), flags.csv
        )
    print_lines(console, [*times(rows), *passes(rows), "", *memory(rows), "", *kept(rows), "", *NOTES])
    return 0


def make_parser() -> Parser:
    """The flags of `p23 --claims`."""
    flags = Parser(
        prog="p23 --claims",
        description="Print what tutorials claim beside what is measured.",
        allow_abbrev=False,
    )
    flags.add_argument(
        "--lengths", type=int, nargs="+", metavar="S", help="default: 512 to 8192; small ones on a CPU"
    )
    for name in ("batch", "heads", "dim"):
        flags.add_argument(f"--{name}", type=int, help=f"default: {LARGE[name]}; {SMALL[name]} on a CPU")
    flags.add_argument("--rounds", type=int, default=9, help="of the fair method (default: %(default)s)")
    flags.add_argument("--csv", type=Path, metavar="FILE", help="keep the rows here")
    flags.add_argument(
        "--read", type=Path, metavar="FILE", help="print the rows of such a file, measure nothing"
    )
    return flags


# ---- What is printed ----------------------------------------------------------------------------------------

NOTES = (
    "its method: one run without warm-up, autograd first; copies and forward pass counted as backward; autograd",
    "scales the scores, the custom pass does not; gradients of the copies are kept while the other one runs",
    "fair: both scaled, warmed up, turns in random order, forward and backward pass, median",
    "p23: harness.nn.attention; two passes, one pass: the puzzle's flash kernels without and with atomics",
)


def milliseconds(row: Row | None) -> str:
    """Its time, or what it failed by."""
    return "-" if row is None else row.failed or f"{row.ms:.4g}"


def times_faster(slow: float | None, fast: float | None) -> str:
    """How many times faster, or nothing."""
    return f"{slow / fast:.3g}x" if slow and fast else "-"


def pair(rows: Iterable[Row], length: int, method: str) -> list[str]:
    """Autograd, custom, and how many times faster, by a method."""
    both = [candidate_row(rows, length, method, who) for who in (AUTOGRAD, CUSTOM)]
    return [*map(milliseconds, both), times_faster(*(row.ms if row else None for row in both))]


def published(length: int) -> list[str]:
    """The published times."""
    if length not in PUBLISHED:
        return ["-", "-", "-"]
    slow, fast = PUBLISHED[length]
    return ["OOM" if slow is None else str(slow), str(fast), times_faster(slow, fast)]


def times(rows: list[Row]) -> list[str]:
    """The table of times."""
    others = (LAYER, SDPA)
    first = rows[0]
    sizes = f"float32, B = {first.batch}, {first.heads} heads, d = {first.dim}"
    lines = [
        f"forward and backward pass in ms, {sizes}",
        f"on {first.device} ({first.date})",
        f"{'':>7}{'published':^25}{'by its method':^25}{'by a fair one':^25}".rstrip(),
        f"{'length':>7}"
        + f"{'autograd':>9}{'custom':>8}{'':>8}" * 3
        + "".join(f"{who:>11}" for who in others),
    ]
    for length in dict.fromkeys(row.length for row in rows):
        cells = [*published(length), *pair(rows, length, OWN), *pair(rows, length, FAIR)]
        text = "".join(f"{cell:>{width}}" for cell, width in zip(cells, (9, 8, 8) * 3, strict=True))
        rest = "".join(f"{milliseconds(candidate_row(rows, length, FAIR, who)):>11}" for who in others)
        lines.append(f"{length:>7}{text}{rest}")
    return lines


def passes(rows: list[Row]) -> list[str]:
    """The table of the flash kernels' two backward passes; nothing where neither was measured."""
    lengths = [row.length for row in rows if row.who == ONE_PASS]
    lines = (
        ["", "the flash kernels of the puzzle in ms, and whether two runs gave the same gradients"]
        if lengths
        else []
    )
    lines += [f"{'length':>7}{TWO_PASSES:>12}{'':>5}{ONE_PASS:>12}"] if lengths else []
    for length in lengths:
        both = [candidate_row(rows, length, FAIR, who) for who in (TWO_PASSES, ONE_PASS)]
        cells = "".join(f"{milliseconds(row):>12}{row.same_bits if row else '':>5}" for row in both)
        lines.append(f"{length:>7}{cells}".rstrip())
    return lines


def gib(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.2f}" if count >= 2**27 else f"{count / 2**30:.2g}" if count else "-"


def memory(rows: list[Row]) -> list[str]:
    """The table of peaks: what is printed, what the formulas give, what is measured by both methods."""
    lines = [
        "peak memory in GiB (published: GB)",
        f"{'':>7}{'published':^16}{'its formulas':^16}{'its method':^16}{'by a fair one':^34}".rstrip(),
        f"{'length':>7}" + f"{AUTOGRAD:>9}{CUSTOM:>7}" * 3 + names_shown(),
    ]
    for length in dict.fromkeys(row.length for row in rows):
        sizes = next(row for row in rows if row.length == length)
        printed = [f"{value:g}" for value in PUBLISHED_GB.get(length, ())] or ["-", "-"]
        formulas = [gib(value) for value in formula(length, sizes.batch, sizes.heads, sizes.dim)]
        own = [peak_of(candidate_row(rows, length, OWN, who)) for who in (AUTOGRAD, CUSTOM)]
        fair = [peak_of(candidate_row(rows, length, FAIR, who)) for who in SHOWN]
        widths = (9, 7) * 3 + WIDTHS
        lines.append(f"{length:>7}" + aligned([*printed, *formulas, *own, *fair], widths))
    return lines


def kept(rows: list[Row]) -> list[str]:
    """The table of what is kept from the forward to the backward pass."""
    lines = [
        "kept for the backward pass in MiB, query, key and value among it (saved_tensors_hooks)",
        f"{'length':>7}{names_shown()}",
    ]
    for length in dict.fromkeys(row.length for row in rows):
        candidate_rows = [candidate_row(rows, length, FAIR, who) for who in SHOWN]
        cells = [f"{row.kept / 2**20:.4g}" if row and row.kept else "-" for row in candidate_rows]
        lines.append(f"{length:>7}" + aligned(cells, WIDTHS))
    return lines


def names_shown() -> str:
    """The names over the columns of the fair method."""
    return aligned(SHOWN, WIDTHS)


def aligned(cells: Iterable[str], widths: Iterable[int]) -> str:
    """Cells to the right of their columns."""
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def peak_of(row: Row | None) -> str:
    """A peak, or what it failed by."""
    return "-" if row is None else row.failed or gib(row.peak)

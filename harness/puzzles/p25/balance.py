"""`p25 --balance`: how many tiles each rank of a causal ring computes at each step, plain and zig-zag."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.puzzles.p25 import layout

TILE = 16


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    """Prints both tables. Raises BadUse."""
    parser = Parser(prog="p25 --balance", description="Count the work of each rank under a causal mask.")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--length", type=int, default=2048, metavar="S", help="positions, default: %(default)s"
    )
    flags = parser.parse_args(arguments)
    if not 1 <= flags.ranks <= 16:
        raise BadUse(f"--ranks {flags.ranks}: must be 1 to 16")
    if flags.length < 1:
        raise BadUse(f"--length {flags.length}: must be at least 1")
    words = f"{flags.length} positions, causal, tiles of {TILE} x {TILE}"
    print_lines(
        console, [words, *table(flags.ranks, flags.length, False), *table(flags.ranks, flags.length, True)]
    )
    return 0


def table(size: int, length: int, balanced: bool) -> Iterator[str]:
    """The tiles of every rank at every step; a step lasts as long as its busiest rank."""
    ranks = [layout.tiles(rank, size, length, balanced, TILE) for rank in range(size)]
    steps = list(zip(*ranks, strict=True))
    yield row("zig-zag" if balanced else "plain", [f"rank {rank}" for rank in range(size)], "busiest")
    for number, counts in enumerate(steps):
        yield row(f"   step {number}", [f"{count:,}" for count in counts], f"{max(counts):,}")
    lasts, work = sum(map(max, steps)), sum(map(sum, ranks))
    yield row("   sum", [f"{sum(counts):,}" for counts in ranks], f"{lasts:,}")
    yield f"   {work / (size * lasts):.0%} of the ranks' time is work, where every tile takes the same"


def row(head: str, cells: Sequence[str], last: str) -> str:
    """A line of a table."""
    return f"{head:<11}" + "".join(f"{cell:>9}" for cell in cells) + f"{last:>12}"

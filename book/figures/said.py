"""What pages say of records: what is derived from several numbers of one, or of several.

A page calls these functions in its references (`book/build/references.py`), beside the records themselves, so that its sentences
cannot say anything else than its tables.
"""

import math
import re
import statistics
from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np

from book.figures import (
    attention_times,
    bench_results,
    every_size,
    gradcheck_matrix,
    heroes,
    ring_results,
    unlearning,
)
from book.figures.order_figures import ratio as order_ratio  # noqa: F401
from book.figures.timing_pages import duration as brief  # noqa: F401
from book.figures.unlearning import RISE, rise, share_undone
from book.figures.worklog import SLAB  # noqa: F401
from book.figures.worklog_results import (  # noqa: F401
    change_of,
    launches,
    median,
    of_step,
    passes,
    peer,
    share_of_memory,
    sum_products,
    time_workbook_layer,
)
from book.measure import record
from book.measure.record import Row, Rows
from harness.puzzles.p25 import layout

CITATION = dict(
    re.findall(r"^([\w-]+): (.+)$", (record.ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
)
VERSION, RELEASED = CITATION["version"], CITATION["date-released"]
"""The workbook's, as it is to be cited."""
UNTRAINED = math.log(256)
"""The loss of a model over bytes that has never seen a text."""


# ---- Whole models with one mistake, and parts of a step --------------------------------------------------------


def curves(which: str, step: int, **where: object) -> list[float]:
    """The losses after a step of the runs with a mistake ("wrong"), or of the correct runs beside them ("right")."""
    return Rows("museum_curves").all(which, step=step, **where)


def count_falling() -> int:
    """In how many runs with a mistake the loss falls."""
    return sum(end < start for end, start in zip(curves("wrong", 300), curves("wrong", 10), strict=True))


def count_below(seed: int | None = None, factor: float = 1, **where: object) -> int:
    """How many runs with a mistake, of one seed or of all, end below the correct run times a factor."""
    where |= {} if seed is None else {"seed": seed}
    ends = zip(curves("wrong", 300, **where), curves("right", 300, **where), strict=True)
    return sum(wrong < factor * right for wrong, right in ends)


MINOR_KINDS = "LayerNorm", "GELU", "cross-entropy", "AdamW and the norm", "token table"
KINDS = ("products", "attention", *MINOR_KINDS)
"""Kinds of kernels in a step of GPT-2 by hand."""


def above_floor(*kinds: str) -> float:
    """The microseconds that these kinds take beyond what their bytes or their arithmetic need."""
    rows = Rows("step_by_hand")
    return sum(rows("median_us", what=kind) - rows("floor_us", what=kind) for kind in kinds)


def share_above_floor(*kinds: str) -> float:
    """The same as a share of the step."""
    return above_floor(*kinds) / Rows("step_by_hand")("median_us", what="by hand")


def launch(position: int) -> float:
    """The microseconds of a launch of the fast layer's forward pass."""
    return Rows("ladder")("median_us", algorithm="fast", pass_="forward", position=position)


def head_ms(way: str) -> float:
    """The milliseconds of GPT-2's head with its loss."""
    return Rows("cross_entropy")("ms", H=768, V=50304, way=way)


def of_compile(setting: str, number: str = "median_ms") -> float:
    """A number of GPT-2's step with the swapping backend over `torch.compile`'s."""
    ours, compiled = (
        Rows("gpt2_step")(number, setting=setting, way=way) for way in ("mojo_workbook", "torch.compile")
    )
    return ours / compiled


# ---- What gradcheck misses, and a step that unlearns -----------------------------------------------------------

USUAL = gradcheck_matrix.USUAL
FOLLOWED = {"text": "PyTorch", "size": "small", "warm_up": 1}
"""What the followed run shares with the runs of the other seeds."""


def count_caught(*checks: str) -> int:
    """How many of puzzle 21's wrong backward passes at least one of these checks finds; without any, how many there are."""
    return count(gradcheck_matrix.own(), checks)


def count_reports() -> int:
    """How many reconstructed reports there are."""
    return len(gradcheck_matrix.reports())


def count_all(*checks: str, first: str = "") -> int:
    """The same of both together, or of those that `check_backward` rejects in one of its checks."""
    return count([row for row in gradcheck_matrix.every() if first in ("", row["try"])], checks)


def count_strided(first: str) -> int:
    """How many of those gradgradcheck finds, given gradients that are not contiguous."""
    rows = [row for row in gradcheck_matrix.every() if row["try"] == first]
    return sum(gradcheck_matrix.calls_of(row["version"])["gradgradcheck strided"] == "1" for row in rows)


def count(rows: Sequence[Row], checks: Sequence[str]) -> int:
    """How many at least one of the checks finds; without any, how many there are."""
    return sum(not checks or any(gradcheck_matrix.finds(row, name) for name in checks) for row in rows)


def count_accepted() -> int:
    """How many one call of gradcheck does not find."""
    return count_all() - count_all(USUAL[0])


def count_more(*without: str) -> int:
    """How many only more calls of gradcheck find, without the calls of these columns."""
    return count_all(*[name for name in gradcheck_matrix.GROUPS if name not in without])


def count_unfit() -> int:
    """How many gradcheck cannot judge, because it rejects the correct version too."""
    return sum(gradcheck_matrix.state(row, USUAL[0]) == "unfit" for row in gradcheck_matrix.every())


def after_update(update: float, column: str = "loss") -> float:
    """Return a column of the followed run's record after an update, or on the way to the next."""
    return Rows("unlearning_path")(column, place_updates=f"{update:.3f}")


def path_ratio(update: float) -> float:
    """Return what the shared vector's length is to the spread there."""
    return after_update(update, "size") / after_update(update, "spread")


def count_lowered(fraction: str) -> int:
    """Return in how many runs of `unlearning_fractions` this fraction of the worst update lowers the loss of its batch."""
    rows = record.rows("unlearning_fractions")
    return sum(float(row[f"{fraction}_loss"]) < float(row["before_loss"]) for row in rows)


def spoiled(column: str) -> float:
    """Return a column of `unlearning_causes` for the followed run, which has the largest rise."""
    return float(max(record.rows("unlearning_causes"), key=rise)[column])


def count_causes(column: str) -> int:
    """Return in how many runs this rise of `unlearning_causes` counts as a step that unlearns."""
    return sum(number > RISE for number in Rows("unlearning_causes").all(column))


def causes(restored: bool, turned: bool | None = None) -> list[record.Row]:
    """Return the rows of `unlearning_causes` of the runs whose rise the old vector undoes, or not, and whose vector turns by more than a
    right angle, or not; without `turned` of both."""
    return [
        row
        for row in record.rows("unlearning_causes")
        if unlearning.is_restored(row) is restored and turned in (None, unlearning.has_turned(row))
    ]


def straight(number: str, restored: bool) -> list[float]:
    """Return a number of each run whose vector turns by at most a right angle: what the step multiplies its `size` or the `spread` by,
    or the `ratio` after it."""
    rows = causes(restored, False)
    if number == "ratio":
        return [unlearning.ratio(row, "after") for row in rows]
    return [float(row[f"after_{number}"]) / float(row[f"before_{number}"]) for row in rows]


def falls() -> list[float]:
    """Return what the step divides the ratio by in each of these runs whose rise the old vector undoes."""
    return [
        wider / kept for wider, kept in zip(straight("spread", True), straight("size", True), strict=True)
    ]


def most_off() -> float:
    """Return how far the curve of `unlearning_scales` is at most from the rise of such a run that the old vector undoes."""
    points = sorted((float(row["scale"]), float(row["loss"])) for row in record.rows("unlearning_scales"))
    scales, losses = zip(*points, strict=True)
    curve = np.interp(np.array(straight("ratio", True)) / path_ratio(14), scales, losses) - after_scaling(1)
    return float(max(abs(curve - [rise(row) for row in causes(True, False)])))


def sudden(turned: bool | None, least: float = -math.inf) -> list[record.Row]:
    """Return the steps of `unlearning_steps` that turn the vector by more than a right angle, that divide its ratio by more than 2.5,
    to less than 1.5, or all; of these, only those that raise the loss by more than `least`."""
    return [
        row
        for row in record.rows("unlearning_steps")
        if turned is None
        or (
            (float(row["cosine"]) < 0) is turned
            and (turned or float(row["after_ratio"]) < min(float(row["before_ratio"]) / 2.5, 1.5))
        )
        if float(row["rise"]) > least
    ]


def last_steps(below: float = math.inf) -> list[int]:
    """Return the number of steps of each run there that ends with a ratio below this."""
    runs = record.by(record.rows("unlearning_steps"), "size", "warm_up", "seed").values()
    return [int(run[-1]["update"]) for run in runs if float(run[-1]["after_ratio"]) < below]


def most_unrestored() -> float:
    """Return the largest share that the old shared vector undoes in a run where it does not undo nine tenths."""
    return max(share_undone(row, "restored") for row in causes(False))


def undone(kind: str, least: float) -> list[float]:
    """Return the shares of the rise that the old parameters of a kind undo, if more than `least`."""
    return [share for share in unlearning.shares_undone()[kind] if share > least]


def alone(kind: str) -> list[float]:
    """Return the share of each run's rise that an update of one kind of parameter alone causes."""
    return [1 - share_undone(row, "alone") for row in Rows("unlearning_parts").select(kind=kind)]


def middle(numbers: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(numbers)


def count_set_jumps(size: str, rate: float, beta: float = 0.95) -> int:
    """Return how many runs of `unlearning_settings` with clipping have a step that counts."""
    rises = Rows("unlearning_settings").all("rise", size=size, at_rate=rate, beta=beta, clip=1.0)
    return sum(number > RISE for number in rises)


def after_scaling(scale: float, column: str = "loss") -> float:
    """Return a column of `unlearning_scales` for the followed run with its shared vector scaled."""
    return Rows("unlearning_scales")(column, scale=float(scale))


def jumps(least: float, **where: object) -> list[record.Row]:
    """The runs of the record `unlearning`, with these values, whose worst step costs more than so many nats."""
    return [row for row in Rows("unlearning").select(**where) if float(row["rise"]) > least]


def count_warming(warm_up: int) -> int:
    """Return how many runs with this warm-up have their worst step during it."""
    return sum(int(row["update"]) < warm_up for row in jumps(RISE, warm_up=warm_up))


def mean_end_loss(**where: object) -> float:
    """Return the mean loss at the last step of the runs with these values."""
    return fmean(Rows("unlearning").all("end_loss", **where))


def end_differences() -> list[float]:
    """Return for each text, size and warm-up with runs of both kinds, how much higher those with a step that counts end."""
    differences = []
    for rows in record.by(record.rows("unlearning"), "text", "size", "warm_up").values():
        with_step, without = (
            [float(row["end_loss"]) for row in rows if (float(row["rise"]) > RISE) is counts]
            for counts in (True, False)
        )
        if with_step and without:
            differences.append(fmean(with_step) - fmean(without))
    return differences


def worse_ends() -> list[float]:
    """Return the positive ones."""
    return [difference for difference in end_differences() if difference > 0]


def lasting_steps() -> list[record.Row]:
    """Return the steps that count and that the next update does not undo."""
    return [row for row in jumps(RISE) if float(row["next_loss"]) > float(row["before_loss"]) + RISE]


# ---- Training and every size --------------------------------------------------------------------------------


def mib_saved(setting: str) -> float:
    """What replacing GPT-2's LayerNorms saves of `torch.compile`'s peak of memory."""
    whole, swapped = (
        Rows("gpt2_step")("peak_mib", setting=setting, way=way)
        for way in ("torch.compile", "mojo_workbook, LayerNorms alone")
    )
    return whole - swapped


def beside(column: str = "graph", least: float = 0) -> list[float]:
    """The layer's time over its fastest peer's at every size of the record `sizes` where it takes that many microseconds or more."""
    return [one.ratio for one in every_size.beside(record.rows("sizes"), column) if one.time >= least]


def odd_sizes(least: int = 0, most: int = 10**9) -> list[float]:
    """As `beside`, where a row fills no whole vectors and the number of rows lies between these."""
    return [
        one.ratio
        for one in every_size.beside(record.rows("sizes"), "graph")
        if least <= one.dims[0] <= most and any(width % 8 for width in one.dims[1:])
    ]


def two_branches() -> dict[every_size.Size, float]:
    """The time of two branches over that of one, by size."""
    rows = every_size.by_branches(record.rows("branches"))
    return {size: float(two["us"]) / float(one["us"]) for size, one, two, _ in rows}


def of_products(*size: int) -> float:
    """The layer's time over the three bare products' at one of the benchmark's sizes, as graphs."""
    by_name = bench_results.select(record.rows("bench"), "both", "graph")[size[0], size[1], size[2]]
    return float(by_name["fast"]["ratio_to_floor"])


def gains_shrink() -> bool:
    """Whether the layer gains less over plain PyTorch the larger the product is, in the record `bench`."""
    selected = bench_results.select(record.rows("bench"), "both", "graph")
    by_size = sorted(selected.items(), key=lambda item: item[0][0] * item[0][1] * item[0][2])
    gains = [float(at["eager"]["median_us"]) / float(at["fast"]["median_us"]) for _, at in by_size]
    return gains == sorted(gains, reverse=True)


# ---- Attention ----------------------------------------------------------------------------------------------


def of_peer(
    other: str, d: int, causal: bool = False, who: str = "attention", ragged: bool = False
) -> list[float]:
    """Attention's time over another's, forward and backward as a graph, at every length with such heads."""
    return [
        attention_times.microseconds(size, who) / attention_times.microseconds(size, other)
        for size in attention_times.sizes(d, causal, ragged)
    ]


def forward_gain(d: int) -> float:
    """How many times as fast `wgmma` and the TMA make the forward pass with such heads, at the best length."""
    forward = partial(
        Rows("attention"), "median_us", **attention_times.SHOWN | {"pass_": "forward"}, d=d, part=1
    )
    lengths = {size[0] for ragged in (False, True) for size in attention_times.sizes(d, False, ragged)}
    return max(forward(S=S, candidate="portable") / forward(S=S, candidate="attention") for S in lengths)


def of_fair(who: str, other: str) -> float:
    """Time over another's at 4,096 positions by the fair method, in the record `attention_claims`."""
    fair = partial(Rows("attention_claims"), "ms", length=4096, method="fair")
    return fair(who=who) / fair(who=other)


# ---- The ring -----------------------------------------------------------------------------------------------


def ring_time(size: int, balanced: bool, length: int = 2048, tile: int = 16) -> int:
    """Return the tiles of the busiest rank of each step of a causal ring, all steps together."""
    ranks = [layout.count_tiles(rank, size, length, balanced, tile) for rank in range(size)]
    return sum(map(max, zip(*ranks, strict=True)))


def ring_errors(direction: str = "forward") -> list[float]:
    """The largest error of an output, or of a dK, after each step of the run that the ring's player shows."""
    forward, _where, _added, backward = heroes.ring_run()
    return forward if direction == "forward" else backward


def ring_speedup(kernels: str, d: int, length: int, ranks: int) -> float:
    """How many times as fast a ring is as one GPU."""
    one = ring_results.milliseconds("one GPU", kernels, 1, length, d)
    whole = ring_results.milliseconds("ring", kernels, ranks, length, d)
    if not one or not whole:
        raise LookupError(f"no ring of {ranks} with {kernels}, d = {d}, {length} positions")
    return one / whole

"""What pages say of records: each record as a function of columns, and what is derived from several numbers of one.

A page calls these functions in its references (`book/build/references.py`), so that its sentences cannot say anything else
than its tables.
"""

import math
import re
from datetime import date

from book.figures import (
    attention_times,
    bench_results,
    every_size,
    gradcheck_matrix,
    heroes,
    order_figures,
    ring_results,
    unlearning,
    worklog,
    worklog_results,
)
from book.figures.timing_pages import duration
from book.measure import record
from harness.check import zoo
from harness.puzzles.p25 import layout

CITATION = dict(
    re.findall(r"^([\w-]+): (.+)$", (record.ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
)
VERSION, RELEASED = CITATION["version"], CITATION["date-released"]
"""The workbook's, as it is to be cited."""
UNTRAINED = math.log(256)
"""The loss of a model over bytes that has never seen a text."""


class Rows:
    """A record in an expression: its numbers by column and by the values of other columns."""

    def __init__(self, name: str):
        self.name = name

    @property
    def gpu(self) -> str:
        """What measured it, in a word: H200."""
        return record.rows(self.name)[0]["device"].removeprefix("NVIDIA ").split()[0]

    @property
    def day(self) -> str:
        """When it was measured, in words: 29 November 2026."""
        return f"{date.fromisoformat(record.read(self.name).date):%-d %B %Y}"

    def all(self, number: str, /, **where: object) -> list[float]:
        """The numbers of every row with these values, rows without a number left out. Raises LookupError where none is."""
        wanted = {key.rstrip("_"): str(value) for key, value in where.items()}
        rows = record.rows(self.name)
        if unknown := {number, *wanted} - rows[0].keys():
            raise LookupError(f"{self.name} has no column {', '.join(sorted(unknown))}")
        matching = [
            float(row[number]) for row in rows if row[number] and all(row[k] == v for k, v in wanted.items())
        ]
        if not matching:
            raise LookupError(
                f"{self.name}: no row with {', '.join(f'{k} = {v}' for k, v in wanted.items())}"
            )
        return matching

    def __call__(self, number: str, /, **where: object) -> float:
        """The one number with these values. Raises LookupError where there is none or more than one."""
        matching = self.all(number, **where)
        if len(matching) > 1:
            raise LookupError(f"{self.name}: {len(matching)} rows with these values, not one")
        return matching[0]


# ---- The steps of puzzle 28 ----------------------------------------------------------------------------------

SLAB = worklog.SLAB
median, passes, of_step, peer, share_of_memory, gradients_gain, brief = (
    worklog_results.median,
    worklog_results.passes,
    worklog_results.of_step,
    worklog_results.peer,
    worklog_results.share_of_memory,
    worklog_results.gradients_gain,
    duration,
)

order_ratio = order_figures.ratio

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


KINDS = "products", "attention", "LayerNorm", "GELU", "cross-entropy", "AdamW and the norm", "token table"
"""Kinds of kernels in a step of GPT-2 by hand."""


def above_floor(*kinds: str) -> float:
    """The microseconds that these kinds take beyond what their bytes or their arithmetic need."""
    rows = Rows("step_by_hand")
    return sum(rows("median_us", what=kind) - rows("floor_us", what=kind) for kind in kinds)


def loss_by_hand(step: int) -> float:
    """The loss at a step of the run that trains by hand."""
    return Rows("training_by_hand")("loss", step=step)


def timed(what: str) -> float:
    """The microseconds of one way to time a product."""
    return Rows("timing_ways")("median_us", what=what)


def launch(position: int) -> float:
    """The microseconds of a launch of the fast layer's forward pass."""
    return Rows("ladder")("median_us", algorithm="fast", pass_="forward", position=position)


def head_ms(way: str) -> float:
    """The milliseconds of GPT-2's head with its loss."""
    return Rows("cross_entropy")("ms", H=768, V=50304, way=way)


def by_pairs(way: str) -> float:
    """The microseconds of LayerNorm and Linear in float32, by pairs of float16 numbers or as usual."""
    return Rows("pairs")("graph_us", M=4096, H=768, O=3072, way=way)


def of_compile(setting: str, number: str = "median_ms") -> float:
    """A number of GPT-2's step with the swapping backend over `torch.compile`'s."""
    rows = Rows("gpt2_step")
    return rows(number, setting=setting, way="mojo_workbook") / rows(
        number, setting=setting, way="torch.compile"
    )


# ---- What gradcheck misses, and a step that unlearns -----------------------------------------------------------

USUAL, MORE = gradcheck_matrix.USUAL, gradcheck_matrix.CALLS
FOLLOWED = {"text": "PyTorch", "size": "small", "warm_up": 1}
"""What the followed run shares with the runs of the other seeds."""


def count_caught(*checks: str) -> int:
    """How many of puzzle 21's wrong backward passes at least one of these checks finds; without any, how many there are."""
    rows = gradcheck_matrix.ordered()
    return (
        sum(any(gradcheck_matrix.finds(row, name) for name in checks) for row in rows)
        if checks
        else len(rows)
    )


def count_reports(check: str) -> int:
    """How many of the reconstructed reports a check finds."""
    return sum(gradcheck_matrix.finds(row, check) for row in gradcheck_matrix.reports())


def count_reported() -> int:
    """How many of them are modelled on a public report."""
    return sum(bool(wrong.source) for wrong in zoo.load_wrong_kernels("p21") if wrong.rung == "torch")


def after_update(update: int, column: str = "loss") -> float:
    """A column of the followed run's record after an update."""
    (row,) = (row for row in unlearning.path() if float(row["place_updates"]) == update)
    return float(row[column])


def vector_length(update: int) -> float:
    """The length of the shared vector there."""
    return math.hypot(after_update(update, "along_size"), after_update(update, "across_size"))


def vector_move(update: int) -> float:
    """Return how far this update moves the tip of the shared vector in the plane of the record."""
    before, after = (
        (after_update(number, "along_size"), after_update(number, "across_size"))
        for number in (update - 1, update)
    )
    return math.dist(before, after)


def spoiled(column: str) -> float:
    """Return a column of `unlearning_causes` for the followed run, which has the largest rise."""
    rows = record.rows("unlearning_causes")
    return float(max(rows, key=lambda row: float(row["after_loss"]) - float(row["before_loss"]))[column])


def count_causes(column: str) -> int:
    """Return in how many runs this rise of `unlearning_causes` counts as a step that unlearns."""
    return sum(float(row[column]) > unlearning.RISE for row in record.rows("unlearning_causes"))


def vector_angle(update: int) -> float:
    """Return the degrees by which the shared vector has turned from its direction before the worst update."""
    return math.degrees(math.atan2(after_update(update, "across_size"), after_update(update, "along_size")))


def guilty(column: str) -> float:
    """Return a column of `unlearning_causes` for the run in which other batches do least harm."""
    return float(
        min(record.rows("unlearning_causes"), key=lambda row: float(row["others_median_rise"]))[column]
    )


def count_warming(warm_up: int) -> int:
    """Return how many runs with this warm-up have their worst step during it."""
    return sum(int(row["update"]) < warm_up for row in jumps(unlearning.RISE, warm_up=warm_up))


def lengths_kept(restored: bool, turned: bool) -> list[float]:
    """Return what share of its length the shared vector keeps in the worst step of each run, by two properties of the run.

    Args:
        restored: Whether the old vector undoes the rise.
        turned: Whether the vector turns by more than a right angle.
    """
    return [
        float(row["after_size"]) / float(row["before_size"])
        for row in record.rows("unlearning_causes")
        if is_restored(row) is restored and unlearning.has_turned(row) is turned
    ]


def straight_ratios(when: str) -> list[float]:
    """Return the shared vector's ratio to the spread before or after the step of each run that turns it by less than a right angle."""
    rows = record.rows("unlearning_causes")
    return [unlearning.ratio(row, when) for row in rows if not unlearning.has_turned(row)]


def ratio_falls() -> list[float]:
    """Return what the step divides that ratio by in each of these runs."""
    return [a / b for a, b in zip(straight_ratios("before"), straight_ratios("after"), strict=True)]


def share_restored(row: record.Row) -> float:
    """Return what share of a run's rise the old shared vector undoes."""
    before, after, restored = (float(row[f"{name}_loss"]) for name in ("before", "after", "restored"))
    return (after - restored) / (after - before)


def is_restored(row: record.Row) -> bool:
    """Return whether the old shared vector undoes at least nine tenths of a run's rise."""
    return share_restored(row) >= 0.9


def most_unrestored() -> float:
    """Return the largest share that the old shared vector undoes in a run where it does not undo nine tenths."""
    return max(share_restored(row) for row in record.rows("unlearning_causes") if not is_restored(row))


def undone(kind: str) -> list[float]:
    """Return the share of the rise that the old parameters of a kind undo, for each run."""
    return unlearning.shares_undone()[kind]


def most_alone(kind: str) -> float:
    """Return the largest share of a run's rise that an update of one kind of parameter alone causes."""
    rows = [row for row in record.rows("unlearning_parts") if row["kind"] == kind]
    return max(
        (float(row["alone_loss"]) - float(row["before_loss"]))
        / (float(row["after_loss"]) - float(row["before_loss"]))
        for row in rows
    )


def steps_of(kind: str, column: str) -> float:
    """Return how far an element of a kind moves in the followed run's worst update, or in the one before, in learning rates."""
    rows = [row for row in record.rows("unlearning_parts") if row["kind"] == kind]
    return float(max(rows, key=lambda row: float(row["after_loss"]) - float(row["before_loss"]))[column])


def after_scaling(scale: float, column: str = "loss") -> float:
    """Return a column of `unlearning_scales` for the followed run with its shared vector scaled."""
    (row,) = (row for row in record.rows("unlearning_scales") if float(row["scale"]) == scale)
    return float(row[column])


def jumps(least: float, **where: object) -> list[record.Row]:
    """The runs of the record `unlearning`, with these values, whose worst step costs more than so many nats."""
    return [
        row
        for row in record.rows("unlearning")
        if float(row["rise"]) > least and all(row[name] == str(value) for name, value in where.items())
    ]


def count_short(text: str) -> int:
    """Return how many runs on a text without a long warm-up have such a step."""
    return sum(int(row["warm_up"]) < 100 for row in jumps(unlearning.RISE, text=text))


def mean_end_loss(jumped: bool | None = None, **where: object) -> float:
    """Return the mean loss at the last step of the runs with these values.

    Args:
        jumped: Take only runs with a step that counts, or only runs without one.
        where: Column -> value of the runs to take.
    """
    rows = jumps(-math.inf, **where)
    losses = [
        float(row["end_loss"])
        for row in rows
        if jumped is None or (float(row["rise"]) > unlearning.RISE) is jumped
    ]
    return sum(losses) / len(losses)


def end_differences() -> list[float]:
    """Return, for each text, size and warm-up with runs of both kinds, how much higher those with a step that counts end."""
    columns = ("text", "size", "warm_up")
    cells = [dict(zip(columns, key, strict=True)) for key in record.by(jumps(-math.inf), *columns)]
    both = [cell for cell in cells if 0 < len(jumps(unlearning.RISE, **cell)) < len(jumps(-math.inf, **cell))]
    return [mean_end_loss(True, **cell) - mean_end_loss(False, **cell) for cell in both]


def worse_ends() -> list[float]:
    """Return the positive ones."""
    return [difference for difference in end_differences() if difference > 0]


def lasting_steps() -> list[record.Row]:
    """Return the steps that count and that the next update does not undo."""
    limit = unlearning.RISE
    return [row for row in jumps(limit) if float(row["next_loss"]) > float(row["before_loss"]) + limit]


def lasting(column: str) -> float:
    """Return a column of the largest of them."""
    return float(max(lasting_steps(), key=lambda row: float(row["rise"]))[column])


# ---- Training and every size --------------------------------------------------------------------------------


def mib_saved(setting: str) -> float:
    """What replacing GPT-2's LayerNorms saves of `torch.compile`'s peak of memory."""
    peak = {
        row["way"]: float(row["peak_mib"]) for row in record.rows("gpt2_step") if row["setting"] == setting
    }
    return peak["torch.compile"] - peak["mojo_workbook, LayerNorms alone"]


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


def apart(model: str) -> float:
    """How far the losses of a training run are from plain PyTorch's on average."""
    models = {
        name: [float(row["loss"]) for row in rows]
        for name, rows in bench_results.training("training").items()
    }
    plain = models["plain PyTorch"]
    return sum(abs(a - b) for a, b in zip(models[model], plain, strict=True)) / len(plain)


# ---- Attention ----------------------------------------------------------------------------------------------


def of_peer(
    peer: str, d: int, causal: bool = False, who: str = "attention", ragged: bool = False
) -> list[float]:
    """Attention's time over a peer's, forward and backward as a graph, at every length with such heads."""
    times = attention_times.read()
    sizes = times.sizes("graph", d, causal, ragged)
    return [
        times.microseconds(size, "graph", who) / times.microseconds(size, "graph", peer) for size in sizes
    ]


def of_nine_products(length: int, d: int, who: str = "attention") -> float:
    """Time over that of the nine products that the kernels make, at a large product's rate."""
    times, size = attention_times.read(), (length, d, False, "bfloat16")
    return times.microseconds(size, "graph", who) / attention_times.predicted(times, size)["done"]


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
    ring = ring_results.Ring([row for name in ring_results.RINGS for row in record.rows(name)])
    one, whole = (ring.ms(who, kernels, n, length, d) for who, n in (("one GPU", 1), ("ring", ranks)))
    if not one or not whole:
        raise LookupError(f"no ring of {ranks} with {kernels}, d = {d}, {length} positions")
    return one / whole

"""Cost limits of puzzle 28's steps, from the shapes of their tensors.

A limit is the minimum cost of a step's technique plus up to 10 %, whatever the solution costs. Limits scale
with the sizes.
"""

import re
from collections.abc import Callable, Mapping

from harness.spec.limits import Cost, Counts, Limit, divide_amounts

VECTOR = 16
"""Bytes of a thread's widest load."""
WARP = 32
WARPS = 4
"""Warps per block in the row kernels."""
SLAB = 32
"""Rows that a warp sums in the first stage of `dgamma`."""
SECTOR = 32
"""Bytes of a sector, global memory's smallest transfer."""
TILE = 32
"""Side of the tile of results in `tiled`."""
BLOCK = 64
EACH = 4
"""Sides of a block's and of a thread's tile of results in `registers`."""

SIDES = (128, 96)
"""Sides of a block's tile of results with tensor cores."""

F32, BF16 = "float32", "bfloat16"
FACTORS = ("ln_out", "linear_weight")
NARROW_FACTORS = ("ln_out_16", "weight_16")
First = float | Mapping[str, float]
"""The cost of the blank's initial code, in both dtypes or by dtype."""


def charge_bytes(sites, over: float) -> Cost:
    """Return the cost of the bytes that memory instructions move, divided by `over`."""
    return divide_amounts([(site.instr, site.traffic.bytes) for site in sites], over)


def sum_bytes(sites) -> int:
    return sum(site.traffic.bytes for site in sites)


def count_matrix_bytes(counts: Counts) -> int:
    return counts.sizes["rows"] * counts.sizes["hidden"] * counts.element


def count_product_multiply_adds(counts: Counts) -> int:
    return counts.sizes["rows"] * counts.sizes["hidden"] * counts.sizes["outputs"]


def make_limit(
    id: str,
    short: str,
    counter: str,
    cost: Callable[[Counts], Cost],
    most: float,
    first: First,
    hint: int = 1,
) -> Limit:
    by_dtype = {F32: first, BF16: first} if isinstance(first, int | float) else first
    return Limit(id, short, counter, cost, most, by_dtype, hint)


def limit_sectors(step: str, tensors: tuple[str, ...], first: First) -> Limit:
    """Return a limit on the sectors moved, relative to the fewest that contain the requested bytes."""

    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors)
        requested = max(sum_bytes(sites), 1)
        amounts = [(site.instr, SECTOR * site.traffic.sectors - site.traffic.bytes) for site in sites]
        ratio = divide_amounts([(site.instr, SECTOR * site.traffic.sectors) for site in sites], requested)
        return Cost(ratio.value, divide_amounts(amounts, requested).shares)

    counter = f"32-byte sectors of {' and '.join(tensors)}, over the minimum for the requested bytes"
    return make_limit("not-coalesced", "sectors / fewest", counter, cost, 1.1, first)


def limit_reads(step: str, tensors: tuple[str, ...], first: First) -> Limit:
    """Return a limit on the bytes read: one read of each matrix."""

    def cost(counts: Counts) -> Cost:
        selected, size = counts.select_launches(step), count_matrix_bytes(counts)
        costs = [charge_bytes(selected.select_sites("global", [name], "load"), size) for name in tensors]
        return max(costs, key=lambda cost: cost.value)

    counter = f"bytes read of {' or '.join(tensors)}, over its size"
    return make_limit("read-again", "bytes read / size", counter, cost, 1.05, first)


def limit_parameter_reads(step: str, tensors: tuple[str, ...], first: First) -> Limit:
    """Return a limit on the bytes read of parameter vectors: one read per row."""

    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors, "load")
        return charge_bytes(sites, count_matrix_bytes(counts) * len(tensors))

    counter = f"bytes read of {' and '.join(tensors)}, over one read per row"
    return make_limit("parameters-again", "gamma, beta read / row width", counter, cost, 1.05, first)


def limit_load_requests(step: str, tensors: tuple[str, ...], first: First) -> Limit:
    """Return a limit on the memory requests: those needed with 16 bytes per thread."""

    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors)
        amounts = [(site.instr, VECTOR * WARP * site.traffic.requests) for site in sites]
        return divide_amounts(amounts, max(sum_bytes(sites), 1))

    counter = f"requests for {' and '.join(tensors)}, over the minimum with 16 bytes per thread"
    return make_limit("narrow-loads", "requests / fewest", counter, cost, 1.1, first)


def limit_local_memory(step: str) -> Limit:
    """Return a limit on local memory, which stores arrays with dynamic indices: 0 bytes."""

    def cost(counts: Counts) -> Cost:
        return charge_bytes(counts.select_launches(step).select_sites("local"), counts.sizes["rows"])

    counter = "bytes per row moved to and from local memory, which is off-chip: an array is not in registers"
    return make_limit("not-in-registers", "local bytes / row", counter, cost, 0, 0, 2)


def limit_shared_stores(step: str, first: First) -> Limit:
    """Return a limit on shared memory stored per row: for each of two sums, a word per warp and one more."""

    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("shared", verb="store")
        return charge_bytes(sites, counts.sizes["rows"])

    counter, bound = "bytes stored in shared memory per row", 2 * 4 * (WARPS + 1)
    return make_limit("shared-sums", "shared bytes / row", counter, cost, bound, first)


def limit_barriers(step: str, first: First) -> Limit:
    """Return a limit on the barriers per row: none if one warp reduces it, else two for each of two sums."""

    def cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        bars = [(bar.instr, bar.count) for bar in selected.select_issued("bar")]
        got = divide_amounts(bars, counts.sizes["rows"])
        allowed = 4 if selected.select_sites("shared") else 0
        return Cost(max(got.value - allowed, 0), got.shares)

    counter = "barriers per row beyond the needed ones (two per sum if warps share the row, else none)"
    return make_limit("needless-barriers", "barriers / row, too many", counter, cost, 0, first)


def limit_atomics(step: str, first: First) -> Limit:
    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", verb="atomic")
        return divide_amounts([(s.instr, s.traffic.bytes / s.nbytes) for s in sites], 1)

    return make_limit("atomics", "atomics", "atomics, whose order differs from run to run", cost, 0, first)


def limit_partial_sums(step: str, first: First) -> Limit:
    """Return a limit on the partial sums written: two per column and slab."""

    def cost(counts: Counts) -> Cost:
        size = 2 * 4 * counts.sizes["hidden"] * -(-counts.sizes["rows"] // SLAB)
        return charge_bytes(counts.select_launches(step).select_sites("global", ("sums",), "store"), size)

    counter = "bytes written of partial sums, over two sums per column and slab"
    return make_limit("sums-again", "sums stored / needed", counter, cost, 1.05, first)


def limit_global_loads(
    step: str, high: int, wide: int, first: First, tensors: tuple[str, ...] = FACTORS
) -> Limit:
    """Return a limit on the elements read per multiply-add: 1 / high + 1 / wide, those of a high x wide tile."""

    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors, "load")
        element = 2 if tensors == NARROW_FACTORS else counts.element
        return charge_bytes(sites, count_product_multiply_adds(counts) * element)

    counter = f"elements of {' and '.join(tensors)} read per multiply-add"
    bound = 1.1 * (1 / high + 1 / wide)
    return make_limit("tile-not-shared", "elements / multiply-add", counter, cost, bound, first)


def limit_bank_conflicts(step: str, first: First) -> Limit:
    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("shared")
        return divide_amounts([(s.instr, s.traffic.bank_conflicts) for s in sites], 1)

    counter = "extra cycles of shared memory from bank conflicts"
    return make_limit("bank-conflicts", "bank conflicts", counter, cost, 0, first)


def limit_shared_loads(step: str, each: int, first: First, element: int = 4) -> Limit:
    """Return a limit on shared bytes loaded per multiply-add; a thread computes each x each results."""

    def cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("shared", verb="load")
        return charge_bytes(sites, count_product_multiply_adds(counts))

    counter, bound = "bytes loaded from shared memory per multiply-add", 1.1 * 2 * element / each
    return make_limit("registers-not-used", "shared bytes / multiply-add", counter, cost, bound, first)


def limit_exposed_copies(step: str, first: First) -> Limit:
    """Return a limit on the share of a tile's multiply-adds that do not overlap its copies.

    The worst tile counts: 1 if the wait follows immediately, or if nothing is copied asynchronously.
    """

    def cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        overlaps = [item for launch in selected.launches for item in launch.counters.overlaps.values()]
        hidden = [item for item in overlaps if item.minimum is not None]
        if not hidden:
            return Cost(1.0, [(item.instr, 1.0) for item in selected.select_issued("bar")])
        groups = sum(item.count for item in selected.select_issued("cp"))
        threads = sum(launch.counters.threads for launch in selected.launches)
        tile = sum(launch.counters.multiply_adds for launch in selected.launches) / (WARP * groups)
        assert threads and tile
        shares = [(item.instr, max(0.0, 1 - (item.minimum or 0) / tile)) for item in hidden]
        return Cost(max(share for _, share in shares), shares)

    counter = "share of a tile's multiply-adds outside the time between a copy's commit and its wait"
    return make_limit("copy-waited-for", "copy not hidden", counter, cost, 0.01, first)


def count_mma_multiply_adds(instr) -> int:
    sizes = re.search(r"m(\d+)n(\d+)k(\d+)", ".".join(instr.mods))
    return int(sizes[1]) * int(sizes[2]) * int(sizes[3]) if sizes else 0


def limit_scalar_share(step: str, first: First) -> Limit:
    """Return a limit on the share of multiply-adds that run outside tensor cores."""

    def cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        everything = sum(launch.counters.multiply_adds * 1.0 for launch in selected.launches)
        issued = [item for op in ("mma", "wgmma") for item in selected.select_issued(op)]
        cores = sum(item.count * count_mma_multiply_adds(item.instr) for item in issued)
        loads = selected.select_sites("shared", verb="load")
        value = 1 - cores / max(everything, 1.0)
        return Cost(value, [(site.instr, site.traffic.requests) for site in loads])

    counter = "share of the multiply-adds outside mma and wgmma"
    return make_limit("no-tensor-cores", "part not on tensor cores", counter, cost, 0.05, first)


def limit_repeated_products(step: str, first: First) -> Limit:
    """Return a limit on the multiply-adds: those that the matmul needs."""

    def cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        total = sum(launch.counters.multiply_adds for launch in selected.launches)
        issued = [(item.instr, item.count) for op in ("mma", "wgmma") for item in selected.select_issued(op)]
        return Cost(total / count_product_multiply_adds(counts), issued)

    counter = "multiply-adds, over those that the product needs"
    return make_limit("multiplied-again", "multiply-adds / needed", counter, cost, 1.1, first)


def limit_extra_copies(tensors: tuple[str, ...], first: First) -> Limit:
    """Return a limit on the bytes read by launches without multiply-adds, relative to the matrices' sizes.

    A step limited only in dy is not charged for the previous step's transpose.
    """

    def cost(counts: Counts) -> Cost:
        sizes = counts.sizes
        rows, hidden, outputs = (sizes[name] for name in ("rows", "hidden", "outputs"))
        elements = {"ln_out_16": rows * hidden, "dy_16": rows * outputs, "weight_16": hidden * outputs}
        before = "transpose" if tensors == ("dy_16",) else ""
        idle = [item for item in counts.launches if not item.counters.multiply_adds and item.name != before]
        sites = Counts(idle, sizes, 2).select_sites("global", tensors, "load")
        return charge_bytes(sites, 2 * sum(elements[name] for name in tensors))

    counter = f"bytes of {', '.join(tensors)} that launches read without multiplying, over their size"
    return make_limit("copied-first", "copied first / size", counter, cost, 0.1, first)


def limit_launches(most: int, first: float) -> Limit:
    def cost(counts: Counts) -> Cost:
        return Cost(len(counts.launches))

    return make_limit("more-launches", "launches", "launches", cost, most, first)


def limit_output_traffic(first: First) -> Limit:
    """Return a limit on the output bytes moved over its size; blame launches without multiply-adds."""

    def cost(counts: Counts) -> Cost:
        size = 2 * counts.sizes["rows"] * counts.sizes["outputs"]
        idle = [launch for launch in counts.launches if not launch.counters.multiply_adds]
        later = Counts(idle, counts.sizes, 2).select_sites("global", ["output"])
        value = sum_bytes(counts.select_sites("global", ["output"])) / size
        return Cost(value, charge_bytes(later, size).shares)

    counter = "bytes of the output written and read, over its size"
    return make_limit("output-again", "output moved / size", counter, cost, 1.05, first)


X = ("input",)
PARAMETERS = ("ln_weight", "ln_bias")
BACKWARD = ("dln", "input")


def list_row_limits(step: str, **first: First) -> tuple[Limit, ...]:
    """Return the limits of a LayerNorm forward step: its own first, then those of earlier steps."""
    output = f"{step}_out"
    limits: list[Limit] = []
    if "shared" in first:
        limits += [limit_shared_stores(step, first["shared"]), limit_barriers(step, 0)]
    if "wide" in first:
        limits.append(limit_load_requests(step, (*X, output), first["wide"]))
    if "read" in first:
        limits.append(limit_reads(step, X, first["read"]))
        limits += [limit_parameter_reads(step, PARAMETERS, 1), limit_local_memory(step)]
    return (*limits, limit_sectors(step, (*X, output), first["coalesced"]))


LIMITS: dict[str, tuple[Limit, ...]] = {
    "rows": list_row_limits("rows", coalesced={F32: 8, BF16: 16}),
    "once": list_row_limits("once", coalesced=1, read=3),
    "vectors": list_row_limits("vectors", coalesced=1, read=1, wide={F32: 4, BF16: 8}),
    "shuffles": list_row_limits("shuffles", coalesced=1, read=1, wide=1, shared=256),
    "dx": (
        limit_reads("dx", BACKWARD, 2),
        limit_load_requests("dx", (*BACKWARD, "grad_input"), {F32: 4, BF16: 8}),
        limit_parameter_reads("dx", ("ln_weight",), 2),
        limit_local_memory("dx"),
        limit_shared_stores("dx", 0),
        limit_barriers("dx", 0),
        limit_sectors("dx", (*BACKWARD, "grad_input"), 1),
    ),
    "dgamma": (
        limit_atomics("dgamma", 2 * 64 * 768),
        limit_sectors("dgamma", BACKWARD, 1),
        limit_reads("dgamma", BACKWARD, 1),
        limit_partial_sums("dgamma", 0),
        limit_local_memory("dgamma"),
    ),
    "tiled": (
        limit_global_loads("tiled", TILE, TILE, 2),
        limit_bank_conflicts("tiled", 0),
        limit_sectors("tiled", FACTORS, {F32: 4.125, BF16: 8.25}),
    ),
    "registers": (
        limit_shared_loads("registers", EACH, 8),
        limit_global_loads("registers", BLOCK, BLOCK, 2 / BLOCK),
        limit_local_memory("registers"),
        limit_bank_conflicts("registers", 0),
        limit_sectors("registers", FACTORS, 1),
    ),
    "copies": (
        limit_exposed_copies("copies", 1),
        limit_shared_loads("copies", EACH, 1, 2),
        limit_global_loads("copies", BLOCK, BLOCK, 2 / BLOCK, NARROW_FACTORS),
        limit_bank_conflicts("copies", 0),
        limit_sectors("copies", NARROW_FACTORS, 1),
    ),
    "tensor": (
        limit_scalar_share("tensor", 1),
        limit_repeated_products("tensor", 1),
        limit_global_loads("tensor", *SIDES, sum(1 / side for side in SIDES), NARROW_FACTORS),
    ),
    "layouts": (limit_extra_copies(("ln_out_16", "dy_16", "weight_16"), 1), limit_launches(4, 5)),
    "epilogue": (limit_output_traffic(3), limit_extra_copies(("dy_16",), 1)),
}
"""Gate -> its limits, with the cost of the blank's initial code in the counted case."""

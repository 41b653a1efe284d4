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
BLOCK_TILE = 64
THREAD_TILE = 4
"""Sides of a block's and of a thread's tile of results in `registers`."""

TENSOR_CORE_TILE = (128, 96)
"""Sides of a block's tile of results with tensor cores."""

F32, BF16 = "float32", "bfloat16"
OPERANDS = ("ln_out", "linear_weight")
BF16_OPERANDS = ("ln_out_16", "weight_16")
InitialCost = float | Mapping[str, float]
"""The cost of the blank's initial code, in both dtypes or by dtype."""


def divide_bytes(sites, divisor: float) -> Cost:
    """Return the cost of the bytes that memory instructions move, divided by `divisor`."""
    return divide_amounts([(site.instr, site.traffic.bytes) for site in sites], divisor)


def sum_bytes(sites) -> int:
    return sum(site.traffic.bytes for site in sites)


def count_matrix_bytes(counts: Counts) -> int:
    return counts.sizes["rows"] * counts.sizes["hidden"] * counts.itemsize


def count_matmul_multiply_adds(counts: Counts) -> int:
    return counts.sizes["rows"] * counts.sizes["hidden"] * counts.sizes["outputs"]


def make_limit(
    id: str,
    label: str,
    counter: str,
    compute_cost: Callable[[Counts], Cost],
    maximum: float,
    initial: InitialCost,
    hint: int = 1,
) -> Limit:
    by_dtype = {F32: initial, BF16: initial} if isinstance(initial, int | float) else initial
    return Limit(id, label, counter, compute_cost, maximum, by_dtype, hint)


def make_sector_limit(step: str, tensors: tuple[str, ...], initial: InitialCost) -> Limit:
    """Return a limit on the sectors moved, relative to the fewest that contain the requested bytes."""

    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors)
        requested = max(sum_bytes(sites), 1)
        amounts = [(site.instr, SECTOR * site.traffic.sectors - site.traffic.bytes) for site in sites]
        ratio = divide_amounts([(site.instr, SECTOR * site.traffic.sectors) for site in sites], requested)
        return Cost(ratio.value, divide_amounts(amounts, requested).shares)

    counter = f"32-byte sectors of {' and '.join(tensors)}, over the minimum for the requested bytes"
    return make_limit("not-coalesced", "sectors / fewest", counter, compute_cost, 1.1, initial)


def make_read_limit(step: str, tensors: tuple[str, ...], initial: InitialCost) -> Limit:
    """Return a limit on the bytes read: one read of each matrix."""

    def compute_cost(counts: Counts) -> Cost:
        selected, size = counts.select_launches(step), count_matrix_bytes(counts)
        costs = [divide_bytes(selected.select_sites("global", [name], "load"), size) for name in tensors]
        return max(costs, key=lambda cost: cost.value)

    counter = f"bytes read of {' or '.join(tensors)}, over its size"
    return make_limit("read-again", "bytes read / size", counter, compute_cost, 1.05, initial)


def make_parameter_read_limit(step: str, tensors: tuple[str, ...], initial: InitialCost) -> Limit:
    """Return a limit on the bytes read of parameter vectors: one read per row."""

    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors, "load")
        return divide_bytes(sites, count_matrix_bytes(counts) * len(tensors))

    counter = f"bytes read of {' and '.join(tensors)}, over one read per row"
    return make_limit(
        "parameters-again", "gamma, beta read / row width", counter, compute_cost, 1.05, initial
    )


def make_request_limit(step: str, tensors: tuple[str, ...], initial: InitialCost) -> Limit:
    """Return a limit on the memory requests: those needed with 16 bytes per thread."""

    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors)
        amounts = [(site.instr, VECTOR * WARP * site.traffic.requests) for site in sites]
        return divide_amounts(amounts, max(sum_bytes(sites), 1))

    counter = f"requests for {' and '.join(tensors)}, over the minimum with 16 bytes per thread"
    return make_limit("narrow-loads", "requests / fewest", counter, compute_cost, 1.1, initial)


def make_local_memory_limit(step: str) -> Limit:
    """Return a limit on local memory, which stores arrays with dynamic indices: 0 bytes."""

    def compute_cost(counts: Counts) -> Cost:
        return divide_bytes(counts.select_launches(step).select_sites("local"), counts.sizes["rows"])

    counter = "bytes per row moved to and from local memory, which is off-chip: an array is not in registers"
    return make_limit("not-in-registers", "local bytes / row", counter, compute_cost, 0, 0, 2)


def make_shared_store_limit(step: str, initial: InitialCost) -> Limit:
    """Return a limit on shared memory stored per row: for each of two sums, a word per warp and one more."""

    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("shared", verb="store")
        return divide_bytes(sites, counts.sizes["rows"])

    counter, bound = "bytes stored in shared memory per row", 2 * 4 * (WARPS + 1)
    return make_limit("shared-sums", "shared bytes / row", counter, compute_cost, bound, initial)


def make_barrier_limit(step: str, initial: InitialCost) -> Limit:
    """Return a limit on the barriers per row: none if one warp reduces it, else two for each of two sums."""

    def compute_cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        bars = [(bar.instr, bar.count) for bar in selected.select_issued("bar")]
        got = divide_amounts(bars, counts.sizes["rows"])
        allowed = 4 if selected.select_sites("shared") else 0
        return Cost(max(got.value - allowed, 0), got.shares)

    counter = "barriers per row beyond the needed ones (two per sum if warps share the row, else none)"
    return make_limit("needless-barriers", "barriers / row, too many", counter, compute_cost, 0, initial)


def make_atomics_limit(step: str, initial: InitialCost) -> Limit:
    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", verb="atomic")
        return divide_amounts([(s.instr, s.traffic.bytes / s.nbytes) for s in sites], 1)

    return make_limit(
        "atomics", "atomics", "atomics, whose order differs from run to run", compute_cost, 0, initial
    )


def make_partial_sum_limit(step: str, initial: InitialCost) -> Limit:
    """Return a limit on the partial sums written: two per column and slab."""

    def compute_cost(counts: Counts) -> Cost:
        size = 2 * 4 * counts.sizes["hidden"] * -(-counts.sizes["rows"] // SLAB)
        return divide_bytes(counts.select_launches(step).select_sites("global", ("sums",), "store"), size)

    counter = "bytes written of partial sums, over two sums per column and slab"
    return make_limit("sums-again", "sums stored / needed", counter, compute_cost, 1.05, initial)


def make_global_load_limit(
    step: str, tile_height: int, tile_width: int, initial: InitialCost, tensors: tuple[str, ...] = OPERANDS
) -> Limit:
    """Return a limit on the elements read per multiply-add: those of a tile, 1 / tile_height + 1 / tile_width."""

    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("global", tensors, "load")
        element = 2 if tensors == BF16_OPERANDS else counts.itemsize
        return divide_bytes(sites, count_matmul_multiply_adds(counts) * element)

    counter = f"elements of {' and '.join(tensors)} read per multiply-add"
    bound = 1.1 * (1 / tile_height + 1 / tile_width)
    return make_limit("tile-not-shared", "elements / multiply-add", counter, compute_cost, bound, initial)


def make_bank_conflict_limit(step: str, initial: InitialCost) -> Limit:
    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("shared")
        return divide_amounts([(s.instr, s.traffic.bank_conflicts) for s in sites], 1)

    counter = "extra cycles of shared memory from bank conflicts"
    return make_limit("bank-conflicts", "bank conflicts", counter, compute_cost, 0, initial)


def make_shared_load_limit(step: str, thread_tile: int, initial: InitialCost, itemsize: int = 4) -> Limit:
    """Return a limit on shared bytes loaded per multiply-add; a thread computes a square of `thread_tile` x `thread_tile`."""

    def compute_cost(counts: Counts) -> Cost:
        sites = counts.select_launches(step).select_sites("shared", verb="load")
        return divide_bytes(sites, count_matmul_multiply_adds(counts))

    counter, bound = "bytes loaded from shared memory per multiply-add", 1.1 * 2 * itemsize / thread_tile
    return make_limit(
        "registers-not-used", "shared bytes / multiply-add", counter, compute_cost, bound, initial
    )


def make_exposed_copy_limit(step: str, initial: InitialCost) -> Limit:
    """Return a limit on the share of a tile's multiply-adds that do not overlap its copies.

    The worst tile counts: 1 if the wait follows immediately, or if nothing is copied asynchronously.
    """

    def compute_cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        overlaps = [item for launch in selected.launches for item in launch.counters.overlaps.values()]
        measured = [item for item in overlaps if item.minimum is not None]
        if not measured:
            return Cost(1.0, [(item.instr, 1.0) for item in selected.select_issued("bar")])
        groups = sum(item.count for item in selected.select_issued("cp"))
        threads = sum(launch.counters.threads for launch in selected.launches)
        tile = sum(launch.counters.multiply_adds for launch in selected.launches) / (WARP * groups)
        assert threads and tile
        shares = [(item.instr, max(0.0, 1 - (item.minimum or 0) / tile)) for item in measured]
        return Cost(max(share for _, share in shares), shares)

    counter = "share of a tile's multiply-adds outside the time between a copy's commit and its wait"
    return make_limit("copy-waited-for", "copy not hidden", counter, compute_cost, 0.01, initial)


def count_mma_multiply_adds(instr) -> int:
    sizes = re.search(r"m(\d+)n(\d+)k(\d+)", ".".join(instr.mods))
    return int(sizes[1]) * int(sizes[2]) * int(sizes[3]) if sizes else 0


def make_scalar_share_limit(step: str, initial: InitialCost) -> Limit:
    """Return a limit on the share of multiply-adds that run outside tensor cores."""

    def compute_cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        total = sum(launch.counters.multiply_adds * 1.0 for launch in selected.launches)
        issued = [item for op in ("mma", "wgmma") for item in selected.select_issued(op)]
        on_tensor_cores = sum(item.count * count_mma_multiply_adds(item.instr) for item in issued)
        loads = selected.select_sites("shared", verb="load")
        value = 1 - on_tensor_cores / max(total, 1.0)
        return Cost(value, [(site.instr, site.traffic.requests) for site in loads])

    counter = "share of the multiply-adds outside mma and wgmma"
    return make_limit("no-tensor-cores", "part not on tensor cores", counter, compute_cost, 0.05, initial)


def make_multiply_add_limit(step: str, initial: InitialCost) -> Limit:
    """Return a limit on the multiply-adds: those that the matmul needs."""

    def compute_cost(counts: Counts) -> Cost:
        selected = counts.select_launches(step)
        total = sum(launch.counters.multiply_adds for launch in selected.launches)
        issued = [(item.instr, item.count) for op in ("mma", "wgmma") for item in selected.select_issued(op)]
        return Cost(total / count_matmul_multiply_adds(counts), issued)

    counter = "multiply-adds, over those that the product needs"
    return make_limit("multiplied-again", "multiply-adds / needed", counter, compute_cost, 1.1, initial)


def make_extra_copy_limit(tensors: tuple[str, ...], initial: InitialCost) -> Limit:
    """Return a limit on the bytes read by launches without multiply-adds, relative to the matrices' sizes.

    A step limited only in dy is not charged for the previous step's transpose.
    """

    def compute_cost(counts: Counts) -> Cost:
        sizes = counts.sizes
        rows, hidden, outputs = (sizes[name] for name in ("rows", "hidden", "outputs"))
        elements = {"ln_out_16": rows * hidden, "dy_16": rows * outputs, "weight_16": hidden * outputs}
        excluded = "transpose" if tensors == ("dy_16",) else ""
        copy_launches = [
            item for item in counts.launches if not item.counters.multiply_adds and item.name != excluded
        ]
        sites = Counts(copy_launches, sizes, 2).select_sites("global", tensors, "load")
        return divide_bytes(sites, 2 * sum(elements[name] for name in tensors))

    counter = f"bytes of {', '.join(tensors)} that launches read without multiplying, over their size"
    return make_limit("copied-first", "copied first / size", counter, compute_cost, 0.1, initial)


def make_launch_limit(maximum: int, initial: float) -> Limit:
    def compute_cost(counts: Counts) -> Cost:
        return Cost(len(counts.launches))

    return make_limit("more-launches", "launches", "launches", compute_cost, maximum, initial)


def make_output_traffic_limit(initial: InitialCost) -> Limit:
    """Return a limit on the output bytes moved over its size; blame launches without multiply-adds."""

    def compute_cost(counts: Counts) -> Cost:
        size = 2 * counts.sizes["rows"] * counts.sizes["outputs"]
        other_launches = [launch for launch in counts.launches if not launch.counters.multiply_adds]
        sites = Counts(other_launches, counts.sizes, 2).select_sites("global", ["output"])
        value = sum_bytes(counts.select_sites("global", ["output"])) / size
        return Cost(value, divide_bytes(sites, size).shares)

    counter = "bytes of the output written and read, over its size"
    return make_limit("output-again", "output moved / size", counter, compute_cost, 1.05, initial)


INPUT = ("input",)
PARAMETERS = ("ln_weight", "ln_bias")
BACKWARD_INPUTS = ("dln", "input")


def list_row_limits(step: str, **initial: InitialCost) -> tuple[Limit, ...]:
    """Return the limits of a LayerNorm forward step: the step's limit first, then those of earlier steps."""
    output = f"{step}_out"
    limits: list[Limit] = []
    if "shared" in initial:
        limits += [make_shared_store_limit(step, initial["shared"]), make_barrier_limit(step, 0)]
    if "wide" in initial:
        limits.append(make_request_limit(step, (*INPUT, output), initial["wide"]))
    if "read" in initial:
        limits.append(make_read_limit(step, INPUT, initial["read"]))
        limits += [make_parameter_read_limit(step, PARAMETERS, 1), make_local_memory_limit(step)]
    return (*limits, make_sector_limit(step, (*INPUT, output), initial["coalesced"]))


LIMITS: dict[str, tuple[Limit, ...]] = {
    "rows": list_row_limits("rows", coalesced={F32: 8, BF16: 16}),
    "once": list_row_limits("once", coalesced=1, read=3),
    "vectors": list_row_limits("vectors", coalesced=1, read=1, wide={F32: 4, BF16: 8}),
    "shuffles": list_row_limits("shuffles", coalesced=1, read=1, wide=1, shared=256),
    "dx": (
        make_read_limit("dx", BACKWARD_INPUTS, 2),
        make_request_limit("dx", (*BACKWARD_INPUTS, "grad_input"), {F32: 4, BF16: 8}),
        make_parameter_read_limit("dx", ("ln_weight",), 2),
        make_local_memory_limit("dx"),
        make_shared_store_limit("dx", 0),
        make_barrier_limit("dx", 0),
        make_sector_limit("dx", (*BACKWARD_INPUTS, "grad_input"), 1),
    ),
    "dgamma": (
        make_atomics_limit("dgamma", 2 * 64 * 768),
        make_sector_limit("dgamma", BACKWARD_INPUTS, 1),
        make_read_limit("dgamma", BACKWARD_INPUTS, 1),
        make_partial_sum_limit("dgamma", 0),
        make_local_memory_limit("dgamma"),
    ),
    "tiled": (
        make_global_load_limit("tiled", TILE, TILE, 2),
        make_bank_conflict_limit("tiled", 0),
        make_sector_limit("tiled", OPERANDS, {F32: 4.125, BF16: 8.25}),
    ),
    "registers": (
        make_shared_load_limit("registers", THREAD_TILE, 8),
        make_global_load_limit("registers", BLOCK_TILE, BLOCK_TILE, 2 / BLOCK_TILE),
        make_local_memory_limit("registers"),
        make_bank_conflict_limit("registers", 0),
        make_sector_limit("registers", OPERANDS, 1),
    ),
    "copies": (
        make_exposed_copy_limit("copies", 1),
        make_shared_load_limit("copies", THREAD_TILE, 1, 2),
        make_global_load_limit("copies", BLOCK_TILE, BLOCK_TILE, 2 / BLOCK_TILE, BF16_OPERANDS),
        make_bank_conflict_limit("copies", 0),
        make_sector_limit("copies", BF16_OPERANDS, 1),
    ),
    "tensor": (
        make_scalar_share_limit("tensor", 1),
        make_multiply_add_limit("tensor", 1),
        make_global_load_limit(
            "tensor", *TENSOR_CORE_TILE, sum(1 / side for side in TENSOR_CORE_TILE), BF16_OPERANDS
        ),
    ),
    "layouts": (make_extra_copy_limit(("ln_out_16", "dy_16", "weight_16"), 1), make_launch_limit(4, 5)),
    "epilogue": (make_output_traffic_limit(3), make_extra_copy_limit(("dy_16",), 1)),
}
"""Gate -> its limits, with the cost of the blank's initial code in the counted case."""

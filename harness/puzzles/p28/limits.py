"""Cost limits of puzzle 28's steps, from the shapes of their tensors.

A limit is the least cost that the idea of a step allows, plus a tenth; the solution's own cost is not used. Limits
scale with the sizes.
"""

import re

from harness.spec.limits import Cost, Counts, Limit, shared_out

VECTOR = 16
"""Bytes of the widest load of a thread."""
WARP = 32
WARPS = 4
"""Warps of a block of rows."""
SLAB = 64
"""Rows that a block sums in the first stage of `dgamma`."""
SECTOR = 32
"""Bytes of a sector, the smallest transfer of global memory."""
TILE = 32
"""Results along a side of the tile of `tiled`."""
BLOCK = 64
EACH = 4
"""Results along a side of a block's tile and of a thread's, in `registers`."""

SIDES = (128, 96)
"""Results along the sides of a block's tile, with tensor cores."""

F32, BF16 = "float32", "bfloat16"
FACTORS = ("ln_out", "linear_weight")
NARROW_FACTORS = ("ln_out_16", "weight_16")


def traffic(counts: Counts, *tensors: str):
    """Return the accesses to some tensors, or to all, in global memory."""
    return counts.sites("global", tensors)


def total_bytes(sites) -> int:
    return sum(site.traffic.bytes for site in sites)


def coalescing(step: str, tensors: tuple[str, ...], first: dict[str, float]) -> Limit:
    """Limit the sectors moved, over the fewest that hold the requested bytes."""

    def cost(counts: Counts) -> Cost:
        sites = traffic(counts.of(step), *tensors)
        requested = max(total_bytes(sites), 1)
        amounts = [(site.instr, SECTOR * site.traffic.sectors - site.traffic.bytes) for site in sites]
        whole = shared_out([(site.instr, SECTOR * site.traffic.sectors) for site in sites], requested)
        return Cost(whole.value, shared_out(amounts, requested).shares)

    words = f"32-byte sectors of {' and '.join(tensors)}, over the fewest that hold what is asked for"
    return Limit("not-coalesced", "sectors / fewest", words, cost, 1.1, first)


def read_once(step: str, tensors: tuple[str, ...], first: dict[str, float]) -> Limit:
    """Limit the bytes read of a matrix, over its size, to one read."""

    def cost(counts: Counts) -> Cost:
        size = counts.sizes["rows"] * counts.sizes["hidden"] * counts.element
        each = [
            shared_out(
                [(s.instr, s.traffic.bytes) for s in counts.of(step).sites("global", [name], "load")], size
            )
            for name in tensors
        ]
        return max(each, key=lambda cost: cost.value)

    return Limit(
        "read-again",
        "bytes read / size",
        f"bytes read of {' or '.join(tensors)}, over its size",
        cost,
        1.05,
        first,
    )


def parameters_once(step: str, tensors: tuple[str, ...], first: dict[str, float]) -> Limit:
    """Limit the bytes read of parameter vectors to one read per row."""

    def cost(counts: Counts) -> Cost:
        size = counts.sizes["rows"] * counts.sizes["hidden"] * counts.element * len(tensors)
        sites = counts.of(step).sites("global", tensors, "load")
        return shared_out([(s.instr, s.traffic.bytes) for s in sites], size)

    return Limit(
        "parameters-again",
        "gamma, beta read / row",
        f"bytes read of {' and '.join(tensors)}, over one reading a row",
        cost,
        1.05,
        first,
    )


def wide(step: str, tensors: tuple[str, ...], first: dict[str, float]) -> Limit:
    """Limit the memory requests to those that 16 bytes per thread need."""

    def cost(counts: Counts) -> Cost:
        sites = traffic(counts.of(step), *tensors)
        return shared_out(
            [(s.instr, VECTOR * WARP * s.traffic.requests) for s in sites], max(total_bytes(sites), 1)
        )

    words = f"requests for {' and '.join(tensors)}, over those that 16 bytes a thread need"
    return Limit("narrow-loads", "requests / fewest", words, cost, 1.1, first)


def shared_words(step: str, first: dict[str, float]) -> Limit:
    """Limit the bytes stored in shared memory per row: for each of two sums, one word per warp and one for the block."""

    def cost(counts: Counts) -> Cost:
        sites = counts.of(step).sites("shared", verb="store")
        return shared_out([(s.instr, s.traffic.bytes) for s in sites], counts.sizes["rows"])

    return Limit(
        "shared-sums",
        "shared bytes / row",
        "bytes stored in shared memory a row",
        cost,
        2 * 4 * (WARPS + 1),
        first,
    )


def barriers(step: str, first: dict[str, float]) -> Limit:
    """Limit the barriers per row: none if one warp reduces the row, else two for each of two sums."""

    def cost(counts: Counts) -> Cost:
        mine = counts.of(step)
        got = shared_out(
            [(each.instr, each.count) for each in mine.count_issued("bar")], counts.sizes["rows"]
        )
        allowed = 4 if mine.sites("shared") else 0
        return Cost(max(got.value - allowed, 0), got.shares)

    words = "barriers a row beyond those that it needs (two a sum where warps share the row, else none)"
    return Limit("needless-barriers", "barriers / row, needless", words, cost, 0, first)


def no_atomics(step: str, first: dict[str, float]) -> Limit:
    """Allow no atomics."""

    def cost(counts: Counts) -> Cost:
        sites = counts.of(step).sites("global", verb="atomic")
        return shared_out([(s.instr, s.traffic.bytes / s.nbytes) for s in sites], 1)

    return Limit("atomics", "atomics", "atomics, whose order differs from run to run", cost, 0, first)


def partial_sums(step: str, first: dict[str, float]) -> Limit:
    """Limit the partial sums written to two per column and slab of rows."""

    def cost(counts: Counts) -> Cost:
        least = 2 * 4 * counts.sizes["hidden"] * -(-counts.sizes["rows"] // SLAB)
        sites = counts.of(step).sites("global", ("sums",), "store")
        return shared_out([(s.instr, s.traffic.bytes) for s in sites], least)

    return Limit(
        "sums-again",
        "sums written / size",
        "bytes written of sums, over two a column and slab",
        cost,
        1.05,
        first,
    )


def multiply_adds(counts: Counts) -> int:
    """Return the multiply-adds of the matrix product."""
    return counts.sizes["rows"] * counts.sizes["hidden"] * counts.sizes["outputs"]


def global_bytes(
    step: str, high: int, wide: int, first: dict[str, float], tensors: tuple[str, ...] = FACTORS
) -> Limit:
    """Limit the elements read per multiply-add to 1 / high + 1 / wide, the cost of a high x wide tile of results."""

    def cost(counts: Counts) -> Cost:
        sites = counts.of(step).sites("global", tensors, "load")
        element = 2 if tensors == NARROW_FACTORS else counts.element
        return shared_out([(s.instr, s.traffic.bytes) for s in sites], multiply_adds(counts) * element)

    words = f"elements of {' and '.join(tensors)} read a multiply-add"
    return Limit(
        "tile-not-shared", "elements / multiply-add", words, cost, 1.1 * (1 / high + 1 / wide), first
    )


def no_conflicts(step: str, first: dict[str, float]) -> Limit:
    """Allow no bank conflicts in shared memory."""

    def cost(counts: Counts) -> Cost:
        sites = counts.of(step).sites("shared")
        return shared_out([(s.instr, s.traffic.bank_conflicts) for s in sites], 1)

    return Limit(
        "bank-conflicts", "bank conflicts", "extra cycles of shared memory by bank conflicts", cost, 0, first
    )


def shared_bytes(step: str, each: int, first: dict[str, float], element: int = 4) -> Limit:
    """Limit the bytes loaded from shared memory per multiply-add: `each` elements of both tiles give each * each results."""

    def cost(counts: Counts) -> Cost:
        sites = counts.of(step).sites("shared", verb="load")
        return shared_out([(s.instr, s.traffic.bytes) for s in sites], multiply_adds(counts))

    words = "bytes loaded from shared memory a multiply-add"
    return Limit(
        "registers-not-used", "shared bytes / multiply-add", words, cost, 1.1 * 2 * element / each, first
    )


def exposed_copies(step: str, first: dict[str, float]) -> Limit:
    """Limit the share of a tile's multiply-adds that is not issued between the commit of its copies and their wait.

    The worst tile counts: 1 if a wait follows at once, or if nothing is copied asynchronously.
    """

    def cost(counts: Counts) -> Cost:
        mine = counts.of(step)
        hidden = [
            o for launch in mine.launches for o in launch.counters.overlaps.values() if o.least is not None
        ]
        if not hidden:
            return Cost(1.0, [(each.instr, 1.0) for each in mine.count_issued("bar")])
        groups = sum(each.count for each in mine.count_issued("cp"))
        threads = sum(launch.counters.threads for launch in mine.launches)
        tile = sum(launch.counters.multiply_adds for launch in mine.launches) / (WARP * groups)
        assert threads and tile
        shares = [(each.instr, max(0.0, 1 - (each.least or 0) / tile)) for each in hidden]
        return Cost(max(share for _, share in shares), shares)

    words = "part of a tile's multiply-adds that does not come between a copy's commit and its wait"
    return Limit("copy-waited-for", "copy not hidden", words, cost, 0.01, first)


def by_matrices(instr) -> int:
    """Return the multiply-adds of an mma or wgmma."""
    sizes = re.search(r"m(\d+)n(\d+)k(\d+)", ".".join(instr.mods))
    return int(sizes[1]) * int(sizes[2]) * int(sizes[3]) if sizes else 0


def scalar_part(step: str, first: dict[str, float]) -> Limit:
    """Limit the share of multiply-adds that do not run on tensor cores."""

    def cost(counts: Counts) -> Cost:
        mine = counts.of(step)
        everything = sum(launch.counters.multiply_adds * 1.0 for launch in mine.launches)
        cores = sum(
            each.count * by_matrices(each.instr) for op in ("mma", "wgmma") for each in mine.count_issued(op)
        )
        loads = mine.sites("shared", verb="load")
        value = 1 - cores / max(everything, 1.0)
        return Cost(value, [(site.instr, site.traffic.requests) for site in loads])

    words = "part of the multiply-adds that no mma or wgmma does"
    return Limit("no-tensor-cores", "scalar / multiply-adds", words, cost, 0.05, first)


def once_each(step: str, first: dict[str, float]) -> Limit:
    """Limit the multiply-adds to those of the product."""

    def cost(counts: Counts) -> Cost:
        mine = counts.of(step)
        done = sum(launch.counters.multiply_adds for launch in mine.launches)
        issued = [(each.instr, each.count) for op in ("mma", "wgmma") for each in mine.count_issued(op)]
        return Cost(done / multiply_adds(counts), issued)

    words = "multiply-adds over those of the product"
    return Limit("multiplied-again", "multiply-adds / needed", words, cost, 1.1, first)


def extra_copies(tensors: tuple[str, ...], first: dict[str, float]) -> Limit:
    """Limit the bytes of matrices read by launches without multiply-adds, over the sizes of the matrices.

    A step that only reads dy is not charged for the transpose of the step before.
    """

    def cost(counts: Counts) -> Cost:
        sizes = counts.sizes
        bytes = {
            "ln_out_16": 2 * sizes["rows"] * sizes["hidden"],
            "dy_16": 2 * sizes["rows"] * sizes["outputs"],
            "weight_16": 2 * sizes["hidden"] * sizes["outputs"],
        }
        before = "transpose" if tensors == ("dy_16",) else ""
        idle = [each for each in counts.launches if not each.counters.multiply_adds and each.name != before]
        sites = Counts(idle, sizes, 2).sites("global", tensors, "load")
        return shared_out([(s.instr, s.traffic.bytes) for s in sites], sum(bytes[name] for name in tensors))

    words = f"bytes of {', '.join(tensors)} that launches read without multiplying, over their size"
    return Limit("copied-first", "read, not multiplied", words, cost, 0.1, first)


def launches(most: int, first: float) -> Limit:
    """Limit the number of launches."""

    def cost(counts: Counts) -> Cost:
        return Cost(len(counts.launches))

    return Limit("more-launches", "launches", "launches", cost, most, both(first))


def output_once(first: dict[str, float]) -> Limit:
    """Limit the bytes of the output that are moved, over its size; reports launches without multiply-adds."""

    def cost(counts: Counts) -> Cost:
        size = 2 * counts.sizes["rows"] * counts.sizes["outputs"]
        idle = [each for each in counts.launches if not each.counters.multiply_adds]
        later = traffic(Counts(idle, counts.sizes, 2), "output")
        value = total_bytes(traffic(counts, "output")) / size
        return Cost(value, shared_out([(s.instr, s.traffic.bytes) for s in later], size).shares)

    words = "bytes of the output written and read, over its size"
    return Limit("output-again", "output moved / size", words, cost, 1.05, first)


def both(number: float) -> dict[str, float]:
    """Return one cost for both dtypes."""
    return {F32: number, BF16: number}


X = ("input",)
PARAMETERS = ("ln_weight", "ln_bias")
BACKWARD = ("dln", "input")


def of_rows(step: str, **first: dict[str, float]) -> tuple[Limit, ...]:
    """Return the limits of a forward step of LayerNorm: its own first, then those of earlier steps."""
    output = f"{step}_out"
    limits: list[Limit] = []
    if "shared" in first:
        limits += [shared_words(step, first["shared"]), barriers(step, both(0))]
    if "wide" in first:
        limits.append(wide(step, (*X, output), first["wide"]))
    if "read" in first:
        limits.append(read_once(step, X, first["read"]))
        limits.append(parameters_once(step, PARAMETERS, both(1)))
    return (*limits, coalescing(step, (*X, output), first["coalesced"]))


LIMITS: dict[str, tuple[Limit, ...]] = {
    "rows": of_rows("rows", coalesced={F32: 8, BF16: 16}),
    "once": of_rows("once", coalesced=both(1), read=both(3)),
    "vectors": of_rows("vectors", coalesced=both(1), read=both(1), wide={F32: 4, BF16: 8}),
    "shuffles": of_rows("shuffles", coalesced=both(1), read=both(1), wide=both(1), shared=both(256)),
    "dx": (
        read_once("dx", BACKWARD, both(2)),
        wide("dx", (*BACKWARD, "grad_input"), {F32: 4, BF16: 8}),
        parameters_once("dx", ("ln_weight",), both(2)),
        shared_words("dx", both(0)),
        barriers("dx", both(0)),
        coalescing("dx", (*BACKWARD, "grad_input"), both(1)),
    ),
    "dgamma": (
        no_atomics("dgamma", both(2 * 64 * 768)),
        coalescing("dgamma", BACKWARD, both(1)),
        read_once("dgamma", BACKWARD, both(1)),
        partial_sums("dgamma", both(0)),
    ),
    "tiled": (
        global_bytes("tiled", TILE, TILE, both(2)),
        no_conflicts("tiled", both(0)),
        coalescing("tiled", FACTORS, {F32: 4.125, BF16: 8.25}),
    ),
    "registers": (
        shared_bytes("registers", EACH, both(8)),
        global_bytes("registers", BLOCK, BLOCK, both(2 / BLOCK)),
        no_conflicts("registers", both(0)),
        coalescing("registers", FACTORS, both(1)),
    ),
    "copies": (
        exposed_copies("copies", both(1)),
        shared_bytes("copies", EACH, both(1), 2),
        global_bytes("copies", BLOCK, BLOCK, both(2 / BLOCK), NARROW_FACTORS),
        no_conflicts("copies", both(0)),
        coalescing("copies", NARROW_FACTORS, both(1)),
    ),
    "tensor": (
        scalar_part("tensor", both(1)),
        once_each("tensor", both(1)),
        global_bytes("tensor", *SIDES, both(sum(1 / side for side in SIDES)), NARROW_FACTORS),
    ),
    "layouts": (
        extra_copies(("ln_out_16", "dy_16", "weight_16"), both(1)),
        launches(4, 5),
    ),
    "epilogue": (
        output_once(both(3)),
        extra_copies(("dy_16",), both(1)),
    ),
}
"""Limits of each gate, with the cost of the blank's initial code in the counted case."""

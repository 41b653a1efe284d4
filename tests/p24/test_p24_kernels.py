"""Puzzle 24's kernels on the virtual GPU: correct values, and loads that match `p24 --count`."""

import pytest
from marks import list_values
from recordings import make_order

from harness.check.checker import Checker
from harness.check.reference import Reference
from harness.devices.recorder import record
from harness.devices.replay import Replay
from harness.puzzles.p24 import counting, orders
from harness.puzzles.p24.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.toolchain import roots

pytestmark = pytest.mark.compiles

EDGE_CASES = [
    Case("one element a head", "", (1, 2, 5, 6, 1, 1, 16), "tiled hard"),
    Case("a tile of three blocks", "", (3, 1, 7, 8, 17, 2, 48), "hilbert hard"),
    Case("one column", "", (1, 1, 33, 1, 4, 2, 16), "z-order hard"),
]
CASES = [*PUZZLE.list_cases(None), *EDGE_CASES]
GRID = (1, 2, 16, 16, 4, 2, 16)
"""Sizes of the counted case: two heads, 16 x 16 cells, radius 2."""
BY_ORDER = [Case(name, "", GRID, f"{name} hard") for name in orders.ORDERS]


@pytest.fixture(scope="module")
def solution():
    return roots.make_op_package(roots.get_solutions(), "p24")


def list_orders(folder, tests):
    return {
        dtype: make_order("p24", [*CASES, *BY_ORDER], PUZZLE.variants, dtype=dtype)
        for dtype in {"float32", *list_values(tests, "dtype")}
    }


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("recorded")
def test_solution_is_correct_in_all_cases(dtype, solution):
    """Check the gates' quantities, and the attention and gradients computed from them."""
    results = Checker(PUZZLE, dtype=dtype).check(solution, None, CASES)
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]
    assert not any(result.findings for result in results)


@pytest.fixture(scope="module")
def replayed_counters(recorded):
    """Traversal order -> launch -> counters in that order's case."""
    recording = record(recorded["float32"])

    def run(case: Case):
        replay = Replay(recording, PUZZLE, "float32")
        inputs = Reference(PUZZLE, "float32", 0).get_inputs(case)
        for variant in ("permute", "window"):
            replay.run(variant, case, inputs)
        return {launch.name: launch.counters for launch in replay.gpu.launches}

    return {case.name: run(case) for case in BY_ORDER}


@pytest.mark.parametrize("name", orders.ORDERS)
def test_loaded_keys_match_the_count(name, replayed_counters):
    """Each pass loads only the rows of required tiles."""
    B, N, H, W, d, radius, tile = GRID
    costs = counting.count_costs(orders.ORDERS[name](H, W), W, radius, tile)
    rows = costs.tile_pairs * tile * B * N * d * 4
    launches = replayed_counters[name]
    assert launches["window_forward"].tensors["key"].read == rows
    assert launches["window_forward"].tensors["value"].read == rows
    assert (
        launches["window_query"].tensors["key"].read == 2 * rows
    )  # once for the scores, once for their gradient
    assert launches["window_key_value"].tensors["query"].read == 2 * rows


def test_traversal_order_changes_the_loads(replayed_counters):
    read = {
        name: launches["window_forward"].tensors["key"].read for name, launches in replayed_counters.items()
    }
    assert read["hilbert"] != read["row-major"]


@pytest.mark.parametrize("name", orders.ORDERS)
def test_scatter_sectors_match_the_count(name, replayed_counters):
    _, _, H, W, d, *_ = GRID
    stores = replayed_counters[name]["hilbert_scatter"].global_store
    assert stores.sectors_per_request == counting.count_sectors(orders.ORDERS[name](H, W), d, 4)


def test_two_runs_are_bit_equal(recorded):
    recording = record(recorded["float32"])
    case = next(case for case in CASES if case.name == "odd sizes")
    inputs = Reference(PUZZLE, "float32", 0).get_inputs(case)
    first, second = (Replay(recording, PUZZLE, "float32").run("window", case, inputs) for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)

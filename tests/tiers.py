"""The tiers of the tests: the default run runs all that do not bear the mark `nightly`, `-m slow` those that do.

Which test bears it is said here and nowhere else. What is nightly runs code that a test of the other tier runs too: in the
other 16-bit type, from another seed, for another GPU or processor, in another width or theme of a page, or on one more wrong
solution of a gate; or it compares what a command or a program prints with what the book says it prints, where other tests
run that command. `python tests/tiers.py` lists what only nightly tests would check, and fails where there is any; so does
tests/test_tiers.py.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

WRONG_OF_A_GATE = 1
"""So many wrong solutions of each gate, the first by name, stay with the default run."""
FIRST = {
    "p22/test_mojo_mistakes.py::test_a_mistake_is_named_and_by_no_wrong_name": 3,
    "p22/test_right_kernels.py::test_a_right_kernel_is_accepted_however_it_is_written": 2,
    "p23/test_p23_options.py::test_a_wrong_index_is_noticed": 2,
    "screens/test_show.py::test_it_can_be_read_at_every_width_in_both_themes": 1,
    "check/test_in_order.py::test_every_kernel_s_gate_passes_in_its_turn": 1,
    "book/test_browser.py::test_a_theme_is_remembered_from_page_to_page": 1,
    "book/test_browser.py::test_text_formulas_and_labels_are_legible": 1,
    "book/test_players.py::test_without_scripts_there_is_a_still_picture": 1,
    "book/test_players.py::test_players_fit_a_phone": 1,
}
"""Test -> how many of its cases stay, of each variant: of a list of wrong or right kernels, of widths, themes and pages."""
ELSEWHERE = (
    r"p22/test_fast\.py::.*\[(gfx942|apple-m4)\]",
    r"p22/test_p22_kernels\.py::.*\[(sm_80|apple-m4)\]",
    r"p22/test_fast_cpu\.py::test_processors_.*\[haswell\]",
    r"p22/test_extension\.py::test_it_loads_.*\[sm_80\]",
)
"""The same test for another GPU or processor than the one that stays."""
OF_PYTORCH_ALONE = ("algebra", "autograd_function", "autograd_graph", "compensated", "compile_saved", "compile_settings",
    "debug_anomaly", "debug_assertions", "debug_bisect", "debug_hooks", "diagonal_formula", "gradcheck_flat", "gradcheck_float32",
    "gradcheck_kink", "gradcheck_order", "gradcheck_strides", "inductor_kernels", "inductor_pattern", "parameter_gradients",
    "saving_less")  # fmt: skip
"""Recorded outputs of the book's programs that import nothing of this repository: only another PyTorch changes them."""
OF_KERNELS = ("brightest_mended", "brightest_race", "first_backward", "first_registration", "forward_fused",
    "hunt_matrix", "mirrored_mended", "mirrored_race", "picture_of_a_bug", "profile_fast", "race_reversed", "row_largest",
    "wrong_kernels")  # fmt: skip
"""Recorded outputs that compile kernels for seconds each, of commands that other tests run: of each kind of them one stays."""
RECORDED = "book/test_outputs.py::test_recorded_output_is_what_the_command_prints"
ALONE = {
    "book/test_print_edition.py::test_every_chapter_is_in_the_outline": "book/test_print_edition.py::"
    "test_what_is_folded_is_printed",
    "p22/test_p22_kernels.py::test_the_whole_graph_compiles_for_amd": "p22/test_p22_kernels.py::"
    "test_every_kernel_compiles_in_three_dtypes",
    "p22/test_p22_kernels.py::test_a_wrong_atomic_scope_is_seen_though_the_compile_claims_success": "devices/test_graphs.py::"
    "test_an_error_that_max_prints_and_passes_over_is_an_error",
    "p22/test_public_ops.py::test_another_program_loads_the_package_from_its_own_folder": "p19/test_p19_run.py::"
    "test_another_program_loads_the_package_alone",
    "test_new_puzzle.py::test_the_command_that_the_report_suggests_parses_and_says_the_same": "test_new_puzzle.py::"
    "test_gates_are_unsolved_then_wrong_then_right",
    "p22/test_extension.py::test_the_module_on_the_virtual_gpu": "p22/test_extension.py::"
    "test_hopper_s_kernels_on_the_virtual_gpu",
    "p22/test_fast_cpu.py::test_it_compiles_for_arm": "p22/test_fast_cpu.py::test_sizes_at_the_edges",
}
"""A test none of whose cases stay -> the one that stays and runs the same code: the kernels without the graph around them, the
message without the compiler that prints it, the module for another GPU, the products for the processor at hand, a page printed in the place of the book, the package of another puzzle,
the verdicts on the virtual GPU in the place of those through MAX."""
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: `-m slow` runs it, the default run does not; see tests/tiers.py"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = list(items)
    for item in nightly(items):
        item.add_marker(pytest.mark.slow)


def name_of(item: pytest.Item) -> str:
    """A test's name from tests/ on, without its case and its group of processes: p22/test_fast.py::test_x."""
    return re.split(r"[\[@]", item.nodeid.removeprefix("tests/"), maxsplit=1)[0]


def nightly(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those that the default run leaves out."""
    ids, counts = {item.nodeid for item in items}, Counter()
    return [item for item in items if leaves(item, ids, counts)]


def leaves(item: pytest.Item, ids: set[str], counts: Counter) -> bool:
    """Whether a test is nightly: `ids` are those of all, `counts` counts the cases that were asked about before."""
    name, case = name_of(item), getattr(item, "callspec", None)
    if name in ALONE or any(re.search(pattern, item.nodeid) for pattern in ELSEWHERE):
        return True
    if case is None or item.get_closest_marker("gpu"):
        return False
    if case.params.get("seed") or (
        name == RECORDED and case.params.get("name") in (*OF_PYTORCH_ALONE, *OF_KERNELS)
    ):
        return True
    if (twin := re.sub(r"(?<![a-z])float16", "bfloat16", item.nodeid)) != item.nodeid and twin in ids:
        return True
    if name in FIRST:
        list_of_cases = name, case.params.get("variant")
        counts[list_of_cases] += 1
        return counts[list_of_cases] > FIRST[name]
    if wrong := wrong_of(item):
        counts[name, wrong.rung, wrong.gate] += 1
        return counts[name, wrong.rung, wrong.gate] > WRONG_OF_A_GATE
    return False


def params_of(item: pytest.Item) -> dict[str, Any]:
    """The arguments of a test's case by name; none where it has no cases."""
    return getattr(getattr(item, "callspec", None), "params", {})


def wrong_of(item: pytest.Item):
    """The wrong solution of the zoo that a test is about, or None."""
    return next((value for value in params_of(item).values() if type(value).__name__ == "WrongKernel"), None)


def chosen(request: Any, argument: str) -> list:
    """The values of an argument in the tests of the file that this run takes: all that a fixture (`request` is its own) need compile."""
    cases = [params_of(item) for item in request.session.items if item.path == request.path]
    values = [params[argument] for params in cases if argument in params]
    return [value for i, value in enumerate(values) if value not in values[:i]]


# ---- What only nightly tests would check --------------------------------------------------------------------


def only_nightly(items: Iterable[pytest.Item]) -> list[str]:
    """A line for each test function, and each gate of a wrong solution, none of whose cases the default run runs."""
    left = {item.nodeid for item in nightly(items)}
    stays, gates = defaultdict(bool), defaultdict(bool)
    for item in items:
        stays[name_of(item)] |= item.nodeid not in left
        if wrong := wrong_of(item):
            gates[f"a wrong {wrong.puzzle} {wrong.rung} {wrong.gate}"] |= item.nodeid not in left
    files = {name.partition("::")[0] for name in stays}
    lines = [name for name, kept in stays.items() if not kept and name not in ALONE]
    lines += [f"{name}: in its place there is no {other}" for name, other in ALONE.items()
              if {name.partition("::")[0], other.partition("::")[0]} <= files and not stays.get(other)]  # fmt: skip
    return lines + [gate for gate, kept in gates.items() if not kept]


class Listing:
    """Prints the list after collection."""

    lines: list[str] | None = None

    def pytest_collection_finish(self, session):
        items = session.items
        self.lines = only_nightly(items)
        many = len(nightly(items))
        print(
            f"\n{many} of {len(items)} tests are nightly; without another test in the default run: {len(self.lines)}"
        )
        print("\n".join(self.lines))


def main() -> int:
    """Collects the suite and lists; 1 where the list is not empty."""
    listing = Listing()
    root = Path(__file__).resolve().parents[1]
    code = pytest.main(
        [f"--rootdir={root}", str(root / "tests"), "--collect-only", "-qq", "-s"], plugins=[listing]
    )
    return int(code) or int(listing.lines is None or bool(listing.lines))


if __name__ == "__main__":
    sys.exit(main())

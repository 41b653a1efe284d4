"""`pytest --quick`: everything that needs neither a compiler nor a browser nor many seconds.

A test that compiles Mojo, or a MAX graph, bears the mark `compiler`, one that takes seconds without it the mark `long`; a
quick run leaves them out, as it does nightly ones (tests/tiers.py) and those that ask for the fixtures `started`, the browser,
`site`, the whole book, and `suite`, a run of pytest; of some long lists it takes the first cases (`FEWER`). That the others do
not compile is not believed: in a quick run every cache of the workbook is empty and the Mojo compiler is a script that
refuses, in this process and in those that it starts. A test that called it fails, whatever it made of the refusal.
"""

import os
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from tiers import name_of

REFUSE = """\
#!/bin/sh
# Stands in for the Mojo compiler in a quick run: answers questions about itself and formats, but compiles nothing.
case "$*" in
*--print-supported-accelerators*|--version|format*) exec {mojo} "$@" ;;
esac
echo "mojo $*" >> {calls}
echo "error: a quick run compiles nothing" >&2
exit 1
"""
LEFT_OUT = {"started", "site", "suite"}
"""Fixtures: who asks for one is left out."""
FEWER = {
    "book/test_build.py::test_fault_is_named_with_file_and_line": 1,
    "book/test_terms.py::test_a_term_is_explained_where_it_is_first_used": 10,
    "check/test_apart.py::test_a_blank_that_leaves_is_wrong_and_the_other_gates_are_judged": 2,
    "check/test_apart.py::test_a_file_that_leaves_before_any_gate_is_damaged": 1,
    "check/test_diagnose.py::test_every_mistake_is_named_in_every_quantity_that_it_spoils": 12,
    "check/test_gradient_checks.py::test_a_right_function_passes": 8,
    "check/test_named_mistakes.py::test_a_wrong_line_is_named": 22,
    "check/test_named_mistakes.py::test_chance_is_no_family_of_any_quantity": 2,
    "learner/test_reset.py::test_a_damaged_file_is_one_clear_line_and_reset_repairs_it": 8,
    "nn/test_direct_products.py::test_only_what_is_asked_for_is_computed_or_multiplied": 60,
    "nn/test_patching_random.py::test_random_modules": 1,
    "p19/test_p19_spec.py::test_no_mistake_passes_all_cases": 8,
    "p20/test_p20_rungs.py::test_a_second_derivative_is_refused_by_whatever_words_are_raised": 1,
    "p20/test_p20_rungs.py::test_what_a_learner_may_write": 4,
    "p20/test_p20_zoo.py::test_a_wrong_answer_in_python_is_rejected_for_the_right_reason": 4,
    "p21/test_hunt.py::test_a_wrong_one_is_rejected_by_the_named_check": 6,
    "p22/test_mistakes.py::test_every_known_mistake_is_rejected": 1,
    "p23/test_p23_cases.py::test_exact_agrees_with_autograd_in_float64": 10,
    "p23/test_p23_cases.py::test_the_reference_is_scaled_dot_product_attention": 8,
    "p23/test_p23_zoo.py::test_a_wrong_formula_is_rejected_for_the_right_reason": 2,
    "p24/test_p24_zoo.py::test_a_wrong_formula_is_rejected_for_the_right_reason": 5,
    "p25/test_p25_cases.py::test_reference_derivation_and_formulas_agree": 4,
    "p25/test_ring_attention.py::test_survivors_of_a_killed_rank_name_it": 2,
    "p27/test_p27_kernels.py::test_the_derivation_is_pytorch_s_and_every_known_mistake_is_rejected": 1,
    "screens/test_full_disk.py::test_every_command_on_a_full_disk": 4,
    "test_console.py::test_a_closed_stream_changes_nothing": 1,
    "test_console.py::test_a_terminal_without_utf_8_gets_all_of_it": 1,
    "test_invocation.py::test_what_the_commands_of_a_puzzle_print_can_be_pasted": 5,
    "vgpu/test_hopper_zoo.py::test_right_kernels_are_clean_and_right": 6,
    "vgpu/test_hopper_zoo.py::test_wrong_kernels_are_found": 4,
}
"""Test -> how many of its cases a quick run takes, the first ones: with all of them it took three times as long."""
WHOLE_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.(compiler|long)\b", re.MULTILINE)
CALLS = pytest.StashKey[Path]()


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out every test that needs a compiler, a browser or seconds",
    )


@pytest.hookimpl(trylast=True)  # the folder for temporary files must be there
def pytest_configure(config):
    config.addinivalue_line("markers", "compiler: compiles Mojo or a MAX graph; a quick run leaves it out")
    config.addinivalue_line(
        "markers", "long: takes seconds without a compiler; a quick run leaves it out too"
    )
    if not config.getoption("--quick"):
        return
    from mojo.run import _mojo_env

    folder = config._tmp_path_factory.mktemp("quick")
    config.stash[CALLS] = folder / "calls"
    stand_in = folder / "mojo"
    mojo = _mojo_env()["MODULAR_MOJO_MAX_DRIVER_PATH"]
    stand_in.write_text(REFUSE.format(mojo=shlex.quote(mojo), calls=shlex.quote(str(config.stash[CALLS]))))
    stand_in.chmod(0o755)
    os.environ["MODULAR_MOJO_MAX_DRIVER_PATH"] = str(stand_in)
    os.environ["WORKBOOK_CACHE"] = str(folder / "cache")


def pytest_ignore_collect(collection_path: Path, config):
    """A quick run does not even import a file that bears a mark as a whole: some import much."""
    if config.getoption("--quick") and collection_path.suffix == ".py":
        return True if WHOLE_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        left_out = {
            item
            for item in items
            if any(item.get_closest_marker(mark) for mark in ("compiler", "long", "slow"))
            or LEFT_OUT.intersection(item.fixturenames)
        }
        taken = Counter()
        for item in items:
            if item not in left_out and (name := name_of(item)) in FEWER:
                taken[name] += 1
                if taken[name] > FEWER[name]:
                    left_out.add(item)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def compiles_nothing(request, monkeypatch):
    """In a quick run: fails a test that called the compiler."""
    calls = request.config.stash.get(CALLS, None)
    if calls is None:
        yield
        return
    from max.engine import InferenceSession

    monkeypatch.setattr(InferenceSession, "compile", refuse(calls))
    monkeypatch.setattr(InferenceSession, "load", refuse(calls))
    yield
    if calls.exists():
        called = calls.read_text()
        calls.unlink()
        pytest.fail(f"compiles, but does not bear the mark `compiler`:\n{called}", pytrace=False)


def refuse(calls: Path):
    """What stands in for the compiler of MAX graphs."""

    def compile_graph(*arguments, **options):
        calls.write_text("a MAX graph\n")
        raise RuntimeError("a quick run compiles nothing")

    return compile_graph

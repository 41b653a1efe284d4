"""The tiers: nothing is checked by nightly tests alone, and the rules leave what they should."""

import ast
import os
from types import SimpleNamespace

import cpu_graphs
import pytest
import quick_run
import tiers

from harness.check.zoo import WrongKernel


def test_nothing_is_checked_by_nightly_tests_alone(request):
    """Of what this run has collected, which in the default run is everything."""
    assert tiers.only_nightly(request.config.stash[tiers.COLLECTED]) == []


def test_the_lists_name_tests_that_there_are(request):
    there = {tiers.name_of(item) for item in request.config.stash[tiers.COLLECTED]}
    files = {name.partition("::")[0] for name in there}
    listed = [*tiers.FIRST, *tiers.ALONE, *tiers.ALONE.values(), *quick_run.FEWER]
    assert [name for name in listed if name.partition("::")[0] in files and name not in there] == []


def cases(test: str, marks: tuple[str, ...] = (), **values) -> list:
    """Stand-ins of a test's cases, one for each value of its one argument; without arguments the test alone."""
    (argument, of_each), *_ = [*values.items(), ("", [None])]
    stand_ins = []
    for value in of_each:
        params = {argument: value} if argument else {}
        ending = f"[{getattr(value, 'name', value)}]" if argument else ""
        item = SimpleNamespace(nodeid=f"tests/{test}{ending}", get_closest_marker=lambda mark: mark in marks)
        stand_ins.append(
            SimpleNamespace(**vars(item), callspec=SimpleNamespace(params=params)) if params else item
        )
    return stand_ins


def wrongs(gates: str) -> list[WrongKernel]:
    """A wrong solution of each gate in turn."""
    return [WrongKernel("p90", f"wrong {i}", gate, "", "") for i, gate in enumerate(gates)]


@pytest.mark.parametrize(
    ("items", "left"),
    [
        (cases("a.py::test_x", dtype=["float32", "bfloat16", "float16", "float64"]), ["float16"]),
        (cases("a.py::test_x", dtype=["float32", "float16"]), []),
        (cases("a.py::test_x", ("gpu",), dtype=["bfloat16", "float16"]), []),
        (cases("a.py::test_x", seed=[0, 1, 2]), ["1", "2"]),
        (cases("a.py::test_x", wrong=wrongs("aaabba")), ["wrong 1", "wrong 2", "wrong 4", "wrong 5"]),
        (cases("p22/test_fast.py::test_x", launches=["sm_80", "gfx942", "apple-m4"]), ["gfx942", "apple-m4"]),
        (cases("book/test_players.py::test_players_fit_a_phone", page=["one", "two"]), ["two"]),
        (cases(tiers.RECORDED, name=["algebra", "opcheck", "wrong_kernels"]), ["algebra", "wrong_kernels"]),
        (cases("a.py::test_x"), []),
    ],
)
def test_a_rule_leaves_one_of_its_kind(items, left):
    assert [item.nodeid.split("[")[1][:-1] for item in tiers.nightly(items)] == left
    assert tiers.only_nightly(items) == []


ARM, EDGES = next((a, b) for a, b in tiers.ALONE.items() if "arm" in a)


def test_what_only_nightly_tests_would_check_is_listed():
    # One test for another GPU without its twin for the one at hand.
    assert tiers.only_nightly(cases("p22/test_fast.py::test_x", launches=["gfx942"])) == [
        "p22/test_fast.py::test_x"
    ]
    # A gate whose wrong solutions have nightly tests alone: they come after two others of a list.
    first = "p22/test_mojo_mistakes.py::test_a_mistake_is_named_and_by_no_wrong_name"
    assert tiers.only_nightly(cases(first, kernel=wrongs("a" * tiers.FIRST[first] + "b"))) == [
        "a wrong p90  b"
    ]
    assert tiers.only_nightly(cases(ARM) + cases(EDGES)) == []
    other = cases(EDGES.partition("::")[0] + "::test_x")
    assert tiers.only_nightly(cases(ARM) + other) == [f"{ARM}: in its place there is no {EDGES}"]


def test_recorded_programs_of_pytorch_alone_import_nothing_else():
    from book.measure import outputs

    commands = [outputs.COMMANDS[name] for name in tiers.OF_PYTORCH_ALONE]
    programs = {command.arguments[0] for command in commands}
    roots = {name.removesuffix(".py") for name in os.listdir(outputs.ROOT / "book" / "examples")} | {
        "harness"
    }
    for program in programs:
        tree = ast.parse((outputs.ROOT / program).read_text(encoding="utf-8"))
        names = [each.names[0].name for each in ast.walk(tree) if isinstance(each, ast.Import)]
        names += [each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
        assert not roots.intersection(name.partition(".")[0] for name in names), program


def test_outputs_that_wait_for_the_night_are_outputs():
    from book.measure import outputs

    assert {*tiers.OF_PYTORCH_ALONE, *tiers.OF_KERNELS} <= outputs.COMMANDS.keys()


def test_a_fixture_makes_what_the_run_takes():
    taken = (
        cases("a.py::test_x", name=["one", "two"])
        + cases("a.py::test_y", name=["two"])
        + cases("a.py::test_z")
    )
    for item in taken:
        item.path = "a.py"
    elsewhere = cases("b.py::test_x", name=["three"])
    elsewhere[0].path = "b.py"
    request = SimpleNamespace(path="a.py", session=SimpleNamespace(items=[*taken, *elsewhere]))
    assert tiers.chosen(request, "name") == ["one", "two"]


def test_graphs_of_float16_are_loaded_together_when_the_first_is_asked_for():
    loads = []

    def load():
        loads.append(1)
        return {"float16": 16, "fast_float16": 17}

    units = cpu_graphs.Units({"float32": 32}, ("float16", "fast_float16"), load)
    assert units["float32"] == 32 and not loads
    assert (units["fast_float16"], units["float16"], len(loads)) == (17, 16, 1)
    with pytest.raises(KeyError, match="nothing"):
        units["nothing"]
    assert [cpu_graphs.dtype_of(name) for name in ("fast_float16", "unbound", "fused through MAX")] == [
        "float16",
        "float32",
        "float32",
    ]

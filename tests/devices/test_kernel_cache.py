"""Kernels recorded one by one: the same PTX and lines as of the whole package, and nothing compiled that has not changed."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_texts import fingerprint

from harness import puzzles
from harness.devices import kernel_cache, recorder
from harness.devices.kernel_cache import Instance, Kernels, mark_launches, moved_lines
from harness.devices.recorder import record
from harness.errors import CompileFailed
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

TOY = roots.CHECKOUT / "tests" / "toys" / "solutions" / "p90"
DIMS = ((2, 3), (4, 5))


# ---- Text ---------------------------------------------------------------------------------------------------


def test_launch_code_is_marked_in_its_lines():
    text = '    launcher.launch[kernel[dtype, accum_type[dtype], 32]](\n        "name", x\n    )\n'
    assert mark_launches(text) == (
        '    print("//@ instance", "kernel", dtype, accum_type[dtype], 32); '
        'launcher.launch[kernel[dtype, accum_type[dtype], 32]](\n        "name", x\n    )\n'
    )
    assert mark_launches("    launcher.launch[kernel](") == (
        '    print("//@ instance", "kernel"); launcher.launch[kernel]('
    )
    for other in (
        "    launcher.launch[kernel[width=4]](",
        "    # launcher.launch[kernel](",
        "launch[kernel](",
    ):
        assert mark_launches(other) == other, "what it does not know it leaves alone"


def test_an_instance_is_written_as_mojo_code():
    assert Instance("k", ("float32", "16", "True")).spelled == "k[DType.float32, 16, True]"
    assert Instance("k").spelled == "k"
    assert Instance("k", ("bfloat16", "-1")).is_plain and not Instance("k", ("some text",)).is_plain


def test_lines_follow_code_that_has_moved():
    ptx = '\t.file\t1 "{package}/a.mojo"\n\t.file\t2 "Mojo/b.mojo"\n\t.loc\t1 7 3\n\t.loc\t2 7 3, function_name x, inlined_at 1 8 2\n'
    moved = moved_lines(ptx, {("a.mojo", 7): 17, ("a.mojo", 8): 18})
    assert ".loc\t1 17 3\n" in moved and ".loc\t2 7 3, function_name x, inlined_at 1 18 2" in moved


# ---- Compiled -----------------------------------------------------------------------------------------------


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """(old, new)... -> the toy's op package with those edits, in the same place unless told; recordings start anew."""
    monkeypatch.setattr(roots, "solutions", lambda: TOY.parent)
    monkeypatch.setattr(puzzles, "__path__", [*puzzles.__path__, str(TOY.parents[1] / "puzzles")])
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    text = (TOY / "op" / "square.mojo").read_text()

    def make(*edits: tuple[str, str], place: str = "op") -> OpPackage:
        folder = tmp_path / place
        if not folder.exists():
            shutil.copytree(TOY / "op", folder)
            (folder / "shared").symlink_to(roots.CHECKOUT / "solutions" / "shared")
        changed = text
        for old, new in edits:
            assert changed.count(old) == 1
            changed = changed.replace(old, new)
        (folder / "square.mojo").write_text(changed)
        return OpPackage(folder)

    return make


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """What is compiled: "whole", the "plan" alone, or the kernels."""
    done = []
    whole, some = recorder._run, Kernels.compile

    def run(*arguments, **options):
        done.append("plan" if options.get("plan") else "whole")
        return whole(*arguments, **options)

    monkeypatch.setattr(recorder, "_run", run)

    def compile(self, kernels):
        done.append(" ".join(kernel.function for kernel in kernels))
        return some(self, kernels)

    together = recorder.compile_together

    def compile_together(wanted):
        done.append(" + ".join(" ".join(k.function for k in kernels) for _, kernels in wanted))
        return together(wanted)

    monkeypatch.setattr(Kernels, "compile", compile)
    monkeypatch.setattr(recorder, "compile_together", compile_together)
    return done


def table(ptx: str) -> list[str]:
    """The line table of a kernel."""
    return re.findall(r"\.loc.*", ptx)


def take(package: OpPackage):
    """The recording that the checker of gates would take."""
    return record(package, "p90", "float32", DIMS, ["plain"])


CHANGE = ("2 * x[from_row", "7 * x[from_row")
LONGER = ("def square_kernel[", "def more():\n    pass\n\n\ndef square_kernel[")


@pytest.mark.compiles
def test_only_the_kernel_that_changed_is_compiled_and_it_is_the_same_as_of_the_whole(
    edited, runs, monkeypatch
):
    first = take(edited())
    assert runs == ["whole"] and len(first.ptx) == 2
    parts = take(edited(LONGER, CHANGE))
    assert runs == ["whole", "square_backward_kernel"]
    with pytest.raises(CompileFailed, match="unknown declaration 'no_such_name'") as caught:
        take(edited((CHANGE[0], "no_such_name * x[from_row")))
    assert runs[2:] == ["square_backward_kernel"], "the whole package is not asked"
    assert f"{edited().path}/square.mojo:" in str(caught.value)
    take(edited((CHANGE[0], "  " + CHANGE[0])))
    assert take(edited(LONGER, CHANGE)) == parts and len(runs) == 4, "what was compiled once is known"
    monkeypatch.setattr(kernel_cache.Items, "cut_out", lambda self, items: {"square.mojo": ""})
    shutil.rmtree(kernel_cache.cache_folder("kernels"))
    whole = take(edited(LONGER, CHANGE))
    assert runs[4:] == ["square_backward_kernel square_kernel", "whole"], (
        "what was not read right is compiled whole"
    )
    assert parts.cases == {key: whole.cases[key] for key in parts.cases} and list(parts.ptx) == list(
        whole.ptx
    )
    for symbol, text in whole.ptx.items():
        assert fingerprint(parts.ptx[symbol]) == fingerprint(text)
        assert table(parts.ptx[symbol]) == table(text) and table(text)
        assert (table(text) == table(first.ptx[symbol])) is False, "all lines have moved"


@pytest.mark.compiles
def test_what_many_packages_have_in_common_is_compiled_once(edited, runs):
    """One program plans for each kind of host code, another compiles each kernel; all is as recorded whole."""
    forward = ("scale.cast[accum]() * value * value", "scale.cast[accum]() * value")
    edits = {"right": (), "moved": (LONGER,), "slope": (LONGER, CHANGE), "both": (CHANGE, forward)}
    host = {"host": (("grid_dim=Int(rows),\n        block_dim=THREADS,\n    )\n\n\ndef", "grid_dim=Int(rows),\n        block_dim=32,\n    )\n\n\ndef"),)}  # fmt: skip
    packages = {name: edited(*some, place=name) for name, some in (edits | host).items()}
    sizes = {"slope": DIMS[1:]}
    orders = {name: recorder.Order(p, sizes.get(name, DIMS), ("plain",)) for name, p in packages.items()}
    orders["another variant"] = recorder.Order(packages["slope"], DIMS, ("again",))
    recordings = dict(zip(orders, recorder.record_many([*orders.values()], "p90", "float32"), strict=True))
    every = "square_backward_kernel square_kernel + square_backward_kernel + square_kernel"
    assert runs == ["plan", every], (
        "`both` has the backward kernel of `slope`, `moved` and `host` no kernel of their own"
    )
    geometry = {
        name: {launch.name: launch.block for launch in each.launches()} for name, each in recordings.items()
    }
    assert geometry["host"] == {"square": (32, 1, 1), "square_backward": (64, 1, 1)}
    assert all(geometry[name]["square"] == (64, 1, 1) for name in edits)
    for name, order in orders.items():
        assert take_order(order) == recordings[name] and len(runs) == 2, "found in the cache"
    both = tuple(dict.fromkeys(variant for order in orders.values() for variant in order.variants))
    whole = recorder._run([replace(order, variants=both) for order in orders.values()], "p90")
    for name, text in zip(orders, whole, strict=True):
        assert_same(recordings[name], recorder.parse(text), name, *orders[name].variants)


@pytest.mark.compiles
def test_where_plans_are_known_no_program_runs_but_for_new_kernels_and_one_that_does_not_compile_is_named(
    edited, runs
):
    take(edited())
    recorder.record_dtypes([recorder.Order(edited(), DIMS[:1], ("plain",))], "p90")
    assert runs == ["whole"]
    broken = edited((CHANGE[0], "no_such_name * x[from_row"), place="broken")
    orders = [recorder.Order(each, DIMS, ("plain",)) for each in (edited(CHANGE, place="slope"), broken)]
    with pytest.raises(CompileFailed, match=f"^{broken.path} does not compile") as caught:
        recorder.record_many(orders, "p90")
    assert f"{broken.path}/square.mojo:" in caught.value.details
    assert runs[1:] == ["square_backward_kernel + square_backward_kernel"]


@pytest.mark.compiles
def test_of_many_packages_without_a_plan_the_one_that_does_not_compile_is_named(edited):
    broken = edited((CHANGE[0], "no_such_name * x[from_row"), place="broken")
    orders = [recorder.Order(own, DIMS) for own in (edited(place="right"), broken)]
    with pytest.raises(CompileFailed, match=f"^{broken.path} does not compile") as caught:
        recorder.record_many(orders, "p90", "float32")
    assert f"{broken.path}/square.mojo:" in caught.value.details


def take_order(order: recorder.Order):
    """What `record` gives for an order."""
    return record(order.package, "p90", "float32", order.dims, order.variants)


def assert_same(parts, whole, name: str, variant: str) -> None:
    """Asserts that two recordings launch the same code with the same arguments, its lines in the same places."""
    assert list(parts.cases) == [case for case in whole.cases if case[0] == variant], name
    plain = re.compile(r"_[0-9a-f]{8,}")
    for case, events in parts.cases.items():
        same = [[plain.sub("", repr(event)) for event in some] for some in (events, whole.cases[case])]
        assert same[0] == same[1], name
    codes = [{r.kernel_names()[s]: text for s, text in r.ptx.items()} for r in (parts, whole)]
    assert codes[0].keys() == codes[1].keys()
    for launch, text in codes[1].items():
        assert fingerprint(codes[0][launch]) == fingerprint(text), (name, launch)
        assert table(codes[0][launch]) == table(text), (name, launch)


@pytest.mark.compiles
def test_a_kernel_whose_parameters_are_not_known_is_never_compiled_alone(edited, runs):
    kernel = "launcher.launch[square_kernel[dtype]]("
    helper = ("def launch_square[", "def same[d: DType]() -> DType:\n    return d\n\n\ndef launch_square[")
    package = edited(helper, (kernel, "launcher.launch[square_kernel[same[d=dtype]()]]("))
    assert len(take(package).ptx) == 2 and runs == ["whole"]
    assert recorder._from_parts(recorder.Order(package, DIMS, ("plain",)), "p90") is None


def test_launch_code_that_does_not_compile_with_marks_is_recorded_without(edited, monkeypatch):
    refused = {
        "file": "x.mojo",
        "location": {"line": 1, "column": 1},
        "text": 'print("//@ instance", "k", f); l',
    }
    said = json.dumps({"kind": "error", "message": "not writable", "diagnostic": refused})
    programs = []

    def run_mojo(*arguments, **options):
        programs.append((Path(arguments[-1]).parent / "copy_0" / "op" / "square.mojo").read_text())
        failed = len(programs) == 1
        return SimpleNamespace(
            returncode=failed, stdout="" if failed else "//@ package\n", stderr=said * failed
        )

    monkeypatch.setattr(recorder, "run_mojo", run_mojo)
    assert recorder._run([recorder.Order(edited(), DIMS, ("plain",))], "p90") == [""]
    assert ["//@ instance" in program for program in programs] == [True, False]

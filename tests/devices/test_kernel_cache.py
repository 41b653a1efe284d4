"""Kernels recorded one by one: the same PTX and lines as of the whole package, and nothing compiled that has not changed."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.devices import kernel_cache, recorder
from harness.devices.kernel_cache import Instance, Kernels, marked, moved_lines
from harness.devices.recorder import record
from harness.errors import CompileFailed
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage
from harness.vgpu.driver.kernel_names import fingerprint

TOY = roots.CHECKOUT / "tests" / "toys" / "solutions" / "p90"
DIMS = ((2, 3), (4, 5))


# ---- Text ---------------------------------------------------------------------------------------------------


def test_launch_code_is_marked_in_its_lines():
    text = '    launcher.launch[kernel[dtype, accum_type[dtype], 32]](\n        "name", x\n    )\n'
    assert marked(text) == (
        '    print("//@ instance", "kernel", dtype, accum_type[dtype], 32); '
        'launcher.launch[kernel[dtype, accum_type[dtype], 32]](\n        "name", x\n    )\n'
    )
    assert marked("    launcher.launch[kernel](") == (
        '    print("//@ instance", "kernel"); launcher.launch[kernel]('
    )
    for other in (
        "    launcher.launch[kernel[width=4]](",
        "    # launcher.launch[kernel](",
        "launch[kernel](",
    ):
        assert marked(other) == other, "what it does not know it leaves alone"


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
    """(old, new)... -> the toy's op package with those edits, always in the same place; recordings start anew."""
    monkeypatch.setattr(roots, "solutions", lambda: tmp_path)
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "p90").mkdir()
    shutil.copy(TOY / "record.mojo", tmp_path / "p90")
    folder = tmp_path / "op"
    shutil.copytree(TOY / "op", folder)
    (folder / "shared").symlink_to(roots.CHECKOUT / "solutions" / "shared")
    text = (folder / "square.mojo").read_text()

    def make(*edits: tuple[str, str]) -> OpPackage:
        changed = text
        for old, new in edits:
            assert changed.count(old) == 1
            changed = changed.replace(old, new)
        (folder / "square.mojo").write_text(changed)
        return OpPackage(folder)

    return make


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """What is compiled: "whole" or the kernels."""
    done = []
    whole, some = recorder._run, Kernels.compile

    def run(*arguments, **options):
        done.append("whole")
        return whole(*arguments, **options)

    monkeypatch.setattr(recorder, "_run", run)

    def compile(self, kernels):
        done.append(" ".join(kernel.function for kernel in kernels))
        return some(self, kernels)

    monkeypatch.setattr(Kernels, "compile", compile)
    return done


def table(ptx: str) -> list[str]:
    """The line table of a kernel."""
    return re.findall(r"\.loc.*", ptx)


def take(package: OpPackage):
    """The recording that the checker of gates would take."""
    return record(package, "p90", "float32", DIMS, ["plain"])


CHANGE = ("2 * x[from_row", "7 * x[from_row")
LONGER = ("def square_kernel[", "def more():\n    pass\n\n\ndef square_kernel[")


@pytest.mark.compiler
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


@pytest.mark.compiler
def test_a_kernel_whose_parameters_are_not_known_is_never_compiled_alone(edited, runs):
    kernel = "launcher.launch[square_kernel[dtype]]("
    helper = ("def launch_square[", "def same[d: DType]() -> DType:\n    return d\n\n\ndef launch_square[")
    package = edited(helper, (kernel, "launcher.launch[square_kernel[same[d=dtype]()]]("))
    assert len(take(package).ptx) == 2 and runs == ["whole"]
    assert recorder._from_parts(recorder.Order(package, DIMS, ("plain",)), "p90", "float32") is None


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
    assert recorder._run([recorder.Order(edited(), DIMS, ("plain",))], "p90", "float32") == [""]
    assert ["//@ instance" in program for program in programs] == [True, False]

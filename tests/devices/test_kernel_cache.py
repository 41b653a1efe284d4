"""Separately compiled kernels have the package's PTX and lines, and only changed kernels are compiled."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_texts import normalize_ptx

from harness import puzzles
from harness.devices import kernel_cache, recorder
from harness.devices.kernel_cache import KernelCache, KernelInstance, mark_launches, update_line_table
from harness.devices.recorder import record
from harness.errors import CompileFailed
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

TOY = roots.CHECKOUT / "tests" / "toys" / "solutions" / "p90"
DIMS = ((2, 3), (4, 5))


def test_launch_code_is_marked_without_changing_lines():
    text = '    launcher.launch[kernel[dtype, accum_type[dtype], 32]](\n        "name", x\n    )\n'
    assert mark_launches(text) == (
        '    print("//@ instance", "kernel", dtype, accum_type[dtype], 32); '
        'launcher.launch[kernel[dtype, accum_type[dtype], 32]](\n        "name", x\n    )\n'
    )
    assert mark_launches("    launcher.launch[kernel](") == (
        '    print("//@ instance", "kernel"); launcher.launch[kernel]('
    )
    for unsupported in (
        "    launcher.launch[kernel[width=4]](",
        "    # launcher.launch[kernel](",
        "launch[kernel](",
    ):
        assert mark_launches(unsupported) == unsupported, "unsupported launches are not changed"


def test_instance_is_formatted_as_mojo_code():
    assert KernelInstance("k", ("float32", "16", "True")).source_text == "k[DType.float32, 16, True]"
    assert KernelInstance("k").source_text == "k"
    assert (
        KernelInstance("k", ("bfloat16", "-1")).has_source_text
        and not KernelInstance("k", ("some text",)).has_source_text
    )


def test_lines_are_mapped_to_moved_code():
    ptx = '\t.file\t1 "{package}/a.mojo"\n\t.file\t2 "Mojo/b.mojo"\n\t.loc\t1 7 3\n\t.loc\t2 7 3, function_name x, inlined_at 1 8 2\n'
    mapped = update_line_table(ptx, {("a.mojo", 7): 17, ("a.mojo", 8): 18})
    assert ".loc\t1 17 3\n" in mapped and ".loc\t2 7 3, function_name x, inlined_at 1 18 2" in mapped


@pytest.fixture
def make_edited(tmp_path, monkeypatch):
    """Return a function that writes the toy's op package with edits into a folder; the cache is empty."""
    monkeypatch.setattr(roots, "get_solutions", lambda: TOY.parent)
    monkeypatch.setattr(puzzles, "__path__", [*puzzles.__path__, str(TOY.parents[1] / "puzzles")])
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    text = (TOY / "op" / "square.mojo").read_text()

    def make(*edits: tuple[str, str], folder_name: str = "op") -> OpPackage:
        folder = tmp_path / folder_name
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
def compilations(monkeypatch) -> list[str]:
    """Log of compilations: "whole", "plan" or the kernels' names."""
    log = []

    def log_calls(owner, name, describe):
        original = getattr(owner, name)

        def call(*arguments, **options):
            log.append(describe(*arguments, **options))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    def join_names(kernels):
        return " ".join(kernel.function for kernel in kernels)

    log_calls(recorder, "_run_launcher", lambda *_, plan=False, **__: "plan" if plan else "whole")
    log_calls(KernelCache, "compile", lambda self, kernels: join_names(kernels))
    log_calls(
        recorder,
        "compile_together",
        lambda kernels_by_package: " + ".join(join_names(k) for _, k in kernels_by_package),
    )
    return log


def get_line_table(ptx: str) -> list[str]:
    return re.findall(r"\.loc.*", ptx)


def record_toy(package: OpPackage):
    """Record the toy package in the same way as the gate checker."""
    return record(recorder.RecordRequest(package, "p90", DIMS, ("plain",)))


SLOPE_EDIT = ("2 * x[from_row", "7 * x[from_row")
MOVE_EDIT = ("def square_kernel[", "def more():\n    pass\n\n\ndef square_kernel[")


@pytest.mark.slow
@pytest.mark.compiles
def test_only_changed_kernel_is_compiled_and_equals_the_whole(make_edited, compilations, monkeypatch):
    first = record_toy(make_edited())
    assert compilations == ["whole"] and len(first.ptx) == 2
    parts = record_toy(make_edited(MOVE_EDIT, SLOPE_EDIT))
    assert compilations == ["whole", "square_backward_kernel"]
    with pytest.raises(CompileFailed, match="unknown declaration 'no_such_name'") as caught:
        record_toy(make_edited((SLOPE_EDIT[0], "no_such_name * x[from_row")))
    assert compilations[2:] == ["square_backward_kernel"], "the whole package is not compiled"
    assert f"{make_edited().path}/square.mojo:" in str(caught.value)
    record_toy(make_edited((SLOPE_EDIT[0], "  " + SLOPE_EDIT[0])))
    assert record_toy(make_edited(MOVE_EDIT, SLOPE_EDIT)) == parts and len(compilations) == 4, (
        "compiled kernels are cached"
    )
    monkeypatch.setattr(kernel_cache.Items, "extract_items", lambda self, items: {"square.mojo": ""})
    shutil.rmtree(kernel_cache.get_cache_folder("kernels"))
    reference = record_toy(make_edited(MOVE_EDIT, SLOPE_EDIT))
    assert compilations[4:] == ["square_backward_kernel square_kernel", "whole"], (
        "if the items are wrong, the whole package is compiled"
    )
    assert parts.cases == {key: reference.cases[key] for key in parts.cases} and list(parts.ptx) == list(
        reference.ptx
    )
    for symbol, text in reference.ptx.items():
        assert normalize_ptx(parts.ptx[symbol]) == normalize_ptx(text)
        assert get_line_table(parts.ptx[symbol]) == get_line_table(text) and get_line_table(text)
        assert (get_line_table(text) == get_line_table(first.ptx[symbol])) is False, "all lines moved"


@pytest.mark.slow
@pytest.mark.compiles
def test_common_code_of_many_packages_is_compiled_once(make_edited, compilations):
    """One program plans all host code, and another compiles all kernels; recordings match whole packages."""
    forward = ("scale.cast[accum]() * value * value", "scale.cast[accum]() * value")
    edits = {
        "unchanged": (), "moved": (MOVE_EDIT,), "slope": (MOVE_EDIT, SLOPE_EDIT),
        "both": (SLOPE_EDIT, forward),
    }  # fmt: skip
    host = {"host": (("grid_dim=Int(rows),\n        block_dim=THREADS,\n    )\n\n\ndef", "grid_dim=Int(rows),\n        block_dim=32,\n    )\n\n\ndef"),)}  # fmt: skip
    packages = {
        name: make_edited(*package_edits, folder_name=name) for name, package_edits in (edits | host).items()
    }
    sizes = {"slope": DIMS[1:]}
    requests = {
        name: recorder.RecordRequest(p, "p90", sizes.get(name, DIMS), ("plain",))
        for name, p in packages.items()
    }
    requests["another variant"] = recorder.RecordRequest(packages["slope"], "p90", DIMS, ("again",))
    recordings = dict(zip(requests, recorder.record_many([*requests.values()]), strict=True))
    all_kernels = "square_backward_kernel square_kernel + square_backward_kernel + square_kernel"
    assert compilations == ["plan", all_kernels], (
        "`both` shares the backward kernel of `slope`; `moved` and `host` have no new kernel"
    )
    geometry = {
        name: {launch.name: launch.block for launch in each.list_launches()}
        for name, each in recordings.items()
    }
    assert geometry["host"] == {"square": (32, 1, 1), "square_backward": (64, 1, 1)}
    assert all(geometry[name]["square"] == (64, 1, 1) for name in edits)
    for name, request in requests.items():
        assert record_request(request) == recordings[name] and len(compilations) == 2, "read from the cache"
    both = tuple(dict.fromkeys(variant for request in requests.values() for variant in request.variants))
    reference = recorder._run_launcher([replace(request, variants=both) for request in requests.values()])
    for name, text in zip(requests, reference, strict=True):
        assert_same(recordings[name], recorder.parse(text), name, *requests[name].variants)


@pytest.mark.slow
@pytest.mark.compiles
def test_cached_plans_compile_only_new_kernels(make_edited, compilations):
    record_toy(make_edited())
    recorder.record_dtypes([recorder.RecordRequest(make_edited(), "p90", DIMS[:1], ("plain",))])
    assert compilations == ["whole"]
    broken = make_edited((SLOPE_EDIT[0], "no_such_name * x[from_row"), folder_name="broken")
    requests = [
        recorder.RecordRequest(each, "p90", DIMS, ("plain",))
        for each in (make_edited(SLOPE_EDIT, folder_name="slope"), broken)
    ]
    with pytest.raises(CompileFailed, match=f"^{broken.path} does not compile") as caught:
        recorder.record_many(requests)
    assert f"{broken.path}/square.mojo:" in caught.value.details
    assert compilations[1:] == ["square_backward_kernel + square_backward_kernel"]


@pytest.mark.slow
@pytest.mark.compiles
def test_broken_package_without_a_plan_is_reported(make_edited):
    broken = make_edited((SLOPE_EDIT[0], "no_such_name * x[from_row"), folder_name="broken")
    requests = [
        recorder.RecordRequest(package, "p90", DIMS)
        for package in (make_edited(folder_name="unchanged"), broken)
    ]
    with pytest.raises(CompileFailed, match=f"^{broken.path} does not compile") as caught:
        recorder.record_many(requests)
    assert f"{broken.path}/square.mojo:" in caught.value.details


def record_request(request: recorder.RecordRequest):
    return record(recorder.RecordRequest(request.package, "p90", request.dims, request.variants))


def assert_same(parts, reference, name: str, variant: str) -> None:
    """Compare launches, arguments, code and line tables of two recordings."""
    assert list(parts.cases) == [case for case in reference.cases if case[0] == variant], name
    suffix = re.compile(r"_[0-9a-f]{8,}")
    for case, events in parts.cases.items():
        texts = [[suffix.sub("", repr(event)) for event in each] for each in (events, reference.cases[case])]
        assert texts[0] == texts[1], name
    codes = [{r.map_kernel_names()[s]: text for s, text in r.ptx.items()} for r in (parts, reference)]
    assert codes[0].keys() == codes[1].keys()
    for launch, text in codes[1].items():
        assert normalize_ptx(codes[0][launch]) == normalize_ptx(text), (name, launch)
        assert get_line_table(codes[0][launch]) == get_line_table(text), (name, launch)


@pytest.mark.slow
@pytest.mark.compiles
def test_kernel_with_unknown_parameters_is_not_compiled_separately(make_edited, compilations):
    kernel = "launcher.launch[square_kernel[dtype]]("
    helper = ("def launch_square[", "def same[d: DType]() -> DType:\n    return d\n\n\ndef launch_square[")
    package = make_edited(helper, (kernel, "launcher.launch[square_kernel[same[d=dtype]()]]("))
    assert len(record_toy(package).ptx) == 2 and compilations == ["whole"]
    assert recorder._assemble_from_cache(recorder.RecordRequest(package, "p90", DIMS, ("plain",))) is None


def test_launch_code_that_fails_with_marks_is_recorded_without_them(make_edited, monkeypatch):
    diagnostic = {
        "file": "x.mojo",
        "location": {"line": 1, "column": 1},
        "text": 'print("//@ instance", "k", f); l',
    }
    message = json.dumps({"kind": "error", "message": "not writable", "diagnostic": diagnostic})
    programs = []

    def run_mojo(*arguments, **options):
        programs.append((Path(arguments[-1]).parent / "copy_0" / "op" / "square.mojo").read_text())
        failed = len(programs) == 1
        return SimpleNamespace(
            returncode=failed, stdout="" if failed else "//@ package\n", stderr=message * failed
        )

    monkeypatch.setattr(recorder, "run_mojo", run_mojo)
    assert recorder._run_launcher([recorder.RecordRequest(make_edited(), "p90", DIMS, ("plain",))]) == [""]
    assert ["//@ instance" in program for program in programs] == [True, False]

"""Every kind of file that is cached, cut at some point: it is builds anew without a word, and the answer is the same.

The compilers are played by what they once answered, so that only the files are real; the graph is one that another test
has compiled.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from max.driver import CPU
from max.engine import read

from harness.check import zoo
from harness.devices import graphs, recorder
from harness.toolchain import extension, packages
from harness.toolchain.cache import whole
from harness.toolchain.packages import OpPackage
from harness.vgpu.driver import build

CUTS = {"0 %": 0.0, "50 %": 0.5, "97 %": 0.97, "minus three bytes": -3}
# As long as a real one, and the last digits are an argument of the last launch: three bytes less still parse.
RECORDED = (
    "//@ package\n//@ case fused 2 3 5 7\n//@ tensor input 94557999988736 120\n//@ ptx kernel\n"
    + ".version 8.0\n" * 500
    + "//@ launch forward kernel 1 1 1 64 1 1 0 0000005a5a000000 05000000 07000000\n"
)


@dataclass
class Kind:
    """One user of the cache: `use` asks for the entry and returns what it got; `builds` has an element for each time it was made."""

    use: Callable[[], object]
    builds: list


def answered(output: str = "", data: bytes = b"", builds: list | None = None) -> Callable:
    """In the place of the Mojo compiler: prints, and writes the file after -o."""

    def run(*arguments, **options):
        if builds is not None:
            builds.append(arguments)
        if "-o" in arguments:
            Path(arguments[arguments.index("-o") + 1]).write_bytes(data)
        return subprocess.CompletedProcess(arguments, 0, output, "")

    return run


def recordings(monkeypatch, solution, request) -> Kind:
    builds = []
    monkeypatch.setattr(recorder, "run_mojo", answered(RECORDED, builds=builds))
    return Kind(lambda: recorder.record(solution, "p22", "float32", [(2, 3, 5, 7)]), builds)


def op_packages(monkeypatch, solution, request) -> Kind:
    builds = []
    monkeypatch.setattr(packages, "run_mojo", answered(data=bytes(range(256)) * 99, builds=builds))
    return Kind(lambda: solution.compile().read_bytes(), builds)


def wrong_kernels(monkeypatch, solution, request) -> Kind:
    builds, wrong, honest = [], zoo.load("p22")[0], zoo.WrongKernel.apply
    monkeypatch.setattr(
        zoo.WrongKernel, "apply", lambda *arguments: [builds.append(1), honest(*arguments)][1]
    )
    return Kind(lambda: wrong.package().digest, builds)


def vgpu_driver(monkeypatch, solution, request) -> Kind:
    builds, honest = [], build.build_into

    def library(target, source, mojo, env):
        target.write_bytes(target.name.encode() * 99)

    def build_into(folder, mojo):
        builds.append(folder)
        honest(folder, mojo)

    monkeypatch.setattr(build, "compile_library", library)
    monkeypatch.setattr(build, "build_into", build_into)
    monkeypatch.setattr(build, "cache_key", lambda mojo: "key")
    return Kind(lambda: {p.name: p.read_bytes() for p in build.build().folder.iterdir()}, builds)


def extension_modules(monkeypatch, solution, request) -> Kind:
    builds = []

    def compile_module(architecture, staging, puzzle):
        builds.append(architecture)
        (staging / "module.so").write_bytes(bytes(range(256)) * 99)
        return staging / "module.so"

    monkeypatch.delenv(extension.VARIABLE, raising=False)
    monkeypatch.setattr(extension, "compile_module", compile_module)
    return Kind(lambda: extension.build("sm_80").path.read_bytes(), builds)


def compiled_graphs(monkeypatch, solution, request) -> Kind:
    from harness.puzzles.p22.spec import PUZZLE

    builds, places = [], []
    request.getfixturevalue("program")("float32")  # lies in the session's cache now
    calls = PUZZLE.calls_of(PUZZLE.default_variants)

    def use() -> list[str]:
        return graphs.load(solution, calls, "float32", CPU()).arguments

    with monkeypatch.context() as patched:
        patched.setattr(graphs, "read_cached", lambda path: [places.append(path), read(path)][1])
        use()

    def compile_graph(session, module, package):
        builds.append(1)
        return read(places[0])

    monkeypatch.setattr(graphs, "compile_graph", compile_graph)
    monkeypatch.setattr(graphs, "kernel_library", lambda package: None)
    monkeypatch.setattr(graphs, "build", lambda *arguments: (SimpleNamespace(module="a module"), []))
    return Kind(use, builds)


KINDS = [recordings, op_packages, wrong_kernels, vgpu_driver, extension_modules, compiled_graphs]


@pytest.mark.compiler
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_cached_file_that_is_cut_is_made_anew_without_a_word(
    kind, monkeypatch, tmp_path, request, solution, capfd
):
    entry = kind(monkeypatch, OpPackage(solution.path), request)
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    right = entry.use()
    assert entry.use() == right and len(entry.builds) == 1, "the second time it is there"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".sum" for path in files) and len(files) >= 2
    capfd.readouterr()
    for number, file in enumerate(files):
        # Of many files the first three are cut everywhere, the others at one point each.
        for name, at in CUTS.items() if number < 3 else [list(CUTS.items())[number % len(CUTS)]]:
            data, before = file.read_bytes(), len(entry.builds)
            file.write_bytes(data[:at] if at < 0 else data[: int(len(data) * at)])
            assert entry.use() == right, (file.name, name)
            assert len(entry.builds) == before + 1, (file.name, name)
    assert capfd.readouterr() == ("", "")


def test_a_module_that_was_built_elsewhere_travels_with_its_note(monkeypatch, tmp_path):
    """WORKBOOK_EXTENSIONS names a folder that was copied from another machine."""
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "there"))
    monkeypatch.setattr(
        extension,
        "compile_module",
        lambda architecture, staging, puzzle: shutil.copy(__file__, staging / "module.so"),
    )
    path = extension.build("sm_80").path
    shutil.copytree(path.parent, tmp_path / "here")
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "here"))
    monkeypatch.setattr(extension, "compile_module", lambda *arguments: pytest.fail("built again"))
    assert whole(extension.build("sm_80").path)

"""Everything that the virtual GPU finds, as a learner reads it: wrong code in a blank, judged by the gate, and the text whole.

What somebody writes in Mojo stands in `learner_findings.toml`, for the blanks of puzzle 19. Instructions of Hopper, and what
the compiler does not let pass, are PTX in the place of the toy's kernel, with the line of its blank. Every kind of finding
has an entry.
"""

import importlib.util
import shutil
import sys
import tomllib
from itertools import zip_longest
from pathlib import Path

import pytest
from typed import present

from harness.check.checker import Checker
from harness.devices.recorder import Order, RecordedLaunch, RecordedTensor, Recording, record_many
from harness.devices.replay import pointer
from harness.learner import blanks
from harness.puzzles.p19.spec import PUZZLE
from harness.screens.report import verdict_lines
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage
from harness.vgpu.checks.findings import KINDS

HERE = Path(__file__).parent
TEXTS = tomllib.loads((HERE / "learner_findings.toml").read_text())
ENTRIES, PTX = TEXTS["entry"], TEXTS["ptx"]
NOT_HERE = {
    "output never written": "gates fill outputs with a pattern and say of each element whether it was written",
    "threads exited before a barrier": "a note, which gates do not show",
}
SOLUTION = roots.op_package(roots.solutions(), "p19")
CASES = [PUZZLE.cases(None)[0], Case("wide", "more columns than a block has threads", (131, 3, 150), "hard")]
"""Cases of these texts alone, so that they say the same whatever cases the puzzle has."""


def groups() -> list[list[dict]]:
    """The entries in groups that hold at most one of each gate: a package can hold a group."""
    of_gate = {entry["gate"]: [e for e in ENTRIES if e["gate"] == entry["gate"]] for entry in ENTRIES}
    return [[entry for entry in group if entry] for group in zip_longest(*of_gate.values())]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The name of an entry -> its kinds of finding, and what is printed about its gate, the file called by its name."""
    packages = []
    for number, group in enumerate(groups()):
        folder = tmp_path_factory.mktemp("learner") / str(number) / "op"
        shutil.copytree(SOLUTION.path, folder)
        source = folder / PUZZLE.source
        bodies = {entry["gate"]: tuple(entry["code"].strip("\n").split("\n")) for entry in group}
        source.write_text(blanks.join(blanks.split(blanks.skeleton(source.read_text())), bodies))
        packages.append(OpPackage(folder))
    dims = tuple(case.dims for case in CASES)
    orders = [
        Order(package, dims, tuple(sorted(entry["gate"] for entry in group)), small_grid=True)
        for package, group in zip(packages, groups(), strict=True)
    ]
    record_many(orders, "p19", "float32")
    checker, out = Checker(PUZZLE), {}
    for package, group in zip(packages, groups(), strict=True):
        results = {r.gate.id: r for r in checker.check(package, [e["gate"] for e in group], CASES)}
        for entry in group:
            out[entry["name"]] = said(results[entry["gate"]], PUZZLE, package.path / PUZZLE.source)
    return out


def said(result, puzzle, source: Path) -> tuple[set[str], list[str]]:
    """The kinds of finding of a verdict, and what is printed of it, the file by its name and lines of values left out."""
    lines = [line.plain for line in verdict_lines(result, puzzle, source, {})]
    lines = [line.replace(f"{source.resolve().parent}/", "").strip() for line in lines]
    return {finding.kind for finding in result.findings}, lines


@pytest.mark.compiles
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_what_is_found_is_said_in_these_words(printed, entry):
    kinds, lines = printed[entry["name"]]
    assert kinds >= set(entry["kinds"])
    assert lines == entry["said"].strip("\n").split("\n")


class OfRecording(Checker):
    """Judges by a recording that it is given."""

    recording: Recording

    def _recorded(self, *arguments, **options):
        return {self.dtype: self.recording}


@pytest.fixture(scope="module")
def printed_ptx(tmp_path_factory):
    """The same for the entries in PTX: the toy's blank is solved, and each of these runs as one more launch of its kernel."""
    toys = HERE.parent / "toys"
    file = toys / "puzzles" / "p90" / "__init__.py"
    spec = present(importlib.util.spec_from_file_location("toy_p90", file))
    toy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = toy
    present(spec.loader).exec_module(toy)
    folder = tmp_path_factory.mktemp("toy") / "op"
    shutil.copytree(toys / "solutions" / "p90" / "op", folder)
    source = folder / toy.PUZZLE.source
    text = source.read_text()
    body = blanks.find(text)["square"].body
    source.write_text(blanks.join(blanks.split(blanks.skeleton(text)), {"square": body}))
    line = blanks.find(source.read_text())["square"].line
    out = {}
    for entry in PTX:
        checker = OfRecording(toy.PUZZLE)
        checker.recording = recorded(entry, source.resolve(), line)
        (result,) = checker.check(OpPackage(folder), ["square"], toy.cases()[:1])
        out[entry["name"]] = said(result, toy.PUZZLE, source)
    return out


RIGHT = """
    setp.ge.u32 %p0, %t, 32; @%p0 bra END; shr.u32 %r0, %t, 3; and.b32 %r1, %t, 7;
    mad.wide.u32 %d0, %r0, 4, %order; ld.global.u32 %r2, [%d0]; cvt.u64.u32 %d1, %r0; add.u64 %d1, %d1, %mask;
    ld.global.u8 %h0, [%d1]; setp.ne.s16 %p1, %h0, 0; mad.lo.u32 %r2, %r2, 8, %r1; mad.wide.u32 %d2, %r2, 4, %in;
    ld.global.f32 %f0, [%d2]; mul.f32 %f1, %f0, %f0; mul.f32 %f1, %f1, 0f3F000000; selp.f32 %f1, %f1, 0f00000000, %p1;
    mad.wide.u32 %d3, %t, 4, %out; st.global.f32 [%d3], %f1; setp.ne.u32 %p2, %r1, 0; @%p2 bra END;
    cvt.u64.u32 %d1, %r0; add.u64 %d1, %d1, %kept; st.global.u8 [%d1], %h0;
"""
TENSORS = {"output": 128, "kept": 4, "input": 128, "order": 16, "mask": 4}
ADDRESSES = {name: 0x5A5A00000000 + 0x2000 * number for number, name in enumerate(TENSORS)}


def kernel(name: str, body: str, source: Path, line: int, *, declare="", module="", bound="") -> str:
    """A kernel in PTX with the toy's arguments; all of its instructions are of one line of the source."""
    parameters = ", ".join(f".param .u64 q{k}" for k in range(len(TENSORS)))
    registers = ("%out", "%kept", "%in", "%order", "%mask")
    loads = "\n".join(f"ld.param.u64 {register}, [q{k}];" for k, register in enumerate(registers))
    return f"""
.version 8.5
.target sm_90a
.address_size 64
.file 1 "{source}"
{module}
.visible .entry {name}({parameters})
{bound}
{{
    .reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<32>, %t, %z; .reg .f32 %f<8>;
    .reg .b64 %d<16>, %out, %kept, %in, %order, %mask;
    {declare}
    .loc 1 {line} 5
    {loads}
    mov.u32 %t, %tid.x; mov.b32 %z, 0;
    {body}
END: ret;
}}
"""


def recorded(entry: dict, source: Path, line: int) -> Recording:
    """A recording of the right kernel and, after it, of an entry's."""
    tensors = [RecordedTensor(name, ADDRESSES[name], size) for name, size in TENSORS.items()]
    arguments = tuple(pointer(address) for address in ADDRESSES.values())
    launches = [
        RecordedLaunch("right", "right", (1, 1, 1), (32, 1, 1), arguments),
        RecordedLaunch("square", "wrong", (1, 1, 1), (entry["threads"], 1, 1), arguments),
    ]
    more = {what: entry.get(what, "") for what in ("declare", "module", "bound")}
    texts = {
        "right": kernel("right", RIGHT, source, line),
        "wrong": kernel("wrong", entry["code"], source, line, **more),
    }
    grads = [
        RecordedTensor(name, 0x5A5A00100000 + k, 128)
        for k, name in ((0, "grad_output"), (0x2000, "grad_input"))
    ]
    return Recording({("plain", (4, 8)): [*tensors, *grads, *launches]}, texts)


@pytest.mark.parametrize("entry", PTX, ids=lambda entry: entry["name"])
def test_what_is_found_in_ptx_is_said_in_these_words(printed_ptx, entry):
    kinds, lines = printed_ptx[entry["name"]]
    assert kinds >= set(entry["kinds"])
    assert lines == entry["said"].strip("\n").split("\n")


def test_every_kind_of_finding_has_an_entry():
    told = {kind for entry in (*ENTRIES, *PTX) for kind in entry["kinds"]}
    assert told == set(KINDS) - NOT_HERE.keys()

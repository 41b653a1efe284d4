"""The error translator, on what the installed compiler really says: every case compiles a small file with one mistake."""

import json
from pathlib import Path

import pytest
from kernel_slips import SLIPS

from harness.invocation import command
from harness.toolchain import roots
from harness.toolchain.diagnostics import Diagnostic
from harness.toolchain.packages import compile_failed, run_mojo
from harness.toolchain.translate import SIZES, explain, failure_text, sizes_at


def in_main(*lines: str) -> str:
    """A program whose main holds these lines."""
    return "def main():\n" + "".join(f"    {line}\n" for line in lines)


# What no slip in a kernel can hold: the program, what the compiler says, and what the sentence must tell.
MISTAKES = {
    "alias at file scope": ("alias N = 8\n" + in_main("pass"), "expressions must not", "`comptime N = 8`"),
    "@value": ("@value\nstruct S:\n    var x: Int\n" + in_main("pass"), "'value'", "@fieldwise_init"),
    "++": (in_main("var i = 0", "i++"), "unexpected token", "`i += 1`"),
    "tabs": (in_main("var a = 1") + "\tvar b = 2\n    print(a)\n", "must not mix tabs", "indents by spaces"),
    "negative index": (
        in_main("var l: List[Int] = [1, 2]", "print(l[-1])"),
        "negative indexing is not supported",
        "`x[len(x) - 1]`",
    ),
    "vector comparison": (
        in_main("var a = SIMD[DType.float32, 4](1)", "if a > 0:", "    print(1)"),
        "only defined for `Scalar`s",
        "`a.gt(b)`",
    ),
    "GPU of no name": (
        "from max.gpu.host.compile import get_gpu_target\nfrom std.compile import compile_info\n"
        "def k(p: Pointer[Float32, MutAnyOrigin]):\n    p[unsafe_offset=0] = 1\n"
        + in_main('print(compile_info[k, emission_kind="asm", target=get_gpu_target["sm_999"]()]().asm)'),
        "Unknown GPU architecture",
        "workbook doctor",
    ),
    "no GPU here": (
        "from max.gpu.host import DeviceContext\ndef k(p: Pointer[Float32, MutAnyOrigin]):\n    p[unsafe_offset=0] = 1\n"
        "def main() raises:\n    var ctx = DeviceContext()\n    var b = ctx.enqueue_create_buffer[DType.float32](4)\n"
        "    ctx.enqueue_function[k](b, grid_dim=1, block_dim=1)\n",
        "target 'unknown' is not supported",
        "nothing is wrong with the kernel",
    ),
}  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("name", MISTAKES)
def test_the_compilers_message_comes_first_and_then_what_it_means(name, tmp_path):
    code, message, meaning = MISTAKES[name]
    program = tmp_path / "program.mojo"
    program.write_text(code)
    result = run_mojo("run", "--diagnostic-format", "json", str(program))
    if name == "no GPU here" and result.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert result.returncode != 0
    lines = str(compile_failed(tmp_path, result.stdout + result.stderr)).splitlines()
    arrow = next(number for number, line in enumerate(lines) if line.startswith("   -> "))
    assert lines[0] == f"{tmp_path} does not compile"
    assert lines[1].startswith(f"{program}:")
    assert name != "negative index" or f"{program}:3:" in "\n".join(
        lines
    )  # the learner's line, not the library's
    assert message in "\n".join(lines[1:arrow])
    assert meaning in lines[arrow]
    assert lines[arrow].endswith((".", "type."))


def test_of_a_program_around_the_package_the_learners_line_is_named(tmp_path):
    def said(kind: str, file: str, line: int, text: str, message: str) -> str:
        place = {"file": file, "location": {"line": line, "column": 5}, "text": text}
        return json.dumps({"kind": kind, "message": message, "diagnostic": place})

    package, around = tmp_path / "op", tmp_path / "around"
    output = [
        said("error", f"{around}/main.mojo", 3, "def main() raises:", "function instantiation failed"),
        said(
            "note", f"{package}/hunt.mojo", 170, "def launch_scale_gradient[", "function instantiation failed"
        ),
        said(
            "note", f"{package}/hunt.mojo", 182, "    launcher.launch[clear_kernel](", "call expansion failed"
        ),
        said("note", f"{around}/recorder.mojo", 90, "  args[i]._to_device_type(", "call expansion failed"),
        "Mojo/stdlib/std/simd.mojo:662:9: note: constraint failed: Int and UInt do not conform to DevicePassable; use Int32",
    ]
    text = str(compile_failed(package, "\n".join(output)))
    assert text.splitlines()[1].startswith(f"{package}/hunt.mojo:182:5: ")
    assert "launcher.launch[clear_kernel](" in text and str(around) not in text
    assert text.splitlines()[-1].startswith("   -> A launch passes no Int") and "`Int32(width)`" in text


def test_a_message_that_no_rule_knows_stands_alone(tmp_path):
    assert explain(Diagnostic("a.mojo", 1, 1, "error", "the moon is full", "x")) is None


@pytest.mark.parametrize(("folder", "puzzle"), [("problems/p23/op", "p23"), ("somewhere/op", "pNN")])
def test_reset_is_of_the_puzzle_whose_file_it_is(folder, puzzle):
    words = "module 'shared.common' does not contain 'atomic_add'"
    sentence = explain(Diagnostic(f"/home/me/{folder}/ops.mojo", 3, 1, "error", words))
    assert sentence is not None and sentence.endswith(
        f"put the file back with `{command(f'reset {puzzle}')}`."
    )


def test_a_missing_op_is_explained():
    sentence = explain(Diagnostic("op", 1, 1, "error", "op registers no op 'layernorm_linear_train'"))
    assert sentence is not None and '@extensibility.register("layernorm_linear_train")' in sentence


# ---- Kernels ------------------------------------------------------------------------------------------------

PRELUDE = """\
from std.math import sqrt
from max.gpu import barrier, block_dim, block_idx, global_idx, grid_dim, thread_idx
from max.gpu.primitives import block
from layout import TileTensor
from layout.tile_layout import row_major
from shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type, atomic_add
"""
KERNEL_HEAD = """
def kernel_{number}[dtype: DType, sum_dtype: DType](
    grad_input: MutPtr[dtype], grad_bias: MutPtr[sum_dtype], input: ImmPtr[dtype], mean: ImmPtr[accum_type[dtype]],
    rows: Int32, hidden_dim: Int32,
):
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))
    var dx = TileTensor(grad_input, row_major(Int(rows), H))
"""


@pytest.fixture(scope="module")
def slips(tmp_path_factory) -> dict[str, str]:
    """Slip -> what is said about it, all of them from one run of the compiler."""
    folder = tmp_path_factory.mktemp("slips")
    (folder / "shared").symlink_to(roots.solutions() / "shared")
    text, ends = PRELUDE, []
    for number, (code, _) in enumerate(SLIPS.values()):
        text += KERNEL_HEAD.format(number=number) + "".join(f"    {line}\n" for line in code.split("\n"))
        ends.append(text.count("\n") + 1)
    program = folder / "program.mojo"
    program.write_text(text + "\n\ndef main():\n    pass\n")
    result = run_mojo(
        "build", "--diagnostic-format", "json", "--emit", "asm", "-o", str(folder / "x"), str(program)
    )
    output: dict[str, list[str]] = {name: [] for name in SLIPS}
    name = ""
    for line in (result.stdout + result.stderr).splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            at = entry.get("diagnostic", {})
            if entry.get("kind") == "error" and at.get("file") == str(program):
                name = next(n for n, end in zip(SLIPS, ends, strict=True) if at["location"]["line"] < end)
        output.setdefault(name, []).append(line)
    return {name: str(compile_failed(folder, "\n".join(lines))) for name, lines in output.items()}


@pytest.mark.compiles
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_a_kernel_is_explained_with_its_line_and_a_caret(slips, name):
    code, meaning = SLIPS[name]
    lines = slips[name].splitlines()
    arrow = next((line for line in lines if line.startswith("   -> ")), "")
    assert meaning in arrow and arrow.endswith((".", "type.")), slips[name]
    assert lines[2].strip() in [line.strip() for line in code.split("\n")] and lines[3].strip() == "^"


def test_further_errors_are_listed_a_line_each_and_counted_beyond_three():
    errors = [Diagnostic("a.mojo", line, 5, "error", f"no {line}", "    x = y") for line in range(1, 7)]
    assert failure_text(errors[:2], "", Path()).splitlines() == [
        "a.mojo:1:5: error: no 1", "    x = y", "    ^", "also a.mojo:2:5: error: no 2",
    ]  # fmt: skip
    assert failure_text(errors, "", Path()).splitlines()[-2:] == [
        "also a.mojo:4:5: error: no 4",
        "(and 2 more)",
    ]


def test_a_minimum_of_an_int_and_a_float_is_no_sum():
    line = "    var factor = min(1, limit / norm)"
    error = Diagnostic(
        "a.mojo", 3, 5, "error", "value passed to 'y' cannot be converted from 'Float32' to 'Int'", line
    )
    assert explain(error) == (
        "Both arguments of `min` need one type, and `1` alone is an Int: `min(Scalar[accum](1), ...)`."
    )


def test_the_sizes_of_the_very_kernel_are_named(tmp_path):
    path = tmp_path / "kernel.mojo"
    path.write_text(KERNEL_HEAD.format(number=1) + "    if row < rows:\n        return\n")
    line = path.read_text().count("\n") - 1
    assert sizes_at(str(path), line) == (
        "This kernel's sizes (rows, hidden_dim) arrive as Int32 (`H` is `hidden_dim` as an Int)"
    )
    assert sizes_at(str(tmp_path / "gone.mojo"), 1) == SIZES

"""Explanations of compile errors, tested with the installed compiler on files with one mistake each."""

import json
from pathlib import Path

import pytest
from kernel_slips import SLIPS

from harness.invocation import format_command
from harness.toolchain import roots
from harness.toolchain.diagnostics import Diagnostic
from harness.toolchain.packages import make_compile_error, run_mojo
from harness.toolchain.translate import SIZES_SENTENCE, describe_failure, describe_sizes, explain


def make_main(*lines: str) -> str:
    return "def main():\n" + "".join(f"    {line}\n" for line in lines)


# Mistakes that need a whole program: (program, compiler's message, part of the explanation).
MISTAKES = {
    "alias at file scope": ("alias N = 8\n" + make_main("pass"), "expressions must not", "`comptime N = 8`"),
    "@value": ("@value\nstruct S:\n    var x: Int\n" + make_main("pass"), "'value'", "@fieldwise_init"),
    "++": (make_main("var i = 0", "i++"), "unexpected token", "`i += 1`"),
    "tabs": (make_main("var a = 1") + "\tvar b = 2\n    print(a)\n", "must not mix tabs", "indents by spaces"),
    "negative index": (
        make_main("var l: List[Int] = [1, 2]", "print(l[-1])"),
        "negative indexing is not supported",
        "`x[len(x) - 1]`",
    ),
    "vector comparison": (
        make_main("var a = SIMD[DType.float32, 4](1)", "if a > 0:", "    print(1)"),
        "only defined for `Scalar`s",
        "`a.gt(b)`",
    ),
    "unknown GPU": (
        "from max.gpu.host.compile import get_gpu_target\nfrom std.compile import compile_info\n"
        "def k(p: Pointer[Float32, MutAnyOrigin]):\n    p[unsafe_offset=0] = 1\n"
        + make_main('print(compile_info[k, emission_kind="asm", target=get_gpu_target["sm_999"]()]().asm)'),
        "Unknown GPU architecture",
        "workbook doctor",
    ),
    "no GPU": (
        "from max.gpu.host import DeviceContext\ndef k(p: Pointer[Float32, MutAnyOrigin]):\n    p[unsafe_offset=0] = 1\n"
        "def main() raises:\n    var ctx = DeviceContext()\n    var b = ctx.enqueue_create_buffer[DType.float32](4)\n"
        "    ctx.enqueue_function[k](b, grid_dim=1, block_dim=1)\n",
        "target 'unknown' is not supported",
        "nothing is wrong with the kernel",
    ),
}  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("name", MISTAKES)
def test_compiler_message_is_followed_by_its_explanation(name, tmp_path):
    code, message, meaning = MISTAKES[name]
    program = tmp_path / "program.mojo"
    program.write_text(code)
    result = run_mojo("run", "--diagnostic-format", "json", str(program))
    if name == "no GPU" and result.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert result.returncode != 0
    lines = str(make_compile_error(tmp_path, result.stdout + result.stderr)).splitlines()
    arrow = next(number for number, line in enumerate(lines) if line.startswith("   -> "))
    assert lines[0] == f"{tmp_path} does not compile"
    assert lines[1].startswith(f"{program}:")
    assert name != "negative index" or f"{program}:3:" in "\n".join(lines), (
        "the learner's line, not the library's"
    )
    assert message in "\n".join(lines[1:arrow])
    assert meaning in lines[arrow]
    assert lines[arrow].endswith((".", "type."))


def test_error_in_a_generated_program_reports_the_learners_line(tmp_path):
    def make_message(kind: str, file: str, line: int, text: str, message: str) -> str:
        place = {"file": file, "location": {"line": line, "column": 5}, "text": text}
        return json.dumps({"kind": kind, "message": message, "diagnostic": place})

    package, generated = tmp_path / "op", tmp_path / "around"
    output = [
        make_message(
            "error", f"{generated}/main.mojo", 3, "def main() raises:", "function instantiation failed"
        ),
        make_message(
            "note", f"{package}/hunt.mojo", 170, "def launch_scale_gradient[", "function instantiation failed"
        ),
        make_message(
            "note", f"{package}/hunt.mojo", 182, "    launcher.launch[clear_kernel](", "call expansion failed"
        ),
        make_message(
            "note", f"{generated}/recorder.mojo", 90, "  args[i]._to_device_type(", "call expansion failed"
        ),
        "Mojo/stdlib/std/simd.mojo:662:9: note: constraint failed: Int and UInt do not conform to DevicePassable; use Int32",
    ]
    text = str(make_compile_error(package, "\n".join(output)))
    assert text.splitlines()[1].startswith(f"{package}/hunt.mojo:182:5: ")
    assert "launcher.launch[clear_kernel](" in text and str(generated) not in text
    assert text.splitlines()[-1].startswith("   -> A launch passes no Int") and "`Int32(width)`" in text


MISSING_NAME = "module 'shared.common' does not contain 'atomic_add'"


@pytest.mark.parametrize(
    ("file", "message", "line", "meaning"),
    [
        ("a.mojo", "unknown message", "x", None),
        ("/home/me/problems/p23/op/ops.mojo", MISSING_NAME, "", f"with `{format_command('reset p23')}`."),
        ("/home/me/somewhere/op/ops.mojo", MISSING_NAME, "", f"with `{format_command('reset pNN')}`."),
        ("op", "op registers no op 'two_ops'", "", '@extensibility.register("two_ops")'),
        (
            "a.mojo",
            "value passed to 'y' cannot be converted from 'Float32' to 'Int'",
            "    var factor = min(1, limit / norm)",
            "Both arguments of `min` need one type, and `1` alone is an Int: `min(Scalar[accum](1), ...)`.",
        ),
    ],
)
def test_messages_are_explained(file, message, line, meaning):
    sentence = explain(Diagnostic(file, 1, 1, "error", message, line))
    assert sentence is None if meaning is None else sentence is not None and meaning in sentence


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
def explanations(tmp_path_factory) -> dict[str, str]:
    """Mistake -> message with explanation, from a single run of the compiler."""
    folder = tmp_path_factory.mktemp("slips")
    (folder / "shared").symlink_to(roots.get_solutions() / "shared")
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
    return {name: str(make_compile_error(folder, "\n".join(lines))) for name, lines in output.items()}


@pytest.mark.compiles
@pytest.mark.parametrize("name", SLIPS)
def test_kernel_mistake_is_explained_with_line_and_caret(explanations, name):
    code, meaning = SLIPS[name]
    lines = explanations[name].splitlines()
    arrow = next((line for line in lines if line.startswith("   -> ")), "")
    assert meaning in arrow and arrow.endswith((".", "type.")), explanations[name]
    assert lines[2].strip() in [line.strip() for line in code.split("\n")] and lines[3].strip() == "^"


def test_further_errors_are_listed_or_counted():
    errors = [Diagnostic("a.mojo", line, 5, "error", f"no {line}", "    x = y") for line in range(1, 7)]
    assert describe_failure(errors[:2], "", Path()).splitlines() == [
        "a.mojo:1:5: error: no 1", "    x = y", "    ^", "also a.mojo:2:5: error: no 2",
    ]  # fmt: skip
    assert describe_failure(errors, "", Path()).splitlines()[-2:] == [
        "also a.mojo:4:5: error: no 4",
        "(and 2 more)",
    ]


def test_explanation_names_the_kernels_sizes(tmp_path):
    path = tmp_path / "kernel.mojo"
    path.write_text(KERNEL_HEAD.format(number=1) + "    if row < rows:\n        return\n")
    line = path.read_text().count("\n") - 1
    assert describe_sizes(str(path), line) == (
        "This kernel's sizes (rows, hidden_dim) arrive as Int32 (`H` is `hidden_dim` as an Int)"
    )
    assert describe_sizes(str(tmp_path / "missing.mojo"), 1) == SIZES_SENTENCE

"""The command line: the published lines in real output, JSON, every exit code, and one clear line for every bad input.

Runs in this process use the CPU alone; the virtual GPU, which stays for a process, gets processes of its own.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typed import present

from harness import cli
from harness.check.options import Options, parse
from harness.console import make_console
from harness.devices import graphs, poison, targets
from harness.learner import blanks
from harness.puzzles.p22 import spec as p22
from harness.puzzles.p27.spec import PUZZLE as P27
from harness.toolchain.packages import OpPackage

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = ("p22", "--backward", "--solution")
ON_CPU = (*SOLUTION, "--device", "cpu")
SMALL = ("--dims", "2", "3", "5", "7")

# What readers compare with; GPU stands for the device that ran the GPU kernels, N for a number.
SECTION = """\
Testing {device} Backward Pass:

Testing {device} Backward Implementation - Backward Pass
---------------------------------------------------------
   Computing PyTorch autograd reference...
   Computing Mojo backward implementation ({device})...
{gap}✅ {device} Backward Implementation backward completed
   Forward max difference: N
   grad_input: N ✅
   grad_ln_weight: N ✅
   grad_ln_bias: N ✅
   grad_linear_weight: N ✅
   grad_linear_bias: N ✅

   Forward pass: ✅ CORRECT
   Gradients:    ✅ CORRECT
   Overall:      ✅ CORRECT

"""
CPU_SECTION = SECTION.format(device="CPU", gap="")
GPU_SECTION = SECTION.format(device="GPU", gap="\n")
PUBLISHED = f"""\
Testing with dimensions: [4, 4, 8] -> [4, 4, 16]
✅ Loaded Mojo operations library
============================================================
           Comprehensive Backward Pass Test
           Testing Custom LayerNorm + Linear Gradients
============================================================
Testing with dimensions: [4, 4, 8] -> [4, 4, 16]

{CPU_SECTION}{GPU_SECTION}Backward Pass Test Summary:
   - CPU Backward:  ✅ CORRECT
   - GPU Backward:  ✅ CORRECT

   Overall Result: ✅ ALL CORRECT

BACKWARD PASS Test Completed!
"""
FIGURE = r"\d\.\d\de[+-]\d\d"
CPU_ONLY = ("Testing GPU", "(GPU)...", "✅ GPU", "- GPU")


def harness(*arguments: str, **options) -> subprocess.CompletedProcess:
    """The command line in a process of its own, piped, in the checkout."""
    command = [sys.executable, "-m", "harness", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, **options)


@pytest.fixture(scope="session")
def full_run(tmp_path_factory):
    """`p22 --backward --solution` on every device there is: the finished process and its JSON."""
    file = tmp_path_factory.mktemp("run") / "run.json"
    finished = harness(*SOLUTION, "--json", file)
    return finished, json.loads(file.read_text())


def missing_lines(wanted: list[str], printed: list[str]) -> list[str]:
    """Those lines of `wanted` that do not follow in order in what was printed; N in a line is a number."""
    rest = iter(printed)
    patterns = [re.escape(line).replace("N", FIGURE) if ": N" in line else re.escape(line) for line in wanted]
    return [p for p in patterns if not any(re.fullmatch(p, line) for line in rest)]


# ---- A whole run --------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_the_published_lines_in_order(full_run):
    finished, data = full_run
    kinds = [device["device"] for device in data["devices"]]
    if kinds == ["cpu"]:
        pytest.skip(f"GPU kernels ran nowhere on this machine: {data['skipped']}")
    label = {"gpu": "GPU", "virtual": "Virtual GPU"}[kinds[1]]
    assert finished.returncode == 0, finished.stdout + finished.stderr
    wanted = PUBLISHED.replace("GPU", label).splitlines()
    assert not missing_lines(wanted, finished.stdout.splitlines())


@pytest.mark.compiles
def test_without_a_gpu_the_cpu_lines_stand(command_line):
    finished = command_line(*ON_CPU)
    wanted = [line for line in PUBLISHED.splitlines() if not any(part in line for part in CPU_ONLY)]
    wanted = [line.replace("ALL CORRECT", "CPU CORRECT, GPU NOT RUN") for line in wanted]
    cpu_section = wanted[: wanted.index("   Overall:      ✅ CORRECT") + 1]
    assert not missing_lines(
        cpu_section + wanted[wanted.index("Backward Pass Test Summary:") :], finished.lines
    )
    assert finished.code == 6


@pytest.mark.compiles
def test_piped_output_is_plain_and_unwrapped(full_run):
    finished, _ = full_run
    assert "\x1b" not in finished.stdout and "\r" not in finished.stdout
    longest = (
        "   unfused:       3,200 (forward ln_out 512, forward linear_weight_t 512, backward ln_out 512, "
    )
    assert longest in finished.stdout and "backward row_sums 128)\n" in finished.stdout
    assert all(line == line.rstrip() for line in finished.stdout.splitlines())


@pytest.mark.compiles
def test_unfused_sections_follow_and_name_themselves(full_run):
    lines = full_run[0].stdout.splitlines()
    first = lines.index("Testing CPU Backward Implementation - Backward Pass (unfused)")
    assert lines.index("Testing CPU Backward Implementation - Backward Pass") < first
    assert first < lines.index("Backward Pass Test Summary:")
    assert "   - CPU Backward (unfused):  ✅ CORRECT" in lines


@pytest.mark.compiles
def test_a_run_says_which_files_it_ran(full_run, solution):
    assert f"   ran solutions/p22/op (hash {solution.digest[:8]}), float32, seed 0" in full_run[0].stdout


@pytest.mark.compiles
def test_a_second_run_says_cached(full_run, command_line):
    finished = command_line(*ON_CPU)
    assert any(re.fullmatch(r"   on CPU: .*, graph cached", line) for line in finished.lines)
    assert "Compiling" not in finished.out


# ---- JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_json_to_a_file(full_run):
    finished, data = full_run
    assert data["exit_code"] == finished.returncode
    assert (data["puzzle"], data["dtype"], data["dims"], data["seed"]) == ("p22", "float32", [4, 4, 8, 16], 0)
    for device in data["devices"]:
        for variant in device["variants"].values():
            assert variant["state"] == "correct" and not variant["unsolved"]
            assert list(variant["cases"]) == [case.name for case in p22.cases()]
            for quantities in variant["cases"].values():
                assert {"grad_linear_weight", "grad_linear_bias", "grad_input"} <= set(quantities)
                assert all(
                    verdict["ok"] and verdict["error"] <= verdict["limit"] for verdict in quantities.values()
                )


@pytest.mark.compiles
def test_json_to_standard_output_is_nothing_but_json(command_line):
    """Of a gate, whose own quantities alone are compared."""
    finished = command_line(*ON_CPU, "--gate", "dW", "--json", "-")
    data = json.loads(finished.out)
    (device,) = data["devices"]
    assert list(device["variants"]) == ["fused"] and data["exit_code"] == finished.code == 6
    assert set(device["variants"]["fused"]["cases"]["chapter"]) == {"grad_linear_weight"}
    assert "Overall Result" in finished.err


def test_json_of_a_rung_in_python(command_line):
    finished = command_line("p24", "--rung", "numpy", "--solution", "--gate", "index", "--json", "-")
    data = json.loads(finished.out)
    assert (data["puzzle"], data["rung"], data["exit_code"]) == ("p24", "numpy", 0) and finished.code == 0
    (gate,) = data["gates"].values()
    assert gate["state"] == "correct" and list(data["gates"]) == ["index"] and not gate["lines"]
    assert gate["cases"] and all(
        verdict["ok"] and verdict["error"] <= verdict["limit"]
        for case in gate["cases"].values()
        for verdict in case.values()
    )
    assert "✅ index" in finished.err


@pytest.mark.compiles
def test_json_and_repeats_of_a_gate_take_the_gate_s_own_road(command_line):
    finished = command_line(
        *(
            *SOLUTION,
            "--fused",
            "--gate",
            "dx",
            "--json",
            "-",
            "--repeat",
            "2",
            "--blocks",
            "reversed",
            *SMALL,
        )
    )
    data = json.loads(finished.out)
    assert (finished.code, data["exit_code"], data["rung"]) == (0, 0, "mojo")
    assert data["gates"]["dx"]["state"] == "correct"
    assert data["gates"]["dx"]["repeat"]["grad_input"]["bit_equal"]
    assert (
        "      grad_input: bit-equal in 2 runs (as it must be: the order of its sums is fixed)"
        in finished.err
    )
    assert "float32, then bfloat16, seed 0, on the virtual GPU" in finished.err


@pytest.mark.compiles
def test_a_gate_imports_neither_max_nor_torch():
    """Nor does a whole run on the virtual GPU alone. Torch is imported where what is right is not in the cache."""
    for more in (["--gate", "dx"], ["--show", "dx", "--json", "-"], ["--device", "virtual"]):
        arguments = ["p22", "--backward", "--solution", "--fused", *more, *SMALL]
        for heavy in ({"max"}, {"max", "torch"}):
            code = f"import sys; from harness.cli import main; main({arguments}); found = {heavy} & {{*sys.modules}}"
            code += "; sys.exit(bool(found))"
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (ON_CPU, "--json"),
        (("p24", "--rung", "numpy"), "--json"),
        (("p22", "--show"), "--html"),
        (("p22", "--bench"), "--csv"),
    ],
)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("missing/file", "No such file or directory"),
        (".", "Is a directory"),
        ("file/file", "Not a directory"),
        ("link", "No such file or directory"),
        ("no.such" * 60, "File name too long"),
    ],
    ids=["no folder", "a folder", "below a file", "a link to nowhere", "too long"],
)
def test_2_a_target_that_cannot_be_written_is_found_before_anything_runs(
    command_line, tmp_path, monkeypatch, flags, flag, place, words
):
    def too_late(*arguments, **options):
        pytest.fail("something ran")

    monkeypatch.setattr("harness.check.runs.run", too_late)
    monkeypatch.setattr("harness.check.profile.Counting.replay", too_late)
    monkeypatch.setattr("harness.screens.checking.GateCheck.run", too_late)
    monkeypatch.setattr("harness.bench.runner.Bench.run", too_late)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere/run.json")
    finished = command_line(*flags, flag, tmp_path / place)
    assert (finished.code, finished.err) == (2, f"error: {flag} {tmp_path / place}: {words}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


# ---- What a run can be told ---------------------------------------------------------------------------------


@pytest.mark.compiles
def test_repeat_on_the_cpu_is_bit_equal(command_line):
    finished = command_line(*ON_CPU, "--repeat", "5")
    assert finished.code == 6
    for name in ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_linear_weight", "grad_linear_bias"):
        line = f"   {name}: bit-equal in 5 runs (as it must be: the order of its sums is fixed)"
        assert finished.lines.count(line) == 2


@pytest.mark.compiles
def test_dims_seed_and_dtype_reach_the_run(command_line, cpu_graphs):
    cpu_graphs()  # the graph of this run among them
    finished = command_line(*ON_CPU, *SMALL, "--seed", "4", "--dtype", "bfloat16")
    assert "Testing with dimensions: [2, 3, 5] -> [2, 3, 7]" in finished.lines
    assert any(line.endswith("bfloat16, seed 4") for line in finished.lines)
    assert finished.code == 6


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_a_variant_flag_filters(command_line, name):
    finished = command_line(*ON_CPU, f"--{name}")
    assert ("(unfused)" in finished.out) == (name == "unfused")
    assert sum("Testing CPU Backward Implementation" in line for line in finished.lines) == 1


def test_a_large_run_leaves_devices_out_and_says_why(command_line, monkeypatch):
    monkeypatch.setattr(targets, "CPU_LIMIT", 1)
    monkeypatch.setattr(targets, "VIRTUAL_LIMIT", 1)
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: False)
    finished = command_line(*SOLUTION, *SMALL)
    assert (
        "   - CPU Backward:  ⏭ SKIPPED (more than 2^28 multiply-adds; --device cpu runs it)" in finished.lines
    )
    assert finished.code == 6


@pytest.mark.compiles
def test_the_forward_check_prints_times_and_no_ratio_without_a_gpu(command_line, cpu_graphs):
    cpu_graphs()  # the graph that it times among them
    finished = command_line("p22", "--fused", "--solution", "--device", "cpu")
    assert "FORWARD PASS Test Completed!" in finished.lines
    assert "grad_input" not in finished.out
    assert re.search(r"^   CPU time \(fused\): [\d,.]+ us", finished.out, re.MULTILINE)
    assert "   CPU / GPU (fused): no GPU: ratio not measured" in finished.lines
    assert finished.code == 6


def test_a_terminal_gets_its_own_width_and_colour():
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    console = make_console(terminal)
    assert console.is_terminal and console.width < 200
    assert not make_console(io.StringIO()).is_terminal


# ---- Exit codes ---------------------------------------------------------------------------------------------


@pytest.fixture
def run_with(command_line, monkeypatch):
    """Run p22's solution on the CPU with an output of the graph changed in place: output, change, flags -> finished."""

    def run(output, change, *flags):
        honest = graphs.execute

        def wrong(*arguments):
            outputs = honest(*arguments)
            change(outputs[output])
            return outputs

        monkeypatch.setattr(graphs, "execute", wrong)
        finished = command_line(*ON_CPU, *flags)
        assert finished.code == 1
        return finished

    return run


@pytest.mark.compiles
def test_1_a_wrong_gradient_is_shown_with_its_case(run_with):
    finished = run_with("fused.grad_weight", lambda array: np.multiply(array, 1.001, out=array))
    assert "   Overall Result: ❌ INCORRECT" in finished.lines
    (line,) = [line for line in finished.lines if "is wrong in" in line]
    cases = p22.cases()
    truths = [p22.PUZZLE.exact(p22.inputs(case, "float32", 0))["grad_weight"] for case in cases]
    count = sum(bool(np.isfinite(truth).any()) for truth in truths)  # a thousandth more of NaN is NaN
    assert line.startswith(f"   ❌ grad_linear_weight is wrong in {count} of {len(cases)} cases, most in '")
    assert "   Run this again: workbook p22 --backward --fused --device cpu --solution" in finished.lines


@pytest.mark.compiles
def test_1_nan_is_reported_as_such_and_not_as_a_wrong_gradient(run_with):
    finished = run_with("fused.grad_input", lambda array: array.flat.__setitem__(0, np.inf), "--fused")
    assert "1 elements are NaN or infinite where the reference is not" in finished.out
    assert "one at [0, 0, 0]: not a wrong gradient but a value that is none" in finished.out


@pytest.mark.compiles
def test_1_an_unwritten_element_is_reported_as_such(run_with):
    poisoned = lambda a: np.copyto(a, poison.make_poisoned(a.shape, "float32"))  # noqa: E731
    finished = run_with("fused.grad_bias", poisoned, "--fused", *SMALL)
    assert "7 elements were never written" in finished.out


def test_of_a_puzzle_with_files_in_python_only_the_kernels_have_a_dtype():
    asked = Options(P27, "solutions", dtype="bfloat16", repeat=2, blocks="reversed")
    got = [(each.rung, each.dtype, each.repeat, each.blocks) for each in asked.files]
    assert got == [
        ("numpy", "float32", 1, "natural"),
        ("tape", "float32", 1, "natural"),
        (None, "bfloat16", 2, "reversed"),
    ]


def bad_use(command_line, *arguments: str) -> str:
    """The one line that a command line of exit code 2 prints."""
    finished = command_line(*arguments)
    assert finished.code == 2 and finished.out == ""
    assert finished.err.startswith("error: ") and finished.err.count("\n") == 1
    return finished.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["p99"], ["unknown puzzle 'p99'", "there is ", "p22"]),
        (["wtch"], ["unknown command 'wtch': did you mean watch?"]),
        (["p22", "--dims", "4", "4", "8"], ["--dims", "expected 4 arguments", "got: p22 --dims 4 4 8"]),
        (["p22", "--dims", "4", "4", "0", "8"], ["--dims 4 4 0 8", "every size must be at least 1"]),
        (["p22", "--dims", "4", "4", "-8", "8"], ["--dims 4 4 -8 8", "every size must be at least 1"]),
        (["p22", "--dims", "4", "4", "x", "8"], ["--dims", "invalid int value", "'x'"]),
        (["p22", "--backwards"], ["unrecognized arguments: --backwards"]),
        (["p22", "--device", "tpu"], ["--device", "'tpu'", "virtual"]),
        (["p22", "--dtype", "int8"], ["--dtype", "'int8'", "float32"]),
        (["p22", "--gate", "dZ"], ["--gate dZ", "unknown gate", "ln, forward, row_sums, db, dW, dgamma, dx"]),
        (["p22", "--gate", "dW", "--unfused"], ["--gate dW", "the fused kernels", "leave out --unfused"]),
        (["p22", "--repeat", "0"], ["--repeat 0", "must be at least 1"]),
        (["p22", "--seed", "-1"], ["--seed -1", "must not be negative"]),
        (["p22", "--seed", str(2**64)], [f"--seed {2**64}", "must fit into 64 bits"]),
        (["p22", "--dims", "1", "1", str(2**31), "1"], ["--dims 1 1 2147483648 1", "up to 2,147,483,647"]),
        (["p22", "--dims", "65536", "65536", "1", "1"], ["sizes and rows up to", "not 4,294,967,296"]),
        (["p22", "--dims", "30000", "30000", "2000", "1"], ["needs more than", "GiB, and this machine has"]),
        (["p22", "--rung", "numpy", "--gate", ""], ["the NumPy rung has no gate ''"]),
        (["p22", "--rung", "numpy", "--gate", "ln"], ["the NumPy rung has no gate 'ln'; there is db"]),
        (["p26", "--gate", "rows", "--rung", "swap"], ["the swap rung has no gate 'rows'; there is find"]),
        (["hint", "p22", "dx-9"], ["the ladder of dx has rungs 1 to 3, not 9"]),
        (["hint"], ["the following arguments are required: puzzle"]),
        (["diff", "p22", "ln", "--rung", "numpy"], ["the NumPy rung has no gate 'ln'; there is db, dW"]),
        (["p22", "--json", ""], ["--json : the name of a file is missing"]),
        (["p22", "--blocks", ""], ["--blocks : expected natural"]),
        (["reset", "p22", ""], ["unknown blank ''"]),
        (["watch", "p22", "--gate", ""], ["unknown gate ''"]),
        (["list", ""], ["unknown puzzle ''"]),
        (["verify", ""], ["unknown puzzle ''"]),
        (["p22", "--blocks", "random"], ["--blocks random", "natural, reversed, shuffled"]),
        (["p22", "--ops", "/nowhere"], ["no op package at /nowhere", "not a folder"]),
        (
            ["p22", "--rung", "numpy", "--dtype", "float16"],
            ["--dtype: only for kernels", "is a Python file"],
        ),
        (["p22", "--rung", "numpy", "--repeat", "2"], ["--repeat: only for kernels"]),
        (["p22", "--rung", "numpy", "--blocks", "reversed"], ["--blocks: only for kernels"]),
        (
            ["p22", "--ops", "op", "--rung", "numpy"],
            ["--ops op: an op package has no file of the NumPy rung"],
        ),
        (["p25", "--ranks", "17"], ["--ranks 17: must be 2 to 16"]),
        (["p22", "--ranks", "3"], ["unrecognized arguments: --ranks 3"]),
        (["p22", "--solution", "--device", "virtual", "--dtype", "float64"], ["--dtype float64", "CPU path"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("p22", "p99") else "",
)
def test_2_bad_use_is_one_line(command_line, arguments, words):
    line = bad_use(command_line, *arguments)
    assert all(word in line for word in words), line


def test_5_a_gpu_by_name_where_there_is_none(command_line, monkeypatch):
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: False)
    finished = command_line(*SOLUTION, "--device", "gpu")
    assert finished.code == 5 and "--device gpu: MAX sees no GPU" in finished.err


def test_2_a_damaged_blank_marker(command_line, copied_package):
    line = copied_package.replace("    # BLANK-END row_sums\n", "")
    source = copied_package.path / copied_package.source
    said = bad_use(command_line, "p22", "--ops", str(copied_package.path))
    assert said.startswith(f"error: {source}:") and "blank row_sums" in said
    assert int(said.split(":")[2]) >= line - 40


def test_help_lists_the_exit_codes(command_line):
    of_all, of_one = ("list, hint, watch", "p22"), ("--dims B S H O", "--gate ID", "--fused")
    for arguments, own in ((["--help"], of_all), ([], of_all), (["p22", "--help"], of_one)):
        finished = command_line(*arguments)
        assert finished.code == 0
        for words in ("exit codes: 0 all correct", "130 interrupted", *own):
            assert words in " ".join(finished.out.split())


@pytest.mark.compiles
def test_4_a_broken_mojo_file_is_shown_by_file_and_line(command_line, copied_package):
    given = "unfused_backward.mojo"
    line = copied_package.replace(
        "dx[row, h] = (rstd[unsafe_offset=row] * (g - c2",
        "dx[row, h] = (rstdd[unsafe_offset=row] * (g - c2",
        file=given,
    )
    arguments = ("p22", "--ops", str(copied_package.path), "--device", "cpu")
    short = command_line(*arguments)
    assert short.code == 4
    assert f"{copied_package.path / given}:{line}:" in short.err and "rstdd" in short.err
    assert short.err.startswith(f"error: {copied_package.path} does not compile\n")
    assert short.err.count("\n") <= 5, "message, line of code, caret, meaning"
    whole = command_line(*arguments, "--verbose")
    assert whole.code == 4 and whole.err.startswith(short.err) and len(whole.err) > len(short.err)


@pytest.mark.compiles
def test_4_an_op_that_the_package_lacks_is_named(command_line, copied_package):
    copied_package.replace("    LayerNormLinearRowSums,\n", "", file="__init__.mojo")
    copied_package.replace('@extensibility.register("layernorm_linear_row_sums")', "", file="passes.mojo")
    finished = command_line("p22", "--backward", "--ops", str(copied_package.path), "--device", "cpu")
    assert finished.code == 4
    assert finished.err == f"error: {copied_package.path} registers no op 'layernorm_linear_row_sums'\n"


def test_5_a_cache_folder_that_cannot_be_written(command_line, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file"))
    finished = command_line(*ON_CPU)
    assert finished.code == 5
    assert f"cannot make the cache folder {tmp_path}/file/" in finished.err
    assert "set WORKBOOK_CACHE to a folder you can write" in finished.err and finished.err.count("\n") == 1


@pytest.mark.compiles
def test_130_an_interrupt_during_a_compile_is_clean(tmp_path):
    environment = {**os.environ, "WORKBOOK_CACHE": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "harness", *ON_CPU]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert any(
            line.startswith("Compiling the Mojo kernels for the CPU") for line in present(process.stdout)
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.endswith("interrupted\n") and "Traceback" not in out + err
    assert not list((tmp_path / "cache" / "graphs").glob("*.mef")), "nothing half-written"


# ---- Problems -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def skeleton_package(solution, tmp_path_factory):
    """The problem that `generate` would write: nothing solved, whatever a learner has done to problems/."""
    folder = tmp_path_factory.mktemp("skeleton") / "op"
    shutil.copytree(solution.path, folder)
    for file in folder.rglob("*.mojo"):
        file.write_text(blanks.skeleton(file.read_text()))
    return folder


@pytest.mark.compiles
@pytest.mark.skipif(sys.platform != "linux", reason="the virtual GPU's driver needs Linux")
def test_3_untouched_problems_compile_and_say_what_is_unsolved(skeleton_package):
    """On the CPU, whose path has no blanks, they are the solution; the toy puzzle's test sees what is said of that."""
    finished = harness("p22", "--backward", "--ops", skeleton_package, "--device", "virtual")
    assert finished.returncode == 3, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    at = lines.index("Unsolved blanks (7 of 8):")
    by_id = blanks.find((skeleton_package / "layernorm_linear.mojo").read_text())
    source = skeleton_package / "layernorm_linear.mojo"
    expected = {id: f"{source}:{blank.line}  {blank.task}" for id, blank in by_id.items()}
    del expected["transfer"]  # the last gate's variant runs on request
    assert dict(line.split(maxsplit=1) for line in lines[at + 1 : at + 8]) == expected
    assert "   Overall Result: ⏳ UNSOLVED, nothing attempted is wrong" in lines
    assert "   grad_input: ⏳ UNSOLVED (blank dx)" in lines
    assert "   - Virtual GPU Backward:  ⏳ UNSOLVED" in lines


@pytest.mark.compiles
def test_problems_with_the_solution_s_blanks_pasted_in_pass(solution, full_run, tmp_path):
    """What a learner who solves everything has, whatever stands in the blanks now.

    It compiles, and differs from the solution in the names of book anchors, which are comments; so the whole run of the
    solution, on the CPU and on every GPU there is, is its run too.
    """
    folder = tmp_path / "op"
    shutil.copytree(solution.path, folder)
    for file in solution.files:
        name = file.relative_to(solution.path)
        problem = ROOT / "problems" / "p22" / "op" / name
        pasted = blanks.fill(problem.read_text(), file.read_text(), str(problem))
        (folder / name).write_text(pasted)
        different = [
            (ours, theirs)
            for ours, theirs in zip(pasted.split("\n"), file.read_text().split("\n"), strict=True)
            if ours != theirs
        ]
        assert all(theirs.startswith("# ANCHOR") for _, theirs in different), different
    assert OpPackage(folder).compile().is_file()
    assert full_run[0].returncode in (0, 6)


def test_the_default_root_is_problems():
    options = parse(["p22", "--backward"])
    assert options.work.whole_package().path == ROOT / "problems" / "p22" / "op"
    chosen = parse(["p22", "--solution"])
    assert chosen.work.whole_package().path == ROOT / "solutions" / "p22" / "op"


def test_2_sizes_beyond_the_memory_say_what_was_asked_for(monkeypatch, capsys):
    def refuse(options):
        raise MemoryError("Unable to allocate 522. GiB for an array")

    monkeypatch.setattr(cli, "run_puzzle", refuse)
    assert cli.main(["p22"]) == 2
    assert capsys.readouterr().err == (
        "error: not enough memory for these sizes: Unable to allocate 522. GiB for an array\n"
    )

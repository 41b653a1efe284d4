"""The command line: published lines, JSON, exit codes, and one-line errors.

Runs in this process use only the CPU; the virtual GPU, which cannot be disabled again, runs in new processes.
"""

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
from recordings import make_order
from typed import unwrap

from harness import cli
from harness.check.options import Options, parse
from harness.devices import graphs, poison
from harness.learner import blanks
from harness.puzzles.p22 import spec as p22
from harness.puzzles.p27.spec import PUZZLE as P27
from harness.toolchain.packages import OpPackage

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = ("p22", "--backward", "--solution")
ON_CPU = (*SOLUTION, "--device", "cpu")
SMALL = ("--dims", "2", "3", "5", "7")

# Published output; GPU is a placeholder for the device of the GPU kernels, N for a number.
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


def run_in_new_process(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command line in a new process, in the checkout, with piped output."""
    command = [sys.executable, "-m", "harness", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, **options)


def list_orders(folder, tests):
    """Record the solution, also at small sizes in both dtypes, and the untouched package."""
    small = p22.PUZZLE.list_cases((2, 3, 5, 7))
    cases = [*p22.cases(), *small]
    variants = p22.PUZZLE.default_variants
    return {
        "solution": make_order("p22", cases, variants),
        "bfloat16": make_order("p22", small, variants, dtype="bfloat16"),
        "untouched": make_order("p22", cases, variants, write_skeleton(folder / "op")),
    }


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, cpu_graphs, recorded):
    """Completed process and JSON of `p22 --backward --solution` on every available device."""
    cpu_graphs()  # compile the graph of this run
    file = tmp_path_factory.mktemp("run") / "run.json"
    result = run_in_new_process(*SOLUTION, "--json", file)
    return result, json.loads(file.read_text())


def find_missing_lines(expected: list[str], printed: list[str]) -> list[str]:
    """Return expected lines that are missing or out of order; N matches any number."""
    rest = iter(printed)
    patterns = [
        re.escape(line).replace("N", FIGURE) if ": N" in line else re.escape(line) for line in expected
    ]
    return [p for p in patterns if not any(re.fullmatch(p, line) for line in rest)]


# ---- A whole run --------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_published_lines_are_in_order(full_run):
    result, data = full_run
    kinds = [device["device"] for device in data["devices"]]
    if kinds == ["cpu"]:
        pytest.skip(f"GPU kernels ran nowhere on this machine: {data['skipped']}")
    label = {"gpu": "GPU", "virtual": "Virtual GPU"}[kinds[1]]
    assert result.returncode == 0, result.stdout + result.stderr
    expected = PUBLISHED.replace("GPU", label).splitlines()
    assert not find_missing_lines(expected, result.stdout.splitlines())


@pytest.mark.compiles
def test_second_run_on_the_cpu_is_cached(full_run, command_line):
    """Only the CPU's published lines are printed without a GPU."""
    result = command_line(*ON_CPU)
    expected = [line for line in PUBLISHED.splitlines() if not any(part in line for part in CPU_ONLY)]
    expected = [line.replace("ALL CORRECT", "CPU CORRECT, GPU NOT RUN") for line in expected]
    cpu_section = expected[: expected.index("   Overall:      ✅ CORRECT") + 1]
    assert not find_missing_lines(
        cpu_section + expected[expected.index("Backward Pass Test Summary:") :], result.lines
    )
    assert result.code == 6
    assert any(re.fullmatch(r"   on CPU: .*, graph cached", line) for line in result.lines)
    assert "Compiling" not in result.out


@pytest.mark.compiles
def test_piped_output_is_plain_and_unwrapped(full_run):
    result, _ = full_run
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    longest = (
        "   unfused:       3,200 (forward ln_out 512, forward linear_weight_t 512, backward ln_out 512, "
    )
    assert longest in result.stdout and "backward row_sums 128)\n" in result.stdout
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


@pytest.mark.compiles
def test_unfused_sections_follow_with_their_name(full_run):
    lines = full_run[0].stdout.splitlines()
    first = lines.index("Testing CPU Backward Implementation - Backward Pass (unfused)")
    assert lines.index("Testing CPU Backward Implementation - Backward Pass") < first
    assert first < lines.index("Backward Pass Test Summary:")
    assert "   - CPU Backward (unfused):  ✅ CORRECT" in lines


@pytest.mark.compiles
def test_run_prints_its_files(full_run, solution):
    assert f"   ran solutions/p22/op (hash {solution.digest[:8]}), float32, seed 0" in full_run[0].stdout


# ---- JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_json_to_a_file(full_run):
    result, data = full_run
    assert data["exit_code"] == result.returncode
    assert (data["puzzle"], data["dtype"], data["dims"], data["seed"]) == ("p22", "float32", [4, 4, 8, 16], 0)
    for device in data["devices"]:
        for variant in device["variants"].values():
            assert variant["state"] == "correct" and not variant["unsolved"]
            assert list(variant["cases"]) == [case.name for case in p22.cases()]
            for quantities in variant["cases"].values():
                assert {"grad_linear_weight", "grad_linear_bias", "grad_input"} <= set(quantities)
                assert all(
                    result["ok"] and result["error"] <= result["limit"] for result in quantities.values()
                )


@pytest.mark.compiles
def test_json_on_stdout_is_only_json(command_line):
    """Run a single gate, which compares only its quantities."""
    result = command_line(*ON_CPU, "--gate", "dW", "--json", "-")
    data = json.loads(result.out)
    (device,) = data["devices"]
    assert list(device["variants"]) == ["fused"] and data["exit_code"] == result.code == 6
    assert set(device["variants"]["fused"]["cases"]["chapter"]) == {"grad_linear_weight"}
    assert "Overall Result" in result.err


def test_json_of_a_python_rung_has_its_gates(command_line):
    result = command_line("p24", "--rung", "numpy", "--solution", "--gate", "index", "--json", "-")
    data = json.loads(result.out)
    assert (data["puzzle"], data["rung"], data["exit_code"]) == ("p24", "numpy", 0) and result.code == 0
    (gate,) = data["gates"].values()
    assert gate["state"] == "correct" and list(data["gates"]) == ["index"] and not gate["lines"]
    assert gate["cases"] and all(
        result["ok"] and result["error"] <= result["limit"]
        for case in gate["cases"].values()
        for result in case.values()
    )
    assert "✅ index" in result.err


@pytest.mark.compiles
@pytest.mark.usefixtures("recorded")
def test_json_and_repeats_of_a_gate(command_line):
    flags = "--fused --gate dx --json - --repeat 2 --blocks reversed"
    result = command_line(*SOLUTION, *flags.split(), *SMALL)
    data = json.loads(result.out)
    assert (result.code, data["exit_code"], data["rung"]) == (0, 0, "mojo")
    assert data["gates"]["dx"]["state"] == "correct"
    assert data["gates"]["dx"]["repeat"]["grad_input"]["bit_equal"]
    assert (
        "      grad_input: bit-equal in 2 runs (as it must be: the order of its sums is fixed)" in result.err
    )
    assert "float32, then bfloat16, seed 0, on the virtual GPU" in result.err


@pytest.mark.compiles
@pytest.mark.usefixtures("recorded")
def test_gate_imports_neither_max_nor_torch():
    """Cover a gate and a full virtual-GPU run. The first run imports torch if its results are not cached."""
    for flags in (["--gate", "dx"], ["--show", "dx", "--json", "-"], ["--device", "virtual"]):
        arguments = ["p22", "--backward", "--solution", "--fused", *flags, *SMALL]
        for heavy in ({"max"}, {"max", "torch"}):
            code = f"import sys; from harness.cli import main; main({arguments}); found = {heavy} & {{*sys.modules}}"
            code += "; sys.exit(bool(found))"
            completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
            assert completed.returncode == 0, completed.stdout + completed.stderr


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
    ("place", "message"),
    [
        ("missing/file", "No such file or directory"),
        (".", "Is a directory"),
        ("file/file", "Not a directory"),
        ("link", "No such file or directory"),
        ("no.such" * 60, "File name too long"),
    ],
    ids=["no folder", "a folder", "below a file", "a link to nowhere", "too long"],
)
def test_2_unwritable_target_is_reported_before_running(
    command_line, tmp_path, monkeypatch, flags, flag, place, message
):
    def fail(*arguments, **options):
        pytest.fail("something ran")

    monkeypatch.setattr("harness.check.runs.start_run", fail)
    monkeypatch.setattr("harness.check.profile.CountRequest.replay", fail)
    monkeypatch.setattr("harness.screens.checking.GateCheck.run", fail)
    monkeypatch.setattr("harness.bench.runner.BenchmarkRun.run", fail)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere/run.json")
    result = command_line(*flags, flag, tmp_path / place)
    assert (result.code, result.err) == (2, f"error: {flag} {tmp_path / place}: {message}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


# ---- Flags ---------------------------------------------------------------------------------


@pytest.mark.compiles
def test_dims_seed_and_dtype_are_forwarded(command_line, cpu_graphs):
    cpu_graphs()  # compile the graph of this run
    result = command_line(*ON_CPU, *SMALL, "--seed", "4", "--dtype", "bfloat16")
    assert "Testing with dimensions: [2, 3, 5] -> [2, 3, 7]" in result.lines
    assert any(line.endswith("bfloat16, seed 4") for line in result.lines)
    assert result.code == 6


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_variant_flag_selects(command_line, name):
    result = command_line(*ON_CPU, f"--{name}")
    assert ("(unfused)" in result.out) == (name == "unfused")
    assert sum("Testing CPU Backward Implementation" in line for line in result.lines) == 1


@pytest.mark.compiles
def test_forward_check_prints_no_ratio_without_a_gpu(command_line, cpu_graphs):
    cpu_graphs()  # compile the graph that is timed
    result = command_line("p22", "--fused", "--solution", "--device", "cpu")
    assert "FORWARD PASS Test Completed!" in result.lines
    assert "grad_input" not in result.out
    assert re.search(r"^   CPU time \(fused\): [\d,.]+ us", result.out, re.MULTILINE)
    assert "   CPU / GPU (fused): no GPU: ratio not measured" in result.lines
    assert result.code == 6


# ---- Exit codes ---------------------------------------------------------------------------------------------


@pytest.fixture
def run_with_changed_outputs(command_line, monkeypatch):
    """Return a function that runs p22's solution on the CPU with some outputs changed."""

    def run(names, change, *flags):
        execute = graphs.execute

        def execute_and_change(*arguments):
            outputs = execute(*arguments)
            for name in names:
                change(outputs[name])
            return outputs

        monkeypatch.setattr(graphs, "execute", execute_and_change)
        result = command_line(*ON_CPU, *flags)
        assert result.code == 1
        return result

    return run


@pytest.mark.compiles
def test_1_wrong_gradient_is_shown_with_its_case(run_with_changed_outputs):
    result = run_with_changed_outputs(
        ["fused.grad_weight"], lambda array: np.multiply(array, 1.001, out=array)
    )
    assert "   Overall Result: ❌ INCORRECT" in result.lines
    (line,) = [line for line in result.lines if "is wrong in" in line]
    cases = p22.cases()
    truths = [p22.PUZZLE.compute_exact(p22.inputs(case, "float32", 0))["grad_weight"] for case in cases]
    count = sum(bool(np.isfinite(truth).any()) for truth in truths)  # NaN times 1.001 is NaN
    assert line.startswith(f"   ❌ grad_linear_weight is wrong in {count} of {len(cases)} cases, most in '")
    assert "   Run this again: workbook p22 --backward --fused --device cpu --solution" in result.lines


@pytest.mark.compiles
def test_1_nan_and_unwritten_elements_are_reported(run_with_changed_outputs):
    def write_nan_or_poison(array):
        if array.ndim == 1:
            np.copyto(array, poison.make_poisoned(array.shape, "float32"))
        else:
            array.flat[0] = np.inf

    result = run_with_changed_outputs(
        ["fused.grad_input", "fused.grad_bias"], write_nan_or_poison, "--fused", *SMALL
    )
    assert "1 elements are NaN or infinite where the reference is not" in result.out
    assert "one at [0, 0, 0]: not a wrong gradient but a value that is none" in result.out
    assert "7 elements were never written" in result.out


def test_only_kernels_have_a_dtype():
    options = Options(P27, "solutions", dtype="bfloat16", repeat=2, blocks="reversed")
    got = [(option.rung, option.dtype, option.repeat, option.blocks) for option in options.file_options]
    assert got == [
        ("numpy", "float32", 1, "natural"),
        ("tape", "float32", 1, "natural"),
        (None, "bfloat16", 2, "reversed"),
    ]


def get_error_line(command_line, *arguments: str) -> str:
    """Return the only line that a command with exit code 2 prints."""
    result = command_line(*arguments)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    return result.err


@pytest.mark.parametrize(
    ("arguments", "messages"),
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
        (["p24", "--gate", "inde"], ["unknown gate 'inde' (did you mean index?); there is index, "]),
        (["hint", "p26", "swp"], ["unknown gate 'swp' (did you mean swap?); there is "]),
        (["p22", "dx"], ["unrecognized arguments: dx; got: p22 dx"]),
        (["p22", "--bakward"], ["arguments: --bakward; got: p22 --bakward (did you mean --backward?)"]),
        (["p22", "backward"], ["arguments: backward; got: p22 backward (did you mean --backward?)"]),
        (["p22", "--show", "dxx"], ["--show dxx: unknown gate 'dxx' (did you mean dx?)"]),
        (["verify", "p24", "--rung", "nope"], ["nope: no such rung of p24; there is numpy, torch, mojo"]),
        (["verify", "--rung", "nope"], ["--rung nope: no such rung of any puzzle; there is "]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("p22", "p99") else "",
)
def test_2_usage_error_is_one_line(command_line, arguments, messages):
    line = get_error_line(command_line, *arguments)
    assert all(message in line for message in messages), line


def test_help_lists_the_exit_codes(command_line):
    main_texts, puzzle_texts = ("list, hint, watch", "p22"), ("--dims B S H O", "--gate ID", "--fused")
    for arguments, expected in (
        (["--help"], main_texts),
        ([], main_texts),
        (["p22", "--help"], puzzle_texts),
    ):
        result = command_line(*arguments)
        assert result.code == 0
        for text in ("exit codes: 0 all correct", "130 interrupted", *expected):
            assert text in " ".join(result.out.split())
    assert "workbook vgpu exec -- mojo run" in command_line("vgpu", "--help").out


@pytest.mark.compiles
def test_4_compile_error_has_file_and_line(command_line, copied_package):
    provided = "unfused_backward.mojo"
    line = copied_package.replace(
        "dx[row, h] = (rstd[unsafe_offset=row] * (g - c2",
        "dx[row, h] = (rstdd[unsafe_offset=row] * (g - c2",
        file=provided,
    )
    arguments = ("p22", "--ops", str(copied_package.path), "--device", "cpu")
    short = command_line(*arguments)
    assert short.code == 4
    assert f"{copied_package.path / provided}:{line}:" in short.err and "rstdd" in short.err
    assert short.err.startswith(f"error: {copied_package.path} does not compile\n")
    assert short.err.count("\n") <= 5, "message, line of code, caret, meaning"
    whole = command_line(*arguments, "--verbose")
    assert whole.code == 4 and whole.err.startswith(short.err) and len(whole.err) > len(short.err)


def test_5_unwritable_cache_folder(command_line, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file"))
    result = command_line(*ON_CPU)
    assert result.code == 5
    assert f"cannot make the cache folder {tmp_path}/file/" in result.err
    assert "set WORKBOOK_CACHE to a folder you can write" in result.err and result.err.count("\n") == 1


@pytest.mark.compiles
def test_130_interrupt_during_a_compile(tmp_path):
    environment = {**os.environ, "WORKBOOK_CACHE": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "harness", *ON_CPU]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert any(
            line.startswith("Compiling the Mojo kernels for the CPU") for line in unwrap(process.stdout)
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.endswith("interrupted\n") and "Traceback" not in out + err
    assert not list((tmp_path / "cache" / "graphs").glob("*.mef")), "no partial files"


# ---- Problems -----------------------------------------------------------------------------------------------


def write_skeleton(folder: Path) -> OpPackage:
    """Write the package that `generate` would write, independent of problems/."""
    shutil.copytree(ROOT / "solutions" / "p22" / "op", folder)
    for file in folder.rglob("*.mojo"):
        file.write_text(blanks.make_skeleton(file.read_text()))
    return OpPackage(folder)


@pytest.mark.compiles
@pytest.mark.skipif(sys.platform != "linux", reason="the virtual GPU's driver needs Linux")
def test_3_untouched_problems_list_unsolved_blanks(recorded):
    """Run only on the virtual GPU, since the CPU path has no blanks."""
    folder = recorded["untouched"].package.path
    result = run_in_new_process("p22", "--backward", "--ops", folder, "--device", "virtual")
    assert result.returncode == 3, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    start = lines.index("Unsolved blanks (7 of 8):")
    by_id = blanks.find_blanks((folder / "layernorm_linear.mojo").read_text())
    source = folder / "layernorm_linear.mojo"
    expected = {id: f"{source}:{blank.line}  {blank.task}" for id, blank in by_id.items()}
    del expected["transfer"]  # the last gate's variant runs on request
    assert dict(line.split(maxsplit=1) for line in lines[start + 1 : start + 8]) == expected
    assert "   Overall Result: ⏳ UNSOLVED, nothing attempted is wrong" in lines
    assert "   grad_input: ⏳ UNSOLVED (blank dx)" in lines
    assert "   - Virtual GPU Backward:  ⏳ UNSOLVED" in lines


def test_default_root_is_problems():
    options = parse(["p22", "--backward"])
    assert options.exercise.load_package().path == ROOT / "problems" / "p22" / "op"
    options = parse(["p22", "--solution"])
    assert options.exercise.load_package().path == ROOT / "solutions" / "p22" / "op"


def test_2_sizes_beyond_memory_are_reported(monkeypatch, capsys):
    def refuse(options):
        raise MemoryError("Unable to allocate 522. GiB for an array")

    monkeypatch.setattr(cli, "run_puzzle", refuse)
    assert cli.main(["p22"]) == 2
    assert capsys.readouterr().err == (
        "error: not enough memory for these sizes: Unable to allocate 522. GiB for an array\n"
    )

"""The printed report and JSON of runs that are correct, wrong, unsolved or without a GPU."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typed import make_stub

from harness import console
from harness.check.compare import Repeats, TensorResult
from harness.check.limits import MeasuredCost
from harness.check.options import Options
from harness.check.results import Comparison, Diagnosis, GateResult, VariantResult
from harness.check.runs import DeviceResult, Run
from harness.devices.targets import SkippedDevice, Target
from harness.learner.blanks import Blank
from harness.puzzles.p22 import spec as p22
from harness.screens import report
from harness.vgpu import Finding

RIGHT = TensorResult(True, 2e-7, 1e-7, 1e-6, 1.5e-8, (0,))
WRONG = TensorResult(False, 5e-3, 1e-7, 1e-6, 2.5e-2, (1, 2))
CASES = p22.cases()[:2]
DETAILS = {"cpu": "x86_64", "gpu": "cuda sm_90a", "virtual": "virtual GPU (sm_90a)"}


@pytest.fixture
def make_run(puzzle, solution):
    """Return a function that creates a run of the solution; unspecified results are correct."""

    def make(
        *kinds, root="solutions", bad=None, unsolved=None, skipped=(), repeats=None, findings=(), **options
    ) -> Run:
        options = Options(puzzle, root=root, **options)
        quantities = [*puzzle.forward, *puzzle.backward, *puzzle.intermediate]
        quantities = quantities if options.backward else list(puzzle.forward)
        devices = []
        for kind in kinds:
            variants = {}
            for name in options.variants:
                unsolved_ids = {q: ids for q, ids in (unsolved or {}).items() if kind != "cpu"}
                results = {q: (bad or {}).get(q, RIGHT) for q in quantities if q not in unsolved_ids}
                comparisons = [Comparison(case, dict(results)) for case in CASES]
                variants[name] = VariantResult(name, comparisons, unsolved_ids, repeats or {})
            first = next(iter(variants.values()))
            first.findings, first.errors = list(findings), [f for f in findings if f.is_error]
            target = Target(kind, None, DETAILS[kind])
            devices.append(DeviceResult(target, kind == "cpu", 12.3, variants))
        blanks = {
            id: Blank(id, f"the task of {id}", "", (), 40) for ids in (unsolved or {}).values() for id in ids
        }
        ledger = puzzle.make_ledger((4, 4, 8, 16), "float32")
        return Run(options, solution, CASES, quantities, devices, [*skipped], blanks, ledger, [*blanks])

    return make


def print_report(run: Run, **options) -> list[str]:
    """Return the report's lines as printed in a pipe."""
    stream = io.StringIO()
    report.write_report(Console(file=stream, highlight=False, width=60), run, **options)
    return stream.getvalue().splitlines()


def test_correct_run_on_cpu_and_gpu(make_run):
    lines = print_report(make_run("cpu", "gpu"))
    assert "   on CPU: x86_64, graph cached" in lines
    assert "   on GPU: cuda sm_90a, graph compiled in 12.3 s" in lines
    assert "   - CPU Backward:  ✅ CORRECT" in lines and "   - GPU Backward:  ✅ CORRECT" in lines
    assert "   - GPU Backward (unfused):  ✅ CORRECT" in lines
    assert "   Overall Result: ✅ ALL CORRECT" in lines
    assert lines[-1] == "BACKWARD PASS Test Completed!"
    assert "   grad_linear_weight: 1.50e-08 ✅" in lines
    assert not any("Run this again" in line for line in lines)


def test_each_part_runs_after_its_line(make_run, monkeypatch):
    printed, computed = [], []
    monkeypatch.setattr(
        Run, "compute_reference", lambda run, device, names: computed.append((printed[-1], *names))
    )
    monkeypatch.setattr(
        Run, "compute_kernels", lambda run, device, names: computed.append((printed[-1], *names))
    )
    for line in report.format_report(make_run("cpu", "gpu")):
        printed.append(str(line).strip())
    kernels = {kind: f"Computing Mojo backward implementation ({kind})..." for kind in ("CPU", "GPU")}
    assert computed == [
        (line, name)
        for name in ("fused", "unfused")
        for kind in ("CPU", "GPU")
        for line in ("Computing PyTorch autograd reference...", kernels[kind])
    ]


def test_virtual_gpu_is_never_called_gpu(make_run):
    lines = print_report(make_run("cpu", "virtual"))
    assert "   - Virtual GPU Backward:  ✅ CORRECT" in lines
    assert "Testing Virtual GPU Backward Pass:" in lines
    assert all(
        "Virtual GPU" in line or "virtual GPU" in line
        for line in lines
        if "GPU" in line and "on a GPU" not in line
    )


def test_gpu_kernels_that_did_not_run_are_reported(make_run):
    lines = print_report(make_run("cpu", skipped=[SkippedDevice("gpu", "no GPU")]))
    index = lines.index("Testing GPU Backward Pass:")
    assert lines[index + 1] == "   ⏭ SKIPPED (no GPU)"
    assert "   - GPU Backward:  ⏭ SKIPPED (no GPU)" in lines
    assert "   Overall Result: ✅ CPU CORRECT, GPU NOT RUN" in lines


def test_wrong_gradient_reports_case_error_and_index(make_run):
    lines = print_report(make_run("cpu", "gpu", bad={"grad_weight": WRONG}))
    assert "   grad_linear_weight: 2.50e-02 ❌" in lines
    index = next(i for i, line in enumerate(lines) if "is wrong in" in line)
    assert lines[index] == (
        f"   ❌ grad_linear_weight is wrong in 2 of 2 cases, most in 'chapter' ({CASES[0].purpose})"
    )
    assert lines[index + 1] == (
        "      error 5.00e-03, 5e+04 times PyTorch's own 1.00e-07 (limit 1.00e-06), worst at [1, 2]"
    )
    assert "   Forward pass: ✅ CORRECT" in lines and "   Gradients:    ❌ INCORRECT" in lines
    assert "   Overall Result: ❌ INCORRECT" in lines


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (replace(WRONG, num_nonfinite=3), "3 elements are NaN or infinite where the reference is not"),
        (
            replace(WRONG, num_unwritten=4, num_nonfinite=4),
            "4 elements were never written, the first wrong one at [1, 2]",
        ),
        (replace(WRONG, baseline=0.0), "inf times PyTorch's own 0.00e+00"),
    ],
)
def test_failed_result_has_a_reason(result, message):
    assert message in report.explain_failure(result)


def test_unsolved_blanks_are_listed_with_file_line_and_task(make_run):
    lines = print_report(make_run("cpu", "gpu", unsolved={"grad_input": ("dx",), "output": ("forward",)}))
    assert "   grad_input: ⏳ UNSOLVED (blank dx)" in lines
    assert "   Forward max difference: ⏳ UNSOLVED (blank forward)" in lines
    assert "   dx       solutions/p22/op/layernorm_linear.mojo:40  the task of dx" in lines
    assert "   - CPU Backward:  ✅ CORRECT" in lines and "   - GPU Backward:  ⏳ UNSOLVED" in lines
    assert "   Overall Result: ⏳ UNSOLVED, nothing attempted is wrong" in lines


def test_repeats_report_bit_equality_or_spread(make_run):
    repeats = {
        "grad_input": Repeats(5, True, 0.0, 0),
        "grad_weight": Repeats(5, False, 2.25, 1, atomic=True),
        "grad_bias": Repeats(5, False, 1.0, 0, atomic=True),
        "grad_ln_bias": Repeats(5, False, 1.0, 0),
    }
    lines = print_report(make_run("gpu", repeats=repeats, variants=("fused",)))
    assert "   grad_input: bit-equal in 5 runs (as it must be: the order of its sums is fixed)" in lines
    atomics = "blocks add with atomics, in any order, and the sum is rounded once: the last bit may differ"
    assert f"   grad_linear_bias: spread of 1.0 ulp in 5 runs ({atomics})" in lines
    more = f"{atomics}, here more: terms cancel, or a sum is kept in float32"
    assert f"   grad_linear_weight: spread of 2.2 ulp in 5 runs ({more}), ❌ wrong in 1" in lines
    fixed = "❌ bit-equal is what it must be: the order of its sums is fixed"
    assert f"   grad_ln_bias: spread of 1.0 ulp in 5 runs ({fixed})" in lines


RACE = Finding("global race", "two blocks\n  and one element", "a.mojo:2:1")
NOTE = Finding("global race", "within", "max/a.mojo:1:1", is_error=False)


def test_virtual_gpu_findings_are_printed(make_run):
    run = make_run("virtual", findings=[RACE, NOTE])
    lines = print_report(run)
    assert "Virtual GPU, memory and race check: 1 finding, 1 note on library code" in lines
    assert "   error: global race at a.mojo:2:1" in lines and "    two blocks" in " ".join(lines)
    assert not any("note: global race" in line for line in lines)
    assert any("note: global race" in line for line in print_report(run, verbose=True))
    assert "Virtual GPU, memory and race check: no findings" in print_report(make_run("virtual"))


def test_wrong_gate_is_explained_once(make_run):
    """The quantity's error and the gate's diagnosis are printed once, and findings are not repeated."""
    run = make_run("virtual", bad={"grad_input": WRONG}, findings=[RACE], variants=("fused",))
    run.blanks["dx"] = Blank("dx", "the task", "", ("x",), 40)
    (variant,) = run.devices[0].variants.values()
    variant.diagnoses["grad_input"] = Diagnosis("diagnosis of the quantity")
    gate = next(gate for gate in run.options.puzzle.gates if gate.id == "dx")
    variant.gates = [
        GateResult(
            gate, "wrong", variant.comparisons, [RACE], ["diagnosis of the gate"], "overwritten", "dx-3"
        )
    ]
    lines = print_report(run)
    index = lines.index("❌ dx        wrong in all 2 cases")
    assert lines[index + 1 : index + 3] == [
        "      diagnosis of the gate",
        "      next: workbook hint p22 dx-3",
    ]
    (measured,) = [i for i, line in enumerate(lines) if line.startswith("      error 5.00e-03, 5e+04 times")]
    assert measured < lines.index("   Overall:      ❌ INCORRECT") < index
    assert "diagnosis of the quantity" not in "\n".join(lines)
    assert "Virtual GPU, memory and race check: 1 finding" in lines
    assert not any("error: global race" in line for line in lines)
    data = report.make_json(run)["devices"][0]["variants"]["fused"]["gates"]["dx"]
    assert (data["state"], data["mistake"], data["lines"]) == (
        "wrong",
        "overwritten",
        ["diagnosis of the gate"],
    )


def test_unfinished_run_is_reported(make_run):
    run = make_run("virtual", variants=("fused",))
    (variant,) = run.devices[0].variants.values()
    variant.comparisons, variant.failure = [], "fused_rows did not end within 100,000 steps"
    lines = print_report(run)
    assert "   ❌ fused_rows did not end within 100,000 steps" in lines
    assert "   Overall:      ❌ INCORRECT" in lines and "   grad_input: not compared" in lines


def test_ledger_lists_saved_bytes_of_pytorch_and_each_variant(make_run):
    run = make_run("cpu")
    run.ledger = replace(
        run.ledger, saved_by_variant={"fused": {"input": 512, "lse": 64}, "not run": {"input": 1}}
    )
    lines = print_report(run)
    first = lines.index("   PyTorch eager: 1,152 (input 512, mean 64, rstd 64, ln_out 512)")
    assert lines[first + 1 : first + 3] == [
        "   ours:          640 (input 512, mean 64, rstd 64)",
        "   fused:         576 (input 512, lse 64)",
    ]
    assert not any("not run" in line for line in lines)
    assert report.make_json(run)["ledger"]["saved_by"]["fused"] == {"input": 512, "lse": 64}


def test_forward_check_prints_no_gradients_or_ledger(make_run):
    lines = print_report(make_run("cpu", backward=False))
    assert lines[-1] == "FORWARD PASS Test Completed!"
    assert "   - CPU Forward:  ✅ CORRECT" in lines
    assert not any("grad_" in line or "Bytes" in line or "Comprehensive" in line for line in lines)


def test_output_is_not_wrapped_or_parsed_as_markup(make_run):
    """Case names and compiler output may contain brackets."""
    message = "[bold]reads x[3, 4][/bold]" + "y" * 80
    lines = print_report(make_run("cpu", "virtual", findings=[Finding("trap", message)]))
    assert any(message in line for line in lines)


@pytest.mark.parametrize(
    ("options", "bad", "expected"),
    [
        ({}, {"grad_input": WRONG}, "workbook p22 --backward --solution"),
        (
            {"variants": ("unfused",), "dims": (2, 3, 5, 7), "dtype": "bfloat16", "seed": 3},
            {"grad_input": WRONG},
            "workbook p22 --backward --unfused --solution --dims 2 3 5 7 --dtype bfloat16 --seed 3",
        ),
        (
            {"variants": ("fused",), "gate": "dx", "repeat": 7, "blocks": "shuffled:2"},
            {"grad_input": WRONG},
            "workbook p22 --backward --fused --solution --gate dx --repeat 7 --blocks shuffled:2",
        ),
        (
            {"root": "some/op", "variants": ("fused",), "device": "virtual"},
            {"grad_input": WRONG},
            "workbook p22 --backward --fused --device virtual --ops some/op",
        ),
        # All values are correct, but another check failed, for example for races.
        (
            {"variants": ("rmsnorm",), "device": "virtual"},
            {},
            "workbook p22 --backward --rmsnorm --device virtual --solution",
        ),
    ],
)
def test_suggested_command_repeats_the_run(make_run, options, bad, expected):
    from harness.check.options import parse

    run = make_run("cpu", "gpu", bad=bad, **options)
    assert report.format_rerun_command(run) == expected
    assert parse(expected.split()[1:]) == run.options


def test_json_has_results_under_printed_names(make_run):
    bad = {"grad_weight": WRONG}
    run = make_run("cpu", "gpu", bad=bad, skipped=[SkippedDevice("virtual", "why not")])
    data = json.loads(json.dumps(report.make_json(run)))
    assert data["exit_code"] == 1 and data["skipped"] == {"virtual": "why not"}
    (cpu, gpu) = data["devices"]
    assert (cpu["device"], cpu["cached"], gpu["cached"], gpu["compile_seconds"]) == ("cpu", True, False, 12.3)
    result = gpu["variants"]["fused"]["cases"]["chapter"]["grad_linear_weight"]
    expected = {"ok": False, "error": 5e-3, "pytorch_error": 1e-7, "limit": 1e-6}
    assert {name: result[name] for name in expected} == expected
    assert gpu["variants"]["fused"]["state"] == "wrong"
    assert data["ledger"]["saved_ours"] == {"input": 512, "mean": 64, "rstd": 64}


def test_dims_and_paths_are_described(puzzle, monkeypatch, tmp_path):
    assert puzzle.format_dims((4, 4, 8, 16)) == "[4, 4, 8] -> [4, 4, 16]"
    assert report.describe_bytes({}) == "none"
    monkeypatch.chdir(tmp_path)
    assert console.format_path(tmp_path / "a" / "b") == "a/b"
    assert console.format_path(tmp_path.parent) == str(tmp_path.parent)


def test_variant_without_forward_pass_has_no_forward_line(make_run):
    lines = print_report(make_run("virtual", variants=("rmsnorm",)))
    assert not [line for line in lines if "Forward" in line or line.startswith("Bytes")]
    assert "   rms_grad_input: 1.50e-08 ✅" in lines and "   Overall:      ✅ CORRECT" in lines


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (["d"], "wrong in 5 of 6 cases (all but d)"),
        (["d", "f"], "wrong in 4 of 6 cases (a, b, c, e)"),
        (["a", "b", "c"], "wrong in 3 of 6 cases (d, e, f)"),
        ([], "wrong in all 6 cases"),
    ],
)
def test_few_correct_cases_are_listed(expected, message):
    comparisons = [
        Comparison(replace(CASES[0], name=name), {"grad_input": RIGHT if name in expected else WRONG})
        for name in "abcdef"
    ]
    result = GateResult(next(gate for gate in p22.PUZZLE.gates if gate.id == "dx"), "wrong", comparisons)
    (line, *_) = report.format_gate(result, p22.PUZZLE, Path("layernorm_linear.mojo"), {})
    assert message in line.plain


def test_correct_but_costly_provided_code_is_called_slow():
    gate = next(gate for gate in p22.PUZZLE.gates if gate.id == "dx")
    blanks = {"dx": make_stub(Blank, line=3, task="be fast")}
    for costs, words in (([make_stub(MeasuredCost)], "is slow:"), ([], "is wrong in every case:")):
        comparisons = [Comparison(CASES[0], {"grad_input": RIGHT if costs else WRONG})]
        result = GateResult(gate, "unsolved", comparisons, diagnosis=["why"], costs=costs)
        lines = report.format_gate(result, p22.PUZZLE, Path("layernorm_linear.mojo"), blanks)
        assert [line.plain for line in lines][2:] == [f"      the provided code {words}", "      why"]


def test_unsolved_blank_and_location_are_separated(make_run):
    run = make_run("virtual")
    run.unsolved.append("longest_id")
    run.blanks = {"longest_id": make_stub(Blank, line=3, task="be fast")}
    *_, line = report.format_unsolved(run)
    assert str(line).split()[0] == "longest_id"

"""The report: what it prints for runs that are right, wrong, unsolved or without a GPU, and the same as JSON."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness import console
from harness.check.compare import Repeats, TensorResult
from harness.check.options import Options
from harness.check.results import Comparison, Diagnosis, GateResult, VariantResult
from harness.check.runs import DeviceResult, Run
from harness.devices.targets import Skipped, Target
from harness.learner.blanks import Blank
from harness.puzzles.p22 import spec as p22
from harness.screens import report
from harness.vgpu import Finding

RIGHT = TensorResult(True, 2e-7, 1e-7, 1e-6, 1.5e-8, (0,))
WRONG = TensorResult(False, 5e-3, 1e-7, 1e-6, 2.5e-2, (1, 2))
CASES = p22.cases()[:2]
WORDS = {"cpu": "x86_64", "gpu": "cuda sm_90a", "virtual": "virtual GPU (sm_90a)"}


@pytest.fixture
def make_run(puzzle, solution):
    """A run of the solution on some kinds of device with given verdicts, everything else right."""

    def make(*kinds, bad=None, unsolved=None, skipped=(), repeats=None, findings=(), **options) -> Run:
        options = Options(puzzle, root="solutions", **options)
        quantities = [*puzzle.forward, *puzzle.backward, *puzzle.intermediate]
        quantities = quantities if options.backward else list(puzzle.forward)
        devices = []
        for kind in kinds:
            variants = {}
            for name in options.variants:
                waiting = {q: ids for q, ids in (unsolved or {}).items() if kind != "cpu"}
                verdicts = {q: (bad or {}).get(q, RIGHT) for q in quantities if q not in waiting}
                comparisons = [Comparison(case, dict(verdicts)) for case in CASES]
                variants[name] = VariantResult(name, comparisons, waiting, repeats or {})
            first = next(iter(variants.values()))
            first.findings, first.errors = list(findings), [f for f in findings if f.is_error]
            target = Target(kind, None, WORDS[kind])
            devices.append(DeviceResult(target, kind == "cpu", 12.3, variants))
        blanks = {
            id: Blank(id, f"the task of {id}", "", (), 40) for ids in (unsolved or {}).values() for id in ids
        }
        return Run(
            options,
            solution,
            CASES,
            quantities,
            devices,
            list(skipped),
            blanks,
            puzzle.ledger((4, 4, 8, 16), "float32"),
            list(blanks),
        )

    return make


def printed(run: Run, **options) -> list[str]:
    """The lines of the report in a pipe."""
    stream = io.StringIO()
    report.write(Console(file=stream, highlight=False, width=60), run, **options)
    return stream.getvalue().splitlines()


def test_a_right_run_on_cpu_and_gpu(make_run):
    lines = printed(make_run("cpu", "gpu"))
    assert "   - CPU Backward:  ✅ CORRECT" in lines and "   - GPU Backward:  ✅ CORRECT" in lines
    assert "   - GPU Backward (unfused):  ✅ CORRECT" in lines
    assert "   Overall Result: ✅ ALL CORRECT" in lines
    assert lines[-1] == "BACKWARD PASS Test Completed!"
    assert "   grad_linear_weight: 1.50e-08 ✅" in lines
    assert not any("Run this again" in line for line in lines)


def test_each_part_is_computed_after_the_line_that_says_so(make_run, monkeypatch):
    said, came = [], []
    monkeypatch.setattr(Run, "compute_reference", lambda run, device, names: came.append((said[-1], *names)))
    monkeypatch.setattr(Run, "compute_kernels", lambda run, device, names: came.append((said[-1], *names)))
    for line in report.lines(make_run("cpu", "gpu")):
        said.append(str(line).strip())
    kernels = {kind: f"Computing Mojo backward implementation ({kind})..." for kind in ("CPU", "GPU")}
    assert came == [
        (line, name)
        for name in ("fused", "unfused")
        for kind in ("CPU", "GPU")
        for line in ("Computing PyTorch autograd reference...", kernels[kind])
    ]


def test_how_each_graph_came_about(make_run):
    lines = printed(make_run("cpu", "gpu"))
    assert "   on CPU: x86_64, graph cached" in lines
    assert "   on GPU: cuda sm_90a, graph compiled in 12.3 s" in lines


def test_a_simulated_gpu_is_never_called_a_gpu(make_run):
    lines = printed(make_run("cpu", "virtual"))
    assert "   - Virtual GPU Backward:  ✅ CORRECT" in lines
    assert "Testing Virtual GPU Backward Pass:" in lines
    assert all(
        "Virtual GPU" in line or "virtual GPU" in line
        for line in lines
        if "GPU" in line and "on a GPU" not in line
    )


def test_gpu_kernels_that_ran_nowhere(make_run):
    lines = printed(make_run("cpu", skipped=[Skipped("gpu", "no GPU")]))
    at = lines.index("Testing GPU Backward Pass:")
    assert lines[at + 1] == "   ⏭ SKIPPED (no GPU)"
    assert "   - GPU Backward:  ⏭ SKIPPED (no GPU)" in lines
    assert "   Overall Result: ✅ CPU CORRECT, GPU NOT RUN" in lines


def test_a_wrong_gradient_names_case_error_and_place(make_run):
    lines = printed(make_run("cpu", "gpu", bad={"grad_weight": WRONG}))
    assert "   grad_linear_weight: 2.50e-02 ❌" in lines
    at = next(i for i, line in enumerate(lines) if "is wrong in" in line)
    assert lines[at] == (
        f"   ❌ grad_linear_weight is wrong in 2 of 2 cases, most in 'chapter' ({CASES[0].why})"
    )
    assert lines[at + 1] == (
        "      error 5.00e-03, 5e+04 times PyTorch's own 1.00e-07 (limit 1.00e-06), worst at [1, 2]"
    )
    assert "   Forward pass: ✅ CORRECT" in lines and "   Gradients:    ❌ INCORRECT" in lines
    assert "   Overall Result: ❌ INCORRECT" in lines


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (replace(WRONG, nonfinite=3), "3 elements are NaN or infinite where the reference is not"),
        (
            replace(WRONG, unwritten=4, nonfinite=4),
            "4 elements were never written, the first wrong one at [1, 2]",
        ),
        (replace(WRONG, baseline=0.0), "inf times PyTorch's own 0.00e+00"),
    ],
)
def test_why_a_verdict_is_not_ok(verdict, words):
    assert words in report.explain(verdict)


def test_unsolved_blanks_are_listed_with_file_line_and_task(make_run):
    lines = printed(make_run("cpu", "gpu", unsolved={"grad_input": ("dx",), "output": ("forward",)}))
    assert "   grad_input: ⏳ UNSOLVED (blank dx)" in lines
    assert "   Forward max difference: ⏳ UNSOLVED (blank forward)" in lines
    assert "   dx       solutions/p22/op/layernorm_linear.mojo:40  the task of dx" in lines
    assert "   - CPU Backward:  ✅ CORRECT" in lines and "   - GPU Backward:  ⏳ UNSOLVED" in lines
    assert "   Overall Result: ⏳ UNSOLVED, nothing attempted is wrong" in lines


def test_repeats_say_bit_equal_or_the_spread(make_run):
    repeats = {
        "grad_input": Repeats(5, True, 0.0, 0),
        "grad_weight": Repeats(5, False, 2.25, 1, atomic=True),
        "grad_bias": Repeats(5, False, 1.0, 0, atomic=True),
        "grad_ln_bias": Repeats(5, False, 1.0, 0),
    }
    lines = printed(make_run("gpu", repeats=repeats, variants=("fused",)))
    assert "   grad_input: bit-equal in 5 runs (as it must be: the order of its sums is fixed)" in lines
    atomics = "blocks add with atomics, in any order, and the sum is rounded once: the last bit may differ"
    assert f"   grad_linear_bias: spread of 1.0 ulp in 5 runs ({atomics})" in lines
    more = f"{atomics}, here more: terms cancel, or a sum is kept in float32"
    assert f"   grad_linear_weight: spread of 2.2 ulp in 5 runs ({more}), ❌ wrong in 1" in lines
    fixed = "❌ bit-equal is what it must be: the order of its sums is fixed"
    assert f"   grad_ln_bias: spread of 1.0 ulp in 5 runs ({fixed})" in lines


RACE = Finding("global race", "two blocks\n  and one element", "a.mojo:2:1")
NOTE = Finding("global race", "within", "max/a.mojo:1:1", is_error=False)


def test_findings_of_the_virtual_gpu(make_run):
    run = make_run("virtual", findings=[RACE, NOTE])
    lines = printed(run)
    assert "Virtual GPU, memory and race check: 1 finding, 1 note on library code" in lines
    assert "   error: global race at a.mojo:2:1" in lines and "    two blocks" in " ".join(lines)
    assert not any("note: global race" in line for line in lines)
    assert any("note: global race" in line for line in printed(run, verbose=True))
    assert "Virtual GPU, memory and race check: no findings" in printed(make_run("virtual"))


def test_a_wrong_gate_says_once_what_is_wrong(make_run):
    """Its quantities are measured, its own words say why, and its findings are not listed a second time."""
    run = make_run("virtual", bad={"grad_input": WRONG}, findings=[RACE], variants=("fused",))
    run.blanks["dx"] = Blank("dx", "the task", "", ("x",), 40)
    (variant,) = run.devices[0].variants.values()
    variant.diagnoses["grad_input"] = Diagnosis("said of the quantity")
    gate = next(gate for gate in run.options.puzzle.gates if gate.id == "dx")
    variant.gates = [
        GateResult(gate, "wrong", variant.comparisons, [RACE], ["said of the gate"], "overwritten", "dx-3")
    ]
    lines = printed(run)
    at = lines.index("❌ dx        wrong in all 2 cases")
    assert lines[at + 1 : at + 3] == ["      said of the gate", "      next: workbook hint p22 dx-3"]
    (measured,) = [i for i, line in enumerate(lines) if line.startswith("      error 5.00e-03, 5e+04 times")]
    assert measured < lines.index("   Overall:      ❌ INCORRECT") < at
    assert "said of the quantity" not in "\n".join(lines)
    assert "Virtual GPU, memory and race check: 1 finding" in lines
    assert not any("error: global race" in line for line in lines)
    data = report.as_json(run)["devices"][0]["variants"]["fused"]["gates"]["dx"]
    assert (data["state"], data["mistake"], data["lines"]) == ("wrong", "overwritten", ["said of the gate"])


def test_a_run_that_did_not_end_says_so(make_run):
    run = make_run("virtual", variants=("fused",))
    (variant,) = run.devices[0].variants.values()
    variant.comparisons, variant.failure = [], "fused_rows did not end within 100,000 steps"
    lines = printed(run)
    assert "   ❌ fused_rows did not end within 100,000 steps" in lines
    assert "   Overall:      ❌ INCORRECT" in lines and "   grad_input: not compared" in lines


def test_the_ledger_adds_up(make_run):
    lines = printed(make_run("cpu"))
    assert "   PyTorch eager: 1,152 (input 512, mean 64, rstd 64, ln_out 512)" in lines
    assert "   ours:          640 (input 512, mean 64, rstd 64)" in lines


def test_a_variant_that_keeps_something_else_has_a_line_of_its_own(make_run):
    run = make_run("cpu")
    run.ledger = replace(run.ledger, saved_by={"fused": {"input": 512, "lse": 64}, "not run": {"input": 1}})
    lines = printed(run)
    assert lines[lines.index("   ours:          640 (input 512, mean 64, rstd 64)") + 1] == (
        "   fused:         576 (input 512, lse 64)"
    )
    assert not any("not run" in line for line in lines)
    assert report.as_json(run)["ledger"]["saved_by"]["fused"] == {"input": 512, "lse": 64}


def test_the_forward_check_prints_no_gradients_and_no_ledger(make_run):
    lines = printed(make_run("cpu", backward=False))
    assert lines[-1] == "FORWARD PASS Test Completed!"
    assert "   - CPU Forward:  ✅ CORRECT" in lines
    assert not any("grad_" in line or "Bytes" in line or "Comprehensive" in line for line in lines)


def test_nothing_wraps_and_nothing_is_markup(make_run):
    """In a pipe of 60 columns; case names and compiler output may hold brackets."""
    run = make_run("cpu", "virtual", findings=[Finding("trap", "[bold]reads x[3, 4][/bold]" + "y" * 80)])
    lines = printed(run)
    assert any("[bold]reads x[3, 4][/bold]" + "y" * 80 in line for line in lines)
    assert max(map(len, lines)) > 100


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
        # No value is wrong: a race or the like was found.
        (
            {"variants": ("rmsnorm",), "device": "virtual"},
            {},
            "workbook p22 --backward --rmsnorm --device virtual --solution",
        ),
    ],
)
def test_the_command_to_run_again_is_one_that_repeats_the_run(make_run, options, bad, expected):
    from harness.check.options import parse

    run = make_run("cpu", "gpu", bad=bad, **options)
    assert report.command(run) == expected
    assert parse(expected.split()[1:]) == run.options


def test_json_holds_the_verdicts_under_printed_names(make_run):
    bad = {"grad_weight": WRONG}
    run = make_run("cpu", "gpu", bad=bad, skipped=[Skipped("virtual", "why not")])
    data = json.loads(json.dumps(report.as_json(run)))
    assert data["exit_code"] == 1 and data["skipped"] == {"virtual": "why not"}
    (cpu, gpu) = data["devices"]
    assert (cpu["device"], cpu["cached"], gpu["cached"], gpu["compile_seconds"]) == ("cpu", True, False, 12.3)
    verdict = gpu["variants"]["fused"]["cases"]["chapter"]["grad_linear_weight"]
    assert (verdict["ok"], verdict["error"], verdict["pytorch_error"], verdict["limit"]) == (
        False,
        5e-3,
        1e-7,
        1e-6,
    )
    assert gpu["variants"]["fused"]["state"] == "wrong"
    assert data["ledger"]["saved_ours"] == {"input": 512, "mean": 64, "rstd": 64}


def test_dims_and_paths_in_words(puzzle, monkeypatch, tmp_path):
    assert puzzle.say_dims((4, 4, 8, 16)) == "[4, 4, 8] -> [4, 4, 16]"
    assert report.describe_bytes({}) == "none"
    monkeypatch.chdir(tmp_path)
    assert console.shown(tmp_path / "a" / "b") == "a/b"
    assert console.shown(tmp_path.parent) == str(tmp_path.parent)


def test_a_variant_without_a_forward_pass_says_nothing_of_one(make_run):
    lines = printed(make_run("virtual", variants=("rmsnorm",)))
    assert not [line for line in lines if "Forward" in line or line.startswith("Bytes")]
    assert "   rms_grad_input: 1.50e-08 ✅" in lines and "   Overall:      ✅ CORRECT" in lines


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (["d"], "wrong in 5 of 6 cases (all but d)"),
        (["d", "f"], "wrong in 4 of 6 cases (a, b, c, e)"),
        (["a", "b", "c"], "wrong in 3 of 6 cases (d, e, f)"),
        ([], "wrong in all 6 cases"),
    ],
)
def test_the_cases_that_are_right_are_named_where_they_are_few(right, words):
    comparisons = [
        Comparison(replace(CASES[0], name=name), {"grad_input": RIGHT if name in right else WRONG})
        for name in "abcdef"
    ]
    result = GateResult(next(gate for gate in p22.PUZZLE.gates if gate.id == "dx"), "wrong", comparisons)
    (line, *_) = report.result_lines(result, p22.PUZZLE, Path("layernorm_linear.mojo"), {})
    assert words in line.plain


def test_a_verdict_goes_on_below_its_words():
    stream = io.StringIO()
    terminal = Console(file=stream, width=80, force_terminal=True, color_system=None)
    console.print_lines(terminal, [f"✅ dbias        correct in 9 cases; {'largest error, ' * 4}6.4e-07"])
    first, second = stream.getvalue().splitlines()
    assert first.startswith("✅ dbias        correct") and second.startswith(" " * 16)
    assert second[16] != " " and "6.4e-07" in second

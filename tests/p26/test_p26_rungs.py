"""Puzzle 26's rungs: diagnoses of correct and incorrect backends."""

import pytest
import torch
from changed_solutions import write_edited_solution

from harness import cli
from harness.check import zoo
from harness.check.checker import load_checker
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.puzzles.p26 import compile_cases, shows
from harness.puzzles.p26.checker import CHECKS
from harness.puzzles.p26.compile_cases import (
    CheckError,
    CompileCase,
    capture_graph,
    check_case,
    make_numbers,
    make_pass_backend,
)
from harness.puzzles.p26.spec import PUZZLE
from harness.toolchain import roots

pytestmark = pytest.mark.compiles
WRONG = zoo.load_wrong_solutions("p26")
QUICK = [rung for rung in PUZZLE.rungs if rung.id in ("printer", "fold", "match")]


@pytest.fixture(scope="module")
def checkers():
    return {rung.id: load_checker(Exercise(PUZZLE, rung, roots.get_solutions())) for rung in PUZZLE.rungs}


def test_symptoms_have_one_line_each(monkeypatch, command_line):
    selected = [wrong for wrong in WRONG if wrong.name in ("rows_of_inputs", "factor_behind_only")]
    monkeypatch.setattr(zoo, "load_wrong_solutions", lambda name: selected)
    result = command_line("p26", "--symptoms")
    assert result.code == 0
    assert [line.split()[0] for line in result.lines] == [wrong.name for wrong in selected]
    symptoms = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.lines}
    assert (
        symptoms["factor_behind_only"] == "not-rewritten: 2.0 * x: factor(node) is None, expected x and 2.0"
    )
    assert symptoms["rows_of_inputs"].startswith("rows: rows(gm) is [('L_x_', (4, 6), 'float32'), ")
    monkeypatch.setattr(shows, "find_error", lambda *arguments: None)
    result = command_line("p26", "--symptoms")
    assert result.code == 1 and [line.split()[1] for line in result.lines] == ["passes", "passes"]


def test_zoo_has_a_wrong_backend_for_each_gate():
    assert {wrong.gate for wrong in WRONG} == {gate.id for gate in PUZZLE.gates} == set(CHECKS)
    expected_kinds = "aliased across-mutation cast-dropped cudagraph-unsafe dead-nodes erased-in-use exact-gelu input-written"
    expected_kinds += " integer-through-float minus-zero"
    expected_kinds += " no-gradient not-a-tuple output-order rest-dropped shape-baked shared-norm stale-code"
    assert {wrong.mistake for wrong in WRONG} >= {*expected_kinds.split()}
    assert all(wrong.story and len(wrong.story.splitlines()) == 1 for wrong in WRONG)


# ---- The checks of a backend --------------------------------------------------------------------------------

X = make_numbers()


def find_failure_kind(case: CompileCase, backend) -> str:
    with pytest.raises(CheckError) as raised:
        check_case(case, backend)
    return raised.value.kind


def make_backend(change):
    """Create a backend that transforms the graph's outputs."""
    return lambda gm, inputs: lambda *args: change(gm.forward(*args))


SIN_COS = CompileCase("two", lambda x: (x.sin(), x.cos()), (X,))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("not-a-tuple", lambda out: out[0]),
        ("output-missing", lambda out: out[:1]),
        ("output-order", lambda out: out[::-1]),
        ("value", lambda out: (out[0] * 1.001, out[1])),
        ("shape", lambda out: (out[0][:2], out[1])),
        ("dtype", lambda out: (out[0].double(), out[1])),
        ("no-gradient", lambda out: (out[0].detach(), out[1].detach())),
        ("gradient", lambda out: (out[0].detach(), out[1])),
    ],
)
def test_output_errors_are_distinguished(kind, change):
    assert find_failure_kind(SIN_COS, make_backend(change)) == kind


def test_errors_other_than_outputs_are_reported():
    def mutate_input(gm, inputs):
        return lambda x: (gm.forward(x), x.add_(1))[0]

    inference = CompileCase("sin and cos", SIN_COS.function, (X,), gradients=False)
    assert find_failure_kind(inference, mutate_input) == "input-written"
    identity_case = CompileCase("x + 0", lambda x: x * 1.0, (X,), gradients=False)
    assert find_failure_kind(identity_case, lambda gm, inputs: lambda x: (x,)) == "aliased"
    assert find_failure_kind(SIN_COS, lambda gm, inputs: None) == "not-callable"
    zero = CompileCase("x + 0.0", lambda x: x + 0.0, (torch.tensor([-0.0]),), bit_exact=True, gradients=False)
    assert find_failure_kind(zero, make_backend(lambda out: (-out[0],))) == "value"


def test_dead_nodes_are_reported():
    case = CompileCase("x.sin() + 1", lambda x: x.sin() + 1, (X,), ("sin", "add"))
    check_case(case, make_pass_backend(lambda gm: None))
    expected = CompileCase("x.sin() + 1", lambda x: x.sin() + 1, (X,), ("add",))
    assert find_failure_kind(expected, make_pass_backend(lambda gm: None)) == "not-rewritten"

    def leave_dead_nodes(gm):
        (x,) = (n for n in gm.graph.nodes if n.op == "placeholder")
        with gm.graph.inserting_after(x):
            gm.graph.call_function(torch.cos, (x,)).meta = dict(x.meta)

    assert find_failure_kind(case, make_pass_backend(leave_dead_nodes)) == "dead-nodes"

    def reorder_nodes(gm):
        first, second = [n for n in gm.graph.nodes if n.op in compile_cases.CALLS]
        first.prepend(second)

    assert find_failure_kind(case, make_pass_backend(reorder_nodes)) == "out-of-order"


def test_recompilation_per_shape_is_reported():
    case = CompileCase("sin", lambda x: x.sin(), (X,), more_inputs=((X[:2],),), dynamic=True)

    def bake_shape(gm, inputs):
        [int(size) for size in inputs if isinstance(size, torch.SymInt)]
        return gm.forward

    assert find_failure_kind(case, bake_shape) == "shape-baked"
    check_case(case, lambda gm, inputs: gm.forward)


def test_exact_holds_for_all_bfloat16_values():
    """Compare the solution's rule with all 65,536 values, in both directions for some constants."""
    from harness.check.python_files import load_module
    from harness.puzzles.p26.folding import list_values

    exact = load_module(roots.get_solutions() / "p26" / "fold.py")["exact"]
    x = list_values(torch.bfloat16)
    assert len(x.view(torch.int16).unique()) == 65536
    for a, b, expected in ((2.0, 3.0, True), (3.0, 5.0, False), (2.0, 0.5, False), (7.0, -4.0, True)):
        sequential, folded = x * a * b, x * (a * b)
        is_equal = bool(((sequential == folded) | (sequential.isnan() & folded.isnan())).all())
        assert exact(a, b, torch.bfloat16) is expected is is_equal


def test_graph_breaks_match_dynamos_count():
    from harness.puzzles.p26.printing import broken

    assert torch._dynamo.explain(broken)(X).graph_break_count == 1


# ---- The commands, the hints, the chapter -------------------------------------------------------------------


def test_default_run_checks_all_rungs(monkeypatch, capsys):
    """Each part has a heading; only the fast parts run here."""
    monkeypatch.setattr(
        "harness.screens.checking.GateCheck.run",
        lambda check, console: (3 if check.exercise.rung.id == "swap" else 0, {}),
    )
    assert cli.main(["p26", "--solution"]) == 3
    output = capsys.readouterr().out
    assert [rung.label + ":" in output for rung in PUZZLE.rungs] == [True] * 5


def test_single_gate_and_single_rung_can_be_run(capsys):
    assert cli.main(["p26", "--gate", "history", "--solution"]) == 0
    assert "✅ history" in capsys.readouterr().out
    assert cli.main(["p26", "--gate", "nothing"]) == 2
    assert cli.main(["p26", "--rung", "fold", "--solution", "--gate", "exact"]) == 0


def test_learner_exception_is_reported_with_its_line(tmp_path, checkers):
    path = write_edited_solution(PUZZLE, "fold", tmp_path, sweep="    return 1 / 0")
    (result,) = checkers["fold"].check(path, ["sweep"])
    assert result.mistake == "raises" and "fold.py:" in result.diagnosis[0]
    assert "ZeroDivisionError" in result.diagnosis[0]


def test_graph_error_reports_the_line_that_created_the_node(tmp_path, checkers):
    """Dynamo wraps an exception of a pass; the kind of the wrong function determines the mistake."""
    path = write_edited_solution(
        PUZZLE, "match", tmp_path, ("gate.all_input_nodes == [x]", "gate.args[0] is x")
    )
    line = next(
        k for k, line_text in enumerate(path.read_text().splitlines(), 1) if "gate.args[0] is x" in line_text
    )
    (result,) = checkers["match"].check(path, ["silu"])
    assert result.diagnosis[0] == (
        f"keywords: {path}:{line}: torch.sigmoid(input=x) * x: IndexError: tuple index out of range"
    )


def test_rewritten_graph_error_reports_the_blank(tmp_path, checkers):
    """The traceback of a failing graph contains no line of the learner's file."""
    body = "    for node in gm.graph.nodes:\n        if node.op == 'call_function':\n            node.target = math.comb\n    return 0"
    path = write_edited_solution(PUZZLE, "fold", tmp_path, sweep=body)
    line = blanks.find_blanks(path.read_text())["sweep"].line
    (result,) = checkers["fold"].check(path, ["sweep"])
    assert f"{path}:{line}: in the graph that it leaves: TypeError" in result.diagnosis[0]


@pytest.mark.parametrize(
    ("rung", "part", "body", "gate"),
    [
        ("swap", "refuse", '    return ""', "whole"),
        ("fold", "factor", "    return None", "chain"),
        ("printer", "rows", "    return []", "show"),
    ],
)
def test_gate_names_the_wrong_part_to_fix_first(tmp_path, checkers, rung, part, body, gate):
    (result,) = checkers[rung].check(write_edited_solution(PUZZLE, rung, tmp_path, **{part: body}), [gate])
    assert (result.state, result.mistake, result.hint) == ("wrong", None, f"{part}-1")
    assert result.diagnosis == [f"computed from {part}, which is wrong: fix that first"]


def test_wrong_gate_with_a_wrong_part_is_reported(tmp_path, checkers):
    path = write_edited_solution(PUZZLE, "fold", tmp_path, factor="    return None", chain="    return 0")
    (result,) = checkers["fold"].check(path, ["chain"])
    assert result.mistake == "not-rewritten" and result.hint == "chain-1"


@pytest.mark.parametrize(
    ("rung", "gate", "body", "message", "advice"),
    [
        ("fold", "exact", "    return False", "exact(2.0, 3.0, torch.float32) is False, expected True", "too-careful"),
        ("compose", "rewrite", "    for each in passes:\n        each(gm)\n    gm.recompile()", "what rewrite returns is None, expected 1", "count"),
        ("compose", "backend", "    rewrite(gm, passes)", "compiler_fn did not return callable", "not-callable"),
        ("printer", "rows", "    len(gm.graph.nodes)", "rows(gm) is None, expected a list", "rows"),
        ("printer", "groups", "    len(gm.graph.nodes)", "groups(gm) is None, expected a list", "groups"),
    ],
)  # fmt: skip
def test_wrong_return_type_is_reported(tmp_path, checkers, rung, gate, body, message, advice):
    (result,) = checkers[rung].check(write_edited_solution(PUZZLE, rung, tmp_path, **{gate: body}), [gate])
    assert result.mistake == advice and message in result.diagnosis[0], result.diagnosis


def test_output_of_a_failing_graph_is_hidden(tmp_path, checkers, capfd):
    """FX prints a traceback to standard error if generated code raises."""
    dtype = "or not value(x).dtype == value(end).dtype in DTYPES:"
    path = write_edited_solution(PUZZLE, "match", tmp_path, (dtype, "or not is_tensor(end):"))
    (result,) = checkers["match"].check(path, ["gelu"])
    assert result.mistake == "dtype" and "traced Module" not in capfd.readouterr().err


def test_shown_rewrites_match_the_book(capsys):
    assert cli.main(["p26", "--rewrites"]) == 0
    expected_output = roots.CHECKOUT / "book" / "outputs" / "backend_rewrites.txt"
    assert capsys.readouterr().out.strip() == expected_output.read_text().strip()


def test_captured_graph_matches_the_backends():
    gm = capture_graph(lambda x: x.sin() + 1, X)
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_function", "call_function", "output"] or [
        n.op for n in gm.graph.nodes
    ] == ["placeholder", "call_method", "call_function", "output"]


def compute_partly_without_grad(x):
    """Compute chains, a neutral factor and a SiLU partly under no_grad: none may be fused."""
    with torch.no_grad():
        a, b, gate = x * 2.0, x * 1.0, torch.sigmoid(x)
    return (a * 3.0 + b.sin() + x * gate + x).sum()


def test_solution_does_not_rewrite_across_no_grad():
    from harness.check.python_files import load_module

    fold, match = (load_module(roots.get_solutions() / "p26" / name) for name in ("fold.py", "match.py"))
    completed = []

    def backend(gm, inputs):
        completed.append((fold["fold"](gm), fold["drop_ones"](gm), match["silu"](gm), match["gelu"](gm)))
        gm.recompile()
        return gm

    gradients = []
    for function in (
        compute_partly_without_grad,
        torch.compile(compute_partly_without_grad, backend=backend),
    ):
        x = torch.linspace(-2, 2, 5).requires_grad_()
        function(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert completed == [(0, 0, 0, 0)]

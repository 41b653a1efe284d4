"""Puzzle 26 as a learner meets it: what is said of backends, right and wrong."""

import pytest
import torch
from changed_solutions import write_changed

from harness import cli
from harness.check import zoo
from harness.check.checker import make_checker
from harness.learner import blanks
from harness.learner.work import Work
from harness.puzzles.p26 import shows, trying
from harness.puzzles.p26.checker import CHECKS
from harness.puzzles.p26.spec import PUZZLE
from harness.puzzles.p26.trying import Fault, Try, attempt, capture_graph, numbers, run_pass
from harness.toolchain import roots

pytestmark = pytest.mark.compiles
WRONG = zoo.load("p26")
QUICK = [rung for rung in PUZZLE.rungs if rung.id in ("printer", "fold", "match")]


@pytest.fixture(scope="module")
def checkers():
    """The checker of each rung, of the solutions."""
    return {rung.id: make_checker(Work(PUZZLE, rung, roots.solutions())) for rung in PUZZLE.rungs}


def test_the_symptoms_are_a_line_for_each_and_none_may_pass(monkeypatch, command_line):
    chosen = [wrong for wrong in WRONG if wrong.name in ("rows_of_inputs", "factor_behind_only")]
    monkeypatch.setattr(zoo, "load", lambda name: chosen)
    finished = command_line("p26", "--symptoms")
    assert finished.code == 0
    assert [line.split()[0] for line in finished.lines] == [wrong.name for wrong in chosen]
    words = {line.split()[0]: line.split(maxsplit=1)[1] for line in finished.lines}
    assert words["factor_behind_only"] == "not-rewritten: 2.0 * x: factor(node) is None, expected x and 2.0"
    assert words["rows_of_inputs"].startswith("rows: rows(gm) is [('L_x_', (4, 6), 'float32'), ")
    monkeypatch.setattr(shows, "fault_of", lambda *arguments: None)
    finished = command_line("p26", "--symptoms")
    assert finished.code == 1 and [line.split()[1] for line in finished.lines] == ["passes", "passes"]


def test_the_zoo_has_a_wrong_backend_for_every_gate():
    assert {wrong.gate for wrong in WRONG} == {gate.id for gate in PUZZLE.gates} == set(CHECKS)
    shown = "aliased across-mutation cast-dropped cudagraph-unsafe dead-nodes erased-in-use exact-gelu input-written"
    shown += " integer-through-float minus-zero"
    shown += " no-gradient not-a-tuple output-order rest-dropped shape-baked shared-norm stale-code"
    assert {wrong.mistake for wrong in WRONG} >= {*shown.split()}
    assert all(wrong.story and len(wrong.story.splitlines()) == 1 for wrong in WRONG)


# ---- What judges is judged ----------------------------------------------------------------------------------

X = numbers()


def kind_of(one: Try, backend) -> str:
    with pytest.raises(Fault) as raised:
        attempt(one, backend)
    return raised.value.kind


def returning(change):
    """A backend whose outputs are changed on their way."""
    return lambda gm, inputs: lambda *args: change(gm.forward(*args))


SINE = Try("two", lambda x: (x.sin(), x.cos()), (X,))


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
def test_each_fault_of_outputs_is_told_apart(kind, change):
    assert kind_of(SINE, returning(change)) == kind


def test_faults_beside_the_outputs():
    def writes(gm, inputs):
        return lambda x: (gm.forward(x), x.add_(1))[0]

    inference = Try("sin and cos", SINE.function, (X,), gradients=False)
    assert kind_of(inference, writes) == "input-written"
    same = Try("x + 0", lambda x: x * 1.0, (X,), gradients=False)
    assert kind_of(same, lambda gm, inputs: lambda x: (x,)) == "aliased"
    assert kind_of(SINE, lambda gm, inputs: None) == "not-callable"
    zero = Try("x + 0.0", lambda x: x + 0.0, (torch.tensor([-0.0]),), same_bits=True, gradients=False)
    assert kind_of(zero, returning(lambda out: (-out[0],))) == "value"


def test_graphs_are_compared_and_dead_nodes_named():
    one = Try("x.sin() + 1", lambda x: x.sin() + 1, (X,), ("sin", "add"))
    attempt(one, run_pass(lambda gm: None))
    wanted = Try("x.sin() + 1", lambda x: x.sin() + 1, (X,), ("add",))
    assert kind_of(wanted, run_pass(lambda gm: None)) == "not-rewritten"

    def leaves_dead(gm):
        (x,) = (n for n in gm.graph.nodes if n.op == "placeholder")
        with gm.graph.inserting_after(x):
            gm.graph.call_function(torch.cos, (x,)).meta = dict(x.meta)

    assert kind_of(one, run_pass(leaves_dead)) == "dead-nodes"

    def swaps_order(gm):
        first, second = [n for n in gm.graph.nodes if n.op in trying.CALLS]
        first.prepend(second)

    assert kind_of(one, run_pass(swaps_order)) == "out-of-order"


def test_a_compilation_for_each_shape_is_found():
    one = Try("sin", lambda x: x.sin(), (X,), more=((X[:2],),), dynamic=True)

    def bakes(gm, inputs):
        [int(size) for size in inputs if isinstance(size, torch.SymInt)]
        return gm.forward

    assert kind_of(one, bakes) == "shape-baked"
    attempt(one, lambda gm, inputs: gm.forward)


def test_exact_is_right_of_every_bfloat16():
    """The rule of the solution against all 65,536 values, in both directions for some constants."""
    from harness.check.python_files import load
    from harness.puzzles.p26.folding import every

    exact = load(roots.solutions() / "p26" / "fold.py")["exact"]
    x = every(torch.bfloat16)
    assert len(x.view(torch.int16).unique()) == 65536
    for a, b, wanted in ((2.0, 3.0, True), (3.0, 5.0, False), (2.0, 0.5, False), (7.0, -4.0, True)):
        twice, once = x * a * b, x * (a * b)
        same = bool(((twice == once) | (twice.isnan() & once.isnan())).all())
        assert exact(a, b, torch.bfloat16) is wanted is same


def test_graph_breaks_are_as_dynamo_counts_them():
    from harness.puzzles.p26.printing import broken

    assert torch._dynamo.explain(broken)(X).graph_break_count == 1


# ---- The commands, the hints, the chapter -------------------------------------------------------------------


def test_a_plain_run_takes_every_part(monkeypatch, capsys):
    """Each part has its heading; the verdicts of the quick ones are enough here."""
    monkeypatch.setattr(
        "harness.screens.checking.GateCheck.run",
        lambda check, console: (3 if check.work.rung.id == "swap" else 0, {}),
    )
    assert cli.main(["p26", "--solution"]) == 3
    said = capsys.readouterr().out
    assert [rung.words + ":" in said for rung in PUZZLE.rungs] == [True] * 5


def test_one_gate_and_one_rung(capsys):
    assert cli.main(["p26", "--gate", "history", "--solution"]) == 0
    assert "✅ history" in capsys.readouterr().out
    assert cli.main(["p26", "--gate", "nothing"]) == 2
    assert cli.main(["p26", "--rung", "fold", "--solution", "--gate", "exact"]) == 0


def test_what_a_learner_raises_is_a_verdict_with_its_line(tmp_path, checkers):
    path = write_changed(PUZZLE, "fold", tmp_path, sweep="    return 1 / 0")
    (result,) = checkers["fold"].check(path, ["sweep"])
    assert result.mistake == "raises" and "fold.py:" in result.diagnosis[0]
    assert "ZeroDivisionError" in result.diagnosis[0]


def test_what_a_graph_raises_has_the_line_that_wrote_it(tmp_path, checkers):
    """Dynamo wraps what a pass raises, and the kind of the function in question names the mistake."""
    path = write_changed(PUZZLE, "match", tmp_path, ("gate.all_input_nodes == [x]", "gate.args[0] is x"))
    line = next(k for k, each in enumerate(path.read_text().splitlines(), 1) if "gate.args[0] is x" in each)
    (result,) = checkers["match"].check(path, ["silu"])
    assert result.diagnosis[0] == (
        f"keywords: {path}:{line}: torch.sigmoid(input=x) * x: IndexError: tuple index out of range"
    )


def test_what_the_graph_raises_that_a_pass_has_left_has_the_line_of_the_blank(tmp_path, checkers):
    """No line of the file is running when the graph's own code fails."""
    body = "    for node in gm.graph.nodes:\n        if node.op == 'call_function':\n            node.target = math.comb\n    return 0"
    path = write_changed(PUZZLE, "fold", tmp_path, sweep=body)
    line = blanks.find(path.read_text())["sweep"].line
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
def test_a_gate_whose_part_is_wrong_says_which_to_mend_first(tmp_path, checkers, rung, part, body, gate):
    (result,) = checkers[rung].check(write_changed(PUZZLE, rung, tmp_path, **{part: body}), [gate])
    assert (result.state, result.mistake, result.hint) == ("wrong", None, f"{part}-1")
    assert result.diagnosis == [f"computed from {part}, which is wrong: fix that first"]


def test_a_gate_that_is_wrong_beside_a_wrong_part_is_named_itself(tmp_path, checkers):
    path = write_changed(PUZZLE, "fold", tmp_path, factor="    return None", chain="    return 0")
    (result,) = checkers["fold"].check(path, ["chain"])
    assert result.mistake == "not-rewritten" and result.hint == "chain-1"


@pytest.mark.parametrize(
    ("rung", "gate", "body", "words", "advice"),
    [
        ("fold", "exact", "    return False", "exact(2.0, 3.0, torch.float32) is False, expected True", "too-careful"),
        ("compose", "rewrite", "    for each in passes:\n        each(gm)\n    gm.recompile()", "what rewrite returns is None, expected 1", "count"),
        ("compose", "backend", "    rewrite(gm, passes)", "compiler_fn did not return callable", "not-callable"),
        ("printer", "rows", "    len(gm.graph.nodes)", "rows(gm) is None, expected a list", "rows"),
        ("printer", "groups", "    len(gm.graph.nodes)", "groups(gm) is None, expected a list", "groups"),
    ],
)  # fmt: skip
def test_what_a_blank_returns_is_named(tmp_path, checkers, rung, gate, body, words, advice):
    (result,) = checkers[rung].check(write_changed(PUZZLE, rung, tmp_path, **{gate: body}), [gate])
    assert result.mistake == advice and words in result.diagnosis[0], result.diagnosis


def test_what_a_graph_prints_when_it_fails_is_not_shown(tmp_path, checkers, capfd):
    """FX writes a traceback to standard error where generated code raises."""
    dtype = "or not value(x).dtype == value(end).dtype in DTYPES:"
    path = write_changed(PUZZLE, "match", tmp_path, (dtype, "or not is_tensor(end):"))
    (result,) = checkers["match"].check(path, ["gelu"])
    assert result.mistake == "dtype" and "traced Module" not in capfd.readouterr().err


def test_rewrites_are_shown_as_the_book_has_recorded_them(capsys):
    assert cli.main(["p26", "--rewrites"]) == 0
    recorded = roots.CHECKOUT / "book" / "outputs" / "backend_rewrites.txt"
    assert capsys.readouterr().out.strip() == recorded.read_text().strip()


def test_captured_is_the_graph_that_a_backend_gets():
    gm = capture_graph(lambda x: x.sin() + 1, X)
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_function", "call_function", "output"] or [
        n.op for n in gm.graph.nodes
    ] == ["placeholder", "call_method", "call_function", "output"]


def half_recorded(x):
    """Chains, a neutral factor and a SiLU of which a part stands under no_grad: nothing of them may be joined."""
    with torch.no_grad():
        a, b, gate = x * 2.0, x * 1.0, torch.sigmoid(x)
    return (a * 3.0 + b.sin() + x * gate + x).sum()


def test_no_rewrite_of_the_solution_goes_across_no_grad():
    from harness.check.python_files import load

    fold, match = (load(roots.solutions() / "p26" / name) for name in ("fold.py", "match.py"))
    done = []

    def backend(gm, inputs):
        done.append((fold["fold"](gm), fold["drop_ones"](gm), match["silu"](gm), match["gelu"](gm)))
        gm.recompile()
        return gm

    gradients = []
    for function in (half_recorded, torch.compile(half_recorded, backend=backend)):
        x = torch.linspace(-2, 2, 5).requires_grad_()
        function(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert done == [(0, 0, 0, 0)]

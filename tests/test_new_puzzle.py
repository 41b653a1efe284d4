"""Puzzles that consist only of new files, as in CONTRIBUTING.md: p90 has kernels, p91 Python functions."""

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from harness.check import zoo
from harness.check.checker import load_checker
from harness.commands import select_exercise
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.screens.watch import FileWatcher, Terminal, Watch
from harness.spec.catalogue import find_puzzle

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "toys"))
import checkout as toys  # noqa: E402
from checkout import run_merged  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkout with the toy puzzles."""
    checkout = tmp_path_factory.mktemp("checkout")
    toys.create(checkout)
    return checkout


@pytest.fixture
def in_checkout(folder):
    """Enter the checkout, with unsolved problems and no progress."""
    with toys.enter(folder):
        blanks.generate_problems(folder / "solutions", folder / "problems", force=True)
        (folder / ".workbook-progress.json").unlink(missing_ok=True)
        yield folder


def solve(folder: Path, file: str, change: Callable[[str], str] = lambda text: text) -> None:
    """Fill a problem file's blanks with the solution, transformed by `change`."""
    solution = (folder / "solutions" / file).read_text()
    (folder / "problems" / file).write_text(
        blanks.fill_blanks(blanks.make_skeleton(solution), change(solution))
    )


def replace_once(old: str, new: str) -> Callable[[str], str]:
    """Return a function that replaces a string that must occur exactly once."""

    def change(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    return change


# ---- A puzzle with kernels ----------------------------------------------------------------------------------


def test_puzzles_are_listed_with_gates_and_hints(in_checkout):
    code, listed = run_merged("list", "--all")
    assert code == 0 and "p90  A toy: square, forward and backward" in listed
    assert "0/2  Mojo kernels" in listed and "· dsquare" in listed
    assert "0/1  NumPy rung" in listed and "0/2  PyTorch rung: problems/p91/in_torch.py" in listed
    assert run_merged("hint", "p90", "dsquare-2")[1].endswith("`dx = 2 * x * dy`.\n")
    assert "square-1" in run_merged("hint", "p90")[1], "the first unsolved gate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p90", "--rung", "numpy"), "--rung: invalid choice: 'numpy'"),
        (("hint", "p90", "--rung", "numpy"), "p90 has no NumPy rung"),
        (("p90", "--dims", "4", "8", "2", "2"), "unrecognized arguments: 2 2; got: p90 --dims 4 8 2 2"),
        (("p90", "--dims", "4"), "--dims: expected 2 arguments"),
        (("p90", "--fused"), "unrecognized arguments: --fused"),
        (("p90", "--demo"), "unrecognized arguments: --demo"),
        (("p90", "--bench"), "p90"),
        (("p90", "--device", "cpu"), "--device: invalid choice: 'cpu'"),
        (("p90", "--dtype", "float64"), "--dtype: invalid choice: 'float64'"),
        (("p91", "--device", "virtual"), "unrecognized arguments: --device virtual"),
        (("p91", "--backward"), "unrecognized arguments: --backward"),
        (("p91", "--ops", "x"), "unrecognized arguments: --ops x"),
        (
            ("p91", "--gate", "dsquare"),
            "--gate dsquare: unknown gate 'dsquare'; there is cube, dcube",
        ),
    ],
)
def test_irrelevant_flags_are_rejected(in_checkout, arguments, message):
    code, output = run_merged(*arguments)
    assert code == 2 and message in output and output.startswith("error: ") and output.count("\n") == 1


def test_help_describes_the_puzzle(in_checkout):
    code, output = run_merged("p90", "--help")
    assert code == 0 and "check the gradient too" in output and "--dims rows columns" in output
    assert "variants (default: plain)" in output and "--again" in output and "square or dsquare" in output
    code, output = run_merged("p91", "--help")
    assert (
        code == 0 and "--rung {numpy,torch}" in output and "--dims n" in output and "--device" not in output
    )


@pytest.mark.compiles
def test_gates_are_unsolved_then_wrong_then_correct(in_checkout):
    assert run_merged("verify", "p90")[0] == 3
    (bug,) = zoo.load_wrong_solutions("p90")
    solve(in_checkout, "p90/op/square.mojo", replace_once(bug.old, bug.new))
    code, wrong = run_merged("verify", "p90")
    assert code == 1 and "✅ square" in wrong and "❌ dsquare" in wrong
    assert "without the factor 2" in wrong and "hint p90 dsquare-2" in wrong
    code, alone = run_merged("p90", "--gate", "dsquare")
    assert code == 1 and "wrong in the first case" in alone and "hint p90 dsquare-2" in alone
    assert "✅ square" not in alone and "on the virtual GPU" in alone and len(alone.splitlines()) < 15
    assert run_merged("diff", "p90", "dsquare")[0] == 3, "the solution of an unsolved gate is hidden"
    solve(in_checkout, "p90/op/square.mojo")
    assert (
        run_merged("p90", "--gate", "dsquare")[0] == 0
        and "2/2  Mojo kernels" in run_merged("list", "--all")[1]
    ), "both passed gates are saved"
    code, expected = run_merged("verify", "p90")
    assert code == 0, expected
    assert "2/2  Mojo kernels" in run_merged("list", "--all")[1]
    assert "the same as the solution" in run_merged("diff", "p90", "dsquare")[1]
    assert run_merged("reset", "p90", "dsquare", "--yes")[0] == 0
    assert "1/2  Mojo kernels" in run_merged("list", "--all")[1]


@pytest.mark.slow
@pytest.mark.compiles
def test_launches_are_counted(in_checkout):
    code, table = run_merged("p90", "--solution", "--profile", "--dims", "3", "40")
    assert code == 0 and "plain: 2 launches" in table and "square_backward" in table
    matrix, order, mask = 3 * 40 * 4, 3 * 4, 3
    predicted = matrix + order + mask + matrix + mask
    assert f" {predicted:,} " in table, "input, order and mask are read, output and kept are written"


BACKWARD = ("p90", "--backward", "--device", "virtual")


@pytest.mark.slow
@pytest.mark.compiles
def test_dims_variants_and_gate_are_forwarded(in_checkout):
    code, out = run_merged(*BACKWARD, "--solution", "--dims", "3", "8", "--repeat", "2")
    assert code == 0 and "rows = 3, columns = 8" in out and "1 case: chapter" in out
    assert "Overall Result: ✅ ALL CORRECT" in out and "Custom square Gradients" in out
    assert "LayerNorm" not in out and "   grad_input: " in out and "CPU" not in out
    assert "grad_input: bit-equal in 2 runs" in out
    code, out = run_merged(*BACKWARD, "--solution", "--plain", "--again")
    assert code == 0 and "Testing Virtual GPU Backward Pass (again):" in out
    assert run_merged(*BACKWARD[:1], "--gate", "dsquare", "--solution")[0] == 0


def test_cases_that_are_too_large_are_skipped(in_checkout, monkeypatch):
    monkeypatch.setattr("harness.devices.targets.may_have_gpu", lambda: False)
    code, out = run_merged("p90", "--backward", "--solution", "--dims", "4096", "4096")
    assert code == 6 and "Overall Result: ⏭ GPU NOT RUN" in out and "--device virtual runs it" in out


# ---- A puzzle without kernels -------------------------------------------------------------------------------


def test_python_gates_are_unsolved_then_wrong_then_correct(in_checkout):
    code, untouched = run_merged("verify", "p91")
    assert code == 3 and "NumPy rung: problems/p91/in_numpy.py: untouched (it is optional)" in untouched
    assert run_merged("p91")[0] == 3
    solve(in_checkout, "p91/in_torch.py", replace_once("return 3 * x * x * dy", "return x * x * dy"))
    solve(in_checkout, "p91/in_numpy.py", replace_once("return 3 * input", "return input"))
    code, wrong = run_merged("p91")
    assert code == 1 and "✅ cube" in wrong and "❌ dcube" in wrong
    assert "grad_input equals the reference without the factor 3" in wrong and "hint p91 dcube-2" in wrong
    code, wrong = run_merged("p91", "--rung", "numpy")
    assert code == 1 and "hint p91 numpy-dcube-2" in wrong
    assert run_merged("p91", "--gate", "cube", "--dims", "3", "--seed", "1")[0] == 0
    solve(in_checkout, "p91/in_torch.py")
    solve(in_checkout, "p91/in_numpy.py")
    code, expected = run_merged("verify", "p91")
    assert code == 0 and "✅ dcube     correct in 2 cases" in expected, expected
    listed = run_merged("list", "p91")[1]
    assert "1/1  NumPy rung" in listed and "2/2  PyTorch rung" in listed
    assert "the same as the solution" in run_merged("diff", "p91", "dcube", "--rung", "numpy")[1]
    assert (
        run_merged("reset", "p91", "cube", "--yes")[0] == 0
        and "1/2  PyTorch rung" in run_merged("list", "p91")[1]
    )
    assert "in NumPy" in run_merged("hint", "p91", "numpy-dcube-1")[1]


@pytest.mark.parametrize(
    ("name", "gate", "rung"),
    [
        pytest.param("p90", "dsquare", None, id="kernels", marks=pytest.mark.compiles),
        pytest.param("p91", "dcube", None, id="PyTorch"),
        pytest.param("p91", "dcube", "numpy", id="NumPy"),
    ],
)
def test_watch_checks_saved_files(in_checkout, name, gate, rung):
    """Overwrite an unsolved file with the solution."""
    work = select_exercise(find_puzzle(name), rung, gate)
    watch = Watch(work, gate, Console(file=io.StringIO()))
    watch.terminal, watch.stays_after_pass = Terminal(watch.console), True
    files = FileWatcher(work)
    solve(in_checkout, f"{name}/{work.rung.file}")
    while not files.has_changed():
        time.sleep(0.05)
    watch.start_check()
    watch.current.done.wait()
    watch.finish_check()
    assert watch.current.is_correct, watch.current


def test_puzzle_without_kernels_exits_with_0(in_checkout):
    assert run_merged("p91", "--solution")[0] == 0
    assert run_merged("p91", "--solution", "--rung", "numpy")[0] == 0
    assert "0/2  PyTorch rung" in run_merged("list", "p91")[1], "a run of the solution is not progress"


@pytest.mark.parametrize(
    ("old", "new", "gate", "message"),
    [
        ("return x * x * x", "x * x * x", "cube", "Cube should return 1 tensor"),
        ("return x * x * x", "return x[:2] ** 3", "cube", "output has shape [2], expected [5]"),
        ("return x * x * x", "return y", "cube", "in_torch.py:14: NameError: name 'y' is not defined"),
        ("return 3 * x * x * dy", "return None", "dcube", "no gradient comes back for input"),
        ("return 3 * x * x * dy", "return dy.mul_(3 * x * x)", "dcube", "grad_output is changed in place: later reads"),
        # Only torch.autograd.gradcheck has inputs in float64.
        ("return 3 * x * x * dy", "return 3 * x * x * dy * (2 if x.dtype == torch.float64 else 1)", "dcube",
         "by torch.autograd.gradcheck in case 'chapter'"),
        ("class Cube(torch.autograd.Function)", "class Other(torch.autograd.Function)", "cube", "there is no function"),
    ],
)  # fmt: skip
def test_wrong_pytorch_functions_are_rejected(in_checkout, old, new, gate, message):
    path = in_checkout / "problems" / "p91" / "in_torch.py"
    path.write_text(replace_once(old, new)((in_checkout / "solutions" / "p91" / "in_torch.py").read_text()))
    puzzle = find_puzzle("p91")
    (result,) = load_checker(Exercise(puzzle, puzzle.main_rung)).check(path, [gate])
    assert result.state == "wrong" and result.hint == f"{gate}-1"
    assert any(message in line for line in result.diagnosis), result.diagnosis

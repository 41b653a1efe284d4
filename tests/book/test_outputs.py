"""The book's recorded outputs match the commands' output."""

import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from book_paths import BOOK, ROOT
from typed import unwrap

from book.measure.forks import Forks


def list_shown_outputs() -> set[str]:
    """Return the names of outputs used by pages, figures and tables."""
    pages = "\n".join(page.read_text() for page in (BOOK / "src").rglob("*.md"))
    figures = "\n".join(file.read_text() for file in (BOOK / "figures").glob("*.py"))
    printed = re.findall(r"^```output (\S+)(?: \d+-\d+(?: .+)?)?$", pages, re.M)
    return {*printed, *re.findall(r"outputs\.load\(\"(\w+)\"\)", figures)}


def test_shown_outputs_match_the_commands():
    from book.measure import outputs

    assert list_shown_outputs() == set(outputs.COMMANDS)
    assert {file.stem for file in outputs.FOLDER.iterdir()} == set(outputs.COMMANDS)


def test_page_can_show_lines_of_an_output():
    from book.build import preprocess
    from book.measure import outputs

    fence = unwrap(re.match("(?P<ticks>```)", "```"))
    expanded = preprocess.printed_output(preprocess.Chapter("page.md", "", []), fence, "backend_levels 2-4")
    lines = outputs.load("backend_levels").text.splitlines()
    assert expanded.splitlines()[1:4] == lines[1:4] and "Lines 2 to 4, printed by" in expanded
    assert lines[1].startswith("Graph 0/0") and "AOTAutograd" not in expanded


def test_page_can_show_columns_of_a_table():
    from book.build import preprocess

    table = "   launch   read B    x\n   rows      1,024  1.8\n   sum of     2,560  2.5\n"
    assert preprocess.picked(table, ["launch", "x"]) == "launch    x\nrows    1.8\nsum of  2.5\n"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Process with PyTorch imported that forks the commands of this file's tests."""
    with Forks() as process:
        yield process


CHECKED_ELSEWHERE = {
    "ring_broken": "tests/p25/test_p25_run.py: which neighbour reports first depends on the machine",
    "worth_it": "test_decision_table_has_its_rows",
}

SLOW = {
    "algebra", "backend_levels", "backend_report", "compile_saved", "first_functions",
    "gradcheck_flat", "gradcheck_float32",
    "gradcheck_kink", "inductor_kernels", "parameter_gradients",
    "saving_less", "backend_rewrites", "inductor_residual",
    "backward_solution",
    "brightest_mended", "brightest_race", "fast_steps", "first_backward", "first_registration", "hunt_matrix", "own_ops",
    "mirrored_mended", "mirrored_race", "picture_of_a_bug", "race_natural", "race_reversed", "ring_backward", "row_largest", "wrong_kernels",
}  # fmt: skip
"""Programs whose output depends only on PyTorch's version, and commands that other tests run, too."""
NAMES = sorted(list_shown_outputs() - CHECKED_ELSEWHERE.keys())


@pytest.mark.compiles
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NAMES]
)
def test_recorded_output_matches_the_command(name, forks, request):
    from book.measure import outputs

    if sys.platform != "linux" and outputs.COMMANDS[name].virtual:
        pytest.skip("the virtual GPU's driver needs Linux")
    if name in ("backend_report",):
        pytest.importorskip("transformers", reason="needs model definitions: `uv sync --extra models`")
    assert outputs.difference(name, forks.run) == [], (
        f"`python -m book.measure.outputs {name}` records it again"
    )


def test_decision_table_has_its_rows(capsys, monkeypatch):
    """Compare only row names, since times depend on the machine and torch.compile is replaced."""
    from book.examples import worth_it
    from book.measure import outputs

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    worth_it.main()
    assert outputs.rows(capsys.readouterr().out) == outputs.rows(outputs.load("worth_it").text)


def test_wrong_method_is_reported_and_not_timed(capsys, monkeypatch):
    from book.examples import worth_it

    x = torch.randn(8, 16, requires_grad=True)
    operations = [("relu", [x], torch.relu, lambda x: torch.relu(x) + 0.1 * x)]
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(worth_it, "operations", lambda device: operations)
    with pytest.raises(AssertionError, match="relu, custom: wrong"):
        worth_it.main()
    assert " ms" not in capsys.readouterr().out


def test_changed_line_is_detected(monkeypatch):
    from book.measure import outputs

    text = outputs.load("one_row").text
    monkeypatch.setattr(outputs, "run", lambda command, start: text.replace("nudged", "moved"))
    assert any("moved" in line for line in outputs.difference("one_row"))
    monkeypatch.setattr(outputs, "run", lambda command, start: text.replace("0.800", "0.801"))
    assert outputs.difference("one_row") != []


def test_only_numbers_times_and_hashes_may_differ():
    from book.measure import outputs

    assert outputs.machine_free("dx: 2.98e-08 in 1.23 s (a1b2c3d4)") == outputs.machine_free(
        "dx:  3.01e-08 in 10.5 s (0123abcd)"
    )
    table = "   dx  1.1e-06  1.6e-06   0.7x  3.7e-06  wide\nend"
    assert outputs.machine_free(table) == outputs.machine_free(
        "   dx  1.2e-06  1.1e-06   1.1x  2.7e-06  odd sizes\nend"
    )
    assert outputs.machine_free("graph compiled in 12.3 s") == outputs.machine_free("graph cached")
    assert outputs.machine_free("dx: 2.98e-08 ok") != outputs.machine_free("dx: 2.98e-08 wrong")


def test_unknown_output_is_rejected(capsys):
    from book.measure import outputs

    with pytest.raises(SystemExit) as exit:
        outputs.main(["nothing"])
    assert exit.value.code == 2
    assert "no such output: nothing" in capsys.readouterr().err


def test_progress_lines_are_not_recorded():
    from book.measure import outputs

    script = "print('Compiling the Mojo kernels (once) ...'); print(); print('done ...'); print()"
    assert outputs.run(outputs.Command("x", ("-c", script))) == "done ...\n"


def test_wrong_exit_code_is_not_recorded():
    from book.measure import outputs

    with pytest.raises(RuntimeError, match="exit code 3"):
        outputs.run(outputs.Command("x", ("-c", "raise SystemExit(3)")))


PROGRAM = """
import inspect, os, sys
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.path[0], __name__, sys.stdin.read())
print("to standard error", file=sys.stderr)
print(inspect.getsource(sys.modules["__main__"]).count("WORD"))
os.environ["WORD"] = sys.path[0] = "changed"
sys.exit(7)
"""


def test_forked_program_runs_as_in_a_fresh_interpreter(tmp_path):
    from book.measure import outputs

    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "WORD": "x", "WORKBOOK_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with Forks(()) as forks:
        runners = (forks.run, forks.run, outputs.fresh)
        runs = [start(("program.py", "a", "-b"), tmp_path, environment) for start in runners]
        modules = [start(("-m", "harness", "list"), ROOT, environment) for start in runners[1:]]
    assert f"['a', '-b'] {tmp_path} x {tmp_path} __main__ " in runs[0].stdout.splitlines()
    assert [run.returncode for run in runs] == [7, 7, 7] and len({run.stdout for run in runs}) == 1
    assert [run.returncode for run in modules] == [0, 0] and modules[0].stdout == modules[1].stdout != ""


def test_killed_forks_are_reported(tmp_path):
    for name, victim in (("itself", "getpid"), ("parent", "getppid")):
        (tmp_path / f"{name}.py").write_text(f"import os, signal\nos.kill(os.{victim}(), signal.SIGKILL)\n")
    with Forks(()) as forks:
        assert forks.run(("itself.py",), tmp_path, os.environ).returncode == -signal.SIGKILL
        with pytest.raises(RuntimeError, match=r"parent\.py: the process that should run it has ended"):
            forks.run(("parent.py",), tmp_path, os.environ)


def test_forked_program_keeps_the_environment_of_imports(tmp_path):
    """MAX sets variables on import to locate its compiler; explicit values take precedence."""
    (tmp_path / "sets.py").write_text("import os\nos.environ.update(FROM_IMPORT='import', BOTH='import')\n")
    (tmp_path / "program.py").write_text("import os\nprint(os.environ['FROM_IMPORT'], os.environ['BOTH'])\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with Forks(("sets",)) as forks:
        assert forks.run(("program.py",), tmp_path, environment).stdout == "import import\n"
        assert forks.run(("program.py",), tmp_path, environment | {"BOTH": "own"}).stdout == "import own\n"

"""The built wheel works outside the checkout: it includes the solutions and can run a training step."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from harness.learner import blanks
from harness.nn import host
from harness.toolchain.packages import list_mojo_files
from harness.toolchain.roots import CHECKOUT

TRAINING_STEP = """
import sys
from pathlib import Path

import torch
import harness

checkout = Path(sys.argv[1])
assert Path(harness.__file__).is_relative_to(sys.prefix), harness.__file__
assert not any(Path(entry).resolve() == checkout for entry in sys.path), sys.path

torch.manual_seed(0)
reference = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
layer = harness.LayerNormLinear(8, 4)
layer.load_state_dict(reference.state_dict())
x, target = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
losses = {}
for model in (layer, reference):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.nn.functional.mse_loss(model(x), target)
    before.backward()
    optimizer.step()
    losses[model] = before.item(), torch.nn.functional.mse_loss(model(x), target).item()
torch.testing.assert_close(losses[layer], losses[reference])
assert losses[layer][1] < losses[layer][0]
print("trained from", harness.__file__)
"""


def run(*command, **options):
    """Run a command without the environment variables that add the checkout to Python's path."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=300, env=environment, **options
    )
    assert result.returncode == 0, f"{command[0]} failed\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Path of a wheel created by the build backend."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=CHECKOUT)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_can_include_built_libraries(tmp_path, monkeypatch):
    """A wheel with libraries is platform-specific."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "attention_bfloat16_sm_90a_0123.so").write_text("kernels")
    monkeypatch.setenv("WORKBOOK_LIBRARIES", str(libraries))
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=CHECKOUT)
    (path,) = tmp_path.glob("*-py3-none-linux_*.whl")
    assert "harness/_libraries/attention_bfloat16_sm_90a_0123.so" in zipfile.ZipFile(path).namelist()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python interpreter of a new environment with the wheel; torch and MAX are imported from this
    environment.

    The new environment lists this one's folder in a .pth file. Python does not read .pth files in such a
    folder, so the editable install of the checkout is not on the path.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "shared.pth").write_text("\n".join(sorted(shared)) + "\n")
    return python


def test_wheel_includes_the_solutions(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = CHECKOUT / "solutions" / "p22" / "op"
    files = {str(file.relative_to(package)) for file in list_mojo_files(package)}
    assert {"layernorm_linear.mojo", "shared/launcher.mojo"} <= files
    assert {f"harness/_solutions/p22/op/{file}" for file in files} <= names
    assert not any(name.startswith(("tests/", "problems/", "solutions/")) for name in names)
    built = (CHECKOUT / "book" / "html" / "index.html").is_file()
    assert "harness/_book/src/SUMMARY.md" in names and ("harness/_book/html/index.html" in names) == built


LIBRARIES = """
import sys
from harness.nn import host

assert host.KERNELS_FOLDER.is_relative_to(sys.prefix), host.KERNELS_FOLDER
print(*(library.file_name for library in host.select_libraries([], ["sm_90a"], [None])))
"""


def test_layer_libraries_outside_the_checkout(installed, tmp_path):
    """An installed package builds the same libraries as the checkout."""
    script = tmp_path / "names.py"
    script.write_text(LIBRARIES)
    names = [library.file_name for library in host.select_libraries([], ["sm_90a"], [None])]
    assert names and run(installed, script, cwd=tmp_path).split() == names


@pytest.mark.compiles
def test_training_step_outside_the_checkout(installed, tmp_path):
    script = tmp_path / "step.py"
    script.write_text(TRAINING_STEP)
    assert "trained from" in run(installed, script, CHECKOUT, cwd=tmp_path)


def test_command_line_is_installed(installed, tmp_path):
    assert "--backward" in run(installed.parent / "workbook", "p22", "--help", cwd=tmp_path)


def test_init_from_an_installed_package(installed, tmp_path):
    """Run `workbook init` from the installed package, solve a rung in the new folder, and list its progress."""
    workbook, folder = installed.parent / "workbook", tmp_path / "mine"
    assert "next: cd mine && workbook list" in run(workbook, "init", "mine", cwd=tmp_path)
    problem, solution = folder / "problems" / "p20" / "graph.py", folder / "solutions" / "p20" / "graph.py"
    problem.write_text(blanks.fill_blanks(problem.read_text(), solution.read_text()))
    assert "correct" in run(workbook, "p20", "--rung", "derive", cwd=folder)
    assert run(workbook, "list", cwd=folder).startswith("next: p20")
    assert "passed" in run(workbook, "list", "p20", cwd=folder)
    assert "renewed" not in run(workbook, "update", cwd=folder)

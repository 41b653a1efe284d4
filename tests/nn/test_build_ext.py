"""`workbook build-ext`, and what the doctor says of what it builds."""

import os

import pytest
import torch

from harness.nn import host
from harness.screens import doctor
from harness.toolchain import architectures, libraries


@pytest.fixture
def no_compiling(monkeypatch, tmp_path):
    """Compilers that write a file of nothing, and a folder of their own."""

    def compile_mojo(source, include, architecture, staging, *defines):
        (staging / "module.so").write_text("kernels")
        return staging / "module.so"

    monkeypatch.setattr(libraries, "compile_mojo", compile_mojo)
    monkeypatch.setattr(
        libraries, "compile_cpp", lambda compiler, home, source, target, defines: target.write_text("C++")
    )
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "kept"


def gpus(monkeypatch, *capabilities):
    """These GPUs are there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])


def test_it_says_what_it_built_and_where(command_line, no_compiling, tmp_path):
    arguments = (
        "build-ext",
        "cross_entropy",
        "--arch",
        "sm_80",
        "--arch",
        "sm_90",
        "--output",
        tmp_path / "out",
    )
    done = command_line(*arguments)
    wanted = host.select_libraries(["cross_entropy"], ["sm_80", "sm_90a"], [None])
    assert done.code == 0 and len(done.lines) == len(wanted)
    for library, line in zip(wanted, done.lines, strict=True):
        assert line.startswith(f"{library.name}: built in 0.")
        assert line.endswith(os.path.join("out", library.carried_name))
        assert f"Building {library.name} (about {library.estimate:.0f} s, once) ..." in done.err
    again = command_line(*arguments)
    assert all("was there already" in line for line in again.lines) and not again.err


def test_it_builds_for_the_gpus_here(command_line, no_compiling, monkeypatch):
    gpus(monkeypatch, (9, 0), (8, 0), (9, 0))
    assert command_line("build-ext", "cross_entropy/float16").code == 0
    parts = {path.name.rpartition("_")[0] for path in no_compiling.glob("cross_entropy_float16_*.so")}
    assert parts == {"cross_entropy_float16_sm_80", "cross_entropy_float16_sm_90a"}


def test_operators_for_another_pytorch(command_line, no_compiling, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.11.0'\n")
    arguments = ("--arch", "sm_90a", "--torch", tmp_path, "--output", tmp_path / "out")
    assert command_line("build-ext", "cross_entropy/float16", *arguments).code == 0
    assert len([*(tmp_path / "out").glob("cross_entropy_torch2.11_*.so")]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--arch", "h100"], 2, "--arch h100: unknown"),
        (["--arch"], 2, "expected one argument"),
        (["--nonsense"], 2, "--nonsense"),
        (["p21", "--arch", "sm_80"], 2, "unknown layer 'p21'"),
        (["--arch", "sm_80", "--torch", "/nowhere"], 2, "/nowhere is not a PyTorch folder"),
        (["--arch", "sm_80", "--output", "/dev/null/x"], 5, "cannot make the folder /dev/null/x"),
    ],
)
def test_it_refuses(command_line, arguments, code, words):
    done = command_line("build-ext", *arguments)
    assert done.code == code and words in done.err and len(done.err.splitlines()) == 1


def test_without_a_gpu_it_asks_for_a_name(command_line, monkeypatch):
    gpus(monkeypatch)
    done = command_line("build-ext")
    words = "sees no GPU on this machine; name what to build for, as in --arch sm_90a"
    assert done.code == 2 and words in done.err


def test_help(command_line):
    done = command_line("build-ext", "--help")
    assert done.code == 0
    assert all(words in done.out for words in ("--arch", libraries.VARIABLE, "exit codes", "cross_entropy"))


# ---- The doctor ---------------------------------------------------------------------------------------------


def test_the_doctor_without_a_gpu(monkeypatch):
    gpus(monkeypatch)
    (finding,) = doctor.layers()
    assert finding.state == "note" and "PyTorch's own operations run" in finding.words


def test_the_doctor_with_a_gpu(monkeypatch, no_compiling):
    gpus(monkeypatch, (9, 0))
    wanted = host.select_libraries([], ["sm_90a"], [None])
    (finding,) = doctor.layers()
    assert finding.state == "note" and finding.words.startswith(f"0 of {len(wanted)} libraries are built")
    assert "cross_entropy_float16_sm_90a" in finding.words and "build-ext" in finding.remedy
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    (finding,) = doctor.layers()
    assert (
        finding.state == "broken" and "no C++ compiler" in finding.words and "install g++" in finding.remedy
    )
    monkeypatch.undo()


def test_the_doctor_where_all_is_built(monkeypatch, no_compiling):
    gpus(monkeypatch, (9, 0))
    wanted = host.select_libraries([], ["sm_90a"], [None])
    for _ in libraries.build_all(wanted):
        pass
    (finding,) = doctor.layers()
    assert finding.state == "good" and finding.words == f"all {len(wanted)} libraries are built"


def test_the_doctor_with_a_gpu_that_has_no_kernels(monkeypatch):
    gpus(monkeypatch, (7, 5))
    (finding,) = doctor.layers()
    assert finding.state == "note" and "need sm_80 or newer, not sm_75: PyTorch's own" in finding.words
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (finding,) = doctor.layers()
    assert finding.words == f"{architectures.ONLY_NVIDIA}: PyTorch's own operations run here"

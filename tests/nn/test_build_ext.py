"""`workbook build-ext`, and its libraries in the report of `workbook doctor`."""

import os

import pytest
import torch

from harness.nn import host
from harness.screens import doctor
from harness.toolchain import architectures, libraries


@pytest.fixture
def fake_compilers(monkeypatch, tmp_path):
    """Replace the compilers by functions that write dummy files into an empty cache."""

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


def fake_gpus(monkeypatch, *capabilities):
    """Make torch report GPUs with these compute capabilities."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])


def test_build_ext_reports_each_library(command_line, fake_compilers, tmp_path):
    architectures = ("--arch", "sm_80", "--arch", "sm_90")
    arguments = ("build-ext", "cross_entropy", *architectures, "--output", tmp_path / "out")
    result = command_line(*arguments)
    expected = host.select_libraries(["cross_entropy"], ["sm_80", "sm_90a"], [None])
    assert result.code == 0 and len(result.lines) == len(expected)
    for library, line in zip(expected, result.lines, strict=True):
        assert line.startswith(f"{library.name}: built in 0.")
        assert line.endswith(os.path.join("out", library.bundled_name))
        assert f"Building {library.name} (about {library.estimated_s:.0f} s, once) ..." in result.err
    second_result = command_line(*arguments)
    assert all("was there already" in line for line in second_result.lines) and not second_result.err


def test_build_ext_selects_the_gpus_of_this_machine(command_line, fake_compilers, monkeypatch):
    fake_gpus(monkeypatch, (9, 0), (8, 0), (9, 0))
    assert command_line("build-ext", "cross_entropy/float16").code == 0
    parts = {path.name.rpartition("_")[0] for path in fake_compilers.glob("cross_entropy_float16_*.so")}
    assert parts == {"cross_entropy_float16_sm_80", "cross_entropy_float16_sm_90a"}


def test_torch_flag_selects_another_pytorch(command_line, fake_compilers, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.11.0'\n")
    arguments = ("--arch", "sm_90a", "--torch", tmp_path, "--output", tmp_path / "out")
    assert command_line("build-ext", "cross_entropy/float16", *arguments).code == 0
    assert len([*(tmp_path / "out").glob("cross_entropy_torch2.11_*.so")]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--arch", "h100"], 2, "--arch h100: unknown"),
        (["--arch"], 2, "expected one argument"),
        (["--nonsense"], 2, "--nonsense"),
        (["p21", "--arch", "sm_80"], 2, "unknown layer 'p21'"),
        (["--arch", "sm_80", "--torch", "/nowhere"], 2, "/nowhere is not a PyTorch folder"),
        (["--arch", "sm_80", "--output", "/dev/null/x"], 5, "cannot make the folder /dev/null/x"),
    ],
)
def test_build_ext_reports_invalid_arguments(command_line, arguments, code, message):
    result = command_line("build-ext", *arguments)
    assert result.code == code and message in result.err and len(result.err.splitlines()) == 1


def test_build_ext_without_a_gpu_requires_arch(command_line, monkeypatch):
    fake_gpus(monkeypatch)
    result = command_line("build-ext")
    message = "sees no GPU on this machine; name what to build for, as in --arch sm_90a"
    assert result.code == 2 and message in result.err


def test_help_lists_options_and_exit_codes(command_line):
    result = command_line("build-ext", "--help")
    assert result.code == 0
    assert all(text in result.out for text in ("--arch", libraries.VARIABLE, "exit codes", "cross_entropy"))


# ---- The doctor ---------------------------------------------------------------------------------------------


def test_doctor_skips_libraries_without_a_gpu(monkeypatch):
    fake_gpus(monkeypatch)
    (finding,) = doctor.check_layers()
    assert finding.state == "note" and "PyTorch's own operations run" in finding.description


def test_doctor_reports_missing_libraries(monkeypatch, fake_compilers):
    fake_gpus(monkeypatch, (9, 0))
    expected = host.select_libraries([], ["sm_90a"], [None])
    (finding,) = doctor.check_layers()
    text = finding.description
    assert finding.state == "note" and text.startswith(f"0 of {len(expected)} libraries are built")
    assert "cross_entropy_float16_sm_90a" in text and "build-ext" in finding.remedy
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    (finding,) = doctor.check_layers()
    assert finding.state == "broken" and "install g++" in finding.remedy
    assert "no C++ compiler" in finding.description
    monkeypatch.undo()


def test_doctor_reports_complete_libraries(monkeypatch, fake_compilers):
    fake_gpus(monkeypatch, (9, 0))
    expected = host.select_libraries([], ["sm_90a"], [None])
    for _ in libraries.build_all(expected):
        pass
    (finding,) = doctor.check_layers()
    assert finding.state == "good" and finding.description == f"all {len(expected)} libraries are built"


def test_doctor_reports_unsupported_gpus(monkeypatch):
    fake_gpus(monkeypatch, (7, 5))
    (finding,) = doctor.check_layers()
    assert finding.state == "note" and "need sm_80 or newer, not sm_75: PyTorch's own" in finding.description
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (finding,) = doctor.check_layers()
    assert finding.description == f"{architectures.NVIDIA_ONLY_MESSAGE}: PyTorch's own operations run here"

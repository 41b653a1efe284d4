"""The command line of `vgpu`: usage errors, exit codes, device information."""

import os
import re
import selectors
import socket
import sys
from dataclasses import dataclass, field

import pytest
from exec_tools import HERE, run_vgpu

from harness.vgpu import Finding, cli
from harness.vgpu.driver import build, server
from harness.vgpu.errors import LaunchError, StepBudgetExceeded


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exec"], "no program given"),
        (["exec", "--", "/no/such/program"], "cannot run /no/such/program"),
        (["exec", "--checks", "memory,luck", "--", "true"], "unknown check luck"),
        (["exec", "--blocks", "sideways", "--", "true"], "sideways"),
        (
            ["exec", "--timeout", "-1", "--", "true"],
            "--timeout -1: must be more than 0 and at most 10,000,000",
        ),
        (["exec", "--timeout", "0", "--", "true"], "--timeout 0: must be more than 0"),
        (["exec", "--timeout", "nan", "--", "true"], "--timeout nan: must be more than 0"),
        (["exec", "--timeout", "inf", "--", "true"], "--timeout inf: must be more than 0"),
        (["exec", "--error-exitcode", "0", "--", "true"], "--error-exitcode 0: must be from 1 to 255"),
        (["exec", "--", "/"], "cannot run /: Permission denied"),
    ],
)
def test_usage_errors_exit_with_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_unwritable_cache_exits_with_code_5(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file"))
    assert cli.main(["exec", "--", "true"]) == 5
    assert "set WORKBOOK_CACHE to a folder you can write" in capsys.readouterr().err


@dataclass
class DeviceStub:
    """Stub of a `Device` with the attributes that the summary reads."""

    findings: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    launches: tuple = (None,)

    @property
    def gpu(self):
        return self


ERROR = Finding("out-of-bounds load", "load past the end of x")
NOTE = Finding("uninitialised read", "in the library", is_error=False)


@pytest.mark.parametrize(
    ("program", "outcome", "code"),
    [
        (0, DeviceStub(), 0),
        (0, DeviceStub([NOTE]), 0),
        (0, DeviceStub([NOTE, ERROR]), 1),
        (3, DeviceStub([ERROR]), 3),
        (0, DeviceStub(errors=[StepBudgetExceeded("it loops")]), 1),
        (0, DeviceStub(errors=[LaunchError("too many threads")]), 0),  # the program can handle it
    ],
)
def test_exit_code_reports_errors(program, outcome, code, capsys):
    assert cli.summarise([outcome], "sm_90a", program) == code
    errors = sum(finding.is_error for finding in outcome.findings)
    assert f"1 launch, {errors} error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "outcome", "code"),
    [
        (0, DeviceStub(), 0),
        (3, DeviceStub([NOTE]), 3),
        (0, DeviceStub([ERROR]), 99),
        (3, DeviceStub([ERROR]), 99),
    ],
)
def test_error_exitcode_overrides_the_programs(program, outcome, code):
    assert cli.summarise([outcome], "sm_90a", program, 99) == code


@pytest.mark.compiles
def test_unsupported_instruction_exits_with_code_5(tmp_path):
    """The program continues after the error; multimem is not simulated."""
    script = tmp_path / "program.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import cuda_api\n"
        "cuda = cuda_api.Cuda(); cuda('cuInit', 0)\n"
        "ptx = cuda_api.PTX.replace(b'mul.f32 %f3, %f2, %f1;', b'multimem.red.relaxed.sys.global.add.f32 [%rd4], %f2;')\n"
        "ptx = ptx.replace(b'.version 8.0', b'.version 8.5').replace(b'sm_80', b'sm_90a')\n"
        "scale, x = cuda.get_function(ptx, b'scale'), cuda.upload_floats([1.0])\n"
        "n = cuda_api.ctypes.c_uint32(1)\n"
        "print(cuda.launch(scale, (1, 1, 1), (1, 1, 1), [x, x, cuda_api.ctypes.c_float(1), n]))\n"
    )
    completed = run_vgpu("--", sys.executable, str(script))
    assert (completed.returncode, completed.stdout) == (5, "CUDA_ERROR_NOT_SUPPORTED\n")
    assert "multimem.red" in completed.stderr


@pytest.mark.compiles
def test_info_names_the_device(capsys):
    assert cli.main(["info", "--arch", "sm_80"]) == 0
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["device"] == "virtual GPU (sm_80)"
    assert lines["compute capability"] == "8.0"
    assert "166912 bytes" not in lines["threads per block"]
    assert "166912" in lines["shared memory"]


@pytest.mark.compiles
def test_processes_of_other_users_are_rejected(monkeypatch):
    """A process of another user can connect, but its requests are not handled."""
    executor = server.Executor(lambda: pytest.fail("a device was created"), build.build())
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        name = f"\0workbook-vgpu-test-{os.getpid()}"
        listener.bind(name)
        listener.listen()
        client.connect(name)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        executor._accept(selectors.DefaultSelector(), listener)
        assert client.recv(1) == b""
    assert executor.devices == []

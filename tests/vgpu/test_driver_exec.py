"""`vgpu exec`: Mojo GPU programs match NumPy and always exit cleanly.

All programs are in one executable (programs/suite.mojo), compiled once per session.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from exec_tools import HERE, ROOT, VGPU, run_vgpu
from typed import unwrap

from harness.vgpu import cli
from harness.vgpu.driver import build, server


@pytest.fixture(scope="session")
def suite(tmp_path_factory) -> str:
    """Path of the test programs' executable; its kernels are PTX text with line tables."""
    binary = tmp_path_factory.mktemp("suite") / "suite"
    source = str(HERE / "programs" / "suite.mojo")
    command = [build.find_mojo(), "build", "-g1", "--target-accelerator", "sm_90a", source, "-o", str(binary)]
    env = {**os.environ, **build.build().environment()}
    completed = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return str(binary)


@pytest.fixture(scope="session")
def suite_on_gpu(request) -> str:
    """Return `suite`; skip the test without Mojo, since GPU machines may have only MAX."""
    try:
        build.find_mojo()
    except build.DriverBuildError as error:
        pytest.skip(str(error))
    return request.getfixturevalue("suite")


def run_suite(suite: str, name: str, *options: str) -> subprocess.CompletedProcess:
    return run_vgpu(*options, "--", suite, name)


def parse_output(completed: subprocess.CompletedProcess) -> np.ndarray:
    """Return the printed numbers, one per line; assert that the run had no errors."""
    assert completed.returncode == 0, completed.stderr
    assert ", 0 errors" in completed.stderr
    return np.array([float(line) for line in completed.stdout.split()])


def make_inputs(n: int) -> np.ndarray:
    """Return the programs' float input, exact in each dtype: ((37 i) mod 101 - 50) / 8."""
    return (np.arange(n) * 37 % 101 - 50).astype(np.float32) / 8


# ---- programs compared with NumPy ----------------------------------------------------------------------------------


def compute_products(*depths: int) -> np.ndarray:
    """Return the tensor-core program's flattened products [16, k] @ [k, 8] for each k."""
    results = []
    for k in depths:
        a = make_inputs(16 * k).reshape(16, k).astype(np.float64)
        results.append((a @ ((np.arange(k * 8) * 53 % 97 - 48) / 8).reshape(k, 8)).ravel())
    return np.concatenate(results)


# Exact in the program's dtype and any summation order: multiples of 1/128 below 2^12.
PROGRAMS = {
    "histogram": np.bincount(np.arange(3000) ** 2 % 1009 % 20, minlength=20),
    "async_copy": ((np.arange(512) * 37 % 101) / 8).reshape(4, 128)[:, ::-1].ravel(),
    "tensor_core": compute_products(16, 8), "opt_in_shared_memory": np.arange(32) * 2,
}  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "order"),
    [*((name, "natural") for name in PROGRAMS), ("histogram", "reversed"), ("histogram", "shuffled:3")],
)
def test_program_matches_numpy(suite, name, order):
    got, expected = parse_output(run_suite(suite, name, "--blocks", order)), PROGRAMS[name]
    single = expected.astype(np.float32)
    np.testing.assert_array_equal(single, expected)
    np.testing.assert_array_equal(got.astype(np.float32), single)


@pytest.mark.compiles
def test_python_program_can_use_max():
    code = (
        "import numpy as np; from max.driver import CPU, Accelerator, Buffer\n"
        "device = Accelerator(); x = Buffer.from_numpy(np.arange(5.0)).to(device)\n"
        "print(device.architecture_name, x.to(CPU()).to_numpy())"
    )
    completed = run_vgpu("--", sys.executable, "-c", code)
    assert completed.stdout == "sm_90a [0. 1. 2. 3. 4.]\n", completed.stderr


COURSE = re.findall(
    r"\w+",
    "host_fills maps sub_buffers copies kernel_accesses_pinned_memory wrapped_host_memory device_facts streams"
    " events two_dimensions three_dimensions dynamic_shared constant_memory arguments closures last_block"
    " spin_lock atomics clusters mbarriers print_and_assert",
)


@pytest.mark.slow
@pytest.mark.compiles
def test_gpu_course_programs(tmp_path):
    """Compile and run 21 programs of a GPU course with one command; each checks its results.

    The kernels have no line tables, and no temporary files are left.
    """
    course = HERE / "programs" / "course" / "course.mojo"
    command = ("--verbose", "--", build.find_mojo(), "run", str(course))
    completed = run_vgpu(*command, timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert completed.returncode == 0, completed.stdout + completed.stderr
    lines = completed.stdout.splitlines()
    assert [line for line in lines if line in COURSE] == COURSE
    printed = sorted(line for line in lines if line not in COURSE)
    assert printed == [f"block {b} of 2 half: 0.5 yes: True byte: -3" for b in range(2)]
    assert re.search(r" launches, 0 errors, \d+ notes?$", completed.stderr.strip())
    assert re.search(
        r"ran launches_place_3d grid=\(2, 2, 2\) block=\(2, 2, 2\): \d+ thread instructions", completed.stderr
    )
    assert not list(tmp_path.iterdir())


# ---- a real GPU, if available ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_real_gpu_prints_the_same_output(suite_on_gpu, name):
    """The executable is the same on the real and the virtual GPU."""
    real = subprocess.run(
        [suite_on_gpu, name], capture_output=True, text=True, timeout=100, check=True
    ).stdout.split("\n")
    virtual = run_suite(suite_on_gpu, name).stdout.split("\n")
    assert real == virtual


# ---- findings and errors of the device -----------------------------------------------------------------------------


@pytest.mark.compiles
def test_out_of_bounds_access_fails_a_successful_program(suite):
    completed = run_suite(suite, "out_of_bounds")
    assert completed.returncode == 1
    assert "out-of-bounds" in completed.stderr
    assert re.search(r"faults\.mojo:\d+", completed.stderr)
    assert "1 launch, 2 errors" in completed.stderr  # the load and the store


@pytest.mark.compiles
def test_race_is_reported_by_exit_code_and_json(suite, tmp_path):
    """Cover the default exit code, --error-exitcode, and JSON to standard output and to a file."""
    completed, file = run_suite(suite, "race", "--json", "-"), tmp_path / "findings.json"
    assert completed.returncode == 1
    assert "race" in completed.stderr and re.search(r"faults\.mojo:\d+", completed.stderr)
    assert "-g1" not in completed.stderr
    assert run_suite(suite, "race", "--error-exitcode", "99", "--json", str(file)).returncode == 99
    report = json.loads(file.read_text())
    assert (report["exit_code"], report["program_exit_code"], report["launches"]) == (99, 0, 1)
    assert report["device"] == "virtual GPU (sm_90a)"
    (race,) = report["findings"]
    assert json.loads(completed.stdout)["findings"] == [race]
    assert race["kind"] == "global race" and race["error"] and re.search(r"faults\.mojo:\d+", race["where"])
    assert race["index"] == 0 or race["index"] == [0]


def test_unwritable_json_exits_with_code_2(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.Executor, "run", lambda *_: 0)
        patch.setattr(build, "build", lambda: None)
        assert cli.main(["exec", "--json", str(tmp_path / "no" / "file"), "--", "true"]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.compiles
def test_deadlocked_kernel_ends_the_program(suite):
    completed = run_suite(suite, "wait_forever")
    assert completed.returncode != 0
    assert "1 thread waits here forever" in completed.stderr and re.search(
        r"faults\.mojo:\d+", completed.stderr
    )


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("too_many_threads", "CUDA_ERROR_INVALID_VALUE"),
        ("too_many_blocks", "CUDA_ERROR_INVALID_VALUE"),
        ("too_much_shared", "CUDA_ERROR_INVALID_VALUE"),
        ("out_of_memory", "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_exceeded_limits_return_driver_errors(suite, name, error):
    completed = run_suite(suite, name)
    assert completed.returncode == 1
    assert re.search(rf"virtual GPU: {error}: .+", completed.stderr)  # the explanation
    assert f"CUDA call failed: {error}" in completed.stderr + completed.stdout  # the program's error


@pytest.mark.compiles
def test_program_can_catch_an_error(suite):
    completed = run_suite(suite, "out_of_memory_handled")
    assert (completed.returncode, completed.stdout) == (0, "too much\n")


@pytest.mark.compiles
def test_unsupported_call_is_reported_once(suite):
    completed = run_suite(suite, "graph")
    assert completed.returncode == 1
    (line,) = [
        line for line in completed.stderr.splitlines() if line.startswith("virtual GPU: the program called")
    ]
    assert line == "virtual GPU: the program called cuGraphCreate, which the virtual GPU does not implement"


@pytest.mark.compiles
def test_failed_kernel_assertion_is_reported(suite):
    """The message is printed as on a real GPU; the trap that follows is a finding."""
    completed = run_suite(suite, "failed_assert")
    assert completed.returncode == 1
    assert re.search(
        r"faults\.mojo:\d+.*block: \[0,0,0\] thread: \[16,0,0\].*thread 16 is too many", completed.stdout
    )
    assert "error: trap at" in completed.stderr
    assert "first seen in kernel faults_assert_sixteen_threads" in completed.stderr


@pytest.mark.compiles
def test_program_without_kernels(suite):
    completed = run_suite(suite, "no_gpu")
    assert (completed.returncode, completed.stdout) == (0, "no kernel here\n")
    assert "the program ran no kernel, 0 errors, 0 notes" in completed.stderr


# ---- crashes, timeouts, Ctrl-C, forks -----------------------------------------------------------------------------


def list_leftovers() -> set[str]:
    """Return leftover files in /tmp and /dev/shm, and abstract sockets whose server has exited."""
    files = {str(path) for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob("*")}
    sockets = re.findall(r"workbook-vgpu-(\d+)-\w+", Path("/proc/net/unix").read_text())
    ended = {f"socket of {server}" for server in sockets if not Path(f"/proc/{server}").exists()}
    return {name for name in files if "mojo" in name or "vgpu" in name} | ended


@pytest.mark.compiles
def test_exit_code_and_output_are_passed_through():
    completed = run_vgpu("--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (completed.returncode, completed.stdout) == (7, "out\n")
    assert completed.stderr.startswith("err\n")


@pytest.mark.compiles
def test_crashed_program_is_cleaned_up():
    before = list_leftovers()
    assert run_vgpu("--", "sh", "-c", "kill -SEGV $$").returncode == 128 + signal.SIGSEGV
    assert list_leftovers() <= before


@pytest.mark.compiles
def test_program_killed_during_a_kernel_is_cleaned_up(suite):
    before = list_leftovers()
    # A shell kills the Mojo process during an endless kernel.
    completed = run_vgpu("--", "sh", "-c", f"'{suite}' endless & sleep 1; kill -9 $!; echo ended; exit 3")
    assert (completed.returncode, completed.stdout) == (3, "ended\n")
    assert list_leftovers() <= before


@pytest.mark.compiles
def test_timeout_ends_the_program_and_its_children():
    before = list_leftovers()
    completed = run_vgpu("--timeout", "1", "--", "sh", "-c", "sleep 987 & echo $!; exec sleep 987")
    assert completed.returncode == server.TIMED_OUT
    assert "stopped after 1 s" in completed.stderr
    assert not Path(f"/proc/{completed.stdout.strip()}").exists()
    assert list_leftovers() <= before


@pytest.mark.compiles
def test_timeout_during_a_launch(suite):
    completed = run_suite(suite, "endless", "--timeout", "2")
    assert completed.returncode == server.TIMED_OUT


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("send", "number", "code"),
    [
        (os.kill, signal.SIGINT, 130),
        (os.kill, signal.SIGTERM, 143),
        (os.killpg, signal.SIGINT, 130),  # like a terminal: the program also receives the signal
    ],
)
def test_signal_ends_all_processes(suite, send, number, code):
    before = list_leftovers()
    process = subprocess.Popen(
        [*VGPU, "exec", "--verbose", "--", suite, "endless"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in unwrap(process.stderr):
        if "loaded" in line:  # the launch follows immediately
            break
    time.sleep(0.3)
    send(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, 0)
    assert list_leftovers() <= before


@pytest.mark.compiles
def test_forked_child_does_not_share_the_device():
    """The driver library ignores a state page that is already mapped."""
    source = (build.HERE / "transport.mojo").read_text()
    page = unwrap(re.search(r"comptime STATE = (\w+)", source))[1]
    code = (
        "import ctypes, os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
        f"    mapped = libc.mmap(ctypes.c_void_p({page}), ctypes.c_size_t(4096), 3, 0x100022, -1, ctypes.c_long(0))\n"
        f"    os._exit(1 if mapped != {page} else ctypes.CDLL('libcuda.so.1').cuInit(0) % 256)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "assert cuda.cuInit(0) == 0\n"
        "a = ctypes.c_uint64()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(cuda.cuMemAlloc_v2(ctypes.byref(a), ctypes.c_size_t(8)))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), cuda.cuMemAlloc_v2(ctypes.byref(a), ctypes.c_size_t(8)))"
    )
    not_supported, not_initialized = 304, 3
    expected = f"{not_supported % 256}\n{not_initialized} 0\n"
    assert run_vgpu("--", sys.executable, "-c", code).stdout == expected


@pytest.mark.compiles
def test_killed_executor_is_reported(tmp_path):
    """The program receives an error with an explanation and does not hang."""
    code = (
        "import ctypes, os, signal, time\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "assert cuda.cuInit(0) == 0\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(0.2)\n"
        "a = ctypes.c_uint64()\n"
        f"print(cuda.cuMemAlloc_v2(ctypes.byref(a), 8), file=open({str(tmp_path / 'out')!r}, 'w'), flush=True)\n"
    )
    completed = run_vgpu("--", sys.executable, "-c", code)
    assert completed.returncode == -signal.SIGKILL
    for _ in range(100):
        if (tmp_path / "out").exists() and (tmp_path / "out").read_text():
            break
        time.sleep(0.05)
    assert (tmp_path / "out").read_text() == "999\n"
    assert "lost the connection to the executor process" in completed.stderr


@pytest.mark.compiles
def test_program_started_after_the_executor_exits():
    code = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    env = os.environ | {"LD_LIBRARY_PATH": str(build.build().folder)}
    env |= {"WORKBOOK_VGPU_SOCKET": "workbook-vgpu-missing"}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert completed.stdout == "100\n"  # no device
    assert "the executor process does not answer" in completed.stderr


@pytest.mark.compiles
def test_concurrent_programs(suite):
    command = [*VGPU, "exec", "--", suite, "histogram"]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""
